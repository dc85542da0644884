"""Expert selection."""

from __future__ import annotations

from ..cases import normal
from ..registry import Op, register
from . import lean, tiles
from .reference import route

__all__ = ["OP", "route"]


def _cases(g, dtype):
    for t, d, e, k in ((1, 64, 16, 4), (40, 128, 16, 4), (7, 32, 8, 2)):
        yield (
            f"{t}x{d} {k} of {e}",
            dict(
                x=normal(g, t, d, dtype=dtype),
                weight=normal(g, e, d, std=0.1, dtype=dtype),
                bias=normal(g, e, std=0.1),
                bias_image=normal(g, e, std=0.1),
                image=normal(g, t) > 0 if t > 1 else None,
                top_k=k,
                scale=1.5,
            ),
        )


OP = register(
    Op(
        name="route",
        signature=(
            "route(x 't d', weight 'e d', bias 'e', bias_image 'e', image 't' bool | None, "
            "top_k, scale) -> ids 't k' int64, weights 't k'"
        ),
        rows=("x", "image"),
        cases=_cases,
        tolerance={"float64": (1e-12, 1e-12), "float32": (1e-5, 1e-5), "bfloat16": (2e-2, 2e-2)},
        differentiable=True,
    )
)
OP.implement("reference", kind="reference", batch_invariant=False)(route)
OP.implement("lean", batch_invariant=False, supports=lean.supports)(lean.route)
OP.implement("tiles", batch_invariant=True, late=True)(tiles.route)
