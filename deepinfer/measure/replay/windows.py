"""How far window keys are from the exact ones, by layer and by distance from the cut."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from deepinfer.config import ModelConfig
from deepinfer.measure.replay.passes import Pass
from deepinfer.slots.protocols import ReplayPlan


def lowest(plan: ReplayPlan, layer: int) -> int:
    """The lowest position whose window key of a layer is kept and seen: distances count from it.
    Rows that end at the layer, below its rows_from, have left their keys there."""
    return max(plan.start, plan.floor[layer])


def edges(window: int, length: int) -> list[int]:
    """Lower ends of the distance bins up to `length`, then `length`: quarters of a window up to one
    window, then halves up to two, then whole ones up to four, then by factors of 2."""
    quarter = max(window // 4, 1)
    out = [0, *(quarter * x for x in (1, 2, 3, 4, 6, 8, 12, 16))]
    while out[-1] < length:
        out.append(2 * out[-1])
    return [x for x in out if x < length] + [length]


def window_errors(
    exact: Pass, other: Pass, plan: ReplayPlan, first: int, length: int, config: ModelConfig
) -> Iterator[dict[str, object]]:
    """One row a layer from `first` on and distance bin: layer, lowest, distance (from, including),
    until, rows, error2 and norm2 (sums of squares of the difference and of the exact keys), rel_l2
    of them.

    The rows are those of prompt and continuation at or above `lowest`; where that is 0 the window
    is whole, and distances are positions.
    """
    for layer in range(first, config.num_layers):
        low = lowest(plan, layer)
        (a, x), (b, y) = exact.keys[layer], other.keys[layer]
        x, y = (z.double().cpu() for z in (x[low - a : length - a], y[low - b : length - b]))
        ends = torch.tensor(edges(config.sliding_window, length - low))
        place = torch.bucketize(torch.arange(length - low), ends, right=True) - 1
        sums = torch.zeros(3, len(ends) - 1, dtype=torch.float64)
        ones = torch.ones(length - low, dtype=torch.float64)
        for i, values in enumerate(((x - y).square().sum(-1), x.square().sum(-1), ones)):
            sums[i].index_add_(0, place, values)
        for i, (error2, norm2, rows) in enumerate(sums.T.tolist()):
            yield dict(
                layer=layer,
                lowest=low,
                distance=int(ends[i]),
                until=int(ends[i + 1]),
                rows=int(rows),
                error2=error2,
                norm2=norm2,
                rel_l2=(error2 / norm2) ** 0.5 if norm2 else 0.0,
            )
