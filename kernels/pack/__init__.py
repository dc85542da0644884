"""Rows to cache bytes."""

from __future__ import annotations

from ..cases import normal
from ..registry import Op, register
from .reference import pack

__all__ = ["OP", "pack"]


def _cases(g, dtype):
    for format in ("mxfp8", "mxfp4", "nvfp4"):
        for std in (1e-6, 1.0, 1e4):
            x = normal(g, 9, 64, dtype=dtype, std=std)
            x[3] = 0
            yield f"{format} std={std}", dict(x=x, format=format)


OP = register(
    Op(
        name="pack",
        signature="pack(x '... d', format: mxfp8 | mxfp4 | nvfp4) -> uint8 '... bytes'",
        rows=("x",),
        cases=_cases,
        tolerance={"float64": (0, 0), "float32": (0, 0), "bfloat16": (0, 0)},
        differentiable=False,
    )
)
OP.implement("reference", kind="reference", batch_invariant=True)(pack)
