"""The routed experts of each row."""

from __future__ import annotations

from ..cases import fp4, normal
from ..numerics import acc_dtype
from ..registry import Op, register
from . import gathered, segments, tiles
from .reference import experts

__all__ = ["OP", "experts"]


def _ids(g, t, e, k):
    """Distinct experts per row, some slots empty."""
    ids = normal(g, t, e).argsort(1)[:, :k].clone()
    ids[normal(g, t, k) > 1] = -1
    return ids


def _cases(g, dtype):
    for t, d, i, e, k in ((1, 64, 32, 16, 4), (50, 64, 32, 16, 4), (6, 32, 64, 8, 2)):
        shape = dict(x=normal(g, t, d, dtype=dtype), ids=_ids(g, t, e, k), limit=1.5)
        shape["weights"] = normal(g, t, k, dtype=acc_dtype(dtype)).abs()
        yield (
            f"{t}x{d}x{i} {k} of {e}",
            dict(
                **shape,
                w1=normal(g, e, i, d, std=0.2, dtype=dtype),
                w3=normal(g, e, i, d, std=0.2, dtype=dtype),
                w2=normal(g, e, d, i, std=0.2, dtype=dtype),
            ),
        )
        yield (
            f"{t}x{d}x{i} {k} of {e} fp4",
            dict(**shape, w1=fp4(g, e, i, d), w3=fp4(g, e, i, d), w2=fp4(g, e, d, i), act="mxfp8"),
        )


OP = register(
    Op(
        name="experts",
        signature=(
            "experts(x 't d', ids 't k' int64, weights 't k', w1 'e i d', w3 'e i d', w2 "
            "'e d i', limit, *, act=None | 'mxfp8') -> 't d'"
        ),
        rows=("x", "ids", "weights"),
        cases=_cases,
        tolerance={"float64": (1e-12, 1e-12), "float32": (1e-5, 1e-5), "bfloat16": (2e-2, 2e-2)},
        differentiable=True,
    )
)
OP.implement("reference", kind="reference", batch_invariant=False)(experts)
OP.implement("segments", batch_invariant=False, supports=segments.supports)(segments.experts)
OP.implement("gathered", batch_invariant=False, supports=gathered.supports)(gathered.experts)
OP.implement("tiles", batch_invariant=True, late=True)(tiles.experts)
