"""Whether confidences mean what they say: expected calibration error, and how to mend it.

    ECE = sum over bins b of n_b / n |mean confidence in b - mean outcome in b|
bins of equal width on [0, 1] (Naeini, Cooper and Hauskrecht, AAAI 2015). An outcome is a draft that
was accepted (0 or 1), or the probability of that (1 - TV), whose mean is known without drawing.

Sequential temperature scaling: c_k becomes sigmoid(logit(c_k) / T_k). From the first position to
the last, T_k is the one of a grid for which the product of the scaled c_1..c_k is best calibrated
against the survival of drafts 1..k. Source: DSpark technical report.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from experiments.nano.report.acceptance import Acceptance
from experiments.nano.report.drafts import Written, outcomes, repeat_cut
from experiments.nano.report.findings import Finding
from experiments.nano.report.study import Study

GRID = tuple(2 ** (i / 16) for i in range(-48, 49))  # 1/8 to 8, 1 among them
DRAWS = 64


@dataclass(frozen=True)
class Observed:
    """Confidences [s, n] of blocks, and survival [s, n] of drafts 1..k: outcomes 0 and 1, or
    products of probabilities. accept [s, n]: of draft k given those before it, NaN where one of
    those fell."""

    confidence: Tensor
    survival: Tensor
    accept: Tensor

    @staticmethod
    def of_laws(found: Sequence[Acceptance]) -> Observed:
        """From probabilities: every position of every block counts."""
        accept = torch.cat([x.accept for x in found])
        return Observed(torch.cat([x.confidence for x in found]), accept.cumprod(-1), accept)

    @staticmethod
    def of_steps(written: Sequence[Written], cut: bool = False) -> Observed:
        """From what was accepted; cut: steps that begin before their text repeats itself."""
        if cut:
            written = [_before(w, repeat_cut(w.tokens)) for w in written]
        confidence, kept = outcomes(written)
        reached = torch.cat([torch.ones_like(kept[:, :1]), kept[:, :-1]], 1)
        accept = kept.double().masked_fill(~reached, torch.nan)
        return Observed(confidence, kept.double(), accept)


def _before(w: Written, stop: int) -> Written:
    return Written(w.module, w.tokens[:stop], tuple(s for s in w.steps if s.start < stop))


def ece(confidence: Tensor, outcome: Tensor, bins: int) -> float:
    """Expected calibration error of confidences [s] against outcomes [s] in [0, 1]; pairs whose
    outcome is NaN do not count. NaN where none does."""
    known = ~outcome.isnan()
    confidence, outcome = confidence[known].double(), outcome[known].double()
    if not len(outcome):
        return math.nan
    place = (confidence * bins).long().clamp(0, bins - 1)
    gap = torch.zeros(bins, dtype=torch.float64).index_add_(0, place, confidence - outcome)
    return float(gap.abs().sum() / len(outcome))


def ece_by_chance(confidence: Tensor, outcome: Tensor, bins: int) -> float:
    """What ECE would be if the confidences were true: the median over outcomes drawn from them, as
    many as there are of outcome. Few outcomes look uncalibrated by luck. 0 for probabilities."""
    known = ~outcome.isnan()
    c = confidence[known].double()
    if bool(((outcome[known] > 0) & (outcome[known] < 1)).any()) or not len(c):
        return 0.0
    random = torch.Generator().manual_seed(0)
    drawn = [(torch.rand(len(c), generator=random).double() < c).double() for _ in range(DRAWS)]
    return float(torch.tensor([ece(c, x, bins) for x in drawn]).median())


def scaled(confidence: Tensor, temperatures: Sequence[float]) -> Tensor:
    """sigmoid(logit(c) / T) by position. confidence: [s, n]."""
    c = confidence.double().clamp(1e-12, 1 - 1e-12)
    return (c.logit() / torch.tensor(temperatures, dtype=torch.float64)).sigmoid()


def sequential_temperatures(seen: Observed, bins: int, grid: Sequence[float] = GRID) -> list[float]:
    """One temperature a position, fitted left to right. Ties go to the temperature nearest 1."""
    chosen: list[float] = []
    order = sorted(grid, key=lambda t: abs(math.log(t)))
    product = torch.ones(len(seen.confidence), dtype=torch.float64)
    for k in range(seen.confidence.shape[1]):
        column, survival = seen.confidence[:, k : k + 1], seen.survival[:, k]
        tries = [product * scaled(column, [t])[:, 0] for t in order]
        best = min(range(len(order)), key=lambda i: ece(tries[i], survival, bins))
        chosen.append(order[best])
        product = tries[best]
    return chosen


def errors(seen: Observed, bins: int, temperatures: Sequence[float] | None = None) -> list[dict]:
    """By position: ECE of c_k against draft k given those before it, and of the product c_1..c_k
    against the survival of drafts 1..k."""
    n = seen.confidence.shape[1]
    c = scaled(seen.confidence, temperatures or [1.0] * n)
    product = c.cumprod(-1)
    return [
        dict(
            draft=k + 1,
            observed=int((~seen.accept[:, k].isnan()).sum()),
            confidence=float(c[~seen.accept[:, k].isnan(), k].mean()),
            accept=float(seen.accept[:, k].nanmean()),
            ece=ece(c[:, k], seen.accept[:, k], bins),
            by_chance=ece_by_chance(c[:, k], seen.accept[:, k], bins),
            ece_product=ece(product[:, k], seen.survival[:, k], bins),
        )
        for k in range(n)
    ]


def findings(
    study: Study, heldout: dict[str, Observed], dev: dict[str, Observed]
) -> Iterator[Finding]:
    """heldout, dev: what was observed on each text, under the same names of outcomes."""
    bins, rows = study.sizes.bins, []
    for name, seen in heldout.items():
        temperatures = sequential_temperatures(dev[name], bins)
        after = errors(seen, bins, temperatures)
        for t, before, fitted in zip(temperatures, errors(seen, bins), after):
            rows.append(
                dict(outcome=name)
                | before
                | dict(temperature=t, ece_after=fitted["ece"], product_after=fitted["ece_product"])
            )
    says = (
        f"Expected calibration error of the drafter's confidence by position, {bins} bins of equal "
        "width, held-out text. ece: of c_k against draft k where all before it were accepted; "
        "by_chance: what true confidences would show with as few 0/1 outcomes. ece_product: of "
        "c_1...c_k against the survival of drafts 1..k. temperature: fitted on dev text, left to "
        "right; *_after: with it."
    )
    yield Finding("calibration", says, study.table(rows, "calibration of confidence"))
