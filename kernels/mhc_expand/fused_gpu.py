"""The expansion on a GPU: one Triton kernel forward, one backward."""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable

from .. import gpu


def supports(streams, y, post, comb) -> str | None:
    if streams.shape[1] != 4:
        return f"it is written for 4 streams, not {streams.shape[1]}"
    return (
        gpu.unless_cuda(streams=streams, y=y, post=post, comb=comb)
        or gpu.unless_dtypes(gpu.FLOATS, streams=streams, y=y)
        or gpu.unless_dtypes((torch.float32,), post=post, comb=comb)
    )


def mhc_expand(
    streams: torch.Tensor, y: torch.Tensor, post: torch.Tensor, comb: torch.Tensor
) -> torch.Tensor:
    """As the reference, for 4 streams. Gradients of all four, once."""
    return _Expand.apply(streams, y, post, comb)


class _Expand(torch.autograd.Function):
    @staticmethod
    def forward(ctx, streams, y, post, comb):
        from . import triton_kernels

        inputs = [x.contiguous() for x in (streams, y, post, comb)]
        ctx.save_for_backward(*inputs)
        out = torch.empty_like(inputs[0])
        t, _, d = out.shape
        gpu.launch(triton_kernels.forward, t, *inputs, out, D=d, **gpu.tile(d))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        from . import triton_kernels

        inputs = ctx.saved_tensors
        grads = [torch.empty_like(x) for x in inputs]
        t, _, d = grad.shape
        tensors = (grad.contiguous(), *inputs, *grads)
        gpu.launch(triton_kernels.backward, t, *tensors, D=d, **gpu.tile(d))
        return tuple(grads)
