"""DSpark: three window-only blocks that propose a block of tokens in one pass.

    context   c_p = main_norm(main_proj(f_p)), f_p = the stream means of the target layers at p;
              each draft layer keeps wkv_i(c_p) of the last positions in its own ring
    block     inputs [g, noise, noise, ...] at positions a+1.., g = the last emitted token (at a+1);
              every row sees the context positions a-W+1 .. a and ALL rows of the block
    tokens    base_k = head(norm(h_k)); logits_k = base_k + markov.head(markov.embed[prev]);
              conf_k = sigmoid(w . [h_k ; markov.embed[prev]]) with h_k before the norm
Row k predicts position a+2+k. Drafts are drawn with the key of the position they predict, the same
key the target uses there, so that equal distributions give equal tokens.

A draft step reads the context from an engine's cache, or from a `SequenceContext`: the keys of
whole sequences as one forward made them, which a gradient can pass (training, one-shot checks).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn

from deepinfer.cache.addressing import context_places
from deepinfer.cache.kv_cache import KVCache
from deepinfer.config import ModelConfig
from deepinfer.kernels.records import Layout, Records
from deepinfer.model import mhc
from deepinfer.model.attention_layer import store
from deepinfer.model.context import ForwardContext
from deepinfer.model.layers import Linear, Norm, Weight
from deepinfer.model.stack import Layer, Model
from deepinfer.slots.protocols import (
    AttnPlan,
    Batch,
    Draft,
    RowKeys,
    RowParams,
    Rows,
    RowSet,
    Sampler,
)


class Holder(nn.Module):
    """A name in the official layout with weights below it."""


class DraftLayer(Layer):
    """mtp.i: a backbone block; the first also has the feature projection, the last the heads."""

    def __init__(self, config: ModelConfig, i: int) -> None:
        c = config
        super().__init__(c, c.num_hidden_layers + i, draft=True)
        if i == 0:
            self.main_proj = Linear(
                len(c.dspark_target_layer_ids) * c.hidden_size, c.hidden_size, rounded=True
            )
            self.main_norm = Norm(c.hidden_size)
        if i == c.num_nextn_predict_layers - 1:
            self.norm = Norm(c.hidden_size)
            self.markov_head = Holder()
            self.markov_head.embed = Weight(c.vocab_size, c.dspark_markov_rank)
            self.markov_head.head = Linear(c.dspark_markov_rank, c.vocab_size)
            self.confidence_head = Holder()
            self.confidence_head.proj = Linear(c.hidden_size + c.dspark_markov_rank, 1)


@dataclass(frozen=True, slots=True)
class SequenceContext:
    """The drafter's context of whole sequences of `ring` rows each, all from position 0.

    windows: draft layer -> Records of [sequences * ring, d] keys, rounded as a cache keeps them,
    with their gradient. It stands where a draft step expects its cache: a ring that holds a whole
    sequence has position p of sequence s at place s * ring + p, which is the row of the forward.
    Nothing is ever written to it, so place 0 is a record like any other.
    """

    windows: dict[int, Records]
    ring: int


class Drafter:
    """The drafter over a Model's mtp blocks (no weights of its own; embedding and head are
    shared)."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def context_keys(self, features: Tensor, keys: RowSet, ctx: ForwardContext) -> list[Tensor]:
        """[t, d] window key of every draft layer at the rows' positions, before rounding."""
        first = self.model.mtp[0]
        context = first.main_norm(first.main_proj(features, ctx), ctx)
        cos, sin = ctx.angles(keys, False, context.dtype)
        return [layer.attn.window_key(context, cos, sin, ctx) for layer in self.model.mtp]

    def stored_keys(self, rows: Rows, ctx: ForwardContext) -> Iterator[tuple[int, Tensor, Tensor]]:
        """(layer, window keys [t, d], the same as a record keeps them) of every draft layer. Raises
        ValueError when a target layer gave no features."""
        targets = self.model.config.dspark_target_layer_ids
        if len(rows.features) != len(targets):
            raise ValueError(
                f"the drafter reads layers {list(targets)}, but {len(rows.features)} of them gave "
                "features"
            )
        features = ctx.see("features", torch.cat(rows.features, -1), rows.set)
        for layer, key in zip(self.model.mtp, self.context_keys(features, rows.set, ctx)):
            fmt = ctx.attention.kv_spec(ctx.config, layer.layer).window_format
            yield layer.layer, key, ctx.round(key, fmt)

    def remember(self, rows: Rows, ctx: ForwardContext) -> None:
        """Write the drafter's context of the step's rows (later-rejected ones too: they are
        overwritten by position). Raises ValueError when a target layer gave no features."""
        for layer, key, rounded in self.stored_keys(rows, ctx):
            store(ctx.cache.windows[layer], ctx.window_writes(layer, rows.set), key, rounded)

    # ------------------------------------------------------------------ whole sequences, no cache

    def sequence_context(self, rows: Rows, ctx: ForwardContext) -> SequenceContext:
        """The context of every position of the sequences that a forward without a cache has run:
        its `Output.rows`, its ctx. Roundings pass gradients straight through.

        Raises ValueError where the sequences do not all start at position 0 and have as many rows
        as each other, as far as the host knows, or a target layer gave no features.
        """
        sequences, total = rows.set.first.shape[0], rows.set.count
        lengths = {stop - start for _, start, stop in rows.set.segments or ()}
        if ctx.batch.has_history or not sequences or total % sequences or len(lengths) > 1:
            raise ValueError(
                f"{total} rows of {sequences} sequences (lengths "
                f"{sorted(lengths) or 'on the device'}, "
                f"history: {ctx.batch.has_history}): a drafter's context without a cache wants "
                "sequences of one length, each from its position 0; cut or pad them"
            )
        windows = {
            layer: Records(rounded, None, Layout("float", rounded.shape[-1]))
            for layer, _, rounded in self.stored_keys(rows, ctx)
        }
        return SequenceContext(windows, total // sequences)

    def block_context(
        self,
        context: SequenceContext,
        seqs: Tensor,
        tokens: Tensor,
        positions: Tensor,
        ctx: ForwardContext,
    ) -> ForwardContext:
        """The ForwardContext of one draft step over whole sequences, for `states`.

        Block i continues sequence seqs[i] with tokens[i] at positions[i] (all [b] long, 1 <=
        position <= context.ring, not checked: that would wait for the device). Any number of blocks
        may continue one sequence. Nothing here waits for the device.
        """
        b, back = tokens.shape[0], self.model.config.engram_max_ngram_size - 1
        own = torch.arange(b, device=tokens.device)
        none = own.new_zeros(0)
        batch = Batch(
            ids=tokens,
            positions=positions,
            seq=own,
            rows=torch.ones_like(own),
            length=positions,
            pages=own.new_zeros(b, 1),
            state=seqs,
            lookback=own.new_full((b, back), -1),
            logit_rows=none,
            row_set=RowSet(positions, own, own, positions),
            reach=context.ring,
            max_rows=1,
        )
        # Frequencies are the model's; all else that layers share belongs to the rows of one step.
        shared = {key: x for key, x in ctx._shared.items() if key[0] == "frequencies"}
        # Of a cache, a draft step uses the two fields that a SequenceContext has.
        cache = cast(KVCache, context)
        return replace(ctx, batch=batch, cache=cache, _shared=shared)

    # ------------------------------------------------------------------------------ draft blocks

    def block_rows(self, tokens: Tensor, positions: Tensor, n: int) -> Rows:
        """Rows of the draft blocks: [b*n] rows, token g then noise, at positions, positions+1,
        ..."""
        c, b, device = self.model.config, tokens.shape[0], tokens.device
        ids = torch.full((b, n), c.dspark_noise_token_id, dtype=torch.long, device=device)
        ids[:, 0] = tokens
        at = positions[:, None] + torch.arange(n, device=device)
        first = torch.arange(b, device=device) * n
        seq = torch.arange(b, device=device).repeat_interleave(n)
        rows = RowSet(at.flatten(), seq, first, positions)
        streams = self.model.embed_rows(ids.flatten())
        lookback = torch.full(
            (b * n, c.engram_max_ngram_size - 1), -1, dtype=torch.long, device=device
        )
        return Rows(
            rows, streams, mhc.first_pre(b * n, c.hc_mult, streams), ids.flatten(), lookback
        )

    def block_plan(self, rows: RowSet, positions: Tensor, n: int, ctx: ForwardContext) -> AttnPlan:
        """Every row of a block sees the W context positions before it and the whole block."""
        device = positions.device
        width = min(self.model.config.sliding_window, max(ctx.batch.reach, 1))
        stored = ctx.cache.windows[self.model.mtp[0].layer].count if ctx.batch.has_history else 0
        own = stored + rows.first[:, None] + torch.arange(n, device=device)
        floor = ctx.floor(self.model.mtp[0].layer)
        context = context_places(ctx.batch.state, positions, floor, width, ctx.cache.ring)
        places = torch.cat([context, own], 1)
        return AttnPlan(places.repeat_interleave(n, 0), rows)

    def states(
        self, tokens: Tensor, positions: Tensor, n: int, ctx: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        """(h [b, n, d] collapsed residual, base logits [b, n, v]) of the draft blocks.

        tokens [b]: the last emitted token, at `positions` [b]; ctx.batch: its state ids and floors.
        """
        rows = self.block_rows(tokens, positions, n)
        plan = self.block_plan(rows.set, positions, n, ctx)
        for layer in self.model.mtp:
            rows = layer(rows, ctx, plan=plan)
        h = ctx.ops.mhc_collapse(rows.streams, rows.pre)
        acc = torch.promote_types(h.dtype, torch.float32)
        base = self.model.head(self.model.mtp[-1].norm(h, ctx), ctx, acc)
        b = tokens.shape[0]
        base = ctx.see("mtp.base", base, rows.set)
        return h.view(b, n, h.shape[-1]), base.view(b, n, base.shape[-1])

    def slot_logits(
        self, h: Tensor, base: Tensor, previous: Tensor, ctx: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        """(logits [r, v], score [r]) of block slots whose token follows `previous` [r].

        h [r, d], base [r, v]: rows of `states`. The confidence of the token is sigmoid(score).
        """
        last = self.model.mtp[-1]
        markov = last.markov_head.embed.weight[previous]
        logits = base + last.markov_head.head(markov, ctx, base.dtype)
        score = last.confidence_head.proj(torch.cat([h, markov], -1), ctx, base.dtype)
        return logits, score[:, 0]

    def propose(
        self,
        tokens: Tensor,
        positions: Tensor,
        n: int,
        ctx: ForwardContext,
        sampler: Sampler,
        params: RowParams,
        keys: RowKeys,
        keep_dists: bool = False,
    ) -> Draft:
        """Draft n tokens a sequence. keys: of the first draft's output position."""
        h, base = self.states(tokens, positions, n, ctx)
        dists, out, confidence, logprobs = [], [], [], []
        previous = tokens
        for k in range(n):
            logits, score = self.slot_logits(h[:, k], base[:, k], previous, ctx)
            dist = sampler.distribution(logits, params)
            drawn = sampler.draw(dist, keys.later(k))
            confidence.append(score.clamp(-60, 60).sigmoid())
            logprobs.append(drawn.logprobs)
            previous = drawn.tokens
            out.append(previous)
            dists.append(dist)
        return Draft(
            torch.stack(out, 1),
            torch.stack(confidence, 1),
            torch.stack(logprobs, 1),
            tuple(dists) if keep_dists else (),
        )
