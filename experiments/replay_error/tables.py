"""Tables of a report, small enough to be kept, and differences of two policies on the same tokens."""

from __future__ import annotations

from collections.abc import Iterable

from deepinfer.measure.bootstrap import over_groups
from deepinfer.measure.replay.report import ReplayReport
from deepinfer.measure.table import Table

KEPT = (
    "text", "group", "policy", "kl", "kl_p99", "kl_max", "agreement", "nats_p", "nats_q", "length_exact",
    "length",
)  # fmt: skip


def stored(r: ReplayReport, prefix: str = "") -> dict[str, Table]:
    """What is kept of a report: its summary with intervals, passages, window errors, costs."""
    columns = [c for c in KEPT if c in r.passages.columns]
    rows = [{k: row[k] for k in columns} for row in r.passages]
    out = {"summary": r.summary(), "passages": Table(rows, columns, title=r.passages.title)}
    if len(r.windows):
        out |= {"layers": r.by_layer(), "distance": r.by_distance()}
    if len(r.plans):
        out["plans"] = r.plans
    return {prefix + name: table for name, table in out.items()}


def pairs(r: ReplayReport, which: Iterable[tuple[str, str]]) -> Table:
    """KL of the second policy less that of the first on the same tokens, nats, with its interval by paired
    bootstrap over modules; and the ratio of the two means."""
    lines = []
    for a, b in which:
        each: dict[str, list[float]] = {}
        for row in r.passages:
            if row["policy"] in (a, b):
                sums = each.setdefault(str(row["group"]), [0.0, 0.0, 0.0])
                sums[row["policy"] == b] += row["kl"] * row["rows"]
                sums[2] += row["rows"] if row["policy"] == a else 0
        sums = [each[g] for g in sorted(each)]
        difference = over_groups(sums, lambda x: (x[..., 1] - x[..., 0]) / x[..., 2])
        ratio = over_groups(sums, lambda x: x[..., 1] / x[..., 0])
        lines.append(
            dict(first=a, second=b, difference=difference.value, difference_low=difference.low)
            | dict(difference_high=difference.high, ratio=ratio.value, ratio_low=ratio.low)
            | dict(ratio_high=ratio.high)
        )
    title = "KL of the second policy less the first's, and over it; same tokens, 95 % over modules"
    return Table(lines, title=title)


def first(r: ReplayReport, texts: int) -> ReplayReport:
    """The report of the first texts of one without window keys and plans."""
    passages, tokens = ([x for x in t if x["text"] < texts] for t in (r.passages, r.tokens))
    counts = dict(texts=texts, groups=len({x["group"] for x in passages}))
    return ReplayReport.of(passages, tokens, [], [], r.facts | counts)
