"""Matrix product with a float or quantised weight."""

from __future__ import annotations

from ..cases import fp4, fp8, normal
from ..numerics import acc_dtype
from ..registry import Op, register
from . import tiles
from .reference import linear

__all__ = ["OP", "linear"]


def _cases(g, dtype):
    for t, k, n in ((1, 64, 32), (5, 128, 96), (40, 96, 200)):
        yield (
            f"{t}x{k}x{n}",
            dict(x=normal(g, t, k, dtype=dtype), weight=normal(g, n, k, std=0.1, dtype=dtype)),
        )
    yield "fp8", dict(x=normal(g, 3, 64, dtype=dtype), weight=fp8(g, 96, 64), act="mxfp8")
    yield "fp4", dict(x=normal(g, 3, 64, dtype=dtype), weight=fp4(g, 96, 64))
    yield (
        "wide output",
        dict(
            x=normal(g, 3, 64, dtype=dtype),
            weight=normal(g, 48, 64, std=0.1, dtype=dtype),
            out_dtype=acc_dtype(dtype),
        ),
    )


OP = register(
    Op(
        name="linear",
        signature=(
            "linear(x '... k', weight 'n k' | Quantised, *, act=None | 'mxfp8', out_dtype=None) "
            "-> '... n'"
        ),
        rows=("x",),
        cases=_cases,
        tolerance={"float64": (1e-12, 1e-12), "float32": (1e-5, 1e-5), "bfloat16": (2e-2, 2e-2)},
        differentiable=True,
    )
)
OP.implement("reference", kind="reference", batch_invariant=False)(linear)
OP.implement("tiles", batch_invariant=True, late=True)(tiles.linear)
