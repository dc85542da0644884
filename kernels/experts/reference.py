"""The routed experts, one after another, in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..numerics import acc_dtype, round_activation
from ..quantised import Quantised, dense
from ..swiglu.reference import swiglu


def experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w1: torch.Tensor | Quantised,
    w3: torch.Tensor | Quantised,
    w2: torch.Tensor | Quantised,
    limit: float,
    *,
    act: str | None = None,
) -> torch.Tensor:
    """Sum over each row's experts of weight * expert(x).

    x "t d", ids "t k" int64 (-1 none), weights "t k", w1 and w3 "e i d", w2 "e d i" -> "t d" in x's
    dtype. expert(x) = swiglu(x w1^T, x w3^T, limit) w2^T; the weight multiplies the activation
    before w2. Accumulated over experts in the accumulation dtype, in ascending expert order.
    act: "mxfp8" rounds what enters each product per 32 channels.
    """
    wide = acc_dtype(x)
    out = torch.zeros(x.shape, dtype=wide, device=x.device)
    rounded = round_activation(x, act)
    for e in range(w1.shape[0]):
        row, slot = torch.where(ids == e)
        if not len(row):
            continue
        mine = rounded[row]
        gate = F.linear(mine, dense(w1[e], x.dtype)).to(wide)
        up = F.linear(mine, dense(w3[e], x.dtype)).to(wide)
        hidden = swiglu(gate, up, limit) * weights[row, slot].to(wide).unsqueeze(1)
        hidden = round_activation(hidden.to(x.dtype), act)
        out = out.index_add(0, row, F.linear(hidden, dense(w2[e], x.dtype)).to(wide))
    return out.to(x.dtype)
