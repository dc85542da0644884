"""Inputs for the cases of ops: what every implementation is compared on."""

from __future__ import annotations

import torch


def normal(
    g: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32, std: float = 1.0
) -> torch.Tensor:
    """Normal numbers, drawn in float32 so that every dtype sees the same ones up to rounding."""
    return (torch.randn(shape, generator=g) * std).to(dtype)


def integers(g: torch.Generator, low: int, high: int, *shape: int) -> torch.Tensor:
    """int64 in [low, high)."""
    return torch.randint(low, high, shape, generator=g)


def fp8(g: torch.Generator, n: int, k: int):
    """A random FP8 weight "n k" with scales per 32x32 tile."""
    from .quantised import Quantised

    data = normal(g, n, k).to(torch.float8_e4m3fn)
    return Quantised(data, integers(g, 120, 128, -(-n // 32), -(-k // 32)).byte(), "fp8")


def fp4(g: torch.Generator, *shape: int):
    """A random FP4 weight "... n k" with scales per row and 32 columns."""
    from .quantised import Quantised

    *lead, n, k = shape
    data = integers(g, 0, 256, *lead, n, k // 2).byte()
    return Quantised(data, integers(g, 120, 126, *lead, n, k // 32).byte(), "fp4")
