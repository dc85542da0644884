"""Rotary embedding on a GPU: one Triton kernel, which also turns the gradient back."""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable

from .. import gpu


def supports(x, cos, sin, *, inverse=False) -> str | None:
    if x.shape[-1] % 2:
        return f"it is written for an even number of features, not {x.shape[-1]}"
    if cos.ndim != 2 or cos.shape != sin.shape or cos.shape[0] != x.shape[0]:
        found = f"{tuple(cos.shape)} and {tuple(sin.shape)}"
        return f"cos and sin have to be ({x.shape[0]}, r/2) for {x.shape[0]} rows, not {found}"
    if 2 * cos.shape[1] > x.shape[-1]:
        return f"there are {2 * cos.shape[1]} features to rotate in {x.shape[-1]}"
    if torch.is_grad_enabled():
        for name, angle in (("cos", cos), ("sin", sin)):
            if angle.requires_grad:
                return f"a gradient of {name} is wanted"
    return (
        gpu.unless_cuda(x=x, cos=cos, sin=sin)
        or gpu.unless_dtypes(gpu.FLOATS, x=x)
        or gpu.unless_dtypes((torch.float32,), cos=cos, sin=sin)
    )


def rope(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, inverse: bool = False
) -> torch.Tensor:
    """As the reference. A gradient of x alone, once."""
    return _Rotate.apply(x, cos, sin, bool(inverse))


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin, inverse):
        cos, sin = cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(cos, sin)
        ctx.inverse = inverse
        return _rotated(x, cos, sin, inverse)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        cos, sin = ctx.saved_tensors
        return _rotated(grad, cos, sin, not ctx.inverse), None, None, None


def _rotated(x, cos, sin, inverse):
    from . import triton_kernels

    x = x.contiguous()
    out = torch.empty_like(x)
    d, tokens = x.shape[-1], x.shape[0]
    if x.numel():
        rows = x.numel() // d
        gpu.launch(
            triton_kernels.rotate,
            rows,
            x,
            cos,
            sin,
            out,
            INVERSE=inverse,
            EACH=rows // tokens,
            HALF=cos.shape[1],
            D=d,
            **gpu.tile(d),
        )
    return out
