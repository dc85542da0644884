"""Triton kernels of the mixing weights: everything but the projection, in float32.

A normalisation y = x / (s + eps), s the sum of x along an axis, has the gradient
dx = (dy - sum(dy y)) / (s + eps), and x = y (s + eps). So the forward kernel keeps the divisors of
its steps, m numbers a row and step, and the backward kernel walks back from the result.
"""

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]


@triton.jit(do_not_specialize=["t"])
def mean_square(
    streams,
    wide,
    mean,
    t,
    K: tl.constexpr,
    WIDEN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """mean[t] = mean of streams[t, :]^2; with WIDEN the streams are copied in float32, too."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < t
    total = tl.zeros((ROWS,), tl.float32)
    for start in range(0, K, BLOCK):
        col = start + tl.arange(0, BLOCK)
        mask = live[:, None] & (col < K)[None, :]
        at = (row * K)[:, None] + col[None, :]
        v = tl.load(streams + at, mask=mask, other=0.0).to(tl.float32)
        total += tl.sum(v * v, axis=1)
        if WIDEN:
            tl.store(wide + at, v, mask=mask)
    tl.store(mean + row, total / K, mask=live)


@triton.jit(do_not_specialize=["t"])
def add_scaled(
    x, factor, streams, out, t, K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """out[t, :] = x[t, :] + factor[t] streams[t, :]; out may be x."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < t
    by = tl.load(factor + row, mask=live, other=0.0)[:, None]
    for start in range(0, K, BLOCK):
        col = start + tl.arange(0, BLOCK)
        mask = live[:, None] & (col < K)[None, :]
        at = (row * K)[:, None] + col[None, :]
        v = tl.load(streams + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(out + at, tl.load(x + at, mask=mask, other=0.0) + by * v, mask=mask)


@triton.jit
def _softmax(logits):
    """Over the last axis of "rows m m"."""
    e = tl.exp(logits - tl.max(logits, axis=2, keep_dims=True))
    return e / tl.sum(e, axis=2, keep_dims=True)


@triton.jit(do_not_specialize=["t"])
def forward(
    projected,
    mean,
    base,
    scale,
    pre,
    post,
    comb,
    divisors,
    t,
    norm_eps,
    hc_eps,
    M: tl.constexpr,
    ITERS: tl.constexpr,
    KEEP: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Mixing weights of ROWS rows. divisors "steps t m" is written with KEEP only."""
    N: tl.constexpr = M * (2 + M)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < t
    i = tl.arange(0, M)
    gate = (row * M)[:, None] + i[None, :]
    live2, live3 = live[:, None], live[:, None, None]
    rms = tl.rsqrt(tl.load(mean + row, mask=live, other=1.0) + norm_eps)

    of_pre = (row * N)[:, None] + i[None, :]
    z = tl.load(projected + of_pre, mask=live2, other=0.0) * rms[:, None]
    a = z * tl.load(scale) + tl.load(base + i)[None, :]
    tl.store(pre + gate, tl.sigmoid(a) + hc_eps, mask=live2)

    z = tl.load(projected + of_pre + M, mask=live2, other=0.0) * rms[:, None]
    a = z * tl.load(scale + 1) + tl.load(base + M + i)[None, :]
    tl.store(post + gate, 2 * tl.sigmoid(a), mask=live2)

    entry = i[:, None] * M + i[None, :]
    of_comb = (row * N + 2 * M)[:, None, None] + entry[None, :, :]
    z = tl.load(projected + of_comb, mask=live3, other=0.0) * rms[:, None, None]
    c = _softmax(z * tl.load(scale + 2) + tl.load(base + 2 * M + entry)[None, :, :]) + hc_eps
    step = tl.cast(t, tl.int64) * M
    s = tl.sum(c, axis=1) + hc_eps
    c = c / s[:, None, :]
    if KEEP:
        tl.store(divisors + gate, s, mask=live2)
    for n in range(0, ITERS - 1):
        s = tl.sum(c, axis=2) + hc_eps
        c = c / s[:, :, None]
        if KEEP:
            tl.store(divisors + (2 * n + 1) * step + gate, s, mask=live2)
        s = tl.sum(c, axis=1) + hc_eps
        c = c / s[:, None, :]
        if KEEP:
            tl.store(divisors + (2 * n + 2) * step + gate, s, mask=live2)
    tl.store(comb + (row * M * M)[:, None, None] + entry[None, :, :], c, mask=live3)


@triton.jit
def _gate_gradient(grad, a):
    """Of sigmoid(a)."""
    s = tl.sigmoid(a)
    return grad * s * (1 - s)


@triton.jit(do_not_specialize=["t"])
def backward(
    d_pre,
    d_post,
    d_comb,
    projected,
    mean,
    base,
    scale,
    comb,
    divisors,
    d_projected,
    factor,
    partial,
    t,
    norm_eps,
    M: tl.constexpr,
    D: tl.constexpr,
    ITERS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """d_projected "t n"; factor "t", by which the streams count in their own gradient (that of the
    mean square); partial "programs n+3", this program's share of the gradients of base and scale.
    """
    N: tl.constexpr = M * (2 + M)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < t
    i = tl.arange(0, M)
    gate = (row * M)[:, None] + i[None, :]
    live2, live3 = live[:, None], live[:, None, None]
    rms = tl.rsqrt(tl.load(mean + row, mask=live, other=1.0) + norm_eps)
    share = partial + tl.program_id(0) * (N + 3)

    # pre = sigmoid(a) + hc_eps with a = z scale + base and z = projected rms
    of_pre = (row * N)[:, None] + i[None, :]
    x = tl.load(projected + of_pre, mask=live2, other=0.0)
    by = tl.load(scale)
    a = x * rms[:, None] * by + tl.load(base + i)[None, :]
    da = _gate_gradient(tl.load(d_pre + gate, mask=live2, other=0.0), a)
    tl.store(share + i, tl.sum(da, axis=0))
    of_rms = tl.sum(da * x, axis=1)
    tl.store(share + N, tl.sum(of_rms * rms, axis=0))
    tl.store(d_projected + of_pre, da * by * rms[:, None], mask=live2)
    d_rms = of_rms * by

    # post = 2 sigmoid(a)
    x = tl.load(projected + of_pre + M, mask=live2, other=0.0)
    by = tl.load(scale + 1)
    a = x * rms[:, None] * by + tl.load(base + M + i)[None, :]
    da = 2 * _gate_gradient(tl.load(d_post + gate, mask=live2, other=0.0), a)
    tl.store(share + M + i, tl.sum(da, axis=0))
    of_rms = tl.sum(da * x, axis=1)
    tl.store(share + N + 1, tl.sum(of_rms * rms, axis=0))
    tl.store(d_projected + of_pre + M, da * by * rms[:, None], mask=live2)
    d_rms += of_rms * by

    # comb: from the last step to the first
    entry = i[:, None] * M + i[None, :]
    of_row = (row * M * M)[:, None, None] + entry[None, :, :]
    c = tl.load(comb + of_row, mask=live3, other=0.0)
    g = tl.load(d_comb + of_row, mask=live3, other=0.0)
    step = tl.cast(t, tl.int64) * M
    for n in range(0, ITERS - 1):
        last = 2 * (ITERS - 1 - n)
        s = tl.load(divisors + last * step + gate, mask=live2, other=1.0)
        g = (g - tl.sum(g * c, axis=1)[:, None, :]) / s[:, None, :]
        c = c * s[:, None, :]
        s = tl.load(divisors + (last - 1) * step + gate, mask=live2, other=1.0)
        g = (g - tl.sum(g * c, axis=2)[:, :, None]) / s[:, :, None]
        c = c * s[:, :, None]
    s = tl.load(divisors + gate, mask=live2, other=1.0)
    g = (g - tl.sum(g * c, axis=1)[:, None, :]) / s[:, None, :]

    of_comb = (row * N + 2 * M)[:, None, None] + entry[None, :, :]
    x = tl.load(projected + of_comb, mask=live3, other=0.0)
    by = tl.load(scale + 2)
    p = _softmax(x * rms[:, None, None] * by + tl.load(base + 2 * M + entry)[None, :, :])
    da = p * (g - tl.sum(g * p, axis=2)[:, :, None])
    tl.store(share + 2 * M + entry, tl.sum(da, axis=0))
    of_rms = tl.sum(tl.sum(da * x, axis=2), axis=1)
    tl.store(share + N + 2, tl.sum(of_rms * rms, axis=0))
    tl.store(d_projected + of_comb, da * by * rms[:, None, None], mask=live3)
    d_rms += of_rms * by

    # rms = (mean + eps)^(-1/2), and mean = sum(v^2) / (M D)
    tl.store(factor + row, -d_rms * rms * rms * rms / (M * D), mask=live)
