"""The norm on a GPU: one Triton kernel forward, one backward. Kept for the gradient: x alone."""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable

from .. import gpu

WIDEST = 8192  # channels: a program holds whole rows in registers, so that each is read once
PROGRAMS = 1024  # of a backward pass at most, as each leaves a row of partial sums of d_weight


def supports(x, weight, eps) -> str | None:
    d = x.shape[-1]
    if not 1 <= d <= WIDEST:
        return f"it is written for 1 to {WIDEST} channels, not {d}"
    tensors = dict(x=x) if weight is None else dict(x=x, weight=weight)
    if weight is not None and weight.shape != (d,):
        return f"weight has to have the shape of a row, ({d},), not {tuple(weight.shape)}"
    return gpu.unless_cuda(**tensors) or gpu.unless_dtypes(gpu.FLOATS, **tensors)


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """As the reference. Gradients of x and weight, once."""
    return _Norm.apply(x, weight, float(eps))


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        from . import triton_kernels

        x = x.contiguous()
        weight = None if weight is None else weight.contiguous()
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        out = torch.empty_like(x)
        t, tile = _tile(x)
        gpu.launch(
            triton_kernels.forward, t, x, weight, out, eps=eps, WEIGHT=weight is not None, **tile
        )
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        from . import triton_kernels

        x, weight = ctx.saved_tensors
        wants_x, wants_weight, _ = ctx.needs_input_grad
        t, tile = _tile(x)
        tile_rows = tile["ROWS"]
        d_x = torch.empty_like(x) if wants_x else None
        partial = None
        if wants_weight:
            tiles = gpu.power_of_two(gpu.programs(gpu.programs(t, tile_rows), PROGRAMS))
            tile["ROWS"] = tile_rows * tiles
            rows = gpu.programs(t, tile["ROWS"])
            partial = torch.empty(rows, x.shape[-1], dtype=torch.float32, device=x.device)
        gpu.launch(
            triton_kernels.backward,
            t,
            grad.contiguous(),
            x,
            weight,
            d_x,
            partial,
            eps=ctx.eps,
            WEIGHT=weight is not None,
            OF_X=wants_x,
            OF_WEIGHT=wants_weight,
            TILE_ROWS=tile_rows,
            **tile,
        )
        d_weight = None if partial is None else partial.sum(0).to(weight.dtype)
        return d_x, d_weight, None


def _tile(x: torch.Tensor) -> tuple[int, dict[str, int]]:
    """Number of rows of x, and the constants of a program that holds whole rows."""
    d = x.shape[-1]
    block = gpu.power_of_two(d)
    rows = max(gpu.TILE // max(block, 32), 1)
    warps = min(max(block // 512, 4), 16)
    return x.numel() // d, dict(D=d, ROWS=rows, BLOCK=block, num_warps=warps)
