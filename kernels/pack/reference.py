"""Rows to the bytes of a cache record."""

from __future__ import annotations

import torch

from ..formats import encode


def pack(x: torch.Tensor, format: str) -> torch.Tensor:
    """x "... d" -> uint8 "... bytes": [data | scales] of each row.

    format: "mxfp8", "mxfp4" or "nvfp4". unpack(pack(x)) equals cache_round(x) bit for bit.
    """
    return encode(x, format)
