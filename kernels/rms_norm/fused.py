"""Root-mean-square norm as torch's own function."""

from __future__ import annotations

import torch.nn.functional as F

from ..numerics import acc_dtype


def supports(x, weight, eps) -> str | None:
    if x.dtype != acc_dtype(x) or (weight is not None and weight.dtype != x.dtype):
        return "it multiplies in x's own dtype, which has to be float32 or float64 as the weight's"
    return None


def rms_norm(x, weight, eps):
    """As the reference."""
    return F.rms_norm(x, x.shape[-1:], weight, eps)
