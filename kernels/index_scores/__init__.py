"""Scores of the sparse-attention indexer."""

from __future__ import annotations

from ..cases import integers, normal
from ..registry import Op, register
from . import batched, tiles
from .reference import index_scores

__all__ = ["OP", "index_scores"]


def _cases(g, dtype):
    for t, h, d, b, n in ((1, 4, 32, 1, 40), (12, 16, 32, 3, 65), (5, 4, 32, 2, 0)):
        seq = integers(g, -1, b, t)
        yield (
            f"{t}x{h}x{d} {b}x{n}",
            dict(
                query=normal(g, t, h, d, dtype=dtype),
                weights=normal(g, t, h, dtype=dtype, std=0.1),
                keys=normal(g, b, n, d, dtype=dtype),
                seq=seq,
            ),
        )


OP = register(
    Op(
        name="index_scores",
        signature=(
            "index_scores(query 't h d', weights 't h', keys 'b n d', seq 't' int64, "
            "segments=None) -> 't n'"
        ),
        rows=("query", "weights", "seq"),
        cases=_cases,
        tolerance={"float64": (1e-12, 1e-12), "float32": (1e-5, 1e-5), "bfloat16": (2e-2, 2e-2)},
        differentiable=True,
    )
)
OP.implement("reference", kind="reference", batch_invariant=False)(index_scores)
OP.implement("batched", batch_invariant=False, supports=batched.supports)(batched.index_scores)
OP.implement("tiles", batch_invariant=True, late=True)(tiles.index_scores)
