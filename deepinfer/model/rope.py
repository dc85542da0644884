"""Rotary angles. Two kinds of layer: window-only (theta 10000, plain) and compressed (theta 160000
with YaRN).

    f_i = theta^(-2i/R), i = 0..R/2-1;  YaRN blends f_i towards f_i/factor between the dimensions
    that turn beta_fast and beta_slow times over the original context; no amplitude scaling.
Source: the released config and reference (rotation of adjacent pairs of the last R dims).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from deepinfer.config import RopeScaling


def yarn_range(
    theta: float, dims: int, original: int, beta_fast: float, beta_slow: float
) -> tuple[int, int]:
    """First and last dimension of the YaRN ramp; (15, 25) for the released compressed layers."""

    def turns(beta: float) -> float:
        return dims * math.log(original / (beta * 2 * math.pi)) / (2 * math.log(theta))

    return max(math.floor(turns(beta_fast)), 0), min(math.ceil(turns(beta_slow)), dims - 1)


def frequencies(theta: float, dims: int, scaling: RopeScaling | None, dtype: torch.dtype) -> Tensor:
    """[dims/2] angular frequencies; `scaling` is the config's rope_scaling, None = plain."""
    i = torch.arange(0, dims, 2, dtype=dtype)
    f = 1.0 / (theta ** (i / dims))
    if scaling is None:
        return f
    original = scaling.original_max_position_embeddings
    low, high = yarn_range(theta, dims, original, scaling.beta_fast, scaling.beta_slow)
    ramp = ((torch.arange(dims // 2, dtype=dtype) - low) / max(high - low, 0.001)).clamp(0, 1)
    return f * (1 - ramp) + (f / scaling.factor) * ramp


def angles(positions: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
    """(cos, sin), each [t, dims/2], of position times frequency, in the dtype of `f`.

    FP32 products at FP32 positions are the reference's rounding: at positions near 10^6 computing
    the angle more exactly would be a different function than the one the weights were trained with.
    """
    a = positions.to(f.dtype)[:, None] * f
    return a.cos(), a.sin()
