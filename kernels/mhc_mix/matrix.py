"""Mixing weights with the Sinkhorn rounds as two numpy calls a step.

A row of t holds its m*m entries behind each other, and one constant m*m+1 square matrix turns it
into the sums of every entry's matrix row (or column): the division of a step is then one product
and one elementwise division. The extra entry is 1 throughout and carries the eps of the sum.
Decode-sized calls are dominated by the overhead of calls: 20 rounds take 80 of them instead of 240,
and a numpy call costs a third of a torch call.
"""

from __future__ import annotations

import functools

import numpy as np
import torch

from deepinfer.kernels.numerics import acc_dtype, unless_plain_cpu


def supports(streams, fn, base, scale, **_) -> str | None:
    return unless_plain_cpu(streams, fn, base, scale)


def mhc_mix(streams, fn, base, scale, *, iters, norm_eps, hc_eps):
    """As the reference."""
    t, m, _ = streams.shape
    v = streams.flatten(1).to(acc_dtype(streams))
    mean = v.square().mean(-1, keepdim=True)
    z = torch.mm(v, fn.to(v.dtype).T).mul_(mean.add_(norm_eps).rsqrt_())
    z = torch.addcmul(base.to(v.dtype), z, scale.to(v.dtype).index_select(0, _scale_of_column(m)))
    pre, post = torch.sigmoid(z[:, : 2 * m]).split(m, dim=1)
    comb = torch.softmax(z[:, 2 * m :].reshape(t, m, m), dim=-1)
    return pre + hc_eps, post * 2, torch.from_numpy(sinkhorn(comb.numpy(), iters, hc_eps))


def sinkhorn(comb: np.ndarray, iters: int, eps: float) -> np.ndarray:
    """softmaxed "t m m" -> "t m m" after the rest of `iters` rounds."""
    t, m, _ = comb.shape
    n = m * m
    rows, columns = _sums(m, eps, comb.dtype.str)
    c = np.ones((t, n + 1), comb.dtype)
    np.add(comb.reshape(t, n), comb.dtype.type(eps), out=c[:, :n])
    s = np.empty_like(c)
    dot, divide = np.dot, np.divide
    dot(c, columns, s)
    divide(c, s, c)
    for _ in range(iters - 1):
        dot(c, rows, s)
        divide(c, s, c)
        dot(c, columns, s)
        divide(c, s, c)
    return c[:, :n].reshape(t, m, m)


@functools.lru_cache
def _sums(m: int, eps: float, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Matrices that put, at every entry, the sum of its row (column) + eps; 1 at the extra entry."""
    out = []
    one, eye = np.ones((m, m)), np.eye(m)
    for of_entry in (np.kron(eye, one), np.kron(one, eye)):
        matrix = np.zeros((m * m + 1, m * m + 1), dtype)
        matrix[:-1, :-1] = of_entry
        matrix[-1, :] = eps
        matrix[-1, -1] = 1
        matrix.flags.writeable = False
        out.append(matrix)
    return tuple(out)


@functools.lru_cache
def _scale_of_column(m: int) -> torch.Tensor:
    """Which of the three scales column i of the projection takes."""
    return torch.tensor([0] * m + [1] * m + [2] * m * m)
