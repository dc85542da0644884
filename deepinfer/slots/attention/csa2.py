"""CSA2: sliding window plus the top-k compressed entries an indexer picks, in two levels.

    score[t, j] = sum_h w[t, h] relu(iq[t, h] . ik[j]),  j visible iff j < floor((p+1)/r)
    the candidate source keeps the best blocks; later index sources pick within them
    attention over window keys and picked entries together; a sink per head in the denominator only
Ties go to the lowest index, so that a prefix's picks do not depend on what follows it.
Source: the released model's attention (DeepSeek-V4.1-Flash).
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from deepinfer.cache.addressing import entries_before, entry_blocks, window_places
from deepinfer.slots.protocols import (
    AttnPlan,
    Batch,
    EngineInfo,
    IndexQuery,
    KVSpec,
    LayerInfo,
    RowSet,
    Selected,
)
from deepinfer.slots.registry import registry
from deepinfer.slots.settings import shown

if TYPE_CHECKING:
    from deepinfer.cache.layer_kv import LayerKV
    from deepinfer.config import ModelConfig


@registry("attention").register("csa2")
@dataclass(eq=False, repr=False)
class CSA2:
    """topk: entries picked a row (None = the config's index_topk)."""

    topk: int | None = None

    version: ClassVar[int] = 1
    batch_invariant: ClassVar[bool] = True  # as far as the step's kernels are
    on_device: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.topk is not None and (isinstance(self.topk, bool) or self.topk < 1):
            raise ValueError(
                f"CSA2(topk={self.topk!r}): entries picked a row must be a positive integer or None"
            )

    def __repr__(self) -> str:
        return shown(self)

    @property
    def exact(self) -> bool:
        """True where this is the model's own attention."""
        return self.topk is None

    def start(self, info: EngineInfo) -> CSA2:
        own = copy.copy(self)
        own._config = info.config
        return own

    def kv_spec(self, config: ModelConfig, layer: int) -> KVSpec:
        c, ratio = config, config.compress_ratios[layer]
        if layer not in c.kv_source_layer_ids:
            return KVSpec(c.sliding_window, "mxfp8", ratio=ratio)
        entry, key = (
            c.head_dim // 2 + c.head_dim // 16,
            c.index_head_dim // 2 + c.index_head_dim // 32,
        )
        return KVSpec(c.sliding_window, "mxfp8", "nvfp4", "mxfp4", ratio, (entry + key) / ratio)

    def plan(
        self, batch: Batch, keys: RowSet, queries: RowSet, floor: Tensor | None, cache
    ) -> AttnPlan:
        c = self._config
        ring, stored = 1, 0
        if cache is not None and batch.has_history:
            ring, stored = cache.ring, cache.windows[0].count
        places = window_places(batch, keys, queries, floor, c.sliding_window, ring, stored)
        ratios = sorted({c.compress_ratios[layer] for layer in c.kv_source_layer_ids})
        padding = queries.seq < 0
        visible = {r: entries_before(queries.positions, r).masked_fill(padding, 0) for r in ratios}
        return AttnPlan(places, queries, visible, {r: batch.reach // r for r in ratios})

    def select(
        self,
        layer: LayerInfo,
        index: IndexQuery,
        kv: LayerKV,
        plan: AttnPlan,
        carried: Selected | None,
    ) -> Selected:
        n, visible = plan.reach[layer.ratio], plan.visible[layer.ratio]
        candidates = carried.candidates if layer.role == "reindex" and carried is not None else None
        capacity = layer.candidate_blocks * layer.candidate_block_size
        publishes = layer.candidate_source and n > capacity
        hidden = torch.arange(n, device=visible.device) >= visible[:, None]
        k = min(self.topk or layer.top_k, n)
        if k == n and not publishes and candidates is None:
            return Selected(everything(hidden))
        scores = layer.ops.index_scores(
            index.query,
            index.weights,
            kv.index_key_rows(n),
            plan.queries.owner,
            plan.queries.segments,
        ).masked_fill(hidden, -torch.inf)
        if publishes:
            size = layer.candidate_block_size
            candidates = layer.ops.candidate_blocks(scores, visible, size, layer.candidate_blocks)
        elif candidates is not None:
            scores = scores.masked_fill(
                outside(candidates, n, layer.candidate_block_size), -torch.inf
            )
        return Selected(layer.ops.topk(scores, k), candidates)

    def attend(
        self, layer: LayerInfo, q: Tensor, kv: LayerKV, selected: Selected | None, plan: AttnPlan
    ) -> Tensor:
        entries, ids = (None, None) if selected is None else (kv.entries, selected.places)
        return layer.ops.sparse_attend(
            q, kv.window, plan.window_ids, entries, ids, layer.sink, layer.scale
        )


def everything(hidden: Tensor) -> Tensor:
    """[t, n] all visible entries in order, -1 where hidden [t, n]."""
    return (
        torch.arange(hidden.shape[1], device=hidden.device)
        .expand_as(hidden)
        .masked_fill(hidden, -1)
    )


def outside(candidates: Tensor, n: int, block: int) -> Tensor:
    """[t, n] True for entries whose block is not among candidates [t, c] (-1 none)."""
    of_entry = entry_blocks(n, block, candidates.device)
    blocks = -(-n // block)
    kept = torch.zeros(candidates.shape[0], blocks + 1, dtype=torch.bool, device=candidates.device)
    kept.scatter_(1, candidates.masked_fill(candidates < 0, blocks), True)
    return ~kept[:, of_entry]
