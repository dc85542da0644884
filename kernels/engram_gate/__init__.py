"""The gated update of the streams from the n-gram memory."""

from __future__ import annotations

from .. import gpu
from ..cases import normal
from ..registry import Op, register
from . import fused_gpu, tiles
from .reference import engram_gate

__all__ = ["OP", "engram_gate"]


def _cases(g, dtype):
    for t, m, d in ((1, 4, 64), (30, 4, 128), (3, 2, 32)):
        yield (
            f"{t}x{m}x{d}",
            dict(
                streams=normal(g, t, m, d, dtype=dtype),
                key=normal(g, t, m, d, dtype=dtype),
                value=normal(g, t, d, dtype=dtype),
                q_weight=normal(g, m, d),
                k_weight=normal(g, m, d),
                eps=1e-20,
                dead=normal(g, t) > 1 if t > 1 else None,
            ),
        )


OP = register(
    Op(
        name="engram_gate",
        signature=(
            "engram_gate(streams 't m d', key 't m d', value 't d', q_weight 'm d', k_weight "
            "'m d', eps, dead 't' bool | None) -> 't m d'"
        ),
        rows=("streams", "key", "value", "dead"),
        cases=_cases,
        tolerance={"float64": (1e-12, 1e-12), "float32": (1e-5, 1e-5), "bfloat16": (2e-2, 2e-2)},
        differentiable=True,
    )
)
OP.implement("reference", kind="reference", batch_invariant=False)(engram_gate)
OP.implement("triton", batch_invariant=True, supports=fused_gpu.supports, available=gpu.available)(
    fused_gpu.engram_gate
)
OP.implement("tiles", batch_invariant=True, late=True)(tiles.engram_gate)
