"""Snapshot: what a sequence needs beside its pages to continue from a page end.

At position p these are the window keys of the last min(window, p) positions of each backbone layer,
as they are stored: 528 bytes a row and layer in the released format. Nothing else is needed. A page
is a multiple of every compress ratio, so no group is open at its end. The rows behind the page end
fill the drafter's window, and the token ids before it are known.

A prompt that a replay policy cuts leaves snapshots of its first layers only: the layers behind the
cut ran no such rows, or ran them on an approximate window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deepinfer.cache.addressing import page_end, ring_run, ring_start
from deepinfer.cache.kv_cache import KVCache
from deepinfer.kernels import formats
from deepinfer.kernels.records import Records


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """Window rows at `position`, a page end. windows: one tensor [n, d] for each of the first
    backbone layers, with the rows of the positions position-n..position-1, n = min(window,
    position), d the width of the ring's storage. exact: no row was computed on an approximate
    window. floor: the highest floor of the replay plan that the rows were computed with; another
    floor gives other rows in the later layers."""

    position: int
    windows: tuple[Tensor, ...]
    exact: bool = True
    floor: int = 0

    @staticmethod
    def from_rings(
        cache: KVCache,
        state: int,
        position: int,
        *,
        computed: int,
        drafts: int = 0,
        layers: int | None = None,
        exact: bool = True,
        floor: int = 0,
    ) -> Snapshot:
        """Copy the rows of the first `layers` layers (None: of all) from the rings of state id
        `state`. computed, drafts: as in `held`. Raises ValueError if a row has been overwritten;
        ask `held` first."""
        if not held(cache, position, computed=computed, drafts=drafts):
            n = rows_at(cache, position)
            raise ValueError(
                f"the window rows {position - n}..{position - 1} were asked of rings that hold "
                f"{ring_start(computed + drafts, cache.ring)}..{computed - 1}: capture a "
                f"boundary no more than {cache.ring - n - drafts} positions back, or hand the rows "
                "over with from_rows"
            )
        places = ring_rows(cache, state, position)
        rows = tuple(cache.windows[i].stored[places] for i in backbone(cache)[:layers])
        return Snapshot(position=position, windows=rows, exact=exact, floor=floor)

    @staticmethod
    def from_rows(
        cache: KVCache, rows: Sequence[Tensor], position: int, *, exact: bool = True
    ) -> Snapshot:
        """Copy the rows [n, d] of the first backbone layers, oldest first, in the ring's stored
        format (`as_stored`). For page ends inside a chunk that is longer than the rings."""
        snapshot = Snapshot(position, tuple(r.detach().clone() for r in rows), exact)
        snapshot.check(cache)
        return snapshot

    @property
    def layers(self) -> int:
        """How many of the first backbone layers have their rows here."""
        return len(self.windows)

    @property
    def rank(self) -> tuple[bool, int]:
        """Of two snapshots of one prefix the higher rank is worth more (`snapshot_rank`)."""
        return snapshot_rank(self.exact, self.layers)

    @property
    def nbytes(self) -> int:
        return sum(w.numel() * w.element_size() for w in self.windows)

    def to(self, device: torch.device | str) -> Snapshot:
        """A copy on another device, for a store in host memory."""
        return replace(self, windows=tuple(w.to(device) for w in self.windows))

    def first(self, layers: int) -> Snapshot:
        """The snapshot without the rows of later layers."""
        return replace(self, windows=self.windows[:layers])

    def restore(self, cache: KVCache, state: int, position: int) -> None:
        """Write the rows into the rings of slot `state`, whose sequence then goes on at `position`.
        What else is in the rings is not seen by any backbone row from there on."""
        if position != self.position:
            raise ValueError(
                f"a snapshot at position {self.position} cannot restore position {position}: "
                "its rows are those of its own boundary"
            )
        self.check(cache)
        places = ring_rows(cache, state, position)
        for layer, rows in zip(backbone(cache), self.windows):
            stored = cache.windows[layer].stored
            stored[places] = rows.to(stored.device)

    def check(self, cache: KVCache) -> None:
        """Raises ValueError if these are not the rows of a page end in this cache."""
        n, layers = rows_at(cache, self.position), backbone(cache)
        if not 0 < self.layers <= len(layers):
            raise ValueError(
                f"window rows of {self.layers} layers for a model of {len(layers)}: "
                "one tensor a backbone layer from the first on, none for the drafter"
            )
        for layer, rows in zip(layers, self.windows):
            stored = cache.windows[layer].stored
            want, found = ((n, stored.shape[1]), stored.dtype), (tuple(rows.shape), rows.dtype)
            if want != found:
                raise ValueError(
                    f"window rows of layer {layer} at position {self.position} are {found[1]} "
                    f"{found[0]}, the ring stores {want[1]} {want[0]}: pass the last {n} rows as "
                    "they are stored"
                )


def snapshot_rank(exact: bool, layers: int) -> tuple[bool, int]:
    """What a snapshot is worth: an exact one more than an approximate one, then more layers more."""
    return exact, layers


def snapshot_bytes(cache: KVCache, layers: int | None = None) -> int:
    """Bytes of a snapshot of the first `layers` backbone layers (None: of all) with a full window."""
    window = max(s.window for s in cache.specs)
    stored = [cache.windows[i].stored for i in backbone(cache)[:layers]]
    return sum(window * x.shape[1] * x.element_size() for x in stored)


def backbone(cache: KVCache) -> range:
    """Layers whose window rows a snapshot holds."""
    return range(cache.config.num_layers)


def rows_at(cache: KVCache, position: int) -> int:
    """How many window rows a snapshot at a page end has. Raises ValueError if `position` is no page
    end."""
    size = cache.size.page_size
    if position <= 0 or position != page_end(position, size):
        raise ValueError(
            f"position {position} is no page boundary: want a multiple of {size} from {size} on"
        )
    for ratio in sorted({s.ratio for s in cache.specs} - {0}):
        if size % ratio:
            raise ValueError(
                f"page_size={size} is no multiple of compress ratio {ratio}: a group would be open "
                "at a boundary"
            )
    return min(max(s.window for s in cache.specs), position)


def held(cache: KVCache, position: int, *, computed: int, drafts: int = 0) -> bool:
    """Whether the rings of a sequence still hold the window rows of a page end.

    computed: positions of the sequence that are stored and valid. drafts: rows past them that a
    step has written and not accepted; a number that is too large is safe.
    """
    first = position - rows_at(cache, position)
    return position <= computed and first >= ring_start(computed + drafts, cache.ring)


def ring_rows(cache: KVCache, state: int, position: int) -> Tensor:
    """[n] ring places of the window rows of a page end, oldest first."""
    if not 1 <= state <= cache.size.num_states:
        raise ValueError(f"state id {state} is not in 1..{cache.size.num_states}")
    first = position - rows_at(cache, position)
    return ring_run(state, first, position, cache.ring, cache.device)


def as_stored(records: Records, rows: Tensor) -> Tensor:
    """Rows [n, d] as `records.write` would store them: floats of its dtype, or its packed bytes."""
    if records.layout.packed:
        return formats.encode(rows.detach(), records.layout.format)
    return rows.detach().to(records.stored.dtype)
