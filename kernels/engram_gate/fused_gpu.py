"""The gated update on a GPU: one Triton kernel forward, one backward."""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable

from .. import gpu
from .reference import CLAMP

WIDEST = 16 * gpu.TILE  # elements of a row's streams, which one program holds at once
PROGRAMS = 2048  # a GPU has some hundred cores, each of which runs a few programs at a time


def supports(streams, key, value, q_weight, k_weight, eps, dead) -> str | None:
    _, m, d = streams.shape
    if gpu.power_of_two(m) * gpu.power_of_two(d) > WIDEST:
        return f"a row of {m} streams and {d} channels is too wide for one program"
    weights = dict(q_weight=q_weight, k_weight=k_weight)
    tensors = dict(streams=streams, key=key, value=value, **weights)
    return (
        gpu.unless_cuda(**tensors, **({} if dead is None else dict(dead=dead)))
        or gpu.unless_dtypes(gpu.FLOATS, **tensors)
        or (gpu.unless_dtypes((torch.bool,), dead=dead) if dead is not None else None)
    )


def engram_gate(
    streams: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    dead: torch.Tensor | None,
) -> torch.Tensor:
    """As the reference. Gradients of streams, key, value and the two weights, once."""
    return _Gate.apply(streams, key, value, q_weight, k_weight, eps, dead)


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, streams, key, value, q_weight, k_weight, eps, dead):
        from . import triton_kernels

        streams, q_weight, k_weight = (x.contiguous() for x in (streams, q_weight, k_weight))
        key, value = _whole_rows(key), _whole_rows(value)
        dead = None if dead is None else dead.contiguous()
        inputs = (streams, key, value, q_weight, k_weight, dead)
        ctx.save_for_backward(*inputs)
        ctx.eps = eps
        out = torch.empty_like(streams)
        numbers = (key.stride(0), value.stride(0), eps)
        gpu.launch(triton_kernels.forward, len(out), *inputs, out, *numbers, **_constants(out))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        from . import triton_kernels

        inputs = ctx.saved_tensors
        streams, key, value, q_weight, k_weight, _ = inputs
        grads = [x.new_empty(x.shape) for x in (streams, key, value)]
        t, m, d = grad.shape
        constants = _constants(grad)
        shape = (gpu.programs(t, constants["ROWS"]), m, d)
        partial = torch.empty(shape, dtype=torch.float32, device=grad.device)
        tensors = (grad.contiguous(), *inputs, *grads, partial)
        numbers = (key.stride(0), value.stride(0), ctx.eps)
        gpu.launch(triton_kernels.backward, t, *tensors, *numbers, **constants)
        product = partial.sum(0)  # the gradient of q_weight * k_weight
        d_q = (product * k_weight).to(q_weight.dtype)
        d_k = (product * q_weight).to(k_weight.dtype)
        return *grads, d_q, d_k, None, None


def _whole_rows(x: torch.Tensor) -> torch.Tensor:
    """x, copied only where a row is not in one piece. Keys and values usually are halves of the
    same rows: apart from each other, but each in one piece."""
    d = x.shape[-1]
    return x if x.stride()[1:] == ((d, 1) if x.dim() == 3 else (1,)) else x.contiguous()


def _constants(streams: torch.Tensor) -> dict:
    """What both kernels need to know. A program takes ROWS rows one after another, so that weights
    are read, and partial sums of their gradients written, once a program."""
    t, m, d = streams.shape
    wide = dict(MP=gpu.power_of_two(m), BLOCK=gpu.power_of_two(d))
    warps = min(max(wide["MP"] * wide["BLOCK"] // 256, 1), 16)
    rows = max(gpu.programs(t, PROGRAMS), 1)
    return dict(M=m, D=d, SCALE=d**-0.5, CLAMP=CLAMP, ROWS=rows, num_warps=warps, **wide)
