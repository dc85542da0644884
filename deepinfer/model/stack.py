"""The layer stack: embed -> layers (mHC, Engram, attention, MoE) -> logits of the wanted rows.

ONE forward over a flat batch of rows. Prefill is many rows of a sequence, decode one, verify 1 + n;
several sequences lie one after another. With a cache, keys are stored as they pass; without one the
same call is a plain differentiable forward (training, one-shot checks).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from deepinfer.config import ModelConfig
from deepinfer.kernels.numerics import taken
from deepinfer.model import mhc
from deepinfer.model.attention_layer import AttentionLayer
from deepinfer.model.context import ForwardContext
from deepinfer.model.engram import Engram
from deepinfer.model.layers import Linear, Norm, Weight
from deepinfer.model.router import MoE
from deepinfer.slots.protocols import AttnPlan, Batch, Rows, RowSet

if TYPE_CHECKING:
    from deepinfer.model.drafter import Drafter


@dataclass(frozen=True, slots=True)
class Output:
    """logits: [q, v] in FP32 or FP64 of batch.logit_rows; rows: the last row set with its
    streams."""

    logits: Tensor
    rows: Rows


class Layer(nn.Module):
    """One block of the backbone or of the drafter (`layer` counts drafter blocks after the
    backbone)."""

    def __init__(self, config: ModelConfig, layer: int, draft: bool = False) -> None:
        super().__init__()
        c, self.layer = config, layer
        self.name = f"mtp.{layer - c.num_hidden_layers}" if draft else f"layers.{layer}"
        self.feeds_drafter = not draft and layer in c.dspark_target_layer_ids
        for site in ("attn", "ffn"):
            mhc.declare(self, c, site)
        self.attn_norm = Norm(c.hidden_size)
        self.ffn_norm = Norm(c.hidden_size)
        self.attn = AttentionLayer(c, layer)
        self.ffn = MoE(c, draft)
        if not draft and layer in c.engram_layer_ids:
            self.engram = Engram(c, layer)

    def forward(
        self,
        rows: Rows,
        ctx: ForwardContext,
        token_map: Tensor | None = None,
        plan: AttnPlan | None = None,
    ) -> Rows:
        """`plan` is given by the drafter only, whose keys are temporary."""
        name, ops = self.name, ctx.ops
        cut = ctx.batch.cuts.get(self.layer) if plan is None else None
        rows = replace(rows, streams=ctx.see(f"{name}.in", rows.streams, rows.set))
        if hasattr(self, "engram"):
            streams = self.engram(rows, f"{name}.engram", token_map, ctx)
            rows = replace(rows, streams=ctx.see(f"{name}.engram.streams", streams, rows.set))
        if self.feeds_drafter:
            rows = replace(rows, features=(*rows.features, stream_mean(rows.streams)))

        x = self.attn_norm(ops.mhc_collapse(rows.streams, rows.pre), ctx)
        x = ctx.see(f"{name}.attn.in", x, rows.set)
        if cut is not None:
            ctx.check(x, rows.set)
        y, rows = self.attn(x, rows, f"{name}.attn", ctx, cut, plan)
        y = ctx.see(f"{name}.attn.out", y, rows.set)
        pre, post, comb = mhc.mix(self, "attn", rows.streams, ctx)
        comb = ctx.see(f"{name}.attn.comb", comb, rows.set)
        rows = replace(rows, streams=ops.mhc_expand(rows.streams, y, post, comb), pre=pre)

        x = self.ffn_norm(ops.mhc_collapse(rows.streams, rows.pre), ctx)
        x = ctx.see(f"{name}.ffn.in", x, rows.set)
        y = ctx.see(f"{name}.ffn.out", self.ffn(x, rows, f"{name}.ffn", ctx), rows.set)
        pre, post, comb = mhc.mix(self, "ffn", rows.streams, ctx)
        comb = ctx.see(f"{name}.ffn.comb", comb, rows.set)
        return replace(rows, streams=ops.mhc_expand(rows.streams, y, post, comb), pre=pre)


def stream_mean(streams: Tensor) -> Tensor:
    """[t, d] mean over the streams, computed in FP32 or FP64: what the drafter reads of a layer."""
    acc = torch.promote_types(streams.dtype, torch.float32)
    return streams.to(acc).mean(1).to(streams.dtype)


class Model(nn.Module):
    """All weights of the text model under their official tensor names, and the forward.

    Parameters are empty until a loader covers them. The model holds no slot, cache or kernel: they
    come with the ForwardContext, so engines with different slots share one Model.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        from deepinfer.model.drafter import DraftLayer

        c = self.config = config
        self.embed = Weight(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Layer(c, i) for i in range(c.num_hidden_layers))
        self.norm = Norm(c.hidden_size)
        self.head = Linear(c.hidden_size, c.vocab_size)
        self.mtp = nn.ModuleList(DraftLayer(c, i) for i in range(c.num_nextn_predict_layers))
        self.register_buffer("token_map", torch.zeros(0, dtype=torch.long), persistent=False)

    @property
    def drafter(self) -> Drafter:
        """The drafter over the mtp blocks. Made when asked for: held, it would be a reference
        cycle, and weights would outlive their last engine until a garbage collection."""
        from deepinfer.model.drafter import Drafter

        return Drafter(self)

    def set_token_map(self, token_map: Tensor) -> None:
        """[vocab_size] long, compressed id of each token (see engram_hash.token_map)."""
        self.token_map = token_map.to(self.embed.weight.device, torch.long)

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.embed.weight.device

    def embed_rows(self, ids: Tensor) -> Tensor:
        """[t, m, d] streams: the embedding repeated."""
        return taken(self.embed.weight, ids)[:, None].expand(-1, self.config.hc_mult, -1)

    def first_rows(self, batch: Batch) -> Rows:
        """What enters layer 0: every row of the batch, embedded."""
        streams = self.embed_rows(batch.ids)
        return Rows(
            batch.row_set,
            streams,
            mhc.first_pre(batch.num_rows, self.config.hc_mult, streams),
            batch.ids,
            batch.lookback,
            batch.image,
            batch.rank,
        )

    def run(self, rows: Rows, ctx: ForwardContext, first: int = 0, stop: int | None = None) -> Rows:
        """Rows that enter layer `first`, as they leave layer `stop` - 1 (default: the last one)."""
        for i in range(first, len(self.layers) if stop is None else stop):
            rows = self.layers[i](rows, ctx, self.token_map)
        return rows

    def forward(self, ctx: ForwardContext) -> Output:
        rows = self.run(self.first_rows(ctx.batch), ctx)
        ctx.check(rows.streams, rows.set)
        if ctx.drafter and ctx.cache is not None:
            self.drafter.remember(rows, ctx)
        return Output(self.logits(rows, ctx), rows)

    def logits(self, rows: Rows, ctx: ForwardContext) -> Tensor:
        at = ctx.batch.logit_rows
        wanted = wanted_rows(rows.set, at)
        h = ctx.see("final", ctx.ops.mhc_collapse(rows.streams[at], rows.pre[at]), wanted)
        acc = torch.promote_types(h.dtype, torch.float32)
        return ctx.see("logits", self.head(self.norm(h, ctx), ctx, acc), wanted)


def wanted_rows(rows: RowSet, at: Tensor) -> RowSet:
    """Coordinates of chosen rows; only positions and seq mean anything."""
    return RowSet(rows.positions[at], rows.seq[at], rows.first, rows.start)
