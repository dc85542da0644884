"""Quantising weights to the storage of the official checkpoint.

| storage | data                          | scale (E8M0 byte b = 2^(b-127))     |
|---------|-------------------------------|-------------------------------------|
| fp8     | E4M3, one byte                | one per tile of 32 rows, 32 columns |
| table   | E4M3, one byte                | one per row and 32 columns          |
| fp4     | E2M1, two per byte, even low  | one per row and 32 columns          |

The scale is the smallest power of two that brings a block's largest magnitude into the range of the
value type (448 or 6); values are rounded to nearest, ties to even. Weights are read in float32.
Source: the released checkpoint (quantization_config fp8, ue8m0, expert_dtype fp4).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from deepinfer.checkpoint.names import BLOCK
from deepinfer.kernels.formats import e8m0_values
from deepinfer.kernels.quantised import Quantised

__all__ = ["e8m0_to_float", "quantise", "round_storage"]

E4M3_MAX = 448.0
E2M1_MAX = 6.0
# E2M1 magnitudes are 0 .5 1 1.5 2 3 4 6. A magnitude's code counts the midpoints below it; at a
# midpoint itself the even code wins, so every other midpoint counts already when it is reached.
_ODD_MIDPOINTS = (0.25, 1.25, 2.5, 5.0)
_EVEN_MIDPOINTS = (0.75, 1.75, 3.5)


def e8m0_to_float(scale: Tensor) -> Tensor:
    """E8M0 scales (float8_e8m0fnu, or their bytes as uint8) as float32 powers of two.

    ValueError for byte 255 (NaN), TypeError for another dtype. The bytes are reinterpreted, never
    converted: `copy_` and `to` between E8M0 and uint8 would convert values.
    """
    if scale.dtype not in (torch.uint8, torch.float8_e8m0fnu):
        raise TypeError(f"scales of dtype {scale.dtype}; expected float8_e8m0fnu or uint8 bytes")
    exponent = scale.view(torch.uint8)
    if bool((exponent == 255).any()):
        raise ValueError("a scale byte is 255, which E8M0 reads as NaN: the tensor is damaged")
    return e8m0_values(exponent)


def quantise(weight: Tensor, storage: str) -> Quantised:
    """A float weight "... n k" as a Quantised in `storage`: fp8, table or fp4.

    ValueError for another storage, a weight that is not finite, or columns that a format of one
    scale per 32 columns does not divide.
    """
    weight = weight.detach().to(torch.float32)
    scale, scaled = _scaled(weight, storage)
    if not bool(torch.isfinite(weight).all()):
        raise ValueError(f"a weight of shape {tuple(weight.shape)} holds NaN or infinity")
    if storage == "fp4":
        return Quantised(_e2m1_bytes(scaled), scale, "fp4")
    return Quantised(scaled.to(torch.float8_e4m3fn), scale, "fp8")


def round_storage(weight: Tensor, storage: str) -> Tensor:
    """What reading back the stored weight gives, in float32: any storage, bf16 and f32 as well.

    Arithmetic alone: nothing is looked at, so that training can round its weights at every step
    without waiting for the device. A weight that is not finite, which `quantise` refuses, stays so.
    """
    weight = weight.detach().to(torch.float32)
    if storage == "bf16":
        return weight.to(torch.bfloat16).to(torch.float32)
    if storage == "f32":
        return weight
    scale, scaled = _scaled(weight, storage)
    if storage == "fp4":
        values = _e2m1_size(scaled.abs()).copysign(scaled)
    else:
        values = scaled.to(torch.float8_e4m3fn).to(torch.float32)
    return values * _spread(scale, weight.shape, tiled=storage == "fp8")


def _scaled(weight: Tensor, storage: str) -> tuple[Tensor, Tensor]:
    """(scale bytes, weight over its scales) of a float32 weight "... n k"."""
    if storage not in ("fp8", "table", "fp4"):
        raise ValueError(f"storage {storage!r} is not a quantised one; use fp8, table or fp4")
    if weight.ndim < 2 or (storage != "fp8" and weight.shape[-1] % BLOCK):
        need = "at least two axes" + ("" if storage == "fp8" else f" and columns by {BLOCK}")
        raise ValueError(f"{storage} storage of shape {tuple(weight.shape)}; it needs {need}")
    limit = E2M1_MAX if storage == "fp4" else E4M3_MAX
    scale = _scale_bytes(_block_max(weight, tiled=storage == "fp8"), limit)
    return scale, weight / _spread(scale, weight.shape, tiled=storage == "fp8")


def _block_max(weight: Tensor, tiled: bool) -> Tensor:
    """Largest magnitude of each block: "... n/32 k/32" in tiles, else "... n k/32"."""
    rows, columns = weight.shape[-2:]
    size = weight.abs()
    size = functional.pad(size, (0, -columns % BLOCK, 0, -rows % BLOCK if tiled else 0))
    size = size.unflatten(-1, (-1, BLOCK)).amax(-1)
    return size.unflatten(-2, (-1, BLOCK)).amax(-2) if tiled else size


def _scale_bytes(largest: Tensor, limit: float) -> Tensor:
    """E8M0 bytes of the smallest power of two >= largest / limit; an all-zero block gets 1."""
    target = largest.to(torch.float64) / limit  # exact enough to see which side of a power it is
    mantissa, exponent = torch.frexp(target)
    exponent = exponent - (mantissa == 0.5).to(exponent.dtype)
    exponent = torch.where(largest == 0, 0, exponent)
    return (exponent.clamp(-127, 127) + 127).to(torch.uint8)


def _spread(scale: Tensor, shape: torch.Size, tiled: bool) -> Tensor:
    """Scale bytes as float32 factors of every element."""
    factor = e8m0_values(scale).repeat_interleave(BLOCK, -1)[..., : shape[-1]]
    return factor.repeat_interleave(BLOCK, -2)[..., : shape[-2], :] if tiled else factor


def _e2m1_code(size: Tensor) -> Tensor:
    """Code 0..7 of each magnitude, rounded: how many midpoints it has passed."""
    code = sum((size > middle).to(torch.uint8) for middle in _ODD_MIDPOINTS)
    return code + sum((size >= middle).to(torch.uint8) for middle in _EVEN_MIDPOINTS)


def _e2m1_size(size: Tensor) -> Tensor:
    """Magnitudes rounded to those of E2M1: 0 .5 1 1.5 2 are halves of their code, then 3 4 6."""
    code = _e2m1_code(size)
    value = torch.where(code <= 4, code * 0.5, torch.where(code == 7, 6.0, code - 2.0))
    return torch.where(torch.isfinite(size), value, torch.nan)


def _e2m1_bytes(scaled: Tensor) -> Tensor:
    code = _e2m1_code(scaled.abs()) | (torch.signbit(scaled).to(torch.uint8) << 3)
    return code[..., 0::2] | (code[..., 1::2] << 4)
