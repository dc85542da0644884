"""Root-mean-square norm."""

from __future__ import annotations

from .. import gpu
from ..cases import normal
from ..registry import Op, register
from . import fused, fused_gpu
from .reference import rms_norm

__all__ = ["OP", "rms_norm"]


def _cases(g, dtype):
    for t, d in ((1, 64), (7, 128), (33, 5120)):
        yield f"{t}x{d}", dict(x=normal(g, t, d, dtype=dtype), weight=normal(g, d), eps=1e-20)
    yield "no weight", dict(x=normal(g, 3, 5, 64, dtype=dtype), weight=None, eps=1e-6)


OP = register(
    Op(
        name="rms_norm",
        signature="rms_norm(x '... d', weight 'd' | None, eps) -> '... d'",
        rows=("x",),
        cases=_cases,
        tolerance={"float64": (1e-12, 1e-12), "float32": (1e-5, 1e-5), "bfloat16": (2e-2, 2e-2)},
        differentiable=True,
    )
)
OP.implement("reference", kind="reference", batch_invariant=True)(rms_norm)
OP.implement("triton", batch_invariant=True, supports=fused_gpu.supports, available=gpu.available)(
    fused_gpu.rms_norm
)
OP.implement("fused", batch_invariant=True, supports=fused.supports)(fused.rms_norm)
