"""Addressing: from the position of a token to the place of its record. No other file computes one.

    position p     of a token in its sequence, 0 first
    place          row of a `Records` store. Places 0..n-1 are stored records, n = `stored`; the
                   rows that this step computes follow at n.. . -1 means no record
    ring           window keys, drafter keys, open groups: p of state id s is at s * ring + p % ring.
                   Setting a sequence back to a length frees the places above it
    entry j        compressed from the tokens r*j .. r*j+r-1 of a source of ratio r. It is in page
                   pages[j // per_page] of its sequence, at place page * per_page + j % per_page
    page           position p is in page p // page_size of its sequence. Page 0 and state id 0 are
                   spare: padding points at them

Axis letters: b sequences, t rows of this step, w window, r ratio, k picks, p pages. Tensors are
long. Nothing here waits for the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from deepinfer.slots.protocols import Batch, RowSet

# ----------------------------------------------------------------------------------------- rings


def ring_places(state: Tensor, positions: Tensor, ring: int) -> Tensor:
    """Places of positions in rings of `ring` records; state ids and positions broadcast."""
    return state * ring + positions % ring


def ring_run(state: int, start: int, stop: int, ring: int, device: torch.device) -> Tensor:
    """[stop - start] ring places of the positions start..stop-1 of one state id, oldest first."""
    at = torch.arange(start, stop, device=device)
    return ring_places(torch.full_like(at, state), at, ring)


def ring_start(written: int, ring: int) -> int:
    """Lowest position that a ring still holds when the positions 0..written-1 have been written."""
    return max(written - ring, 0)


def ring_writes(batch: Batch, keys: RowSet, ring: int, lowest: Tensor | None = None) -> Tensor:
    """[t] ring places that the rows `keys` are written to; -1 for padding, for rows below
    `lowest` [b], and for rows that a later row of the same step would overwrite."""
    owner = keys.owner
    end = (batch.length + batch.rows)[owner]
    write = (keys.seq >= 0) & (keys.positions >= end - ring)
    if lowest is not None:
        write = write & (keys.positions >= lowest[owner])
    return ring_places(batch.state[owner], keys.positions, ring).masked_fill(~write, -1)


# ----------------------------------------------------------------- windows: the tokens before a row


def window_places(
    batch: Batch,
    keys: RowSet,
    queries: RowSet,
    floor: Tensor | None,
    window: int,
    ring: int,
    stored: int,
) -> Tensor:
    """[t, w] places of the window keys p-w+1..p of each query at p; -1 if there is no such key.

    keys: rows whose window keys this step computes; floor: [b] lowest visible position or None.
    The width w is `window`, or less if no context is that long yet.
    """
    width = max(min(window, batch.reach), 1)
    return _places_back(batch, keys, queries, floor, width, ring, stored)


def group_places(batch: Batch, keys: RowSet, ratio: int, ring: int, stored: int) -> Tensor:
    """[t, r] places of the r tokens that end at each row; -1 before the start of a sequence, and
    below the rows of this step if no record is stored."""
    return _places_back(batch, keys, keys, None, ratio, ring, stored)


def _places_back(
    batch: Batch,
    keys: RowSet,
    queries: RowSet,
    floor: Tensor | None,
    width: int,
    ring: int,
    stored: int,
) -> Tensor:
    """[t, width] places of the positions p-width+1..p of each query: own rows from the first row
    of this step on, ring records below it."""
    back = torch.arange(width - 1, -1, -1, device=queries.positions.device)
    at = queries.positions[:, None] - back
    owner = queries.owner
    start = keys.start[owner][:, None]
    own = at >= start
    lowest = 0 if floor is None else floor[owner][:, None].clamp(min=0)
    valid = (at >= lowest) & (queries.seq >= 0)[:, None]
    places = stored + keys.first[owner][:, None] + at - start
    if stored:
        places = torch.where(own, places, ring_places(batch.state[owner][:, None], at, ring))
    else:
        valid = valid & own
    return places.masked_fill(~valid, -1)


def context_places(
    state: Tensor, positions: Tensor, floor: Tensor | None, width: int, ring: int
) -> Tensor:
    """[b, width] ring places of the positions p-width..p-1 before a draft block at p = positions
    [b]; -1 below `floor` [b] (None: 0). None of them is a row of the block."""
    at = positions[:, None] - torch.arange(width, 0, -1, device=positions.device)
    lowest = 0 if floor is None else floor[:, None].clamp(min=0)
    return ring_places(state[:, None], at, ring).masked_fill(at < lowest, -1)


# --------------------------------------------------------------------- compressed entries in pages


def entries_before(positions: Tensor, ratio: int) -> Tensor:
    """How many entries a row at each position may see: those whose last token it has reached."""
    return (positions + 1) // ratio


def closes_entry(keys: RowSet, ratio: int) -> Tensor:
    """[t] True for rows whose token is the last of an entry."""
    return (keys.seq >= 0) & ((keys.positions + 1) % ratio == 0)


def entry_places(pages: Tensor, ids: Tensor, per_page: int) -> Tensor:
    """[t, k] places of entries `ids` [t, k] in the page tables `pages` [t, p] of their sequences.
    An id outside the table gets an arbitrary place, for the caller to mask."""
    page = (ids // per_page).clamp(0, pages.shape[1] - 1)
    return pages.gather(1, page) * per_page + ids % per_page


def entry_writes(
    batch: Batch, keys: RowSet, own_start: Tensor, ratio: int, per_page: int
) -> Tensor:
    """[t] places that the entries closed by `keys` are written to; -1 for rows that close none,
    for rows below `own_start` [b], and in page 0."""
    ids = (entries_before(keys.positions, ratio) - 1)[:, None]
    places = entry_places(batch.pages[keys.owner], ids, per_page)[:, 0]
    write = closes_entry(keys, ratio) & (keys.positions >= own_start[keys.owner])
    return places.masked_fill(~write | (places < per_page), -1)


def own_entry_places(
    keys: RowSet, ids: Tensor, owner: Tensor, ratio: int, stored: int
) -> tuple[Tensor, Tensor]:
    """(last [t, k], places [t, k]) of entries `ids` as if this step computed them: the position of
    an entry's last token and the place of that token's row."""
    last = ids * ratio + (ratio - 1)
    return last, stored + keys.first[owner][:, None] + last - keys.start[owner][:, None]


def entry_blocks(n: int, block: int, device: torch.device) -> Tensor:
    """[n] candidate block of each of the entries 0..n-1."""
    return torch.arange(n, device=device) // block


# ------------------------------------------------------------------------- pages, in whole numbers


def pages_of(tokens: int, page_size: int) -> int:
    """Pages that hold so many tokens; the last one may be partly empty."""
    return -(-tokens // page_size)


def full_pages(tokens: int, page_size: int) -> int:
    """Pages that so many tokens fill."""
    return max(tokens, 0) // page_size


def page_end(tokens: int, page_size: int) -> int:
    """The last page end at or below a length, in tokens; 0 if no page is full."""
    return full_pages(tokens, page_size) * page_size


def page_ends(start: int, stop: int, page_size: int) -> range:
    """The page ends in start < end <= stop, in tokens."""
    return range(page_end(start, page_size) + page_size, stop + 1, page_size)


def ending_page(end: int, page_size: int) -> int:
    """Index, in its sequence, of the page that ends at the page end `end`."""
    return end // page_size - 1


def most_page_ends(tokens: int, page_size: int) -> int:
    """Most page ends that can be from one page end to `tokens` tokens above it, both included."""
    return pages_of(tokens, page_size) + 1
