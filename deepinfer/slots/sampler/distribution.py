"""From logits to the one distribution of a row: mask, 1/T, joint top-p then top-k, softmax.

Order and edge rules are the released engine's: top-p keeps tokens, most likely first, while the
mass before them is <= p; top-k applies to what is left; ties go to the lower id.

A row's distribution never depends on its neighbours, bit for bit. Hence no floating-point sum over
the vocabulary outside softmax, which treats each row alone: masses are added as integers, whose
sums do not depend on the order that a device chooses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from deepinfer.rng import GREEDY_BELOW
from deepinfer.slots.protocols import Dist, RowParams

if TYPE_CHECKING:
    from torch import Tensor

MASS = 2.0**52  # fixed point of a mass: a row's total stays below 2^53, where FP64 holds integers


def distribution(logits: Tensor, params: RowParams, mask: Tensor | None = None) -> Dist:
    """One Dist per row. logits: [t, v]; params: [t] each; mask: [t, v] bool, True = legal.

    logprobs in FP32, or FP64 for FP64 logits; probs always in FP64, so that a rounding of the
    logits moves a probability by as little as it moved them and never tips their total. A row with
    temperature < 1e-5 is one-hot at its most likely legal token. A row with NaN, +inf or no legal
    token has finite False, probs 0 and logprobs NaN: nothing can be drawn from it unnoticed.
    """
    _check(logits, params, mask)
    x = logits if logits.dtype == torch.float64 else logits.float()
    broken = (x.isnan() | x.isposinf()).any(-1)
    if mask is not None:
        x = x.masked_fill(~mask, -torch.inf)
    finite = ~broken & (x > -torch.inf).any(-1)
    x = x.masked_fill(~finite[:, None], 0.0)  # a stand-in that no later step can trip over
    greedy = params.temperature < GREEDY_BELOW

    wide = x.double()
    kept = _filter(wide, _scale(wide, params, greedy), params, greedy)
    best = torch.zeros_like(wide).scatter_(-1, x.argmax(-1, keepdim=True), 1.0)
    probs = torch.where(greedy[:, None], best, kept.softmax(-1))
    return Dist(
        probs=probs.masked_fill(~finite[:, None], 0.0),
        logprobs=x.log_softmax(-1).masked_fill(~finite[:, None], torch.nan),
        finite=finite,
    )


def _scale(x: Tensor, params: RowParams, greedy: Tensor) -> Tensor:
    """(x - max x) / T, so that no temperature overflows to +inf.

    Where 1/T is 0 (a T beyond the dtype's range), a masked token stays masked and the others are
    equal: 0 meets no infinity, as halves of finite numbers have a finite difference.
    """
    inverse = 2 / params.temperature.to(x.dtype).masked_fill(greedy, 1.0)
    masked = x == -torch.inf
    half = x.masked_fill(masked, 0.0) / 2 - x.amax(-1, keepdim=True) / 2
    return (half * inverse[:, None]).masked_fill(masked, -torch.inf)


def _filter(x: Tensor, scaled: Tensor, params: RowParams, greedy: Tensor) -> Tensor:
    """scaled with -inf where top-p or top-k drop a token."""
    rows = ~greedy & ((params.top_p < 1) | ((params.top_k >= 1) & (params.top_k < x.shape[-1])))
    if x.device.type != "cpu":  # there, looking at `rows` would wait for the device
        return scaled.masked_fill(~_survivors(x, scaled, params), -torch.inf)
    at = rows.nonzero()[:, 0]
    if not at.numel():
        return scaled
    return scaled.index_put(
        (at,), scaled[at].masked_fill(~_survivors(x[at], scaled[at], params.rows(at)), -torch.inf)
    )


def _survivors(x: Tensor, scaled: Tensor, params: RowParams) -> Tensor:
    """[t, v] bool. A row whose filters are off keeps everything."""
    order = x.sort(dim=-1, descending=True, stable=True)[1]
    mass = (scaled.softmax(-1).to(torch.float64) * MASS).long().gather(-1, order)
    before = mass.cumsum(-1) - mass
    limit = (params.top_p.to(torch.float64) * MASS).long()[:, None]
    keep = (before <= limit) | (params.top_p >= 1)[:, None]
    rank = torch.arange(x.shape[-1], device=x.device)
    keep &= (rank < params.top_k[:, None]) | (params.top_k < 1)[:, None]
    return torch.zeros_like(keep).scatter_(-1, order, keep)


def _check(logits: Tensor, params: RowParams, mask: Tensor | None) -> None:
    if logits.ndim != 2 or not logits.is_floating_point() or logits.shape[1] == 0:
        raise ValueError(
            f"distribution: logits must be a float tensor [t, v], "
            f"got {logits.dtype} {tuple(logits.shape)}"
        )
    t = logits.shape[0]
    for name in ("temperature", "top_p", "top_k"):
        shape = tuple(getattr(params, name).shape)
        if shape != (t,):
            raise ValueError(
                f"distribution: logits have {t} rows, params.{name} has shape {shape}; "
                "give one per row"
            )
    if mask is not None and (mask.dtype != torch.bool or mask.shape != logits.shape):
        raise ValueError(
            f"distribution: mask must be bool of shape {tuple(logits.shape)} (True = legal), "
            f"got {mask.dtype} {tuple(mask.shape)}"
        )
