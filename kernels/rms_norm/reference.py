"""Root-mean-square norm in plain torch."""

from __future__ import annotations

import torch

from ..numerics import acc_dtype


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """weight * x / sqrt(mean(x^2) + eps) over the last axis.

    x "... d", weight "d" or None (no weight) -> x's shape and dtype. The weight is a plain
    multiplier, applied in the accumulation dtype before the one cast at the end.
    """
    wide = x.to(acc_dtype(x))
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight.to(y.dtype)
    return y.to(x.dtype)
