"""The collapse on a GPU: one Triton kernel forward, one backward."""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable

from .. import gpu


def supports(streams, pre) -> str | None:
    return (
        gpu.unless_cuda(streams=streams, pre=pre)
        or gpu.unless_dtypes(gpu.FLOATS, streams=streams)
        or gpu.unless_dtypes((torch.float32,), pre=pre)
    )


def mhc_collapse(streams: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
    """As the reference. Gradients of both, once."""
    return _Collapse.apply(streams, pre)


class _Collapse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, streams, pre):
        from . import triton_kernels

        streams, pre = streams.contiguous(), pre.contiguous()
        ctx.save_for_backward(streams, pre)
        t, m, d = streams.shape
        out = streams.new_empty(t, d)
        gpu.launch(triton_kernels.forward, t, streams, pre, out, M=m, D=d, **gpu.tile(d))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        from . import triton_kernels

        streams, pre = ctx.saved_tensors
        t, m, d = streams.shape
        d_streams, d_pre = torch.empty_like(streams), torch.empty_like(pre)
        tensors = (grad.contiguous(), streams, pre, d_streams, d_pre)
        gpu.launch(triton_kernels.backward, t, *tensors, M=m, D=d, **gpu.tile(d))
        return d_streams, d_pre
