"""The routed experts on the CPU: rows sorted by expert, one product per expert and weight."""

from __future__ import annotations

import bisect

import numpy as np
import torch

from ..numerics import acc_dtype, round_activation, unless_plain_cpu
from ..quantised import Quantised, dense
from ..swiglu.reference import swiglu

SMALL = 1 << 18  # multiplications below which numpy's smaller overhead wins; it stays on one thread


def supports(x, ids, weights, w1, w3, w2, limit, *, act=None) -> str | None:
    return unless_plain_cpu(x, weights, w1, w3, w2)


def experts(x, ids, weights, w1, w3, w2, limit, *, act=None):
    """As the reference, without a gradient."""
    wide = acc_dtype(x)
    order, segments = _by_expert(ids)
    out = torch.zeros(x.shape, dtype=wide)
    if not segments:
        return out.to(x.dtype)
    slot = torch.from_numpy(order)
    row = slot // ids.shape[1]
    mine = round_activation(x.detach(), act).index_select(0, row)
    gate, up = _products(mine, w1, segments), _products(mine, w3, segments)
    hidden = swiglu(gate.to(wide), up.to(wide), limit)
    hidden.mul_(weights.detach().to(wide).reshape(-1, 1).index_select(0, slot))
    hidden = round_activation(hidden.to(x.dtype), act)
    return out.index_add_(0, row, _products(hidden, w2, segments).to(wide)).to(x.dtype)


def _by_expert(ids: torch.Tensor) -> tuple[np.ndarray, list[tuple[int, int, int]]]:
    """Slots "s" of ids "t k" (flat places) in ascending expert order without the empty ones, and
    (expert, start, stop) of each expert's slots among them."""
    flat = ids.numpy().ravel()
    order = np.argsort(flat, kind="stable")
    sorted_ids = flat[order].tolist()
    first = bisect.bisect_left(sorted_ids, 0)  # empty slots sort first
    segments, start = [], first
    while start < len(sorted_ids):
        stop = bisect.bisect_right(sorted_ids, sorted_ids[start], start)
        segments.append((sorted_ids[start], start - first, stop - first))
        start = stop
    return order[first:], segments


def _products(x: torch.Tensor, weight: torch.Tensor | Quantised, segments: list) -> torch.Tensor:
    """Rows start..stop of x "s k" times weight[e] "n k", for each segment (e, start, stop)."""
    n, k = weight.shape[1:]
    out = x.new_empty(x.shape[0], n)
    if isinstance(weight, Quantised) or weight.dtype != x.dtype or x.dtype == torch.bfloat16:
        for e, start, stop in segments:
            torch.mm(x[start:stop], dense(weight[e], x.dtype).T, out=out[start:stop])
        return out
    small = [s for s in segments if (s[2] - s[1]) * n * k <= SMALL]
    if small:
        xs, ws, ys = x.numpy(), weight.detach().numpy(), out.numpy()
        for e, start, stop in small:
            np.dot(xs[start:stop], ws[e].T, ys[start:stop])
    if len(small) < len(segments):
        for e, start, stop in segments:
            if (stop - start) * n * k > SMALL:
                torch.mm(x[start:stop], weight.detach()[e].T, out=out[start:stop])
    return out
