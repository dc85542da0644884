"""Arithmetic that several ops share: the accumulation dtype and activation rounding."""

from __future__ import annotations

import torch


def acc_dtype(x: torch.Tensor | torch.dtype) -> torch.dtype:
    """The dtype to accumulate in: float64 for float64 inputs, float32 for everything else."""
    dtype = x.dtype if isinstance(x, torch.Tensor) else x
    return torch.float64 if dtype == torch.float64 else torch.float32


def wants_grad(*values) -> bool:
    """Whether autograd would record a call with these arguments (non-tensors are ignored)."""
    if not torch.is_grad_enabled():
        return False
    return any(isinstance(v, torch.Tensor) and v.requires_grad for v in values)


def round_activation(x: torch.Tensor, act: str | None) -> torch.Tensor:
    """Round x "... k" as a quantised matrix product would read it.

    act: None (x unchanged) or "mxfp8" (E4M3 values, one power-of-two scale per 32 channels).
    """
    if act is None:
        return x
    if act != "mxfp8":
        raise ValueError(f'act={act!r} is not an activation rounding; use None or "mxfp8"')
    from deepinfer.kernels.formats import straight_through

    return straight_through(x, "mxfp8")
