"""The best blocks of index scores."""

from __future__ import annotations

import torch

from ..cases import integers, normal
from ..registry import Op, register
from .reference import candidate_blocks

__all__ = ["OP", "candidate_blocks"]


def _cases(g, dtype):
    for t, n, block, k in ((1, 5, 8, 4), (40, 130, 8, 6), (3, 64, 8, 8), (2, 0, 8, 4)):
        yield (
            f"{t}x{n} k={k}",
            dict(
                scores=torch.relu(normal(g, t, n, dtype=dtype)),
                visible=integers(g, 0, n + 1, t),
                block=block,
                k=k,
            ),
        )


OP = register(
    Op(
        name="candidate_blocks",
        signature=(
            "candidate_blocks(scores 't n', visible 't' int64, block, k) -> blocks "
            "'t min(k, ceil(n/block))' int64, ascending, -1 at the end"
        ),
        rows=("scores", "visible"),
        cases=_cases,
        tolerance={"float64": (0, 0), "float32": (0, 0), "bfloat16": (0, 0)},
        differentiable=False,
    )
)
OP.implement("reference", kind="reference", batch_invariant=True)(candidate_blocks)
