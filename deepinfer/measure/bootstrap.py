"""Intervals over prompts: the percentile bootstrap, with the prompt as the unit that is resampled.

Rows of one prompt depend on one another, prompts do not; so the interval of a mean over rows comes
from drawing prompts, not rows. The draws come from the counter-based generator: the same interval
on every machine, and the same draws for every metric and engine, which pairs them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
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
