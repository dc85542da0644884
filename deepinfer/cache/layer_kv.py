"""LayerKV: history and the step's own rows as one index space, for the layer that is running.

A key that a row may see is either stored (a ring slot or a page slot) or was computed in this very
step. Both get a place in one numbering: places 0..n-1 are stored records, n.. are the step's own
rows. A chunk may then be longer than the ring, a forward without a cache is differentiable, and no
row is read back through bytes it has just written.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.kernels.records import Records
from deepinfer.slots.protocols import Batch, RowSet


def ring_places(state: Tensor, positions: Tensor, ring: int) -> Tensor:
    """Place of a position in a ring of `ring` slots per state id: rollback is setting a length."""
    return state * ring + positions % ring


def window_places(
    batch: Batch,
    keys: RowSet,
    queries: RowSet,
    floor: Tensor | None,
    window: int,
    ring: int,
    stored: int,
) -> Tensor:
    """[t, w] places in a window Records of the keys p-window+1..p of each query, -1 where there is none.

    keys: the rows whose window keys were computed in this step (own rows start at place `stored`);
    floor: [b] lowest position visible or None. Columns never outnumber the longest context.
    """
    width = max(min(window, batch.reach), 1)
    back = torch.arange(width - 1, -1, -1, device=queries.positions.device)
    at = queries.positions[:, None] - back
    owner = queries.owner
    start, first = keys.start[owner][:, None], keys.first[owner][:, None]
    own = at >= start
    lowest = 0 if floor is None else floor[owner][:, None].clamp(min=0)
    valid = (at >= lowest) & (queries.seq >= 0)[:, None]
    places = stored + first + at - start
    if stored:
        places = torch.where(own, places, ring_places(batch.state[owner][:, None], at, ring))
    else:
        valid = valid & own
    return places.masked_fill(~valid, -1)


@dataclass(frozen=True, slots=True)
class LayerKV:
    """The keys of one layer in this step. window: every layer has one; entries, index_keys: of the KV
    source in force (None in window-only layers), numbered by `places`.

    entries of number j cover tokens r*j .. r*j+r-1. Those whose last token is at or above
    `own_start` were computed in this step (place = `stored` + that row), the others lie in pages.
    stored: places of history records, 0 in a step without history.
    """

    window: Records
    entries: Records | None = None
    index_keys: Records | None = None
    ratio: int = 0
    keys: RowSet | None = None
    own_start: Tensor | None = None
    pages: Tensor | None = None
    entries_per_page: int = 0
    stored: int = 0

    def places(self, ids: Tensor, owner: Tensor) -> Tensor:
        """Places of entries `ids` [t, k] (-1 stays -1) of the sequences `owner` [t]."""
        last = ids * self.ratio + (self.ratio - 1)
        own_start = self.own_start[owner][:, None]
        places = (
            self.stored + self.keys.first[owner][:, None] + last - self.keys.start[owner][:, None]
        )
        if self.stored:
            page = (ids // self.entries_per_page).clamp(0, self.pages.shape[1] - 1)
            held = self.pages[owner].gather(1, page)
            history = held * self.entries_per_page + ids % self.entries_per_page
            places = torch.where(last >= own_start, places, history)
        return places.masked_fill(ids < 0, -1)

    def index_key_rows(self, n: int) -> Tensor:
        """[b, n, d] index keys of entries 0..n-1 of every sequence; rows past its end are arbitrary
        but finite and are masked by visibility."""
        seqs = self.keys.first.shape[0]
        ids = torch.arange(n, device=self.keys.first.device).expand(seqs, n)
        places = self.places(ids, torch.arange(seqs, device=ids.device))
        total = self.stored + self.keys.count
        return self.index_keys.gather(places.masked_fill((places < 0) | (places >= total), -1))
