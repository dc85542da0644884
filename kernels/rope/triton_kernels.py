"""Triton kernel of the rotation: pairs are taken apart in registers, so loads stay whole."""

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]


@triton.jit(do_not_specialize=["t"])
def rotate(
    x,
    cos,
    sin,
    out,
    t,
    INVERSE: tl.constexpr,
    EACH: tl.constexpr,
    HALF: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The last HALF pairs of every row by the angles of its token, which has EACH rows."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < t
    angles = (row // EACH * HALF)[:, None]
    for start in range(0, D, BLOCK):
        col = start + tl.arange(0, BLOCK)
        mask = live[:, None] & (col < D)[None, :]
        at = (row * D)[:, None] + col[None, :]
        wide = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(wide, (ROWS, BLOCK // 2, 2)))
        pair = start // 2 + tl.arange(0, BLOCK // 2) - (D // 2 - HALF)
        turns = live[:, None] & ((pair >= 0) & (pair < HALF))[None, :]
        c = tl.load(cos + angles + pair[None, :], mask=turns, other=1.0)
        s = tl.load(sin + angles + pair[None, :], mask=turns, other=0.0)
        if INVERSE:
            s = -s
        first = tl.where(turns, a * c - b * s, a)  # a pair at rest may hold inf or nan
        second = tl.where(turns, a * s + b * c, b)
        turned = tl.reshape(tl.join(first, second), (ROWS, BLOCK))
        tl.store(out + at, turned, mask=mask)
