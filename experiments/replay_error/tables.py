"""Tables of a report, small enough to be kept, and differences of policies on the same tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from deepinfer.measure.bootstrap import over_groups
from deepinfer.measure.replay.report import ReplayReport
from deepinfer.tables.table import Table

KEPT = ("text", "group", "policy", "kl")


def stored(r: ReplayReport, prefix: str = "") -> dict[str, Table]:
    """What is kept of a report: its summary with intervals, window errors, costs, and the mean KL
    of every passage, from which differences are paired."""
    out = {"summary": r.summary(), "passages": brief(r)}
    if len(r.windows):
        out |= {"layers": r.by_layer(), "distance": r.by_distance()}
    if len(r.plans):
        out["plans"] = r.plans
    return {prefix + name: table for name, table in out.items()}


def brief(r: ReplayReport) -> Table:
    """A row a passage and policy. All passages of a report have as many tokens, so that a mean of
    their means is that of the tokens."""
    rows = [{k: row[k] for k in KEPT} for row in r.passages]
    return Table(rows, title="KL(exact || policy) of each passage, mean of its tokens, nats")


def texts_of(r: ReplayReport) -> Table:
    """Which passages a part has measured: number, group and a hash of the ids."""
    seen = {row["text"]: {k: row[k] for k in ("text", "group", "ids")} for row in r.passages}
    return Table(list(seen.values()), title="passages: the group of each, and a hash of its ids")


def pairs(rows: Iterable[Mapping[str, Any]], which: Iterable[tuple[str, str]]) -> Table:
    """KL of the second policy less that of the first on the same tokens, nats, with its interval by
    paired bootstrap over modules; and the ratio of the two means.

    rows: of `brief`, also of several reports on the same texts. KeyError for a policy that is in
    none, ValueError where the two have other texts.
    """
    by: dict[str, dict[int, tuple[str, float]]] = {}
    for row in rows:
        by.setdefault(str(row["policy"]), {})[row["text"]] = (str(row["group"]), row["kl"])
    return Table(
        [_pair(a, b, by[a], by[b]) for a, b in which],
        title="KL of the second policy less the first's, and over it; same tokens, "
        "95 % over modules",
    )


def _pair(
    a: str, b: str, first: dict[int, tuple[str, float]], second: dict[int, tuple[str, float]]
) -> dict[str, object]:
    each: dict[str, list[float]] = {}
    if {t: g for t, (g, _) in first.items()} != {t: g for t, (g, _) in second.items()}:
        raise ValueError(f"{a!r} and {b!r} were measured on other texts: nothing to pair")
    for text, (group, kl) in first.items():
        sums = each.setdefault(group, [0.0, 0.0, 0.0])
        for i, x in enumerate((kl, second[text][1], 1.0)):
            sums[i] += x
    groups = [each[g] for g in sorted(each)]
    difference = over_groups(groups, lambda x: (x[..., 1] - x[..., 0]) / x[..., 2])
    ratio = over_groups(groups, lambda x: x[..., 1] / x[..., 0])
    return (
        dict(first=a, second=b, difference=difference.value, difference_low=difference.low)
        | dict(difference_high=difference.high, ratio=ratio.value, ratio_low=ratio.low)
        | dict(ratio_high=ratio.high)
    )
