"""95 % intervals over modules, paired: every quantity of a comparison comes from the same modules.

A statistic is a function of totals (nats, bytes, ...), so it is never a mean of ratios: modules are
drawn with replacement, their totals added, and the statistic taken of the sums. Source: the
percentile bootstrap over clusters (Efron and Tibshirani, 1993).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from deepinfer.measure.bootstrap import FEWEST, Estimate, resamples


def over_modules(totals: Tensor, statistic: Callable[[Tensor], Tensor]) -> Estimate:
    """statistic of the summed totals, and its interval over modules.

    totals: [m, k], k quantities of m modules; statistic: [..., k] -> [...]. No interval for fewer
    than 8 modules.
    """
    totals = totals.double()
    value = float(statistic(totals.sum(0)))
    if len(totals) < FEWEST:
        return Estimate(value)
    drawn = statistic(totals[resamples(len(totals))].sum(1))
    drawn = drawn[drawn.isfinite()]
    if not len(drawn):
        return Estimate(value)
    low, high = torch.quantile(drawn, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Estimate(value, low, high)


def aligned(*each: Mapping[str, Sequence[float]]) -> Tensor:
    """[m, k] of several {module: quantities} side by side. ValueError where modules differ."""
    names = sorted(each[0])
    for other in each[1:]:
        if sorted(other) != names:
            apart = sorted(set(other) ^ set(names))
            raise ValueError(f"not the same modules on both sides: {', '.join(apart)}")
    rows = [[float(x) for one in each for x in one[name]] for name in names]
    return torch.tensor(rows, dtype=torch.float64)


def bits_per_byte(totals: Tensor) -> Tensor:
    """[..., (nats, bytes)] -> [...]"""
    return totals[..., 0] / math.log(2) / totals[..., 1]


def change(totals: Tensor) -> Tensor:
    """[..., (nats of a, bytes, nats of b, bytes)] -> how much more bits b needs than a, in %."""
    return 100 * (totals[..., 2] / totals[..., 0] - 1)


def ratio(totals: Tensor) -> Tensor:
    """[..., (x, n)] -> the mean x / n."""
    return totals[..., 0] / totals[..., 1]


def verdict(e: Estimate) -> str:
    """What an interval of a change says: 'worse', 'better', or that it is a null."""
    if e.low is None or e.high is None:
        return "too few modules"
    return "worse" if e.low > 0 else "better" if e.high < 0 else "null: 0 is inside"
