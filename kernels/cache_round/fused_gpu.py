"""Cache rounding on a GPU: one Triton kernel, which reads and writes every number once."""

from __future__ import annotations

import torch

from .. import gpu
from ..formats import FORMATS


def supports(x, format) -> str | None:
    if format not in FORMATS or x.shape[-1] % FORMATS[format].group:
        return "the reference says what is wrong with the format, or rounds nothing"
    return gpu.unless_cuda(x=x) or gpu.unless_dtypes(gpu.FLOATS, x=x)


def cache_round(x: torch.Tensor, format: str) -> torch.Tensor:
    """As the reference, with the same bits for one of the rounding formats."""
    if x.requires_grad and torch.is_grad_enabled():
        return _Round.apply(x, format)
    return _rounded(x, format)


class _Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, format):
        return _rounded(x, format)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def _rounded(x: torch.Tensor, format: str) -> torch.Tensor:
    from . import triton_kernels

    f, e4m3 = FORMATS[format], FORMATS["mxfp8"]
    x = x.detach().contiguous()
    out = torch.empty_like(x)
    gpu.launch(
        triton_kernels.forward,
        x.numel() // f.group,
        x,
        out,
        GROUP=f.group,
        LARGEST=f.largest,
        MANTISSA=f.mantissa,
        LOWEST=f.lowest,
        FLOOR=f.floor,
        E4M3=(e4m3.largest, e4m3.mantissa, e4m3.lowest) if format == "nvfp4" else None,
        ROWS=gpu.TILE // f.group,
    )
    return out
