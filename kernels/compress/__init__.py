"""Gated pooling of the tokens of a compression group."""

from __future__ import annotations

from ..cases import normal
from ..numerics import acc_dtype
from ..registry import Op, register
from .reference import compress

__all__ = ["OP", "compress"]


def _cases(g, dtype):
    for t, r, d in ((1, 2, 64), (20, 2, 64), (3, 4, 32), (5, 1, 16)):
        yield (
            f"{t}x{r}x{d}",
            dict(
                values=normal(g, t, r, d, dtype=acc_dtype(dtype)),
                gates=normal(g, t, r, d, dtype=acc_dtype(dtype)),
                weight=normal(g, d),
                eps=1e-20,
                out_dtype=dtype,
            ),
        )


OP = register(
    Op(
        name="compress",
        signature="compress(values 't r d', gates 't r d', weight 'd', eps, out_dtype) -> 't d'",
        rows=("values", "gates"),
        cases=_cases,
        tolerance={"float64": (1e-12, 1e-12), "float32": (1e-5, 1e-5), "bfloat16": (2e-2, 2e-2)},
        differentiable=True,
    )
)
OP.implement("reference", kind="reference", batch_invariant=True)(compress)
