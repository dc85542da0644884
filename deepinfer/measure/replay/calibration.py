"""Calibration: the keeps that `Bounded.fit` tried, the one it took, and how that did elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepinfer.measure.bootstrap import Estimate, quantile, ratio
from deepinfer.measure.replay.report import ReplayReport
from deepinfer.tables.table import Table


@dataclass(frozen=True, eq=False, repr=False)
class Calibration:
    """What `Bounded.fit` found.

    policy, keep: what was fitted. tolerance, in nats, quantile, metric: what was asked. candidates:
    one row a keep, of the calibration groups: `error`, the quantile of the metric over tokens, its
    95 % interval (`low`, `high`), `meets`: high <= tolerance, and the share of exact's rows x
    layers and FLOPs. held: share of the tokens of the other groups whose error is <= tolerance,
    with its 95 % interval over groups. report, check: the measurements behind both, of all
    candidates and of the one that was taken.
    """

    policy: str
    keep: int
    tolerance: float
    quantile: float
    metric: str
    candidates: Table
    held: Estimate
    report: ReplayReport
    check: ReplayReport

    @property
    def holds(self) -> bool:
        """Whether the share that held is at least the one that was asked."""
        return self.held.value is not None and self.held.value >= self.quantile

    @property
    def groups(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """(calibration groups, the other groups), sorted; no group is in both."""
        return _groups(self.report), _groups(self.check)

    def by_group(self) -> Table:
        """One row a group of the check: its tokens, and how many of them held."""
        found = [
            dict(group=name, tokens=len(x), held=int((x <= self.tolerance).sum()))
            for name, x in errors(self.check, self.check.policies[0], self.metric).items()
        ]
        asked = f"{self.metric} <= {self.tolerance:g}"
        title = f"{self.policy}: tokens with {asked} in the groups that checked it"
        return Table(found, title=title, provenance=self.check.facts)

    def __repr__(self) -> str:
        from deepinfer.display.calibration import calibration_text

        return calibration_text(self)

    def _repr_html_(self) -> str:
        from deepinfer.display.calibration import calibration_html

        return calibration_html(self)


def errors(report: ReplayReport, policy: str, metric: str) -> dict[str, Tensor]:
    """Group -> [t] the metric of its tokens, groups in the order of their names."""
    found: dict[str, list[float]] = {}
    rows: list[dict[str, Any]] = report.tokens.where(policy=policy).rows  # type: ignore[assignment]
    for row in rows:
        found.setdefault(row["group"], []).append(row[metric])
    return {name: torch.tensor(found[name], dtype=torch.float64) for name in sorted(found)}


def _groups(report: ReplayReport) -> tuple[str, ...]:
    return tuple(sorted({str(row["group"]) for row in report.passages}))


def tried(report: ReplayReport, keeps: dict[str, int], metric: str, q: float, most: float) -> Table:
    """Calibration.candidates. keeps: policy name -> keep; q: the quantile; most: the tolerance."""
    plans: dict[Any, dict[str, Any]] = {row["policy"]: row for row in report.plans}
    rows = []
    for name, keep in keeps.items():
        e = quantile(list(errors(report, name, metric).values()), q)
        shares = {k: plans[name][k] for k in ("rows_share", "flops_share")}
        meets = e.high is not None and e.high <= most
        rows.append(dict(keep=keep, error=e.value, low=e.low, high=e.high, meets=meets) | shares)
    facts = report.facts | dict(metric=metric, quantile=q, tolerance=most)
    title = f"{q:g} quantile of {metric} over tokens by keep, on {report.facts['groups']} groups"
    return Table(rows, title=title, provenance=facts)


def share_within(report: ReplayReport, policy: str, metric: str, most: float) -> Estimate:
    """ScheduledRequest of all tokens whose metric is <= most, with its interval over groups."""
    groups = errors(report, policy, metric).values()
    return ratio([(x <= most, torch.ones_like(x, dtype=torch.bool)) for x in groups])
