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

from ..numerics import acc_dtype, unless_plain_cpu

BLOCK = 512  # rows whose products stay in cache, and below the size at which BLAS takes threads


def supports(streams, fn, base, scale, **_) -> str | None:
    return unless_plain_cpu(streams, fn, base, scale)


def mhc_mix(streams, fn, base, scale, *, iters, norm_eps, hc_eps):
    """As the reference, without a gradient."""
    with np.errstate(all="ignore"):  # a non-finite row stays one, in silence
        return _mix(streams, fn, base, scale, iters, norm_eps, hc_eps)


def _mix(streams, fn, base, scale, iters, norm_eps, hc_eps):
    t, m, _ = streams.shape
    v = streams.detach().flatten(1).to(acc_dtype(streams))
    z = torch.mm(v, fn.detach().to(v.dtype).T).numpy()
    mean = torch.linalg.vecdot(v, v).numpy() / v.shape[1]
    z /= np.sqrt(mean + z.dtype.type(norm_eps))[:, None]
    z *= scale.detach().to(v.dtype).numpy()[_scale_of_column(m)]
    z += base.detach().to(v.dtype).numpy()
    gates = z[:, : 2 * m]
    np.maximum(gates, -80, out=gates)  # exp(80) is finite, and 1 + exp(80) far past any precision
    gates = 1 / (1 + np.exp(-gates))
    logits = z[:, 2 * m :].reshape(t, m, m)
    blocks = [sinkhorn(logits[i : i + BLOCK], iters, hc_eps) for i in range(0, max(t, 1), BLOCK)]
    comb = torch.from_numpy(blocks[0] if len(blocks) == 1 else np.concatenate(blocks))
    pre, post = gates[:, :m] + gates.dtype.type(hc_eps), gates[:, m:] * 2
    return torch.from_numpy(pre), torch.from_numpy(post), comb


def sinkhorn(logits: np.ndarray, iters: int, eps: float) -> np.ndarray:
    """Logits "t m m" -> positive matrices "t m m"."""
    t, m, _ = logits.shape
    n = m * m
    rows, columns = _sums(m, eps, logits.dtype.str)
    e = np.exp(logits - logits.max(-1, keepdims=True))
    e /= e.sum(-1, keepdims=True)
    c = np.ones((t, n + 1), logits.dtype)
    np.add(e.reshape(t, n), e.dtype.type(eps), out=c[:, :n])
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
    """Matrices that put the sum of its row (column) + eps at every entry, 1 at the extra one."""
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
def _scale_of_column(m: int) -> np.ndarray:
    """Which of the three scales column i of the projection takes."""
    return np.repeat(np.arange(3), (m, m, m * m))
