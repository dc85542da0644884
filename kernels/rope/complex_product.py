"""Rotary embedding as one complex product in place on a copy."""

from __future__ import annotations

import torch

from deepinfer.kernels.numerics import acc_dtype


def supports(x, cos, sin, *, inverse=False) -> str | None:
    if x.dtype != acc_dtype(x) or cos.dtype != x.dtype:
        return f"it rotates float32 and float64 with angles of the same dtype, not {x.dtype}"
    if torch.is_grad_enabled() and (x.requires_grad or cos.requires_grad):
        return "a gradient is wanted"
    if x.shape[-1] % 2:
        return "an odd number of features has no complex view"
    return None


def rope(x, cos, sin, *, inverse=False):
    """As the reference, without a gradient."""
    half = cos.shape[-1]
    turn = torch.complex(cos, -sin if inverse else sin)
    out = x.clone(memory_format=torch.contiguous_format)
    pairs = torch.view_as_complex(out.unflatten(-1, (-1, 2)))[..., x.shape[-1] // 2 - half :]
    pairs.mul_(turn.view(x.shape[0], *(1,) * (x.ndim - 2), half))
    return out
