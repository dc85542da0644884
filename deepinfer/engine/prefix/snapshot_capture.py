"""SnapshotCapture: the window rows at page ends inside prefill chunks, taken layer by layer as they pass.

A chunk longer than a ring leaves only its end there, and a ring is written while its layer runs. So
the rows are taken just before that: of the chunk those about to be written, of the positions before
it those that the ring still holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deepinfer.cache.kv_cache import KVCache
from deepinfer.cache.layer_kv import ring_places
from deepinfer.cache.snapshots import Snapshot, as_stored, backbone, rows_at
from deepinfer.slots.protocols import RowSet

if TYPE_CHECKING:
    from deepinfer.engine.scheduling.output import ScheduledRequest


class SnapshotCapture:
    """Called by every layer with the window rows that it is about to write. wanted: by number of
    the scheduled request, the page ends in it, ascending, and of how many of the first layers their rows are
    taken."""

    def __init__(
        self,
        cache: KVCache,
        scheduled: tuple[ScheduledRequest, ...],
        wanted: dict[int, dict[int, int]],
    ) -> None:
        self.cache, self.scheduled, self.wanted = cache, scheduled, wanted
        # As now: the layers run later, and their rows are read later still.
        self.slots = [s.request.state_id for s in scheduled]
        self._marks = {
            i: (scheduled[i].request.prefix.exact, max(scheduled[i].request.plan.floor))
            for i in wanted
        }
        self._rows: dict[tuple[int, int], list[Tensor]] = {
            (i, at): [] for i, ends in wanted.items() for at in ends
        }

    def __call__(self, layer: int, rows: Tensor, keys: RowSet) -> None:
        """rows [t, d]: window keys of the row set `keys`, as `Records.write` takes them."""
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
                    behind = torch.arange(low, min(begin, at), device=rows.device)
                    state = torch.full_like(behind, self.slots[i])
                    places = ring_places(state, behind, self.cache.ring)
                    parts.insert(0, ring[places])
                self._rows[i, at].append(torch.cat(parts))

    def snapshots(self) -> dict[int, dict[int, Snapshot]]:
        """By request id and position."""
        out: dict[int, dict[int, Snapshot]] = {}
        for (i, at), rows in self._rows.items():
            request = self.scheduled[i].request
            snapshot = Snapshot(at, tuple(rows), *self._marks[i])
            snapshot.check(self.cache)
            out.setdefault(request.id, {})[at] = snapshot
        return out
