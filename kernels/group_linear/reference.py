"""A separate matrix product per group in plain torch."""

from __future__ import annotations

import torch

from ..numerics import round_activation
from ..quantised import Quantised, dense


def group_linear(
    x: torch.Tensor, weight: torch.Tensor | Quantised, *, act: str | None = None
) -> torch.Tensor:
    """Group g of x times block g of weight's rows, the first half of the output projection.

    x "t g k", weight "g*n k" (n rows a group) -> "t g n" in x's dtype.
    """
    x = round_activation(x, act)
    blocks = dense(weight, x.dtype).unflatten(0, (x.shape[1], -1))
    return torch.einsum("tgk,gnk->tgn", x, blocks)
