"""Serial decoding as the oracle: one token at a time, and every row that it leaves in the cache.

`Oracle` decodes a stream alone and keeps, by position, the logits, what each step stored, and the
drafter's block behind each position. `advance` runs sequences in any other way, `check_*` compare.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.engine.runtime import Runtime
from deepinfer.engine.step.batch import Work, build
from deepinfer.slots.protocols import Batch, RowSet
from support.small import DRAFTS

TOLERANCE = dict(rtol=1e-9, atol=1e-9)


@dataclass
class Place:
    """Where a sequence lives in a cache."""

    pages: list[int]
    state: int

    @staticmethod
    def take(rt: Runtime, tokens: int) -> Place:
        return Place(rt.pages.take(-(-tokens // rt.limits.page_size)), rt.states.take(1)[0])

    def give(self, rt: Runtime) -> None:
        rt.pages.give(self.pages)
        rt.states.give([self.state])


def forward(rt: Runtime, works: list[Work], decode: bool, padding: int = 0) -> Tensor:
    """[rows, v] logits of all rows of all works."""
    batch = build([dataclasses.replace(w, logits="all") for w in works], rt.config, decode=decode)
    with torch.no_grad():
        return rt.model(rt.context(padded(batch, padding))).logits


def padded(batch: Batch, rows: int) -> Batch:
    """The batch with padding rows behind it: seq -1, ids and positions that mean nothing."""
    if not rows:
        return batch

    def more(x: Tensor, value: int) -> Tensor:
        return torch.cat([x, x.new_full((rows, *x.shape[1:]), value)])

    positions, seq = more(batch.positions, 3), more(batch.seq, -1)
    rows_ = RowSet(positions, seq, batch.row_set.first, batch.row_set.start, None)
    return dataclasses.replace(
        batch,
        ids=more(batch.ids, 9),
        positions=positions,
        seq=seq,
        lookback=more(batch.lookback, 5),
        row_set=rows_,
    )


def stored(rt: Runtime, place: Place, start: int, stop: int) -> dict[str, dict[int, Tensor]]:
    """{store: {number: row}} of what positions start..stop-1 have left: window keys and the tokens
    of groups by position, entries and index keys by entry number."""
    cache, out = rt.cache, {}

    def read(name: str, records, numbers: list[int], places: list[int]) -> None:
        rows = records.gather(torch.tensor(places, dtype=torch.long), torch.float64)
        out[name] = dict(zip(numbers, rows))

    at = list(range(start, stop))
    for layer, records in enumerate(cache.windows):
        read(
            f"window.{layer}", records, at, [place.state * cache.ring + p % cache.ring for p in at]
        )
    for layer, records in cache.groups.items():
        size = cache.group_ring
        read(f"group.{layer}", records, at, [place.state * size + p % size for p in at])
    for layer in cache.entries:
        ratio, per_page = cache.specs[layer].ratio, cache.entries_per_page(cache.specs[layer].ratio)
        numbers = list(range(start // ratio, stop // ratio))
        places = [place.pages[j // per_page] * per_page + j % per_page for j in numbers]
        read(f"entry.{layer}", cache.entries[layer], numbers, places)
        read(f"index.{layer}", cache.index_keys[layer], numbers, places)
    return out


def state_rows(rt: Runtime, state: int) -> list[Tensor]:
    """Views of all that a state slot holds: window rings, groups, the drafter's rings."""
    sized = [(w, rt.cache.ring) for w in rt.cache.windows]
    sized += [(g, rt.cache.group_ring) for g in rt.cache.groups.values()]
    return [records.stored[state * size : (state + 1) * size] for records, size in sized]


class Oracle:
    """A stream decoded serially by an engine with float records and a drafter."""

    def __init__(self, rt: Runtime, ids: list[int], drafts_from: int = 0) -> None:
        self.ids, self.logits = ids, []
        self.blocks: dict[int, Tensor] = {}
        self.rows: dict[str, dict[int, Tensor]] = defaultdict(dict)
        place = Place.take(rt, len(ids) + DRAFTS)
        for p, token in enumerate(ids):
            work = Work([token], p, ids[max(p - 3, 0) : p], place.pages, place.state)
            self.logits.append(forward(rt, [work], decode=True)[0])
            for name, rows in stored(rt, place, p, p + 1).items():
                self.rows[name].update(rows)
            if drafts_from <= p < len(ids) - 1:
                self.blocks[p + 1] = block(rt, place, p + 1, ids[p + 1])
        place.give(rt)


def block(rt: Runtime, place: Place, position: int, token: int) -> Tensor:
    """[n, d + v] what the drafter computes for its block: hidden rows and base logits."""
    work = Work([token], position, state=place.state, logits="none")
    batch = build([work], rt.config, decode=True)
    with torch.no_grad():
        h, base = rt.model.drafter.states(batch.ids, batch.positions, DRAFTS, rt.context(batch))
    return torch.cat([h, base], -1)[0]


@dataclass
class Sequence:
    """A sequence that follows an oracle's stream: `length` tokens of it are in the cache."""

    oracle: Oracle
    place: Place
    length: int = 0

    def work(self, true: int, junk: int) -> Work:
        """The next `true` tokens of the stream, then `junk` rejected drafts."""
        ids, n = self.oracle.ids, self.length
        drafts = [8 + (ids[(n + true + k) % len(ids)] + 1 + 7 * k) % 80 for k in range(junk)]
        if drafts and n + true < len(ids) and drafts[0] == ids[n + true]:
            drafts[0] += 1
        return Work(
            ids[n : n + true] + drafts,
            n,
            ids[max(n - 3, 0) : n],
            self.place.pages,
            self.place.state,
        )


def advance(
    rt: Runtime, moves: list[tuple[Sequence, int, int]], decode: bool, padding: int
) -> None:
    """One step: each sequence's true rows and rejected drafts. Compares the logits of true rows."""
    logits = forward(
        rt, [s.work(true, junk) for s, true, junk in moves], decode, padding if decode else 0
    )
    at = 0
    for s, true, junk in moves:
        for got, want in zip(logits[at : at + true], s.oracle.logits[s.length : s.length + true]):
            torch.testing.assert_close(got, want, **TOLERANCE)
        at += true + junk
        s.length += true
        assert s.length <= len(s.oracle.ids)


def check_rows(rt: Runtime, s: Sequence) -> None:
    """Every cached row that a later step may read equals the one serial decoding leaves."""
    n, window = s.length, rt.config.sliding_window
    for name, rows in stored(rt, s.place, 0, n).items():
        kind, layer = name.split(".")
        if kind == "window":
            lowest = max(n - window, 0)
        elif kind == "group":
            ratio = rt.config.compress_ratios[int(layer)]
            lowest = n // ratio * ratio
        else:
            lowest = 0
        for number, row in rows.items():
            if number >= lowest:
                torch.testing.assert_close(
                    row,
                    s.oracle.rows[name][number],
                    **TOLERANCE,
                    msg=lambda m: f"{name} {number} of {n}: {m}",
                )


def check_block(rt: Runtime, s: Sequence) -> None:
    """The drafter proposes the same block as behind serially decoded tokens."""
    if s.length in s.oracle.blocks:
        got = block(rt, s.place, s.length, s.oracle.ids[s.length])
        torch.testing.assert_close(got, s.oracle.blocks[s.length], **TOLERANCE)
