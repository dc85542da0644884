"""Matrix product with a float or quantised weight in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..numerics import round_activation
from ..quantised import Quantised, dense


def linear(
    x: torch.Tensor,
    weight: torch.Tensor | Quantised,
    *,
    act: str | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """x weight^T.

    x "... k", weight "n k" -> "... n" in out_dtype (default: x's dtype), computed in out_dtype.
    act: "mxfp8" rounds x per 32 channels first, as an MXFP8 matrix product reads it.
    """
    if act is not None:
        x = round_activation(x, act)
    dtype = out_dtype or x.dtype
    return F.linear(x if x.dtype == dtype else x.to(dtype), dense(weight, dtype))
