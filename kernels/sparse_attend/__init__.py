"""Attention over window keys and selected compressed entries."""

from __future__ import annotations

from ..cases import integers, normal
from ..records import Layout, Records
from ..registry import Op, register
from . import aligned, blocks
from .reference import sparse_attend

__all__ = ["OP", "sparse_attend"]


def _cases(g, dtype):
    for t, h, d, w, k in ((1, 8, 64, 128, 64), (6, 4, 32, 16, 0), (70, 8, 64, 32, 16)):
        own = normal(g, t, d, dtype=dtype)
        window = Records(normal(g, 50, d, dtype=dtype), own, Layout(format="float", dim=d))
        entries = Records(normal(g, 30, d, dtype=dtype), None, Layout(format="float", dim=d))
        ids = integers(g, -1, 50 + t, t, w)
        ids[-1] = -1  # a row whose window is empty
        yield (
            f"{t}x{h}x{d} {w}+{k}",
            dict(
                q=normal(g, t, h, d, dtype=dtype),
                window=window,
                window_ids=ids,
                entries=entries if k else None,
                entry_ids=integers(g, -1, 30, t, k) if k else None,
                sink=normal(g, h),
                scale=d**-0.5,
            ),
        )


OP = register(
    Op(
        name="sparse_attend",
        signature=(
            "sparse_attend(q 't h d', window: Records, window_ids 't w', entries: Records | "
            "None, entry_ids 't k' | None, sink 'h', scale) -> 't h d'"
        ),
        rows=("q", "window_ids", "entry_ids"),
        cases=_cases,
        tolerance={"float64": (1e-12, 1e-12), "float32": (1e-5, 1e-5), "bfloat16": (2e-2, 2e-2)},
        differentiable=True,
    )
)
OP.implement("reference", kind="reference", batch_invariant=False)(sparse_attend)
OP.implement("blocks", batch_invariant=False, supports=blocks.supports)(blocks.sparse_attend)
OP.implement("aligned", batch_invariant=True, late=True)(aligned.sparse_attend)
