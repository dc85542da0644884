"""Several reports as one: texts that were measured apart, or policies that were."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from deepinfer.measure.replay.report import ReplayReport

PARTS = ("texts", "groups", "ids", "policies")  # facts that may differ; hit, prompt, ... may not


def joined(reports: Sequence[ReplayReport]) -> ReplayReport:
    """See ReplayReport.joined."""
    if not reports:
        raise ValueError("joined: no reports: give at least one")
    for other in reports[1:]:
        for name in sorted(set(reports[0].facts) | set(other.facts)):
            mine, its = (r.facts.get(name) for r in (reports[0], other))
            if name not in PARTS and mine != its:
                raise ValueError(f"joined: reports differ in {name}: {mine!r} and {its!r}")
    if len({r.facts["ids"] for r in reports}) == 1 and len(reports) > 1:
        return _policies(reports)
    return _texts(reports)


def _policies(reports: Sequence[ReplayReport]) -> ReplayReport:
    """Other policies on the same texts. The reference ran in each of them and is kept once."""
    names = [name for r in reports for name in r.policies]
    if len(set(names)) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"joined: {', '.join(twice)} were measured twice on the same texts")
    policies = {n: said for r in reports for n, said in r.facts["policies"].items()}
    plans = reports[0].plans.rows
    plans += [row for r in reports[1:] for row in r.plans if row["policy"] != "exact"]
    return _report(reports, [0] * len(reports), plans, dict(policies=policies))


def _texts(reports: Sequence[ReplayReport]) -> ReplayReport:
    """The same policies on other texts."""
    first, seen, offsets = reports[0], set(), []
    for r in reports:
        if r.facts["policies"] != first.facts["policies"]:
            raise ValueError("joined: reports have neither the same texts nor the same policies")
        if r.facts["ids"] in seen:
            raise ValueError(f"joined: the same texts twice (ids {r.facts['ids']})")
        offsets.append(sum(x.facts["texts"] for x in reports[: len(seen)]))
        seen.add(r.facts["ids"])
    plans: list[dict[str, Any]] = []
    each: list[list[dict[str, Any]]] = [[dict(row) for row in r.plans] for r in reports]
    for rows in zip(*each, strict=True):
        plans.append(rows[0] | {k: sum(row[k] for row in rows) for k in ("ran", "alone")})
    groups = {row["group"] for r in reports for row in r.passages}
    digest = hashlib.sha256("".join(r.facts["ids"] for r in reports).encode()).hexdigest()[:16]
    counts = dict(texts=sum(r.facts["texts"] for r in reports), groups=len(groups), ids=digest)
    return _report(reports, offsets, plans, counts if len(reports) > 1 else {})


def _report(
    reports: Sequence[ReplayReport],
    offsets: list[int],
    plans: list[dict[str, Any]],
    facts: dict[str, Any],
) -> ReplayReport:
    def rows(name: str) -> list[dict[str, Any]]:
        return [
            row | dict(text=row["text"] + offset)
            for r, offset in zip(reports, offsets, strict=True)
            for row in getattr(r, name)
        ]

    passages, tokens, windows = rows("passages"), rows("tokens"), rows("windows")
    return ReplayReport.of(passages, tokens, windows, plans, reports[0].facts | facts)
