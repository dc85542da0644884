"""Rounding to a cache format."""

from __future__ import annotations

from .. import gpu
from ..cases import normal
from ..registry import Op, register
from . import bits, fused_gpu
from .reference import cache_round

__all__ = ["OP", "cache_round"]


def _cases(g, dtype):
    for format in ("float", "mxfp8", "mxfp4", "nvfp4"):
        for std in (1e-6, 1.0, 1e4):
            x = normal(g, 9, 64, dtype=dtype, std=std)
            x[3] = 0
            yield f"{format} std={std}", dict(x=x, format=format)


OP = register(
    Op(
        name="cache_round",
        signature="cache_round(x '... d', format: float | mxfp8 | mxfp4 | nvfp4) -> '... d'",
        rows=("x",),
        cases=_cases,
        tolerance={"float64": (0, 0), "float32": (0, 0), "bfloat16": (0, 0)},
        differentiable=True,
    )
)
OP.implement("reference", kind="reference", batch_invariant=True)(cache_round)
OP.implement("triton", batch_invariant=True, supports=fused_gpu.supports, available=gpu.available)(
    fused_gpu.cache_round
)
OP.implement("bits", batch_invariant=True, supports=bits.supports)(bits.cache_round)
