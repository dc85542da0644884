"""The attention sub-layer: projections, keys, index, and the grouped low-rank output.

    q = Wqb RMSNorm(Wqa x), k = RMSNorm(Wkv x): one vector per token is key and value of all heads
    the last R dims of q and k are rotated; the output is rotated back at the query's position
    y = Wo_b concat_g(Wo_a[g] context_g)
Which keys a row looks at is the attention slot's business; what is stored where is LayerKV's.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from deepinfer.cache.addressing import entry_writes
from deepinfer.cache.layer_kv import LayerKV
from deepinfer.config import ModelConfig
from deepinfer.model.compressor import Compressor
from deepinfer.model.context import ForwardContext
from deepinfer.model.layers import Linear, Norm, frozen
from deepinfer.slots.protocols import AttnPlan, Cut, IndexQuery, LayerInfo, Rows, RowSet, Selected
from deepinfer.slots.results import expect, expect_record


class Indexer(nn.Module):
    """Query side (wq_b, weights_proj) at index sources; key side (wk, k_norm) at KV sources."""

    def __init__(self, config: ModelConfig, keys: bool) -> None:
        super().__init__()
        heads, dim = config.index_n_heads, config.index_head_dim
        self.wq_b = Linear(config.q_lora_rank, heads * dim, rounded=True)
        self.weights_proj = Linear(config.hidden_size, heads)
        if keys:
            self.wk = Linear(config.head_dim, dim)
            self.k_norm = Norm(dim)


class AttentionLayer(nn.Module):
    """Weights of one attention sub-layer; `layer` counts drafter layers after the backbone."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        c, self.layer = config, layer
        self.ratio = c.compress_ratios[layer]
        self.heads, self.groups = c.num_attention_heads, c.o_groups
        self.is_source = layer in c.kv_source_layer_ids
        self.attn_sink = frozen(self.heads, dtype=torch.float32)
        self.wq_a = Linear(c.hidden_size, c.q_lora_rank, rounded=True)
        self.q_norm = Norm(c.q_lora_rank)
        self.wq_b = Linear(c.q_lora_rank, self.heads * c.head_dim, rounded=True)
        self.wkv = Linear(c.hidden_size, c.head_dim, rounded=True)
        self.kv_norm = Norm(c.head_dim)
        width = self.heads * c.head_dim // self.groups
        self.wo_a = Linear(width, self.groups * c.o_lora_rank, rounded=True)
        self.wo_b = Linear(self.groups * c.o_lora_rank, c.hidden_size, rounded=True)
        if self.is_source:
            self.compressor = Compressor(c, layer)
        if layer in c.index_source_layer_ids:
            self.indexer = Indexer(c, keys=self.is_source)

    def info(self, name: str, ctx: ForwardContext) -> LayerInfo:
        c = ctx.config
        role = "window" if self.ratio == 0 else "reuse"
        if hasattr(self, "indexer"):
            role = "full" if self.is_source else "reindex"
        return LayerInfo(
            name=name,
            index=self.layer,
            role=role,
            ratio=self.ratio,
            window=c.sliding_window,
            scale=c.head_dim**-0.5,
            sink=self.attn_sink,
            top_k=c.index_topk,
            ops=ctx.ops,
            candidate_source=self.layer == c.candidate_source_layer_id,
            candidate_blocks=c.candidate_topk_blocks,
            candidate_block_size=c.candidate_block_size,
        )

    # ----------------------------------------------------------------------------------- keys

    def window_key(self, x: Tensor, cos: Tensor, sin: Tensor, ctx: ForwardContext) -> Tensor:
        """[t, d] rotated window key of each row, before the record's rounding."""
        return ctx.ops.rope(self.kv_norm(self.wkv(x, ctx), ctx), cos, sin)

    def source_kv(self, x: Tensor, rows: Rows, name: str, ctx: ForwardContext) -> LayerKV:
        """Project, round and store the block KV of a KV source; returns the entries side of
        LayerKV."""
        keys, ops, r = rows.set, ctx.ops, self.ratio
        latent = self.compressor(x, keys, ctx)
        first = keys.positions - (r - 1)
        cos, sin = ctx.once(
            ("entry angles", id(keys), r), lambda: ctx.angles_at(first.clamp(min=0), True, x.dtype)
        )
        entry = ops.rope(latent, cos, sin)
        # Picks carry no gradient; a loss on the scores must train the indexer and nothing before
        # it.
        index = ops.rope(self.indexer.k_norm(self.indexer.wk(latent.detach(), ctx), ctx), cos, sin)
        spec = ctx.attention.kv_spec(ctx.config, self.layer)
        own_entry, entry = record(f"{name}.entries", entry, spec.entry_format, keys, ctx)
        own_index, index = record(f"{name}.index_keys", index, spec.index_format, keys, ctx)
        batch, cache = ctx.batch, ctx.cache
        per_page = 1 if cache is None else cache.entries_per_page(r)
        own_start = (
            keys.start if batch.write_from is None else torch.maximum(keys.start, batch.write_from)
        )
        stored_entry = None if cache is None else cache.entries[self.layer]
        stored_index = None if cache is None else cache.index_keys[self.layer]
        if cache is not None:
            places = ctx.once(
                ("entry writes", id(keys), r),
                lambda: entry_writes(batch, keys, own_start, r, per_page),
            )
            store(stored_entry, places, entry, own_entry)
            store(stored_index, places, index, own_index)
        return LayerKV(
            window=None,
            entries=ctx.records(stored_entry, own_entry),
            index_keys=ctx.records(stored_index, own_index),
            ratio=r,
            keys=keys,
            own_start=own_start,
            pages=batch.pages,
            entries_per_page=per_page,
            stored=stored_entry.count if cache is not None and batch.has_history else 0,
        )

    # ---------------------------------------------------------------------------------- index

    def index_query(
        self, x: Tensor, qa: Tensor, cos: Tensor, sin: Tensor, ctx: ForwardContext
    ) -> IndexQuery:
        c = ctx.config
        x, qa = x.detach(), qa.detach()  # as the index keys: see source_kv
        query = self.indexer.wq_b(qa, ctx).view(-1, c.index_n_heads, c.index_head_dim)
        query = ctx.round(ctx.ops.rope(query, cos, sin), "mxfp4")
        scale = c.index_head_dim**-0.5 * c.index_n_heads**-0.5
        acc = torch.promote_types(x.dtype, torch.float32)
        return IndexQuery(query, self.indexer.weights_proj(x, ctx, acc) * scale)

    # ---------------------------------------------------------------------------------- forward

    def forward(
        self,
        x: Tensor,
        rows: Rows,
        name: str,
        ctx: ForwardContext,
        cut: Cut | None,
        plan: AttnPlan | None,
    ) -> tuple[Tensor, Rows]:
        """x [t, d] normed input of the entering rows -> (y [t', d], rows that go on).

        cut: rows that a replay plan drops here have their keys projected and stored first. plan
        None:
        the slot's plan over the sequence's window (and the ring is written); given: the drafter's,
        whose keys are temporary.
        """
        keys = rows.set
        cos, sin = ctx.angles(keys, self.ratio > 0, x.dtype)
        key = self.window_key(x, cos, sin, ctx)
        spec = ctx.attention.kv_spec(ctx.config, self.layer)
        own, key = record(f"{name}.window_keys", key, spec.window_format, keys, ctx)
        if self.is_source:
            rows = replace(rows, kv=self.source_kv(x, rows, name, ctx))
        if cut is not None:
            rows = rows.keep(cut)
            x, cos, sin = x[cut.keep], cos[cut.keep], sin[cut.keep]
        stored = None if ctx.cache is None else ctx.cache.windows[self.layer]
        window = ctx.records(stored, own)
        kv = (
            LayerKV(window)
            if rows.kv is None or self.ratio == 0
            else replace(rows.kv, window=window)
        )
        shared = plan if plan is not None else ctx.plan(self.layer, keys, rows.set)

        qa = self.q_norm(self.wq_a(x, ctx), ctx)
        q = self.wq_b(qa, ctx).view(-1, self.heads, ctx.config.head_dim)
        q = ctx.ops.rope(q, cos, sin)
        info = self.info(name, ctx)
        if info.role in ("full", "reindex"):
            rows = self._select(x, qa, cos, sin, rows, kv, info, shared, ctx)
        selected = rows.selected if self.ratio > 0 else None
        context = ctx.attention.attend(info, q, kv, selected, shared)
        expect(context, tuple(q.shape), f"attention {type(ctx.attention).__name__}.attend", True)
        if plan is None and stored is not None:
            if ctx.on_window_write is not None:
                ctx.on_window_write(self.layer, key if stored.layout.packed else own, keys)
            store(stored, ctx.window_writes(self.layer, keys), key, own)
        context = ctx.ops.rope(context, cos, sin, inverse=True)
        grouped = context.unflatten(1, (self.groups, -1)).flatten(2)
        z = ctx.ops.group_linear(grouped, self.wo_a.weight, act=ctx.act)
        return self.wo_b(z.flatten(1), ctx), rows

    def _select(
        self, x, qa, cos, sin, rows: Rows, kv: LayerKV, info: LayerInfo, plan: AttnPlan, ctx
    ) -> Rows:
        carried = rows.selected
        who = f"attention {type(ctx.attention).__name__}.select"
        picked = ctx.attention.select(
            info, self.index_query(x, qa, cos, sin, ctx), kv, plan, carried
        )
        expect_record(picked, Selected, who)
        expect(picked.ids, (rows.set.count, *picked.ids.shape[1:2]), f"{who} (ids)", False)
        ids = ctx.see(f"{info.name}.selected", picked.ids, rows.set)
        if picked.candidates is not None:
            blocks = ctx.see(f"{info.name}.candidates", picked.candidates, rows.set)
            picked = replace(picked, candidates=blocks)
        places = kv.places(ids, rows.set.owner)
        return replace(rows, selected=replace(picked, ids=ids, places=places))


def record(
    name: str, exact: Tensor, fmt: str | None, keys: RowSet, ctx: ForwardContext
) -> tuple[Tensor, Tensor]:
    """(the rounded rows that this step reads, what `store` quantises): an edit replaces both, so
    that later steps read it too."""
    rounded = ctx.round(exact, fmt)
    own = ctx.see(name, rounded, keys)
    return own, exact if own is rounded else own


def store(records, places: Tensor, exact: Tensor, rounded: Tensor) -> None:
    """Write one step's records: packed formats quantise the exact values themselves (their scale is
    chosen from them), float records take the rounded ones. Both read back the same numbers."""
    records.write(places, exact if records.layout.packed else rounded)
