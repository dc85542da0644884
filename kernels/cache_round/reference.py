"""The model's own cache roundings."""

from __future__ import annotations

import torch

from ..formats import straight_through


def cache_round(x: torch.Tensor, format: str) -> torch.Tensor:
    """x "... d" rounded as the cache stores it, in x's dtype; the gradient is the identity's.

    format: "float" (unchanged), "mxfp8" (window keys), "nvfp4" (compressed entries) or "mxfp4"
    (index queries and keys). Part of the model: its weights were trained with these roundings.
    """
    return straight_through(x, format)
