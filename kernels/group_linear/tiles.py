"""Grouped product in tiles of a fixed number of rows; see `linear`."""

from __future__ import annotations

import torch

from ..numerics import round_activation, tiled_linear
from ..quantised import dense


def group_linear(x, weight, *, act=None):
    """As the reference."""
    x = round_activation(x, act)
    blocks = dense(weight, x.dtype).unflatten(0, (x.shape[1], -1))
    return torch.stack([tiled_linear(x[:, g], block) for g, block in enumerate(blocks)], dim=1)
