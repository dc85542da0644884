"""Cache bytes to rows."""

from __future__ import annotations

from ..cases import integers
from ..registry import Op, register
from .reference import unpack

__all__ = ["OP", "unpack"]


def _cases(g, dtype):
    for format, width in (("mxfp8", 66), ("mxfp4", 34), ("nvfp4", 36)):
        record = integers(g, 0, 255, 9, width).byte()
        yield format, dict(record=record, format=format, dim=64, dtype=dtype)


OP = register(
    Op(
        name="unpack",
        signature="unpack(record uint8 '... bytes', format, dim, dtype) -> '... d'",
        rows=("record",),
        cases=_cases,
        tolerance={"float64": (0, 0), "float32": (0, 0), "bfloat16": (0, 0)},
        differentiable=False,
    )
)
OP.implement("reference", kind="reference", batch_invariant=True)(unpack)
