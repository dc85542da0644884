"""Rotary position embedding of the last features."""

from __future__ import annotations

from .. import gpu
from ..cases import normal
from ..registry import Op, register
from . import complex_product, fused_gpu
from .reference import rope

__all__ = ["OP", "rope"]


def _cases(g, dtype):
    for inverse in (False, True):
        for shape in ((1, 8, 64), (9, 64), (33, 4, 32)):
            angle = normal(g, shape[0], 8, std=10.0)
            yield (
                f"{shape} inverse={inverse}",
                dict(
                    x=normal(g, *shape, dtype=dtype),
                    cos=angle.cos(),
                    sin=angle.sin(),
                    inverse=inverse,
                ),
            )


OP = register(
    Op(
        name="rope",
        signature="rope(x 't ... d', cos 't r/2', sin 't r/2', *, inverse=False) -> 't ... d'",
        rows=("x", "cos", "sin"),
        cases=_cases,
        tolerance={"float64": (1e-12, 1e-12), "float32": (1e-5, 1e-5), "bfloat16": (2e-2, 2e-2)},
        differentiable=True,
    )
)
OP.implement("reference", kind="reference", batch_invariant=True)(rope)
OP.implement("triton", batch_invariant=True, supports=fused_gpu.supports, available=gpu.available)(
    fused_gpu.rope
)
OP.implement("complex", batch_invariant=False, supports=complex_product.supports)(
    complex_product.rope
)
