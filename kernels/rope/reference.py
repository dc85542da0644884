"""Rotary position embedding in plain torch."""

from __future__ import annotations

import torch
from einops import rearrange

from ..numerics import acc_dtype


def rope(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, inverse: bool = False
) -> torch.Tensor:
    """Rotate the last r features of x, adjacent pairs (a, b) -> (a cos - b sin, a sin + b cos).

    x "t ... d", cos and sin "t r/2" -> x's shape and dtype. inverse: by the opposite angle, as the
    attention output is rotated back at the query's position.
    """
    r = 2 * cos.shape[-1]
    wide = acc_dtype(x)
    shape = (cos.shape[0], *(1,) * (x.ndim - 2), r // 2)
    cos = cos.to(wide).view(shape)
    sin = (-sin if inverse else sin).to(wide).view(shape)
    still, turned = x[..., : x.shape[-1] - r], x[..., x.shape[-1] - r :].to(wide)
    a, b = rearrange(turned, "... (pair two) -> two ... pair", two=2)
    pairs = [a * cos - b * sin, a * sin + b * cos]
    turned = rearrange(pairs, "two ... pair -> ... (pair two)")
    return torch.cat([still, turned.to(x.dtype)], dim=-1)
