"""The mixing weights of manifold-constrained hyper-connections in plain torch."""

from __future__ import annotations

import math

import torch
from einops import rearrange

from ..numerics import acc_dtype


def mhc_mix(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    *,
    iters: int,
    norm_eps: float,
    hc_eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mixing weights of one sub-layer, from the streams of its rows.

    streams "t m d", fn "m(2+m) m*d", base "m(2+m)", scale "3" -> pre "t m", post "t m",
    comb "t m m" (row = input stream, column = output stream), in the accumulation dtype.
    pre collapses the streams for the NEXT sub-layer, post and comb expand this one's output.
    comb is made doubly stochastic by `iters` Sinkhorn rounds; the softmax is the first row step,
    and the last step is a column step (V4.1 released reference).
    """
    v = rearrange(streams, "t m d -> t (m d)").to(acc_dtype(streams))
    projected = v @ fn.to(v.dtype).T
    return from_projected(projected, v, base, scale, iters=iters, norm_eps=norm_eps, hc_eps=hc_eps)


def from_projected(projected, v, base, scale, *, iters, norm_eps, hc_eps):
    """The mixing weights from fn v "t m(2+m)" and v "t m*d"."""
    m = mixed_streams(projected.shape[1])
    base, scale = base.to(v.dtype), scale.to(v.dtype)
    # Project first, then scale by the RMS of all streams together.
    z = projected * torch.rsqrt(v.square().mean(-1, keepdim=True) + norm_eps)
    pre = torch.sigmoid(z[:, :m] * scale[0] + base[:m]) + hc_eps
    post = 2 * torch.sigmoid(z[:, m : 2 * m] * scale[1] + base[m : 2 * m])
    comb = rearrange(z[:, 2 * m :] * scale[2] + base[2 * m :], "t (j k) -> t j k", k=m)
    return pre, post, sinkhorn(comb, iters, hc_eps)


def mixed_streams(n: int) -> int:
    """m of n = m(2 + m)."""
    return math.isqrt(n + 1) - 1


def sinkhorn(logits: torch.Tensor, iters: int, eps: float) -> torch.Tensor:
    """Logits "t m m" -> positive matrices whose rows and columns sum to about 1."""
    comb = torch.softmax(logits, dim=-1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(iters - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return comb
