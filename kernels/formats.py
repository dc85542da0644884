"""The cache formats: rounding to them, and their bytes.

A row of d features is cut into groups; each group has one scale and small-float values.

| format | values                 | group | scale                                                |
|--------|------------------------|-------|------------------------------------------------------|
| mxfp8  | E4M3, 1 byte           | 32    | E8M0 = pow2ceil(max(amax, 1e-4) / 448)               |
| mxfp4  | E2M1, 2 in a byte      | 32    | E8M0 = pow2ceil(max(amax, 6 * 2^-126) / 6)           |
| nvfp4  | E2M1, 2 in a byte      | 16    | E4M3 = round(max(amax, 6 * 2^-9) / 6), at most 448   |

Values are clamp(x / scale) rounded to nearest, ties to even (V4.1 technical report and released
reference). Everything here is arithmetic on floats rather than casts, because a cast from float64
to an 8-bit float goes through float32 and rounds twice.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .numerics import acc_dtype, constant


class Format(NamedTuple):
    """Numbers of one format: values per scale, largest value, mantissa bits and lowest exponent of
    a value, floor of amax (from the released casts), and bytes as data bits per value."""

    group: int
    largest: float
    mantissa: int
    lowest: int
    floor: float
    bits: int


FORMATS = {
    "mxfp8": Format(32, 448.0, 3, -6, 1e-4, 8),
    "mxfp4": Format(32, 6.0, 1, 0, 6 * 2.0**-126, 4),
    "nvfp4": Format(16, 6.0, 1, 0, 6 * 2.0**-9, 4),
}
NAMES = ("float", *FORMATS)
# dtype -> integers of its width, fraction bits; and all-ones exponent, for work on exponents.
_BITS = {torch.float32: (torch.int32, 23), torch.float64: (torch.int64, 52)}
_EXPONENT = {torch.float32: 0xFF, torch.float64: 0x7FF}
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def packed_bytes(format: str, dim: int) -> int:
    """Bytes of one record of `dim` features: data, then one scale byte per group."""
    f = _format(format, dim)
    return dim * f.bits // 8 + dim // f.group


def quantise(x: torch.Tensor, format: str) -> tuple[torch.Tensor, torch.Tensor]:
    """x "... d" -> values "... d" (representable in the format's value type), scales "... d/group";
    both in acc dtype. The rounded row is values * scales. A group that holds a NaN or an infinity
    has a NaN scale."""
    f = _format(format, x.shape[-1])
    grouped = x.to(acc_dtype(x)).unflatten(-1, (-1, f.group))
    amax = grouped.abs().amax(-1, keepdim=True)
    target = amax.clamp(min=f.floor) / f.largest
    scale = _scale_nvfp4(target) if format == "nvfp4" else pow2ceil(target)
    scale = torch.where(torch.isfinite(amax), scale, torch.nan)
    values = (grouped / scale).clamp(-f.largest, f.largest)
    return _round_small(values, f.mantissa, f.lowest).flatten(-2), scale.squeeze(-1)


def round_to(x: torch.Tensor, format: str) -> torch.Tensor:
    """x "... d" rounded to the format, in x's dtype, without a gradient."""
    if format == "float":
        return x
    values, scale = quantise(x, format)
    grouped = values.unflatten(-1, (scale.shape[-1], -1))
    return (grouped * scale.unsqueeze(-1)).flatten(-2).to(x.dtype)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, format):
        return round_to(x, format)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def straight_through(x: torch.Tensor, format: str) -> torch.Tensor:
    """`round_to` whose gradient is that of the identity."""
    if format == "float":
        return x
    if x.requires_grad and torch.is_grad_enabled():
        return _StraightThrough.apply(x, format)
    return round_to(x, format)


def encode(x: torch.Tensor, format: str) -> torch.Tensor:
    """x "... d" -> uint8 "... bytes", [data | scales]."""
    values, scale = quantise(x, format)
    scales = e4m3_bytes(scale) if format == "nvfp4" else e8m0_bytes(scale)
    data = e4m3_bytes(values) if FORMATS[format].bits == 8 else e2m1_bytes(values)
    return torch.cat([data, scales], dim=-1)


def decode(record: torch.Tensor, format: str, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """uint8 "... bytes" -> "... d" in dtype; the inverse of `encode`."""
    f = _format(format, dim)
    if record.dtype != torch.uint8 or record.shape[-1] != packed_bytes(format, dim):
        raise ValueError(
            f"a {format} record of {dim} features has {packed_bytes(format, dim)} uint8 bytes, "
            f"not {record.dtype} {tuple(record.shape)}"
        )
    data, scales = record[..., : dim * f.bits // 8], record[..., dim * f.bits // 8 :]
    scale = e4m3_values(scales) if format == "nvfp4" else e8m0_values(scales)
    values = e4m3_values(data) if f.bits == 8 else e2m1_values(data)
    grouped = values.unflatten(-1, (dim // f.group, f.group))
    wide = acc_dtype(dtype)
    return (grouped.to(wide) * scale.to(wide).unsqueeze(-1)).flatten(-2).to(dtype)


def pow2ceil(x: torch.Tensor) -> torch.Tensor:
    """The smallest power of two >= x, for x > 0 and normal; at most 2^127, the largest that an
    E8M0 byte holds."""
    integers, fraction = _BITS[x.dtype]
    # One less than the next exponent step carries into the exponent unless the fraction is zero.
    bits = (x.view(integers) + ((1 << fraction) - 1)) & (-1 << fraction)
    return bits.view(x.dtype).clamp(max=2.0**127)


def e8m0_values(b: torch.Tensor) -> torch.Tensor:
    """uint8 exponents -> float32 powers of two 2^(b - 127); 255 is NaN, as stored for non-finite
    groups of a cache (weights refuse it: see `Quantised`)."""
    b = b.to(torch.int32)
    # Byte 0 is the subnormal 2^-127, whose fraction's top bit is set; 255 gets a fraction: NaN.
    bits = (b << 23) | ((b == 0) | (b == 255)).to(torch.int32) << 22
    return bits.view(torch.float32)


def e8m0_bytes(scale: torch.Tensor) -> torch.Tensor:
    """Powers of two -> uint8 exponents; NaN -> 255."""
    exponent = torch.frexp(scale)[1] + 126
    return torch.where(torch.isfinite(scale), exponent, 255).to(torch.uint8)


def e4m3_values(b: torch.Tensor) -> torch.Tensor:
    """uint8 codes -> float32."""
    return b.contiguous().view(torch.float8_e4m3fn).to(torch.float32)


def e4m3_bytes(values: torch.Tensor) -> torch.Tensor:
    """Values that E4M3 represents -> uint8 codes."""
    return values.to(torch.float32).to(torch.float8_e4m3fn).view(torch.uint8)


def e2m1_values(b: torch.Tensor) -> torch.Tensor:
    """uint8 "... d/2" -> float32 "... d"; the even feature is the low nibble, bit 3 the sign."""
    table = constant(E2M1 + tuple(-v for v in E2M1), b.device, torch.float32)
    codes = torch.stack([b & 15, b >> 4], dim=-1).flatten(-2)
    return table[codes.to(torch.int64)]


def e2m1_bytes(values: torch.Tensor) -> torch.Tensor:
    """Values that E2M1 represents "... d" -> uint8 "... d/2"."""
    size = values.abs().nan_to_num(nan=0.0)
    # 0 .5 1 1.5 2 are 0..4 halves; 3, 4, 6 are codes 5, 6, 7.
    code = torch.where(size <= 2, size * 2, torch.where(size <= 4, size + 2, size + 1))
    code = code.to(torch.uint8) | (torch.signbit(values).to(torch.uint8) << 3)
    return code[..., 0::2] | (code[..., 1::2] << 4)


def _scale_nvfp4(target: torch.Tensor) -> torch.Tensor:
    e4m3 = FORMATS["mxfp8"]
    return _round_small(target.clamp(max=e4m3.largest), e4m3.mantissa, e4m3.lowest)


def _round_small(x: torch.Tensor, mantissa: int, lowest: int) -> torch.Tensor:
    """Round to `mantissa` fraction bits with exponents from `lowest` up (below: subnormal), to
    nearest, ties to even. torch.round ties to even, and the steps are powers of two, so this is
    exact."""
    integers, fraction = _BITS[x.dtype]
    floor = (x.view(integers) & (_EXPONENT[x.dtype] << fraction)).view(x.dtype)
    step = floor.clamp(min=2.0**lowest) * 2.0**-mantissa
    return torch.round(x / step) * step


def _format(format: str, dim: int) -> Format:
    if format not in FORMATS:
        raise ValueError(f"format {format!r} is not known; use one of {', '.join(NAMES)}")
    f = FORMATS[format]
    if dim % f.group:
        raise ValueError(f"{format} needs features in groups of {f.group}, not {dim} features")
    return f
