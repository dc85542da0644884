"""Triton kernels of the gated update: every input is read once, every result written once. A
program works its rows off one by one; all streams of a row stay in registers, as tiles "m d"."""

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]


@triton.jit
def _gate(s, k, weight, eps, D: tl.constexpr, SCALE: tl.constexpr, CLAMP: tl.constexpr):
    """dot, gate, 1 - gate and the two inverse norms, each "m"."""
    of_s = tl.rsqrt(tl.sum(s * s, axis=1) / D + eps)
    of_k = tl.rsqrt(tl.sum(k * k, axis=1) / D + eps)
    dot = tl.sum(s * weight * k, axis=1) * (of_s * of_k) * SCALE
    size = tl.abs(dot)
    root = tl.sqrt(tl.where(size < CLAMP, CLAMP, size))  # a NaN stays one
    z = tl.where(dot > 0, root, tl.where(dot < 0, -root, 0 * root))
    return dot, tl.sigmoid(z), tl.sigmoid(-z), of_s, of_k


@triton.jit(do_not_specialize=["t", "ROWS"])
def forward(
    streams,
    key,
    value,
    q_weight,
    k_weight,
    dead,
    out,
    key_step,
    value_step,
    eps,
    t,
    ROWS,
    M: tl.constexpr,
    D: tl.constexpr,
    SCALE: tl.constexpr,
    CLAMP: tl.constexpr,
    MP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out = streams + gate value; rows that are dead stay. A row of key begins key_step elements
    after the one before, of value value_step. MP and BLOCK: powers of two from M and D on."""
    i, col = tl.arange(0, MP), tl.arange(0, BLOCK)
    of_value = col < D
    mask = (i < M)[:, None] & of_value[None, :]
    at = i[:, None] * D + col[None, :]
    weight = tl.load(q_weight + at, mask=mask, other=0.0).to(tl.float32)
    weight *= tl.load(k_weight + at, mask=mask, other=0.0).to(tl.float32)
    row = tl.program_id(0).to(tl.int64) * ROWS
    end = tl.minimum(row + ROWS, t)
    while row < end:
        here = row * (M * D) + at
        s = tl.load(streams + here, mask=mask, other=0.0).to(tl.float32)
        k = tl.load(key + row * key_step + at, mask=mask, other=0.0).to(tl.float32)
        v = tl.load(value + row * value_step + col, mask=of_value, other=0.0).to(tl.float32)
        _, gate, _, _, _ = _gate(s, k, weight, eps, D, SCALE, CLAMP)
        result = s + gate[:, None] * v[None, :]
        if dead is not None:
            result = tl.where(tl.load(dead + row), s, result)
        tl.store(out + here, result, mask=mask)
        row += 1


@triton.jit(do_not_specialize=["t", "ROWS"])
def backward(
    grad,
    streams,
    key,
    value,
    q_weight,
    k_weight,
    dead,
    d_streams,
    d_key,
    d_value,
    partial,
    key_step,
    value_step,
    eps,
    t,
    ROWS,
    M: tl.constexpr,
    D: tl.constexpr,
    SCALE: tl.constexpr,
    CLAMP: tl.constexpr,
    MP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gradients from grad g; partial "programs m d" gets this program's share of the gradient of
    q_weight * k_weight = w.

    With dot = n sum(s w k) and n = SCALE of_s of_k, the gradient h of dot gives
    d_s = g + h (n w k - dot of_s^2 s / D), d_k = h (n w s - dot of_k^2 k / D), d_w = h n s k.
    """
    i, col = tl.arange(0, MP), tl.arange(0, BLOCK)
    of_value = col < D
    mask = (i < M)[:, None] & of_value[None, :]
    at = i[:, None] * D + col[None, :]
    weight = tl.load(q_weight + at, mask=mask, other=0.0).to(tl.float32)
    weight *= tl.load(k_weight + at, mask=mask, other=0.0).to(tl.float32)
    total = tl.zeros((MP, BLOCK), tl.float32)
    row = tl.program_id(0).to(tl.int64) * ROWS
    end = tl.minimum(row + ROWS, t)
    while row < end:
        here = row * (M * D) + at
        used = mask
        if dead is not None:  # a dead row counts as zeros, and passes its gradient on
            alive = M - M * tl.load(dead + row).to(tl.int32)  # a loaded bool is no mask everywhere
            used = (i < alive)[:, None] & of_value[None, :]
        whole = tl.load(grad + here, mask=mask, other=0.0).to(tl.float32)
        g = tl.where(used, whole, 0.0)
        s = tl.load(streams + here, mask=used, other=0.0).to(tl.float32)
        k = tl.load(key + row * key_step + at, mask=used, other=0.0).to(tl.float32)
        v = tl.load(value + row * value_step + col, mask=of_value, other=0.0).to(tl.float32)
        dot, gate, shut, of_s, of_k = _gate(s, k, weight, eps, D, SCALE, CLAMP)
        tl.store(d_value + row * D + col, tl.sum(gate[:, None] * g, axis=0), mask=of_value)

        # gate = sigmoid(sign(dot) sqrt(|dot|)); where |dot| is clamped nothing depends on it
        size = tl.abs(dot)
        slope = tl.where(size < CLAMP, 0.0, 0.5 / tl.sqrt(tl.where(size < CLAMP, CLAMP, size)))
        h = tl.sum(g * v[None, :], axis=1) * gate * shut * slope
        by = (h * (of_s * of_k) * SCALE)[:, None]
        back = h * dot / D
        d_s = whole + by * weight * k - (back * of_s * of_s)[:, None] * s
        tl.store(d_streams + here, d_s, mask=mask)
        tl.store(d_key + here, by * weight * s - (back * of_k * of_k)[:, None] * k, mask=mask)
        total += by * s * k
        row += 1
    tl.store(partial + tl.program_id(0).to(tl.int64) * (M * D) + at, total, mask=mask)
