"""The routed experts on the CPU: rows sorted by expert, one product per expert and weight."""

from __future__ import annotations

import numpy as np
import torch

from deepinfer.kernels.numerics import acc_dtype, round_activation, unless_plain_cpu
from deepinfer.kernels.quantised import Quantised, dense
from deepinfer.kernels.swiglu.reference import swiglu

SMALL = 1 << 18  # multiplications below which numpy's smaller overhead wins; it stays on one thread


def supports(x, ids, weights, w1, w3, w2, limit, *, act=None) -> str | None:
    return unless_plain_cpu(x, weights, w1, w3, w2)


def experts(x, ids, weights, w1, w3, w2, limit, *, act=None):
    """As the reference, without a gradient."""
    wide = acc_dtype(x)
    flat = ids.numpy().ravel()
    order = np.argsort(flat, kind="stable")
    order = order[np.searchsorted(flat[order], 0) :]  # empty slots sort first
    counts = np.bincount(flat[order], minlength=w1.shape[0])
    out = torch.zeros(x.shape, dtype=wide)
    if not len(order):
        return out.to(x.dtype)
    row = torch.from_numpy(order // ids.shape[1])
    mine = round_activation(x.detach(), act).index_select(0, row)
    active = np.flatnonzero(counts)
    ends = np.cumsum(counts[active])
    segments = [(e, b - n, b) for e, n, b in zip(active, counts[active], ends)]
    gate, up = _products(mine, w1, segments), _products(mine, w3, segments)
    hidden = swiglu(gate.to(wide), up.to(wide), limit)
    hidden.mul_(weights.detach().to(wide).flatten()[order].unsqueeze(1))
    hidden = round_activation(hidden.to(x.dtype), act)
    return out.index_add_(0, row, _products(hidden, w2, segments).to(wide)).to(x.dtype)


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
