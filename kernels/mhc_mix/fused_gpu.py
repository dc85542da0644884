"""The mixing weights on a GPU: the projection in torch, the rest in Triton kernels.

The projection multiplies as torch is set (TF32 or full float32). Kept for the gradient: the
streams as they came, and per row some 200 float32 numbers.
"""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable

from .. import gpu

ROWS = 32  # of a program that holds "rows m m": 128 threads of 4 entries


def supports(streams, fn, base, scale, **_) -> str | None:
    m = streams.shape[1]
    if m not in (1, 2, 4, 8):
        return f"it is written for 1, 2, 4 or 8 streams, not {m}"
    return (
        gpu.unless_cuda(streams=streams, fn=fn, base=base, scale=scale)
        or gpu.unless_dtypes(gpu.FLOATS, streams=streams)
        or gpu.unless_dtypes((torch.float32,), fn=fn, base=base, scale=scale)
    )


def mhc_mix(streams, fn, base, scale, *, iters, norm_eps, hc_eps):
    """As the reference. Gradients of all four tensors, once."""
    tensors = (streams, fn, base, scale)
    keep = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    return _Mix.apply(*tensors, max(iters, 1), norm_eps, hc_eps, keep)


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(ctx, streams, fn, base, scale, iters, norm_eps, hc_eps, keep):
        from . import triton_kernels

        streams, base, scale = streams.contiguous(), base.contiguous(), scale.contiguous()
        t, m, _ = streams.shape
        pre, post = fn.new_empty(t, m), fn.new_empty(t, m)
        comb = fn.new_empty(t, m, m)
        divisors = fn.new_empty(2 * iters - 1 if keep else 0, t, m)
        v, mean = _widened(streams)
        with torch.autocast(streams.device.type, enabled=False):
            projected = torch.mm(v, fn.T)
        gpu.launch(
            triton_kernels.forward,
            t,
            projected,
            mean,
            base,
            scale,
            pre,
            post,
            comb,
            divisors,
            norm_eps=norm_eps,
            hc_eps=hc_eps,
            M=m,
            ITERS=iters,
            KEEP=keep,
            ROWS=ROWS,
        )
        if keep:
            ctx.save_for_backward(streams, fn, base, scale, projected, mean, comb, divisors)
            ctx.iters, ctx.norm_eps = iters, norm_eps
        return pre, post, comb

    @staticmethod
    @once_differentiable
    def backward(ctx, d_pre, d_post, d_comb):
        streams, fn, base, scale, projected, mean, comb, divisors = ctx.saved_tensors
        grads = (d_pre.contiguous(), d_post.contiguous(), d_comb.contiguous())
        at = (projected, mean, base, scale, comb, divisors)
        d_projected, factor, partial = _small_gradients(grads, at, ctx, streams.shape)
        shared = partial.sum(0)  # n of base, 3 of scale
        d_fn = d_streams = None
        with torch.autocast(streams.device.type, enabled=False):
            if ctx.needs_input_grad[0]:
                d_streams = _add_scaled(torch.mm(d_projected, fn), factor, streams)
            if ctx.needs_input_grad[1]:
                d_fn = torch.mm(d_projected.T, streams.flatten(1).float())
        return d_streams, d_fn, shared[:-3], shared[-3:], None, None, None, None


def _small_gradients(grads, at, ctx, shape):
    """Of all that is small: (d_projected "t n", factor "t", partial sums "programs n+3")."""
    from . import triton_kernels

    t, m, d = shape
    n = m * (2 + m)
    projected = at[0]
    d_projected, factor = torch.empty_like(projected), projected.new_empty(t)
    partial = projected.new_empty(gpu.programs(t, ROWS), n + 3)
    gpu.launch(
        triton_kernels.backward,
        t,
        *grads,
        *at,
        d_projected,
        factor,
        partial,
        norm_eps=ctx.norm_eps,
        M=m,
        D=d,
        ITERS=ctx.iters,
        ROWS=ROWS,
    )
    return d_projected, factor, partial


def _widened(streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Streams as float32 "t m*d" and the mean square of each row "t", in one pass."""
    from . import triton_kernels

    v = streams.flatten(1)
    t, k = v.shape
    widen = v.dtype != torch.float32
    wide = torch.empty_like(v, dtype=torch.float32) if widen else v
    mean = torch.empty(t, dtype=torch.float32, device=v.device)
    gpu.launch(triton_kernels.mean_square, t, v, wide, mean, K=k, WIDEN=widen, **gpu.tile(k))
    return wide, mean


def _add_scaled(x: torch.Tensor, factor: torch.Tensor, streams: torch.Tensor) -> torch.Tensor:
    """x "t m*d" + factor "t" times streams, in the streams' dtype and shape; x may be lost."""
    from . import triton_kernels

    t, k = x.shape
    out = x if streams.dtype == x.dtype else torch.empty_like(streams)
    gpu.launch(triton_kernels.add_scaled, t, x, factor, streams, out, K=k, **gpu.tile(k))
    return out.view_as(streams)
