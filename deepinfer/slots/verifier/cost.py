"""CostCurve: what a step of so many rows costs, as a fixed table."""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass


@dataclass(frozen=True)
class CostCurve:
    """A staircase: a step of `rows` costs what the smallest tabled size >= rows costs.

    Captured graphs come in sizes, so real curves are staircases: one more row is often free, and
    sometimes costs a whole step up. rows: ascending sizes; cost: positive, in any unit, one per
    size. Past the last size the cost grows in proportion to rows. The default is a made-up table
    (a fixed part worth 64 rows, sizes as DeepInfer captures them: powers of two, then multiples of
    8): no decision may depend on a clock unless the user asks, so measured curves are passed in.
    """

    rows: tuple[int, ...] = (1, 2, 4, *range(8, 513, 8))
    cost: tuple[float, ...] = tuple(1.0 + r / 64 for r in (1, 2, 4, *range(8, 513, 8)))

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", tuple(self.rows))
        object.__setattr__(self, "cost", tuple(float(c) for c in self.cost))
        if not self.rows or len(self.rows) != len(self.cost):
            raise ValueError(
                f"CostCurve: {len(self.rows)} sizes and {len(self.cost)} costs; "
                "give one cost per size"
            )
        if self.rows[0] < 1 or any(a >= b for a, b in zip(self.rows, self.rows[1:])):
            raise ValueError(f"CostCurve: rows must be ascending and >= 1, got {self.rows}")
        if not all(math.isfinite(c) and c > 0 for c in self.cost):
            raise ValueError(f"CostCurve: costs must be finite and > 0, got {self.cost}")

    def at(self, rows: int) -> float:
        """Cost of a step of `rows` rows; 0 rows cost nothing."""
        if rows <= 0:
            return 0.0
        i = bisect.bisect_left(self.rows, rows)
        if i < len(self.rows):
            return self.cost[i]
        return self.cost[-1] * rows / self.rows[-1]
