"""Streams to one sub-layer input, in plain torch."""

from __future__ import annotations

import torch


def mhc_collapse(streams: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
    """sum_m pre_m * streams_m, accumulated in pre's dtype.

    streams "t m d", pre "t m" -> "t d" in streams' dtype.
    """
    return (pre.unsqueeze(-1) * streams.to(pre.dtype)).sum(1).to(streams.dtype)
