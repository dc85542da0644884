"""Text that the target writes itself: what the drafter is trained on, for that is what it will draft.

The loop is the engine's forward over its own cache, with whole batches of equally long sequences, so
that nothing is done per sequence on the host.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from deepinfer import kernels
from deepinfer.cache.kv_cache import CacheSize, KVCache
from deepinfer.model.context import ForwardContext
from deepinfer.model.stack import Model
from deepinfer.slots.attention.csa2 import CSA2
from deepinfer.slots.protocols import Batch, EngineInfo, RowSet

from . import fast
from .batches import Split, Stream


def prompts(splits: list[Split], n: int, length: int, seed: int) -> Tensor:
    """[n, length] starts of text, cut anywhere, with a bos in front; an equal share of each split."""
    streams = [Stream(s, seed + i) for i, s in enumerate(splits)]
    share = -(-n // len(streams))
    ids = np.concatenate([s.rows(share, length) for s in streams])[:n]
    ids[:, 0] = 0  # every prompt starts with bos
    return torch.from_numpy(ids)


@torch.no_grad()
def write(
    model: Model, starts: Tensor, length: int, temperatures: Tensor, *, seed: int, prefill: int = 64,
    compiled: bool = False,
) -> Tensor:
    """[n, p + length]: starts [n, p] continued by the model at fidelity 1.

    temperatures [n]: 0 picks the most likely token. prefill: sequences prefilled at a time.
    """
    c, device = model.config, model.device
    n, p = starts.shape
    w = c.sliding_window
    per_seq = -(-(p + length) // w)
    info = EngineInfo(c, device, model.dtype, n)
    attention = CSA2().start(info)
    specs = [attention.kv_spec(c, i) for i in range(len(c.compress_ratios))]
    size = CacheSize(n * per_seq, n, w, backtracking=1)
    cache = KVCache(c, specs, size, dtype=model.dtype, device=device)
    pages = torch.arange(n * per_seq, device=device).view(n, per_seq) + 1
    states = torch.arange(n, device=device) + 1
    random = torch.Generator(device=device).manual_seed(seed)
    ops = kernels.bind()
    out = torch.empty(n, p + length, dtype=torch.long, device=device)
    out[:, :p] = starts.to(device)
    temperatures = temperatures.to(device)

    for i in range(0, n, prefill):
        at = slice(i, i + prefill)
        context = fast.context(c, out[at, :p], compiled=compiled, dtype=model.dtype)
        rows = len(pages[at])
        last = torch.arange(rows, device=device) * p + p - 1
        context.batch = replace(context.batch, pages=pages[at], state=states[at], logit_rows=last)
        context.cache = cache
        out[at, p] = draw(model(context).logits, temperatures[at], random)
    for at in range(p, p + length - 1):
        batch = step_batch(out, at, pages, states, c.engram_max_ngram_size - 1)
        context = ForwardContext(
            config=c, batch=batch, ops=ops, attention=attention, experts=fast.DenseExperts(),
            cache=cache,
        )
        out[:, at + 1] = draw(model(context).logits, temperatures, random)
    return out


def step_batch(ids: Tensor, at: int, pages: Tensor, states: Tensor, back: int) -> Batch:
    """One row for every sequence: the token at position `at` of ids [n, longest]."""
    n, device = ids.shape[0], ids.device
    each = torch.arange(n, device=device)
    positions = torch.full_like(each, at)
    lookback = [ids[:, at - s] if at >= s else torch.full_like(each, -1) for s in range(1, back + 1)]
    return Batch(
        ids=ids[:, at], positions=positions, seq=each, rows=torch.ones_like(each), length=positions,
        pages=pages, state=states, lookback=torch.stack(lookback, 1), logit_rows=each,
        row_set=RowSet(positions, each, each, positions), reach=at + 1, max_rows=1,
    )


def draw(logits: Tensor, temperatures: Tensor, random: torch.Generator) -> Tensor:
    """[n] a token of each row's law: the largest of logit + temperature * Gumbel noise."""
    noise = torch.empty_like(logits).exponential_(generator=random).log_().neg_()
    return (logits + temperatures[:, None].to(logits.dtype) * noise).argmax(1)
