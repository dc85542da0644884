"""Intervals over prompts: the percentile bootstrap, with the prompt as the unit that is resampled.

Rows of one prompt depend on one another, prompts do not; so the interval of a mean over rows comes
from drawing prompts, not rows. The draws come from the counter-based generator: the same interval
on every machine, and the same draws for every metric and engine, which pairs them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer import rng

SEED = 0
RESAMPLES = 2000
FEWEST = (
    8  # prompts: C(15, 8) = 6435 distinct resamples; of fewer a 2.5 % tail is a handful of them
)


@dataclass(frozen=True)
class Estimate:
    """A mean over rows; low, high: its 95 % interval over prompts (None: fewer than 8 have any)."""

    value: float | None
    low: float | None = None
    high: float | None = None


def ratio(prompts: Sequence[tuple[Tensor, Tensor]]) -> Estimate:
    """The mean over all rows that count. prompts: (values [t], counts [t] bool) of each prompt."""
    has = [(v[m].double(), int(m.sum())) for v, m in prompts if m.any()]
    if not has:
        return Estimate(None)
    sums = torch.stack([v.sum() for v, _ in has])
    rows = torch.tensor([n for _, n in has], dtype=torch.float64)
    value = float(sums.sum() / rows.sum())
    if len(has) < FEWEST:
        return Estimate(value)
    at = resamples(len(has))
    means = sums[at].sum(-1) / rows[at].sum(-1)
    low, high = torch.quantile(means, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Estimate(value, low, high)


@functools.lru_cache(maxsize=8)
def resamples(n: int) -> Tensor:
    """[2000, n] long: which of n prompts are drawn, with replacement."""
    seeds = torch.full((RESAMPLES,), SEED, dtype=torch.long)
    drawn = rng.words(seeds, torch.arange(RESAMPLES), rng.Purpose.DRAW, n)
    return (drawn * n) >> 32


def quantile(prompts: Sequence[Tensor], q: float) -> Estimate:
    """The q-quantile of all rows: the lowest value with at least q of them at or below it (q = 0.5
    is the lower median). prompts: values [t] of each prompt."""
    has = [v.double() for v in prompts if len(v)]
    if not has:
        return Estimate(None)
    owner = torch.repeat_interleave(torch.arange(len(has)), torch.tensor([len(v) for v in has]))
    values, order = torch.cat(has).sort(stable=True)
    owner, last = owner[order], len(values) - 1
    value = float(values[min(max(math.ceil(q * len(values) - 1e-9) - 1, 0), last)])
    if len(has) < FEWEST:
        return Estimate(value)
    found = []
    for at in resamples(len(has)).split(250):  # [250, rows] at a time
        times = torch.zeros(len(at), len(has), dtype=torch.float64)
        times.scatter_add_(1, at, torch.ones_like(at, dtype=torch.float64))
        below = times[:, owner].cumsum(-1)
        want = (q * below[:, -1:] - 1e-9).clamp(min=0.5)
        found.append(values[torch.searchsorted(below, want)[:, 0].clamp(max=last)])
    ends = torch.tensor([0.025, 0.975], dtype=torch.float64)
    low, high = torch.quantile(torch.cat(found), ends).tolist()
    return Estimate(value, low, high)


def over_groups(
    totals: Sequence[Sequence[float]], statistic: Callable[[Tensor], Tensor]
) -> Estimate:
    """statistic of the summed totals, with its interval over groups: never a mean of ratios.

    totals: k quantities of each group; statistic: [..., k] -> [...].
    """
    if not totals:
        return Estimate(None)
    sums = torch.tensor(totals, dtype=torch.float64)
    value = float(statistic(sums.sum(0)))
    if len(sums) < FEWEST:
        return Estimate(value)
    drawn = statistic(sums[resamples(len(sums))].sum(1))
    low, high = torch.quantile(drawn, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Estimate(value, low, high)
