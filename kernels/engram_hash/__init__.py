"""Rows of the n-gram table."""

from __future__ import annotations

from ..cases import integers
from ..registry import Op, register
from .reference import engram_hash

__all__ = ["OP", "engram_hash"]


def _cases(g, dtype):
    for t, n, h in ((1, 4, 8), (40, 4, 2), (3, 2, 1)):
        primes = 2 * integers(g, 500, 1000, n - 1, h) + 1
        yield (
            f"{t}x{n}x{h}",
            dict(
                compressed=integers(g, 0, 99092, t, n),
                multipliers=2 * integers(g, 0, 2**45, n) + 1,
                primes=primes,
                offsets=primes.flatten().cumsum(0) - primes.flatten(),
            ),
        )


OP = register(
    Op(
        name="engram_hash",
        signature=(
            "engram_hash(compressed 't n' int64, multipliers 'n', primes 'n-1 h', offsets "
            "'(n-1)*h') -> rows 't (n-1)*h' int64"
        ),
        rows=("compressed",),
        cases=_cases,
        tolerance={"float64": (0, 0), "float32": (0, 0), "bfloat16": (0, 0)},
        differentiable=False,
    )
)
OP.implement("reference", kind="reference", batch_invariant=True)(engram_hash)
