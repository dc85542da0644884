"""The k best entries of each row."""

from __future__ import annotations

import torch

from ..cases import normal
from ..registry import Op, register
from . import packed_key, partition
from .reference import topk

__all__ = ["OP", "topk"]


def _cases(g, dtype):
    for t, n, k in (
        (1, 5, 8),
        (9, 200, 64),
        (3, 64, 64),
        (4, 40, 1),
        (2, 0, 3),
        (130, 130, 16),
        (3, 1500, 64),
    ):
        scores = torch.relu(normal(g, t, n, dtype=dtype))  # many ties at zero
        scores[normal(g, t, n) > 1] = -torch.inf
        yield f"{t}x{n} k={k}", dict(scores=scores, k=k)


OP = register(
    Op(
        name="topk",
        signature="topk(scores 't n', k) -> ids 't min(k, n)' int64, ascending, -1 at the end",
        rows=("scores",),
        cases=_cases,
        tolerance={"float64": (0, 0), "float32": (0, 0), "bfloat16": (0, 0)},
        differentiable=False,
    )
)
OP.implement("reference", kind="reference", batch_invariant=True)(topk)
OP.implement("partition", batch_invariant=True, supports=partition.supports)(partition.topk)
OP.implement("packed_key", batch_invariant=True, supports=packed_key.supports)(packed_key.topk)
