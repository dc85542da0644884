"""Mixing weights of manifold-constrained hyper-connections."""

from __future__ import annotations

from .. import gpu
from ..cases import normal
from ..registry import Op, register
from . import fused_gpu, matrix, tiles
from .reference import mhc_mix

__all__ = ["OP", "mhc_mix"]


def _cases(g, dtype):
    for t, m, d, iters in ((1, 4, 128, 20), (6, 4, 64, 20), (300, 4, 128, 20), (5, 2, 32, 1)):
        n = m * (2 + m)
        yield (
            f"{t}x{m}x{d} iters={iters}",
            dict(
                streams=normal(g, t, m, d, dtype=dtype),
                fn=normal(g, n, m * d, std=0.05),
                base=normal(g, n),
                scale=normal(g, 3),
                iters=iters,
                norm_eps=1e-20,
                hc_eps=1e-6,
            ),
        )


OP = register(
    Op(
        name="mhc_mix",
        signature=(
            "mhc_mix(streams 't m d', fn 'm(2+m) m*d', base 'm(2+m)', scale '3', *, iters, "
            "norm_eps, hc_eps) -> pre 't m', post 't m', comb 't m m'"
        ),
        rows=("streams",),
        cases=_cases,
        tolerance={"float64": (1e-12, 1e-12), "float32": (1e-5, 1e-5), "bfloat16": (2e-2, 2e-2)},
        differentiable=True,
    )
)
OP.implement("reference", kind="reference", batch_invariant=False)(mhc_mix)
OP.implement("triton", batch_invariant=False, supports=fused_gpu.supports, available=gpu.available)(
    fused_gpu.mhc_mix
)
OP.implement("matrix", batch_invariant=False, supports=matrix.supports)(matrix.mhc_mix)
OP.implement("tiles", batch_invariant=True, late=True)(tiles.mhc_mix)
