"""Triton kernels of the collapse: streams and weights are read once, the result is written once."""

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]


@triton.jit(do_not_specialize=["t"])
def forward(
    streams, pre, out, t, M: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """out[t, d] = sum_m pre[t, m] streams[t, m, d]."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < t
    for start in range(0, D, BLOCK):
        col = start + tl.arange(0, BLOCK)
        mask = live[:, None] & (col < D)[None, :]
        total = tl.zeros((ROWS, BLOCK), tl.float32)
        for m in tl.static_range(M):
            weight = tl.load(pre + row * M + m, mask=live, other=0.0)
            at = (row * (M * D) + m * D)[:, None] + col[None, :]
            total += weight[:, None] * tl.load(streams + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(out + (row * D)[:, None] + col[None, :], total, mask=mask)


@triton.jit(do_not_specialize=["t"])
def backward(
    grad,
    streams,
    pre,
    d_streams,
    d_pre,
    t,
    M: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """d_streams[t, m, d] = pre[t, m] grad[t, d]; d_pre[t, m] = sum_d streams[t, m, d] grad[t, d].

    grad is read again for every stream, from the cache: a program's rows are a few KB.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < t
    for m in tl.static_range(M):
        weight = tl.load(pre + row * M + m, mask=live, other=0.0)
        product = tl.zeros((ROWS,), tl.float32)
        for start in range(0, D, BLOCK):
            col = start + tl.arange(0, BLOCK)
            mask = live[:, None] & (col < D)[None, :]
            g_at = (row * D)[:, None] + col[None, :]
            at = (row * (M * D) + m * D)[:, None] + col[None, :]
            g = tl.load(grad + g_at, mask=mask, other=0.0).to(tl.float32)
            s = tl.load(streams + at, mask=mask, other=0.0).to(tl.float32)
            product += tl.sum(s * g, axis=1)
            tl.store(d_streams + at, weight[:, None] * g, mask=mask)
        tl.store(d_pre + row * M + m, product, mask=live)
