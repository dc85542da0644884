"""Rotary embedding as one complex product in place on a copy."""

from __future__ import annotations

import numpy as np
import torch

from ..numerics import acc_dtype, unless_plain_cpu

SMALL = 1 << 13  # elements up to which a numpy call, cheaper than a torch call, decides


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
    if x.numel() <= SMALL and unless_plain_cpu(x, cos) is None:
        return _few(x, cos, sin, inverse)
    half = cos.shape[-1]
    turn = torch.complex(cos, -sin if inverse else sin)
    out = x.clone(memory_format=torch.contiguous_format)
    pairs = torch.view_as_complex(out.unflatten(-1, (-1, 2)))[..., x.shape[-1] // 2 - half :]
    pairs.mul_(turn.view(x.shape[0], *(1,) * (x.ndim - 2), half))
    return out


def _few(x, cos, sin, inverse):
    cos, sin = cos.detach().numpy(), sin.detach().numpy()
    t, half = cos.shape
    turn = np.empty((t, half), np.complex64 if x.dtype == torch.float32 else np.complex128)
    turn.real = cos
    turn.imag = -sin if inverse else sin
    out = np.array(x.detach().numpy(), order="C")
    pairs = out.view(turn.dtype)[..., x.shape[-1] // 2 - half :]
    with np.errstate(invalid="ignore"):  # a non-finite row stays one, in silence
        pairs *= turn.reshape(t, *(1,) * (x.ndim - 2), half)
    return torch.from_numpy(out)
