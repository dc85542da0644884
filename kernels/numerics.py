"""Arithmetic that several ops share: dtypes, activation rounding, products in tiles of rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F

TILE = 16  # rows of a tile of `tiled_linear`


def acc_dtype(x: torch.Tensor | torch.dtype) -> torch.dtype:
    """The dtype to accumulate in: float64 for float64 inputs, float32 for everything else."""
    dtype = x.dtype if isinstance(x, torch.Tensor) else x
    return torch.float64 if dtype == torch.float64 else torch.float32


def round_activation(x: torch.Tensor, act: str | None) -> torch.Tensor:
    """Round x "... k" as a quantised matrix product would read it.

    act: None (x unchanged) or "mxfp8" (E4M3 values, one power-of-two scale per 32 channels).
    """
    if act is None:
        return x
    if act != "mxfp8":
        raise ValueError(f'act={act!r} is not an activation rounding; use None or "mxfp8"')
    from deepinfer.kernels.formats import straight_through

    return straight_through(x, "mxfp8")


def tiled_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x "t k" times weight "n k" -> "t n", in products of always TILE rows.

    A matrix library picks its kernel by the number of rows, so a row's bits depend on its company;
    with one shape they do not. The last tile is filled up with zero rows.
    """
    t = x.shape[0]
    padded = F.pad(x, (0, 0, 0, -t % TILE)) if t % TILE else x
    tiles = [F.linear(tile, weight) for tile in padded.split(TILE)] if t else []
    return torch.cat(tiles)[:t] if tiles else F.linear(x, weight)


def unless_plain_cpu(*values) -> str | None:
    """Why numpy cannot compute with these arguments (None: it can): it works in CPU memory and
    records no gradient. Non-tensors are ignored."""
    grad = torch.is_grad_enabled()
    for v in values:
        if isinstance(v, torch.Tensor):
            if grad and v.requires_grad:
                return "a gradient is wanted"
            if v.device.type != "cpu":
                return f"it runs on the CPU only, not on {v.device.type}"
    return None
