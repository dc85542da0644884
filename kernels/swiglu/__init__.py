"""The clamped gated activation."""

from __future__ import annotations

from ..cases import normal
from ..registry import Op, register
from . import tiles
from .reference import swiglu

__all__ = ["OP", "swiglu"]


def _cases(g, dtype):
    for t, i in ((1, 64), (40, 96)):
        gate, up = normal(g, t, i, dtype=dtype, std=3), normal(g, t, i, dtype=dtype, std=3)
        yield f"{t}x{i}", dict(gate=gate, up=up, limit=1.5)


OP = register(
    Op(
        name="swiglu",
        signature="swiglu(gate '... i', up '... i', limit) -> '... i'",
        rows=("gate", "up"),
        cases=_cases,
        tolerance={"float64": (1e-12, 1e-12), "float32": (1e-5, 1e-5), "bfloat16": (2e-2, 2e-2)},
        differentiable=True,
    )
)
OP.implement("reference", kind="reference", batch_invariant=False)(swiglu)
OP.implement("tiles", batch_invariant=True, late=True)(tiles.swiglu)
