"""Mixing weights whose bits do not depend on other rows: products in tiles, the rest in blocks."""

from __future__ import annotations

from ..mhc_mix.reference import from_projected
from ..numerics import acc_dtype, in_row_blocks, tiled_linear


def mhc_mix(streams, fn, base, scale, *, iters, norm_eps, hc_eps):
    """As the reference."""
    v = streams.flatten(1).to(acc_dtype(streams))
    projected = tiled_linear(v, fn.to(v.dtype))

    def rest(projected, v):
        return from_projected(
            projected, v, base, scale, iters=iters, norm_eps=norm_eps, hc_eps=hc_eps
        )

    return in_row_blocks(rest, projected, v, width=v.shape[1])
