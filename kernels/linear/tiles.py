"""Matrix product in tiles of a fixed number of rows: a row's bits do not depend on others."""

from __future__ import annotations

from ..numerics import round_activation, tiled_linear
from ..quantised import dense


def linear(x, weight, *, act=None, out_dtype=None):
    """As the reference."""
    x = round_activation(x, act)
    dtype = out_dtype or x.dtype
    flat = x.reshape(x.shape[:-1].numel(), x.shape[-1]).to(dtype)
    return tiled_linear(flat, dense(weight, dtype)).view(*x.shape[:-1], weight.shape[0])
