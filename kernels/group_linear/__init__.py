"""A separate matrix product per group of heads."""

from __future__ import annotations

from ..cases import fp8, normal
from ..registry import Op, register
from . import tiles
from .reference import group_linear

__all__ = ["OP", "group_linear"]


def _cases(g, dtype):
    for t, groups, k, n in ((1, 2, 64, 32), (9, 8, 128, 32)):
        yield (
            f"{t}x{groups}x{k}x{n}",
            dict(
                x=normal(g, t, groups, k, dtype=dtype),
                weight=normal(g, groups * n, k, std=0.1, dtype=dtype),
            ),
        )
    yield "fp8", dict(x=normal(g, 3, 2, 64, dtype=dtype), weight=fp8(g, 64, 64), act="mxfp8")


OP = register(
    Op(
        name="group_linear",
        signature=(
            "group_linear(x 't g k', weight 'g*n k' | Quantised, *, act=None | 'mxfp8') -> 't g n'"
        ),
        rows=("x",),
        cases=_cases,
        tolerance={"float64": (1e-12, 1e-12), "float32": (1e-5, 1e-5), "bfloat16": (2e-2, 2e-2)},
        differentiable=True,
    )
)
OP.implement("reference", kind="reference", batch_invariant=False)(group_linear)
OP.implement("tiles", batch_invariant=True, late=True)(tiles.group_linear)
