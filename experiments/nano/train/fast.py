"""The batched training path: the project's own model on many whole sequences at once.

Nothing of the model is written twice. `deepinfer.model.Model` runs as it is, without a cache, over
a flat batch of b sequences of t rows; only two slots know that they are whole and equally long:

    BatchedCSA2   the window as blocks of W queries against 2 W keys; picked entries gathered once
                  per selection and shared by the layers that reuse it, or all entries at once
                  (dense: how training starts); the indexer's loss on the side
    DenseExperts  all experts as one wide MLP whose activations the routing weights mask: at an
                  expert width of 32 this is cheaper than sorting rows
Tests hold them equal to `CSA2`, `Dense` and `Local`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer import kernels
from deepinfer.config import ModelConfig
from deepinfer.kernels.numerics import acc_dtype, taken
from deepinfer.kernels.swiglu.reference import swiglu
from deepinfer.model.context import ForwardContext, Tap
from deepinfer.slots.attention.csa2 import CSA2, outside
from deepinfer.slots.experts.local import Local
from deepinfer.slots.protocols import (
    AttnPlan,
    Batch,
    EngineInfo,
    ExpertLayer,
    IndexQuery,
    LayerInfo,
    Routing,
    RowSet,
    Selected,
)


def batch_of(ids: Tensor, config: ModelConfig) -> Batch:
    """The Batch of whole sequences ids [b, t], each from its start; logits of every row."""
    b, t = ids.shape
    device = ids.device
    positions = torch.arange(t, device=device).repeat(b)
    seq = torch.arange(b, device=device).repeat_interleave(t)
    zeros = torch.zeros(b, dtype=torch.long, device=device)
    segments = tuple((i, i * t, (i + 1) * t) for i in range(b))
    rows = RowSet(positions, seq, torch.arange(b, device=device) * t, zeros, segments)
    back = config.engram_max_ngram_size - 1
    padded = F.pad(ids, (back, 0), value=-1)
    lookback = torch.stack([padded[:, back - s : back - s + t] for s in range(1, back + 1)], -1)
    return Batch(
        ids=ids.flatten(),
        positions=positions,
        seq=seq,
        rows=zeros + t,
        length=zeros,
        pages=zeros[:, None],
        state=zeros,
        lookback=lookback.flatten(0, 1),
        logit_rows=torch.arange(b * t, device=device),
        row_set=rows,
        reach=t,
        max_rows=t,
        has_history=False,
    )


def without_logits(batch: Batch) -> Batch:
    """The same batch when no row's logits are wanted from the forward itself."""
    return replace(batch, logit_rows=batch.logit_rows[:0])


def context(
    config: ModelConfig,
    ids: Tensor,
    *,
    fidelity: int = 1,
    tap: Tap | None = None,
    index_loss: IndexLoss | None = None,
    compiled: bool = False,
    dtype: torch.dtype | None = None,
    constants: dict | None = None,
    dense: bool = False,
) -> ForwardContext:
    """The forward of whole sequences ids [b, t] through the batched slots, without a cache.

    index_loss: collects the indexer's loss of this forward. compiled: fuse the elementwise work of
    attention and experts with torch.compile (worth its start on an accelerator). constants: of an
    earlier context of this model (`constants_of`), so that none is copied to the device again.
    dense: every visible entry is attended to, as by the slot `Dense`, and nothing is picked.
    """
    info = EngineInfo(config, ids.device, dtype or torch.float32, ids.shape[0])
    attention = BatchedCSA2(tuple(ids.shape), index_loss, compiled, dense).start(info)
    return ForwardContext(
        config=config,
        batch=batch_of(ids, config),
        ops=kernels.bind(),
        attention=attention,
        experts=DenseExperts(compiled).start(info),
        fidelity=fidelity,
        tap=tap,
        _shared=dict(constants or {}),
    )


def constants_of(ctx: ForwardContext) -> dict:
    """What a forward that has run shared between layers and depends on the model alone."""
    return {k: x for k, x in ctx._shared.items() if k[0] == "frequencies" or k[-1] == "hash"}


@cache
def fused(fn: Callable) -> Callable:
    """fn as one compiled function per shape."""
    return torch.compile(fn, dynamic=False)


# -------------------------------------------------------------------------------------- attention


class BatchedCSA2(CSA2):
    """CSA2 for `shape` = (b, t): b whole sequences of t rows, t a multiple of the window."""

    def __init__(
        self,
        shape: tuple[int, int],
        index_loss: IndexLoss | None = None,
        compiled: bool = False,
        dense: bool = False,
    ) -> None:
        super().__init__()
        self.shape, self.index_loss, self.compiled = shape, index_loss, compiled
        self.dense = dense
        self._gathered: tuple[Tensor, Tensor] | None = None

    def start(self, info: EngineInfo) -> BatchedCSA2:
        own = copy.copy(self)
        own._config = info.config
        if self.shape[1] % info.config.sliding_window:
            raise ValueError(
                f"sequences of {self.shape[1]} rows: the batched path wants a multiple of the "
                f"window, {info.config.sliding_window}"
            )
        return own

    def select(
        self, layer: LayerInfo, index: IndexQuery, kv, plan: AttnPlan, carried: Selected | None
    ) -> Selected:
        b, t = self.shape
        n, visible = plan.reach[layer.ratio], plan.visible[layer.ratio]
        keys = kv.index_key_rows(n)
        entry = torch.arange(n, device=keys.device)
        hidden = entry >= visible[:, None]
        if self.dense:
            if self.index_loss is not None:
                self.index_loss.start_dense(layer, index, keys, hidden)
            return Selected(hidden.new_full((b * t, 1), -1, dtype=torch.long))
        candidates = carried.candidates if layer.role == "reindex" and carried is not None else None
        with torch.no_grad():
            weigh = fused(weighted) if self.compiled else weighted
            query = index.query.unflatten(0, (b, t)).flatten(1, 2)
            dots = (query @ keys.mT).view(b * t, -1, n)
            scores = weigh(dots, index.weights).masked_fill(hidden, -torch.inf)
            size = layer.candidate_block_size
            if layer.candidate_source and n > layer.candidate_blocks * size:
                candidates = blocks(scores, visible, size, layer.candidate_blocks)
            elif candidates is not None:
                hidden = hidden | outside(candidates, n, size)
                scores = scores.masked_fill(hidden, -torch.inf)
            ids = best(scores, min(layer.top_k, n))
        if self.index_loss is not None:
            self.index_loss.start(layer, index, keys, ids, hidden, self.shape[1])
        return Selected(ids, candidates)

    def attend(self, layer: LayerInfo, q: Tensor, kv, selected: Selected | None, plan: AttnPlan):
        if layer.index >= self._config.num_hidden_layers:  # a draft block lists its own keys
            return super().attend(layer, q, kv, selected, plan)
        if self.dense and selected is not None:
            every = kv.entries.stored.unflatten(0, self.shape)[:, layer.ratio - 1 :: layer.ratio]
            look = fused(attend_dense) if self.compiled else attend_dense
            out, mass = look(
                q, kv.window.stored, every, layer.sink, layer.scale, layer.window, layer.ratio
            )
            if self.index_loss is not None:
                self.index_loss.see_dense(mass)
            return out
        gathered = None if selected is None else self._gather(kv.entries.stored, selected.places)
        none = None if selected is None else selected.places < 0
        look = fused(attend_whole) if self.compiled else attend_whole
        out, mass, lse = look(
            q,
            kv.window.stored,
            gathered,
            none,
            layer.sink,
            layer.scale,
            self.shape[0],
            layer.window,
        )
        if selected is not None and self.index_loss is not None:
            self.index_loss.see(q, kv.entries.stored, mass, lse, layer.scale)
        return out

    def _gather(self, rows: Tensor, places: Tensor) -> Tensor:
        """[t, k, d] entries of a selection, gathered once for all the layers that use it."""
        if self._gathered is None or self._gathered[0] is not places:
            self._gathered = (places, taken(rows, spread(places, len(rows))))
        return self._gathered[1]


def spread(ids: Tensor, n: int) -> Tensor:
    """ids with each -1 replaced by some row of 0..n-1: what is there is masked, and rows that many
    queries do not want must not all be the same one, where their (zero) gradients would queue."""
    other = torch.arange(ids.numel(), device=ids.device).view(ids.shape) % n
    return torch.where(ids < 0, other, ids)


def attend_whole(
    q: Tensor,
    keys: Tensor,
    gathered: Tensor | None,
    none: Tensor | None,
    sink: Tensor,
    scale: float,
    b: int,
    w: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of whole sequences. q "b*t h d", keys "b*t d" window keys, gathered "b*t k d"
    picked entries with none "b*t k" True where there is no pick, sink "h".

    -> out "b*t h d"; without gradient: mass "b*t k" of the picks, summed over heads, and the
    log-sum-exp "b*t h" of each head's logits.
    """
    rows, h, d = q.shape
    near, logits = near_logits(q, keys, scale, b, w)
    if gathered is not None:
        far = (q @ gathered.mT).to(logits.dtype) * scale
        logits = torch.cat([logits, far.masked_fill(none[:, None], -torch.inf)], 2)
    share, lse = with_sink(logits, sink)
    near_share = share[..., : 2 * w].to(q.dtype).view(*near.shape[:2], w * h, 2 * w)
    out = (near_share @ near).view(rows, h, d)
    mass = share.new_zeros(rows, 0)
    if gathered is not None:
        out = out + share[..., 2 * w :].to(q.dtype) @ gathered
        mass = share[..., 2 * w :].detach().sum(1)
    return out, mass, lse.detach()


def attend_dense(
    q: Tensor, keys: Tensor, every: Tensor, sink: Tensor, scale: float, w: int, ratio: int
) -> tuple[Tensor, Tensor]:
    """As `attend_whole` over all visible entries: every "b n d", entry j of the tokens that end at
    ratio * (j + 1) - 1. -> out "b*t h d" and, without gradient, mass "b*t n"."""
    (rows, h, d), (b, n, _) = q.shape, every.shape
    t = rows // b
    near, logits = near_logits(q, keys, scale, b, w)
    far = (q.view(b, t * h, d) @ every.mT).view(b, t, h, n).to(logits.dtype) * scale
    visible = (torch.arange(t, device=q.device) + 1) // ratio
    hidden = torch.arange(n, device=q.device) >= visible[:, None]
    far = far.masked_fill(hidden[None, :, None], -torch.inf).view(rows, h, n)
    share, _ = with_sink(torch.cat([logits, far], 2), sink)
    near_share = share[..., : 2 * w].to(q.dtype).view(*near.shape[:2], w * h, 2 * w)
    out = (near_share @ near).view(rows, h, d)
    far_share = share[..., 2 * w :]
    out = out + (far_share.to(q.dtype).reshape(b, t * h, n) @ every).view(rows, h, d)
    return out, far_share.detach().sum(1)


def near_logits(q: Tensor, keys: Tensor, scale: float, b: int, w: int) -> tuple[Tensor, Tensor]:
    """(window keys "b n 2w d" of each block of w queries: its own block's and the one before,
    logits "b*t h 2w"). Row i of a block sees columns i+1 .. i+w of its 2 w."""
    rows, h, d = q.shape
    t = rows // b
    block = keys.view(b, t // w, w, d)
    before = F.pad(block[:, :-1], (0, 0, 0, 0, 1, 0))
    near = torch.cat([before, block], 2)
    logits = (q.view(b, t // w, w * h, d) @ near.mT).view(b, t // w, w, h, 2 * w)
    row = torch.arange(w, device=q.device)[:, None]
    column = torch.arange(2 * w, device=q.device)
    seen = (column > row) & (column <= row + w)
    first = torch.arange(t // w, device=q.device)[:, None, None] == 0
    seen = seen & ~(first & (column < w))  # n w 2w
    logits = logits.to(acc_dtype(q)) * scale
    return near, logits.masked_fill(~seen[None, :, :, None], -torch.inf).view(rows, h, 2 * w)


def with_sink(logits: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """(softmax of logits "t h k" with a head's sink in the denominator, its log-sum-exp "t h")."""
    sinks = sink.to(logits.dtype).view(1, -1, 1).expand(len(logits), -1, 1)
    lse = torch.cat([logits, sinks], 2).logsumexp(2, keepdim=True)
    return torch.exp(logits - lse), lse.squeeze(2)


def weighted(dots: Tensor, weights: Tensor) -> Tensor:
    """dots "t h n", weights "t h" -> "t n" index scores: sum over heads of weight * relu(dot)."""
    wide = acc_dtype(dots)
    return (torch.relu(dots.to(wide)) * weights.to(wide)[..., None]).sum(1)


def best(scores: Tensor, k: int) -> Tensor:
    """[t, k] entries of the k largest scores, in no order, -1 where fewer are visible.

    Equal scores are frequent: relu gives zeros, and FP4 queries and keys have few products. The
    model gives ties to the lowest index. Here the entry's number times a value below the scores'
    precision does the same at zero, and in FP64 everywhere, without a stable sort of whole rows.
    """
    n = scores.shape[1]
    later = torch.arange(n, device=scores.device, dtype=scores.dtype)
    small = 1e-30
    if scores.dtype == torch.float64:
        small = torch.where(scores.isfinite(), scores.abs(), 0) * 1e-14 + 1e-30
    values, ids = torch.topk(scores - later * small, k, sorted=False)
    return ids.masked_fill(values == -torch.inf, -1)


def blocks(scores: Tensor, visible: Tensor, size: int, k: int) -> Tensor:
    """[t, k] candidate blocks of `size` entries by their best score, the newest always kept."""
    n = scores.shape[1]
    count = -(-n // size)
    padded = F.pad(scores, (0, count * size - n), value=-torch.inf)
    top = padded.unflatten(1, (count, size)).amax(2)
    newest = torch.arange(count, device=scores.device) == ((visible - 1) // size)[:, None]
    return best(torch.where(newest, torch.inf, top), min(k, count))


# ----------------------------------------------------------------------------- the indexer's loss


@dataclass
class IndexLoss:
    """KL from the attention of the layers that use an indexer's picks to the softmax of its scores.

    The hard top-k passes the indexer no gradient, so it learns from what attention makes of its
    picks: on every `every`-th query (from `phase` on; every divides a sequence), over the picked
    entries and `random` other visible ones, target = attention mass of all heads and layers,
    normalised over that set (as published for DeepSeek Sparse Attention). Inputs of the indexer are
    detached in the model.
    """

    every: int
    random: int
    phase: int | Tensor = 0  # below `every`
    sources: list[dict[str, Any]] = field(default_factory=list)

    def start(
        self, layer: LayerInfo, index: IndexQuery, keys: Tensor, ids: Tensor, hidden: Tensor, t: int
    ) -> None:
        """A new index source: fix the set of entries of each sampled row and score it, with
        gradient. keys "b n d", ids "b*t k" the picks, hidden "b*t n" what may not be picked."""
        at = torch.arange(0, len(ids), self.every, device=ids.device) + self.phase
        owner = at // t
        picked, hidden = ids[at], hidden[at]
        n = hidden.shape[1]
        other = torch.randint(n, (len(at), self.random), device=ids.device)
        twice = (other[:, :, None] == picked[:, None]).any(2)
        twice = twice | (other[:, :, None] == other[:, None]).tril(-1).any(2)
        other = other.masked_fill(hidden.gather(1, other) | twice, -1)
        entries = torch.cat([picked, other], 1)
        chosen = taken(keys.flatten(0, 1), owner[:, None] * n + spread(entries, n))
        query, weights = taken(index.query, at), taken(index.weights, at)
        scores = weighted(query @ chosen.mT, weights).masked_fill(entries < 0, -torch.inf)
        # own rows: entry j of a sequence lies where its last token does
        last = other.clamp(min=0) * layer.ratio + layer.ratio - 1
        place = owner[:, None] * t + last
        self.sources.append(
            dict(name=layer.name, at=at, place=place, scores=scores, none=entries < 0, mass=0)
        )

    def start_dense(
        self, layer: LayerInfo, index: IndexQuery, keys: Tensor, hidden: Tensor
    ) -> None:
        """The same where every visible entry is attended to: the set is all of them."""
        b, n, _ = keys.shape
        at = torch.arange(0, len(hidden), self.every, device=hidden.device) + self.phase
        query, weights = taken(index.query, at), taken(index.weights, at)
        dots = query.view(b, -1, query.shape[-1]) @ keys.mT
        none = hidden[at]
        scores = weighted(dots.view(len(at), -1, n), weights).masked_fill(none, -torch.inf)
        self.sources.append(dict(name=layer.name, at=at, scores=scores, none=none, mass=0))

    @torch.no_grad()
    def see_dense(self, mass: Tensor) -> None:
        """Add one layer's attention mass "b*t n"."""
        s = self.sources[-1]
        s["mass"] = s["mass"] + mass[s["at"]]

    @torch.no_grad()
    def see(self, q: Tensor, entries: Tensor, mass: Tensor, lse: Tensor, scale: float) -> None:
        """Add one layer's attention mass: q "b*t h d", entries: rows that entries are stored in."""
        s = self.sources[-1]
        far = (q[s["at"]] @ entries[s["place"]].mT).to(lse.dtype) * scale
        share = torch.exp(far - lse[s["at"]][..., None]).sum(1)
        s["mass"] = s["mass"] + torch.cat([mass[s["at"]], share], 1)

    def terms(self) -> dict[str, Tensor]:
        """{layer: mean KL in nats} over the queries that see an entry."""
        out = {}
        for s in self.sources:
            none = s["none"]
            mass = s["mass"].masked_fill(none, 0)
            seen = ~none.all(1)
            target = mass / mass.sum(1, keepdim=True).clamp(min=1e-20)
            scores = torch.where(seen[:, None], s["scores"], 0).log_softmax(1)
            scores = scores.masked_fill(none, 0)
            kl = (torch.xlogy(target, target) - target * scores).sum(1)
            out[s["name"]] = torch.where(seen, kl, 0).sum() / seen.sum().clamp(min=1)
        return out


# ----------------------------------------------------------------------------------------- experts


class DenseExperts(Local):
    """Every expert on every row; what a row did not choose is masked by a routing weight of 0."""

    def __init__(self, compiled: bool = False) -> None:
        self.compiled = compiled

    def forward(self, layer: ExpertLayer, x: Tensor, routing: Routing) -> Tensor:
        e, i, d = layer.w1.shape
        weights = torch.zeros(x.shape[0], e, dtype=routing.weights.dtype, device=x.device)
        there = routing.ids >= 0
        weights = weights.scatter_add(1, routing.ids.clamp(min=0), routing.weights * there)
        gate, up = F.linear(x, layer.w1.flatten(0, 1)), F.linear(x, layer.w3.flatten(0, 1))
        act = fused(masked_swiglu) if self.compiled else masked_swiglu
        hidden = act(gate, up, weights, layer.limit)
        return F.linear(hidden, layer.w2.permute(1, 0, 2).reshape(d, e * i))


def masked_swiglu(gate: Tensor, up: Tensor, weights: Tensor, limit: float) -> Tensor:
    """gate and up "t e*i", weights "t e" (0 for experts not chosen) -> "t e*i" in gate's dtype."""
    t, e = weights.shape
    hidden = swiglu(gate.to(weights.dtype), up.to(weights.dtype), limit).view(t, e, -1)
    return (hidden * weights[..., None]).view(t, -1).to(gate.dtype)
