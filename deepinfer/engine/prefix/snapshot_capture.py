"""SnapshotCapture: copies the window rows at page ends inside prefill chunks while the layers run.

A chunk that is longer than a ring leaves only its last rows there, so the ring alone does not hold
the rows of a page end further up. Each layer hands its window rows over just before it writes them:
rows of the chunk come from there, rows before the chunk from the ring.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deepinfer.cache.addressing import ring_run
from deepinfer.cache.kv_cache import KVCache
from deepinfer.cache.snapshots import Snapshot, as_stored, backbone, rows_at
from deepinfer.slots.protocols import RowSet

if TYPE_CHECKING:
    from deepinfer.engine.request import Request
    from deepinfer.engine.scheduling.output import ScheduledRequest


class SnapshotCapture:
    """Every layer calls it with the window rows that it is about to write.

    wanted: index of a scheduled request -> page end in its chunk, ascending -> number of first
    layers whose rows are taken. Lengths and positions in tokens.
    """

    def __init__(
        self,
        cache: KVCache,
        scheduled: Sequence[ScheduledRequest],
        requests: Sequence[Request],
        wanted: dict[int, dict[int, int]],
    ) -> None:
        self.cache, self.scheduled, self.wanted = cache, scheduled, wanted
        # Read now: when the layers run, the requests may already have changed.
        self.state_ids = [r.state_id for r in requests]
        self._marks = {i: (requests[i].prefix.exact, max(requests[i].plan.floor)) for i in wanted}
        self._rows: dict[tuple[int, int], list[Tensor]] = {
            (i, at): [] for i, ends in wanted.items() for at in ends
        }

    def __call__(self, layer: int, rows: Tensor, keys: RowSet) -> None:
        """rows: [t, d] window keys of the row set `keys`, as `Records.write` takes them."""
        if layer not in backbone(self.cache):
            return
        records = self.cache.windows[layer]
        ring = records.stored
        assert ring is not None  # a cache has storage
        segments = {i: (first, stop) for i, first, stop in keys.segments or ()}
        for i, all_ends in self.wanted.items():
            ends = [at for at, layers in all_ends.items() if layer < layers]
            if not ends:
                continue
            first, last = segments[i]
            item = self.scheduled[i]
            own = as_stored(records, rows[first:last])
            begin = item.stop - (last - first)  # a plan may have dropped rows before this layer
            for at in ends:
                low = at - rows_at(self.cache, at)
                parts = [own[max(low - begin, 0) : at - begin]]
                if low < begin:
                    end, length = min(begin, at), self.cache.ring
                    before = ring_run(self.state_ids[i], low, end, length, rows.device)
                    parts.insert(0, ring[before])
                self._rows[i, at].append(torch.cat(parts))

    def snapshots(self) -> dict[int, dict[int, Snapshot]]:
        """Request id -> page end -> snapshot. Call it when every layer has run."""
        out: dict[int, dict[int, Snapshot]] = {}
        for (i, at), rows in self._rows.items():
            exact, floor = self._marks[i]
            snapshot = Snapshot(position=at, windows=tuple(rows), exact=exact, floor=floor)
            snapshot.check(self.cache)
            out.setdefault(self.scheduled[i].id, {})[at] = snapshot
        return out
