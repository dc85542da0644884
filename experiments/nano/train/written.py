"""Text that the target writes itself: the drafter is trained on what it will have to draft.

The loop is the engine's forward over its own cache, with whole batches of equally long sequences,
so that nothing is done per sequence on the host.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer import kernels
from deepinfer.cache.kv_cache import CacheSize, KVCache
from deepinfer.model.context import ForwardContext
from deepinfer.model.stack import Model
from deepinfer.slots.attention.csa2 import CSA2
from deepinfer.slots.protocols import Batch, EngineInfo, RowSet
from experiments.nano.train import fast
from experiments.nano.train.batches import Split, Stream
from experiments.nano.train.graphs import Captured


def prompts(splits: list[Split], n: int, length: int, seed: int) -> Tensor:
    """[n, length] starts of text, cut anywhere, bos in front; an equal share of each split."""
    streams = [Stream(s, seed + i) for i, s in enumerate(splits)]
    share = -(-n // len(streams))
    ids = np.concatenate([s.rows(share, length) for s in streams])[:n]
    ids[:, 0] = 0  # every prompt starts with bos
    return torch.from_numpy(ids)


@torch.no_grad()
def write(
    model: Model,
    starts: Tensor,
    length: int,
    temperatures: Tensor,
    *,
    seed: int,
    prefill: int = 64,
    compiled: bool = False,
    capture: bool = False,
) -> Tensor:
    """[n, p + length]: starts [n, p] continued by the model at fidelity 1.

    temperatures [n]: 0 picks the most likely token. prefill: sequences prefilled at a time.
    compiled, capture: torch.compile for the prompts and a CUDA graph for the rest.
    """
    c, device = model.config, model.device
    n, p = starts.shape
    torch.manual_seed(seed)
    cache, pages, states = _cache(model, n, p + length)
    out = torch.empty(n, p + length, dtype=torch.long, device=device)
    out[:, :p] = starts.to(device)
    temperatures = temperatures.to(device)
    whole = -(-p // c.sliding_window) * c.sliding_window  # the batched path wants whole windows
    for i in range(0, n, prefill):
        at = slice(i, i + prefill)
        rows = len(pages[at])
        padded = F.pad(out[at, :p], (0, whole - p), value=c.pad_token_id)
        # Rows behind the prompt write keys that the first steps overwrite or may not see.
        context = fast.context(c, padded, compiled=compiled, dtype=model.dtype)
        last = torch.arange(rows, device=device) * whole + p - 1
        context.batch = replace(context.batch, pages=pages[at], state=states[at], logit_rows=last)
        context.cache = cache
        out[at, p] = draw(model(context).logits, temperatures[at])
    step = _step(model, cache, pages, states, out, temperatures, capture)
    for at in range(p, p + length - 1):
        step(at=at)
    return out


def _cache(model: Model, n: int, longest: int) -> tuple[KVCache, Tensor, Tensor]:
    """(cache for n sequences of up to `longest` tokens, pages [n, pages], states [n])."""
    c, device = model.config, model.device
    # room for the rows that fill up a prompt's last window
    per_seq = -(-longest // c.sliding_window) + 1
    attention = CSA2().start(EngineInfo(c, device, model.dtype, n))
    specs = [attention.kv_spec(c, i) for i in range(len(c.compress_ratios))]
    size = CacheSize(n * per_seq, n, c.sliding_window, backtracking=c.sliding_window)
    cache = KVCache(c, specs, size, dtype=model.dtype, device=device)
    pages = torch.arange(n * per_seq, device=device).view(n, per_seq) + 1
    return cache, pages, torch.arange(n, device=device) + 1


def _step(
    model: Model,
    cache: KVCache,
    pages: Tensor,
    states: Tensor,
    out: Tensor,
    temperatures: Tensor,
    capture: bool,
) -> Captured:
    """step(at=p): every sequence's token at position p goes in, that at p + 1 is drawn."""
    c, device = model.config, model.device
    n, longest = out.shape
    each, back = torch.arange(n, device=device), c.engram_max_ngram_size - 1
    info = EngineInfo(c, device, model.dtype, n)
    slots = dict(attention=CSA2().start(info), experts=fast.DenseExperts().start(info))
    inputs = {"at": torch.zeros((), dtype=torch.long, device=device)}
    ops, constants = kernels.bind(), {}

    def run() -> dict[str, Tensor]:
        at = inputs["at"]
        positions = at.expand(n)
        behind = at - torch.arange(1, back + 1, device=device)
        lookback = out[:, behind.clamp(min=0)].masked_fill(behind < 0, -1)
        batch = Batch(
            ids=out.index_select(1, at[None])[:, 0],
            positions=positions,
            seq=each,
            rows=torch.ones_like(each),
            length=positions,
            pages=pages,
            state=states,
            lookback=lookback,
            logit_rows=each,
            row_set=RowSet(positions, each, each, positions),
            reach=longest,
            max_rows=1,
        )
        ctx = ForwardContext(
            config=c, batch=batch, ops=ops, cache=cache, _shared=dict(constants), **slots
        )
        tokens = draw(model(ctx).logits, temperatures)
        constants.update(fast.constants_of(ctx))
        out.index_copy_(1, (at + 1)[None], tokens[:, None])
        return {"tokens": tokens}

    return Captured(run, inputs, capture)


def draw(logits: Tensor, temperatures: Tensor) -> Tensor:
    """[n] a token of each row's law: the largest of logit + temperature * Gumbel noise."""
    noise = torch.empty_like(logits).exponential_().log_().neg_()
    return (logits + temperatures[:, None].to(logits.dtype) * noise).argmax(1)
