"""Cache rounding on the bits of float32 and float64 numbers, in numpy.

Adding and subtracting c = 1.5 * 2^fraction * step rounds to a multiple of step, ties to even,
because the sum's last bit is worth one step. With a power-of-two scale the steps can be taken in
the units of x itself, so neither x / scale nor the product back is needed.
"""

from __future__ import annotations

import numpy as np
import torch

from ..formats import FORMATS
from ..numerics import acc_dtype, unless_plain_cpu

# dtype -> integers of its width, fraction bits, bits of the exponent
_BITS = {"f4": (np.int32, 23, 0x7F800000), "f8": (np.int64, 52, 0x7FF0000000000000)}
_E4M3 = FORMATS["mxfp8"]


def supports(x, format) -> str | None:
    if format not in FORMATS or x.shape[-1] % FORMATS[format].group:
        return "the reference says what is wrong with the format"
    return unless_plain_cpu(x)


def cache_round(x: torch.Tensor, format: str) -> torch.Tensor:
    """As the reference, without a gradient."""
    f = FORMATS[format]
    wide = x.detach().to(acc_dtype(x)).numpy()
    g = wide.reshape(-1, f.group)
    # A non-finite group becomes NaN on purpose, and numpy would say so.
    with np.errstate(invalid="ignore", over="ignore"):
        amax = np.abs(g).max(-1, keepdims=True, initial=0)
        bad = amax * 0
        np.maximum(amax, f.floor, out=amax)
        amax /= f.largest
        rounded = _nvfp4(g, amax) if format == "nvfp4" else _power_of_two(g, amax, f)
        rounded += bad
    return torch.from_numpy(rounded.reshape(wide.shape)).to(x.dtype)


def _power_of_two(g: np.ndarray, target: np.ndarray, f) -> np.ndarray:
    """Groups g and amax/largest of each -> the rounded groups; the scale is pow2ceil(target)."""
    integers, fraction, exponent = _BITS[g.dtype.str[1:]]
    bits = target.view(integers)
    bits += (1 << fraction) - 1
    bits &= exponent
    scale = np.minimum(target, 2.0**127)
    rounded = _round(g, scale * 2.0**f.lowest, f.mantissa)
    # Only a scale cut off at the largest E8M0 leaves anything to clamp.
    if g.dtype == np.float64:
        np.clip(rounded, -f.largest * scale, f.largest * scale, out=rounded)
    return rounded


def _nvfp4(g: np.ndarray, target: np.ndarray) -> np.ndarray:
    f = FORMATS["nvfp4"]
    scale = _round(np.minimum(target, _E4M3.largest), 2.0**_E4M3.lowest, _E4M3.mantissa)
    x = g / scale
    np.clip(x, -f.largest, f.largest, out=x)
    x = _round(x, 2.0**f.lowest, f.mantissa)
    x *= scale
    return x


def _round(x: np.ndarray, smallest: np.ndarray | float, mantissa: int) -> np.ndarray:
    """x rounded to `mantissa` fraction bits; below the power of two `smallest` in its steps."""
    integers, fraction, exponent = _BITS[x.dtype.str[1:]]
    c = (x.view(integers) & exponent).view(x.dtype)
    np.maximum(c, smallest, out=c)
    c *= 1.5 * 2.0 ** (fraction - mantissa)
    rounded = x + c
    rounded -= c
    return np.copysign(rounded, x, out=rounded)
