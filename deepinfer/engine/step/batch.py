"""Batch building: from what the scheduler decided to the flat tensors of one step.

Host side. Everything an earlier step's acceptance decides stays a tensor from here on; the host
keeps only totals and upper bounds (`reach`, `max_rows`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from deepinfer.config import ModelConfig
from deepinfer.engine.device import put
from deepinfer.slots.protocols import Batch, Cut, ReplayPlan, RowSet


@dataclass(frozen=True, slots=True)
class Work:
    """One sequence's rows of a step. ids: of the rows; start: position of the first; before: the ids
    in front of it, oldest first (at least n-gram - 1 of them where there are so many); logits: which of
    its rows want logits, counted from its first row of this step ('all', 'last', 'none')."""

    ids: list[int]
    start: int = 0
    before: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    state: int = 0
    plan: ReplayPlan | None = None
    logits: str = "last"


def build(
    works: list[Work], config: ModelConfig, device: torch.device | str = "cpu", decode: bool = False
) -> Batch:
    """The Batch of these works, in their order. decode: the rows are decode or verify rows, so how
    many belong to whom is left to the device (no host-known segments)."""

    def long(values) -> Tensor:
        return put(values, device)

    counts = [len(w.ids) for w in works]
    starts = [w.start for w in works]
    offsets = [sum(counts[:i]) for i in range(len(works))]
    positions = [p for w in works for p in range(w.start, w.start + len(w.ids))]
    seq = [i for i, n in enumerate(counts) for _ in range(n)]
    segments = (
        None
        if decode
        else tuple((i, o, o + n) for i, (o, n) in enumerate(zip(offsets, counts)) if n)
    )
    rows = RowSet(long(positions), long(seq), long(offsets), long(starts), segments)
    cuts, last = row_cuts(works, config.num_hidden_layers, rows, device)
    floors, kv_from, groups = layer_floors(works, config)
    write_from = [w.plan.write_from if w.plan is not None else 0 for w in works]
    found = any(f > s for f, s in zip(write_from, starts))  # block KV that these rows do not write
    width = max([1, *(len(w.pages) for w in works)])
    return Batch(
        ids=long([i for w in works for i in w.ids]),
        positions=rows.positions,
        seq=rows.seq,
        rows=long(counts),
        length=rows.start,
        pages=long([w.pages + [0] * (width - len(w.pages)) for w in works]).view(len(works), width),
        state=long([w.state for w in works]),
        lookback=lookback(works, config.engram_max_ngram_size - 1, device),
        logit_rows=long(logit_rows(works, last)),
        row_set=rows,
        reach=max([0, *(s + n for s, n in zip(starts, counts))]),
        max_rows=max([0, *counts]),
        has_history=any(starts) or found,
        floors=None if floors is None else long(floors),
        floor_groups=groups,
        write_from=long(write_from) if found else None,
        kv_from=None if kv_from is None else long(kv_from),
        cuts=cuts,
    )


def lookback(works: list[Work], back: int, device) -> Tensor:
    """[t, back] ids before each row, nearest first, -1 where the sequence starts."""
    out = []
    for w in works:
        tail = w.before[-back:] if back else []
        ids = [-1] * (back - len(tail)) + tail + w.ids
        out += [[ids[back + i - 1 - s] for s in range(back)] for i in range(len(w.ids))]
    return put(out, device).view(len(out), back)


def row_cuts(
    works: list[Work], layers: int, rows: RowSet, device
) -> tuple[dict[int, Cut], list[tuple[int, int]]]:
    """(cuts by layer, per sequence the (first, stop) positions alive at the end). A plan's rows_from
    is absolute in the prompt, so how the prompt was chunked does not change which rows go on."""
    alive = [(w.start, w.start + len(w.ids)) for w in works]
    cuts: dict[int, Cut] = {}
    if all(w.plan is None or max(w.plan.rows_from) <= w.start for w in works):
        return cuts, alive
    for layer in range(layers):
        after = [
            (lo if w.plan is None else min(max(lo, w.plan.rows_from[layer]), hi), hi)
            for w, (lo, hi) in zip(works, alive)
        ]
        if after == alive:
            continue
        keep, positions, seq, first, offset = [], [], [], [], 0
        for i, ((lo, hi), (new, _)) in enumerate(zip(alive, after)):
            first.append(len(keep))
            keep += range(offset + new - lo, offset + hi - lo)
            positions += range(new, hi)
            seq += [i] * (hi - new)
            offset += hi - lo
        segments = tuple(
            (i, f, f + hi - lo) for i, (f, (lo, hi)) in enumerate(zip(first, after)) if hi > lo
        )

        def long(values) -> Tensor:
            return put(values, device)

        starts = long([lo for lo, _ in after])
        cuts[layer] = Cut(
            long(keep), RowSet(long(positions), long(seq), long(first), starts, segments)
        )
        alive = after
    return cuts, alive


def layer_floors(works: list[Work], config: ModelConfig):
    """(floors [l, b], kv_from [l, b], group number per layer) or Nones where no plan restricts
    anything. Drafter layers see what the last backbone layer's rows left them."""
    plans = [w.plan for w in works]
    if all(p is None or not (any(p.floor) or any(p.kv_from) or any(p.rows_from)) for p in plans):
        return None, None, None
    layers, drafts = config.num_hidden_layers, config.num_nextn_predict_layers

    def column(values: tuple[int, ...], last: int) -> list[int]:
        return [*values, *[last] * drafts]

    floors = [column(p.floor, p.rows_from[-1]) if p else [0] * (layers + drafts) for p in plans]
    kv_from = [column(p.kv_from, p.rows_from[-1]) if p else [0] * (layers + drafts) for p in plans]
    floors, kv_from = [list(x) for x in zip(*floors)], [list(x) for x in zip(*kv_from)]
    seen: dict[tuple, int] = {}
    groups = tuple(seen.setdefault((*f, *k), len(seen)) for f, k in zip(floors, kv_from))
    return floors, kv_from, groups


def logit_rows(works: list[Work], alive: list[tuple[int, int]]) -> list[int]:
    """Row ids, in the last row set, of the wanted logits. Dropped rows have none."""
    out, offset = [], 0
    for w, (lo, hi) in zip(works, alive):
        if w.logits == "all":
            out += range(offset, offset + hi - lo)
        elif w.logits == "last" and hi > lo:
            out.append(offset + hi - lo - 1)
        offset += hi - lo
    return out
