"""The clamped gated activation in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..numerics import acc_dtype


def swiglu(gate: torch.Tensor, up: torch.Tensor, limit: float) -> torch.Tensor:
    """silu(min(gate, limit)) * clamp(up, -limit, limit), in the accumulation dtype.

    gate and up "... i" -> same shape and dtype. `limit` is swiglu_limit of the config.
    """
    wide = acc_dtype(gate)
    gated = F.silu(gate.to(wide).clamp(max=limit)) * up.to(wide).clamp(-limit, limit)
    return gated.to(gate.dtype)
