"""What the Triton implementations share. Triton itself is imported when one of them first runs.

A kernel that walks rows of d channels takes a tile of rows and BLOCK channels per program. A row is
worked off in the same order whatever its company, so its bits do not depend on other rows.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from typing import Any

import torch

TILE = 1024  # elements of a tile: 8 a thread in 4 warps, loads of 16 bytes in bf16
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def available() -> str | None:
    """Why no Triton kernel can run on this machine (None: it can)."""
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    return _importable()


@functools.cache
def _importable() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed: pip install 'deepinfer-lab[gpu]'"
    return None


def unless_cuda(**tensors: torch.Tensor) -> str | None:
    """Why a kernel cannot take these tensors (None: it can): they must be on one CUDA device."""
    devices = {x.device for x in tensors.values()}
    if any(device.type != "cuda" for device in devices):
        off = next(name for name, x in tensors.items() if x.device.type != "cuda")
        return f"it runs on CUDA only, and {off} is on {tensors[off].device.type}"
    if len(devices) > 1:
        found = ", ".join(f"{name} on {x.device}" for name, x in tensors.items())
        return f"all tensors have to be on one device: {found}"
    return None


def unless_dtypes(allowed: tuple[torch.dtype, ...], **tensors: torch.Tensor) -> str | None:
    """Why a kernel cannot take these tensors (None: it can), by their dtypes."""
    for name, x in tensors.items():
        if x.dtype not in allowed:
            names = " or ".join(str(d).removeprefix("torch.") for d in allowed)
            return f"{name} has to be {names}, not {str(x.dtype).removeprefix('torch.')}"
    return None


def tile(d: int) -> dict[str, int]:
    """ROWS and BLOCK of a kernel over rows of d channels; both are powers of two."""
    block = min(power_of_two(d), TILE)
    return dict(ROWS=max(TILE // max(block, 32), 1), BLOCK=block)


def power_of_two(n: int) -> int:
    """The least power of two that is not below n."""
    return 1 << max(n - 1, 0).bit_length()


def programs(t: int, rows: int) -> int:
    """How many programs of `rows` rows take t rows."""
    return -(-t // rows)


def launch(kernel: Any, t: int, *arguments, ROWS: int, **constants) -> None:
    """Run a Triton kernel over t rows, on the device of its first argument (in Triton's
    interpreter: here). The kernel gets the arguments, t and the constants by name."""
    x = arguments[0]
    if t:
        with torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext():
            kernel[(programs(t, ROWS),)](*arguments, t=t, ROWS=ROWS, **constants)
