"""Streams to one sub-layer input."""

from __future__ import annotations

from .. import gpu
from ..cases import normal
from ..numerics import acc_dtype
from ..registry import Op, register
from . import fused_gpu
from .reference import mhc_collapse

__all__ = ["OP", "mhc_collapse"]


def _cases(g, dtype):
    for t, m, d in ((1, 4, 128), (50, 4, 64), (3, 2, 32)):
        pre = normal(g, t, m, dtype=acc_dtype(dtype))
        yield f"{t}x{m}x{d}", dict(streams=normal(g, t, m, d, dtype=dtype), pre=pre)


OP = register(
    Op(
        name="mhc_collapse",
        signature="mhc_collapse(streams 't m d', pre 't m') -> 't d'",
        rows=("streams", "pre"),
        cases=_cases,
        tolerance={"float64": (1e-12, 1e-12), "float32": (1e-5, 1e-5), "bfloat16": (2e-2, 2e-2)},
        differentiable=True,
    )
)
OP.implement("reference", kind="reference", batch_invariant=True)(mhc_collapse)
OP.implement("triton", batch_invariant=True, supports=fused_gpu.supports, available=gpu.available)(
    fused_gpu.mhc_collapse
)
