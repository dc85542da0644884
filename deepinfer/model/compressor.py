"""Compressors and index keys of the KV-source layers.

ratio 1: latent_j = RMSNorm(Wc x_j).   ratio r: over the r tokens of group j, per channel,
    latent_j = RMSNorm( sum_t softmax_t(Wg x_t) * (Wc x_t) ),  in FP32 before the norm
    entry_j     = rope(latent_j, r j) then NVFP4
    index key_j = rope(RMSNorm(Wk latent_j), r j) then MXFP4
Every row is treated as if it closed its group, with a mask for those that do: no shape depends on a
position, so decode, verify and prefill are the same code. The rows before this step come from a
ring addressed by position, which makes any accepted length leave exactly the state of serial
decoding.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from deepinfer.cache.addressing import group_places, ring_writes
from deepinfer.config import ModelConfig
from deepinfer.model.context import ForwardContext
from deepinfer.model.layers import Linear, Norm
from deepinfer.slots.protocols import RowSet


class Compressor(nn.Module):
    """Latents [t, d] of the groups that end at each row."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.ratio = config.compress_ratios[layer]
        self.wkv = Linear(config.hidden_size, config.head_dim)
        if self.ratio > 1:
            self.wgate = Linear(config.hidden_size, config.head_dim)
        self.norm = Norm(config.head_dim)

    def forward(self, x: Tensor, keys: RowSet, ctx: ForwardContext) -> Tensor:
        if self.ratio == 1:
            return self.norm(self.wkv(x, ctx), ctx)
        acc = torch.promote_types(x.dtype, torch.float32)
        token = torch.cat([self.wkv(x, ctx, acc), self.wgate(x, ctx, acc)], -1)
        groups = self._groups(token, keys, ctx)
        values, gates = groups.chunk(2, -1)
        weight = self.norm.weight
        return ctx.ops.compress(values, gates, weight, ctx.config.rms_norm_eps, x.dtype)

    def _groups(self, token: Tensor, keys: RowSet, ctx: ForwardContext) -> Tensor:
        """[t, r, 2d] values and gates of the r tokens that end at each row; tokens of earlier steps
        come from the ring. Before the start of a sequence they are zeros, and no group closes
        there."""
        ring = None if ctx.cache is None else ctx.cache.groups[self.layer]
        records = ctx.records(ring, token)
        stored = ring.count if ring is not None and ctx.batch.has_history else 0
        length = 1 if ring is None else ctx.cache.group_ring
        places = ctx.once(
            ("group places", id(keys), self.ratio),
            lambda: group_places(ctx.batch, keys, self.ratio, length, stored),
        )
        groups = records.gather(places)
        if ring is not None:
            last = ctx.once(
                ("group writes", id(keys)),
                lambda: ring_writes(ctx.batch, keys, length),
            )
            ring.write(last, token)
        return groups
