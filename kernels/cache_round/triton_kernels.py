"""Triton kernel of the cache formats' rounding, in float32 arithmetic with the reference's bits:
IEEE division, and work on exponents by integers."""

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]


@triton.jit
def _round_small(x, MANTISSA: tl.constexpr, LOWEST: tl.constexpr):
    """x >= 0 rounded to MANTISSA fraction bits with exponents from LOWEST up, ties to even.

    One step is the last bit of c = 1.5 * 2^23 * step, so adding c rounds and all else is exact
    (also where a product and a sum become one instruction)."""
    exponent = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    c = tl.maximum(exponent, 2.0**LOWEST) * (1.5 * 2.0 ** (23 - MANTISSA))
    return (x + c) - c


@triton.jit(do_not_specialize=["t"])
def forward(
    x,
    out,
    t,
    GROUP: tl.constexpr,
    LARGEST: tl.constexpr,
    MANTISSA: tl.constexpr,
    LOWEST: tl.constexpr,
    FLOOR: tl.constexpr,
    E4M3: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Rounds t groups. E4M3: largest, mantissa and lowest of the scale's format; None: the scale
    is a power of two."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = (row * GROUP)[:, None] + tl.arange(0, GROUP)[None, :]
    mask = (row < t)[:, None]
    bits = tl.load(x + at, mask=mask, other=0.0).to(tl.float32).to(tl.int32, bitcast=True)
    size_bits = bits & 0x7FFFFFFF
    amax_bits = tl.max(size_bits, axis=1)  # as integers: infinity is above all numbers, NaN above
    amax = amax_bits.to(tl.float32, bitcast=True)
    target = tl.div_rn(tl.maximum(amax, FLOOR), tl.full(amax.shape, LARGEST, tl.float32))
    if E4M3 is not None:
        scale = _round_small(tl.minimum(target, E4M3[0]), E4M3[1], E4M3[2])
    else:
        # One less than the next exponent step carries into the exponent unless the fraction is 0.
        up = (target.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
        scale = up.to(tl.float32, bitcast=True)
    scale = tl.broadcast_to(scale[:, None], at.shape)
    values = tl.minimum(tl.div_rn(size_bits.to(tl.float32, bitcast=True), scale), LARGEST)
    rounded = _round_small(values, MANTISSA, LOWEST) * scale
    signed = rounded.to(tl.int32, bitcast=True) | (bits ^ size_bits)  # -0.0 stays -0.0
    finite = (amax_bits < 0x7F800000)[:, None]
    result = tl.where(finite, signed, 0x7FC00000).to(tl.float32, bitcast=True)  # NaN
    tl.store(out + at, result, mask=mask)
