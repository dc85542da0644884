"""One sub-layer's output back into the streams."""

from __future__ import annotations

from .. import gpu
from ..cases import normal
from ..numerics import acc_dtype
from ..registry import Op, register
from . import fused, fused_gpu
from .reference import mhc_expand

__all__ = ["OP", "mhc_expand"]


def _cases(g, dtype):
    for t, m, d in ((1, 4, 128), (50, 4, 64), (3, 2, 32)):
        yield (
            f"{t}x{m}x{d}",
            dict(
                streams=normal(g, t, m, d, dtype=dtype),
                y=normal(g, t, d, dtype=dtype),
                post=normal(g, t, m, dtype=acc_dtype(dtype)),
                comb=normal(g, t, m, m, dtype=acc_dtype(dtype)),
            ),
        )


OP = register(
    Op(
        name="mhc_expand",
        signature="mhc_expand(streams 't m d', y 't d', post 't m', comb 't m m') -> 't m d'",
        rows=("streams", "y", "post", "comb"),
        cases=_cases,
        tolerance={"float64": (1e-12, 1e-12), "float32": (1e-5, 1e-5), "bfloat16": (2e-2, 2e-2)},
        differentiable=True,
    )
)
OP.implement("reference", kind="reference", batch_invariant=True)(mhc_expand)
OP.implement("triton", batch_invariant=True, supports=fused_gpu.supports, available=gpu.available)(
    fused_gpu.mhc_expand
)
OP.implement("fused", batch_invariant=True, supports=fused.supports)(fused.mhc_expand)
