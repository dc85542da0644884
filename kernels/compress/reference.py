"""Gated pooling of the tokens of a compression group, in plain torch."""

from __future__ import annotations

import torch

from ..numerics import acc_dtype
from ..rms_norm.reference import rms_norm


def compress(
    values: torch.Tensor,
    gates: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """rms_norm(sum_r softmax_r(gates) * values), the softmax separately per channel.

    values and gates "t r d" (t groups of r tokens), weight "d" -> "t d" in out_dtype. The sum is
    cast to out_dtype before the norm, as the model was trained.
    """
    wide = acc_dtype(values)
    share = torch.softmax(gates.to(wide), dim=1)
    pooled = (share * values.to(wide)).sum(1)
    return rms_norm(pooled.to(out_dtype), weight, eps)
