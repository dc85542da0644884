"""ForwardContext: what one forward carries besides rows. Nothing in it outlives the step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from deepinfer.cache.addressing import ring_writes
from deepinfer.cache.kv_cache import KVCache
from deepinfer.config import ModelConfig
from deepinfer.kernels.numerics import constant
from deepinfer.kernels.records import Layout, Records
from deepinfer.kernels.registry import Ops
from deepinfer.model.rope import angles, frequencies
from deepinfer.slots.protocols import Attention, AttnPlan, Batch, Experts, RowSet

Tap = Callable[[str, Tensor, RowSet], Tensor]
OnWindowWrite = Callable[[int, Tensor, RowSet], None]
RowCheck = Callable[[Tensor, RowSet], None]


@dataclass
class ForwardContext:
    """The step's batch, kernels, slots and cache, and what layers share within the step.

    cache None: nothing is stored or read, keys are the step's own rows (training, one-shot).
    fidelity 0: no rounding; 1: the cache roundings that are part of the model; 2: also MXFP8 inputs
    of the stored-quantised matrices. drafter: keep the drafter's context. tap(name, tensor, rows)
    sees, and may replace, every named value; on_window_write(layer, rows, row set) is handed the
    window keys of every layer just before they are stored; row_check(values, row set) looks at rows
    where they end: behind the last layer, and at what their last keys are projected from where they
    are dropped.
    """

    config: ModelConfig
    batch: Batch
    ops: Ops
    attention: Attention
    experts: Experts
    cache: KVCache | None = None
    fidelity: int = 1
    drafter: bool = False
    tap: Tap | None = None
    on_window_write: OnWindowWrite | None = None
    row_check: RowCheck | None = None
    _shared: dict = field(default_factory=dict)

    @property
    def act(self) -> str | None:
        return "mxfp8" if self.fidelity >= 2 else None

    def round(self, x: Tensor, fmt: str | None) -> Tensor:
        """The rounding a record of this format goes through; identity at fidelity 0."""
        if self.fidelity < 1 or fmt is None or fmt == "float":
            return x
        return self.ops.cache_round(x, fmt)

    def see(self, name: str, x: Tensor, rows: RowSet) -> Tensor:
        return x if self.tap is None else self.tap(name, x, rows)

    def check(self, x: Tensor, rows: RowSet) -> None:
        """Rows end here, with these values [t, ...]."""
        if self.row_check is not None:
            self.row_check(x, rows)

    def once(self, key: tuple, make: Callable):
        """A value shared by layers of this step, made the first time it is asked for."""
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]

    def angles(self, rows: RowSet, compressed: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos, sin [t, r/2] at the rows' positions for a window-only or a compressed layer."""
        return self.once(
            ("angles", id(rows), compressed),
            lambda: self.angles_at(rows.positions, compressed, dtype),
        )

    def angles_at(
        self, positions: Tensor, compressed: bool, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        c, acc = self.config, torch.promote_types(dtype, torch.float32)

        def make() -> Tensor:
            theta = c.compress_rope_theta if compressed else c.rope_theta
            f = frequencies(theta, c.qk_rope_head_dim, c.rope_scaling if compressed else None, acc)
            return constant(tuple(f.tolist()), positions.device, acc)

        return angles(positions, self.once(("frequencies", compressed), make))

    def floor(self, layer: int) -> Tensor | None:
        return None if self.batch.floors is None else self.batch.floors[layer]

    def plan(self, layer: int, keys: RowSet, queries: RowSet) -> AttnPlan:
        """The attention slot's plan; layers with equal row sets and floors share one."""
        groups = self.batch.floor_groups
        key = ("plan", id(keys), id(queries), 0 if groups is None else groups[layer])
        return self.once(
            key,
            lambda: self.attention.plan(self.batch, keys, queries, self.floor(layer), self.cache),
        )

    def records(self, stored: Records | None, own: Tensor) -> Records:
        """History followed by the step's own rows, as one index space. Where no sequence has any
        history the own rows are all there is, and they start at place 0."""
        if stored is not None and self.batch.has_history:
            return Records(stored.stored, own, stored.layout)
        rows = own if len(own) else own.new_zeros(1, own.shape[-1])
        return Records(rows, None, Layout(format="float", dim=own.shape[-1]))

    def window_writes(self, layer: int, keys: RowSet) -> Tensor:
        """[t] ring place each own row is written to, -1 for padding, for rows the same step
        overwrites (a chunk longer than the ring) and below the plan's kv_from."""
        batch, cache = self.batch, self.cache
        kv_from = None if batch.kv_from is None else batch.kv_from[layer]
        groups = batch.floor_groups
        key = ("window writes", id(keys), 0 if groups is None or kv_from is None else groups[layer])
        return self.once(key, lambda: ring_writes(batch, keys, cache.ring, kv_from))
