"""Arithmetic that several ops share: dtypes, activation rounding, products in tiles of rows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

TILE = 16  # rows of a tile of `tiled_linear`, and what `in_row_blocks` rounds rows up to
BLOCK = 1 << 15  # elements up to which torch works an elementwise op off in one thread


def acc_dtype(x: torch.Tensor | torch.dtype) -> torch.dtype:
    """The dtype to accumulate in: float64 for float64 inputs, float32 for everything else."""
    dtype = x.dtype if isinstance(x, torch.Tensor) else x
    return torch.float64 if dtype == torch.float64 else torch.float32


def constant(values: tuple, device: torch.device | str, dtype: torch.dtype) -> torch.Tensor:
    """These values on the device; to be read only. On an accelerator they are copied there once: a
    copy from the host's memory waits for all that the device still has to do."""
    if torch.device(device).type == "cpu":
        return torch.tensor(values, dtype=dtype)
    return _on_device(values, torch.device(device), dtype)


@functools.lru_cache(maxsize=256)
def _on_device(values: tuple, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    with torch.inference_mode(False):  # or training could not use it later
        return torch.tensor(values, dtype=dtype, device=device)


class _Taken(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, ids):
        ctx.save_for_backward(ids)
        ctx.shape, ctx.dtype = rows.shape, rows.dtype
        return rows[ids]

    @staticmethod
    def backward(ctx, grad):
        (ids,) = ctx.saved_tensors
        total = grad.new_zeros(ctx.shape, dtype=acc_dtype(grad))
        total.index_add_(0, ids.flatten(), grad.reshape(-1, *ctx.shape[1:]).to(total.dtype))
        return total.to(ctx.dtype), None


def taken(rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """rows[ids]: rows "n ...", ids "..." of 0..n-1 -> "... ...".

    Plain indexing sums its gradient in the rows' dtype, and on a GPU sorts the ids first. Here it
    is summed in the accumulation dtype, without a sort: a row is often taken by thousands.
    """
    if rows.requires_grad and torch.is_grad_enabled():
        return _Taken.apply(rows, ids)
    return rows[ids]


def round_activation(x: torch.Tensor, act: str | None) -> torch.Tensor:
    """Round x "... k" as a quantised matrix product would read it.

    act: None (x unchanged) or "mxfp8" (E4M3 values, one power-of-two scale per 32 channels).
    """
    if act is None:
        return x
    if act != "mxfp8":
        raise ValueError(f'act={act!r} is not an activation rounding; use None or "mxfp8"')
    from .formats import straight_through

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


def in_row_blocks(
    fn: Callable[..., Any], first: torch.Tensor, *others: torch.Tensor | None, width: int
) -> Any:
    """fn over blocks of rows, results (a tensor or a tuple of them) put together again.

    torch computes the last few elements of a contiguous range with other instructions than the
    rest, and cuts long ranges by the number of threads, so the bits of an exp depend on where in a
    tensor it stands. Blocks of a multiple of TILE rows and at most BLOCK elements (`width` is the
    most a row has) have neither. Zero rows fill up the last block.
    """
    t = first.shape[0]
    step = max(BLOCK // max(width, 1) // TILE * TILE, TILE)
    fill = -t % TILE
    padded = [None if x is None else _pad_rows(x, fill) for x in (first, *others)]
    results = []
    for i in range(0, max(t, 1), step):
        results.append(fn(*(None if x is None else x[i : i + step] for x in padded)))
    if isinstance(results[0], torch.Tensor):
        return torch.cat(results)[:t]
    return tuple(torch.cat(parts)[:t] for parts in zip(*results))


def _pad_rows(x: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.cat([x, x.new_zeros(rows, *x.shape[1:])]) if rows else x


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
