"""Triton kernels of the norm: whole rows stay in registers, every input is read once."""

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]


@triton.jit
def _inverse_rms(x, eps, D: tl.constexpr):
    """1 / sqrt(mean(x^2) + eps) of each row; channels beyond D are 0."""
    return tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)


@triton.jit(do_not_specialize=["t"])
def forward(
    x,
    weight,
    out,
    t,
    eps,
    WEIGHT: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[t, d] = weight[d] x[t, d] / sqrt(mean_d(x[t, d]^2) + eps)."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    mask = (row < t)[:, None] & (col < D)[None, :]
    at = (row * D)[:, None] + col[None, :]
    wide = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    y = wide * _inverse_rms(wide, eps, D)[:, None]
    if WEIGHT:
        y *= tl.load(weight + col, mask=col < D, other=0.0).to(tl.float32)[None, :]
    tl.store(out + at, y, mask=mask)


@triton.jit(do_not_specialize=["t"])
def backward(
    grad,
    x,
    weight,
    d_x,
    partial,
    t,
    eps,
    WEIGHT: tl.constexpr,
    OF_X: tl.constexpr,
    OF_WEIGHT: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """With n = x / sqrt(mean(x^2) + eps) and h = weight grad: d_x = (h - n mean(h n)) / sqrt(...),
    partial[program, d] = sum over the ROWS rows of the program of grad n."""
    col = tl.arange(0, BLOCK)
    scale = tl.full((BLOCK,), 1.0, tl.float32)
    if WEIGHT:
        scale = tl.load(weight + col, mask=col < D, other=0.0).to(tl.float32)
    total = tl.zeros((TILE_ROWS, BLOCK), tl.float32)
    for start in range(0, ROWS, TILE_ROWS):
        row = tl.program_id(0).to(tl.int64) * ROWS + start + tl.arange(0, TILE_ROWS)
        mask = (row < t)[:, None] & (col < D)[None, :]
        at = (row * D)[:, None] + col[None, :]
        wide = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(grad + at, mask=mask, other=0.0).to(tl.float32)
        inverse = _inverse_rms(wide, eps, D)[:, None]
        n = wide * inverse
        if OF_X:
            h = g * scale[None, :]
            mean = tl.sum(h * n, axis=1)[:, None] / D
            tl.store(d_x + at, (h - n * mean) * inverse, mask=mask)
        if OF_WEIGHT:
            total += tl.where(mask, g * n, 0.0)  # eps = 0 makes the rows beyond t nan
    if OF_WEIGHT:
        to = partial + tl.program_id(0).to(tl.int64) * D + col
        tl.store(to, tl.sum(total, axis=0), mask=col < D)
