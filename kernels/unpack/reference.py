"""The bytes of a cache record to rows."""

from __future__ import annotations

import torch

from ..formats import decode


def unpack(record: torch.Tensor, format: str, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """uint8 "... bytes" -> "... d" in dtype; the inverse of `pack`."""
    return decode(record, format, dim, dtype)
