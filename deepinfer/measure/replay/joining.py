"""Several reports as one: texts that were measured apart, or policies that were.

A group is a name: texts of several reports that have the same one are one group. Texts that were
given none are groups of their own, named by their numbers, which go on counting.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from deepinfer.measure.replay.report import ReplayReport

# Facts that may differ; hit, prompt, ... may not. grouped: looked at apart, older files lack it.
PARTS = ("texts", "groups", "ids", "policies", "grouped")


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
    first = _groups(reports[0])
    if any(_groups(r) != first for r in reports):
        raise ValueError("joined: reports of the same texts have them in different groups")
    policies = {n: said for r in reports for n, said in r.facts["policies"].items()}
    plans = reports[0].plans.rows
    plans += [row for r in reports[1:] for row in r.plans if row["policy"] != "exact"]
    return _report(reports, [0] * len(reports), plans, dict(policies=policies))


def _texts(reports: Sequence[ReplayReport]) -> ReplayReport:
    """The same policies on other texts."""
    first, seen, offsets = reports[0], set(), []
    held: dict[str, str] = {}  # hash of a text's ids -> where it is
    for r in reports:
        if r.facts["policies"] != first.facts["policies"]:
            raise ValueError("joined: reports have neither the same texts nor the same policies")
        if r.facts["ids"] in seen:
            raise ValueError(f"joined: the same texts twice (ids {r.facts['ids']})")
        number = len(offsets)
        own = {
            str(row["ids"]): f"text {row['text']} of report {number}"
            for row in r.passages
            if row.get("ids")
        }
        if twice := sorted(set(own) & set(held)):
            raise ValueError(
                f"joined: the same text twice: {held[twice[0]]} is {own[twice[0]]}; a policy would "
                f"count it twice ({len(twice)} such)"
            )
        held |= own
        if _grouped(r) != _grouped(first):
            raise ValueError("joined: groups were given in some reports and not in others")
        offsets.append(sum(x.facts["texts"] for x in reports[:number]))
        seen.add(r.facts["ids"])
    plans: list[dict[str, Any]] = []
    each = [{row["policy"]: row for row in r.plans} for r in reports]  # in any order
    for name in each[0]:
        rows: list[Any] = [plan[name] for plan in each]
        plans.append(rows[0] | {k: sum(row[k] for row in rows) for k in ("ran", "alone")})
    groups = {
        row["group"]
        for r, offset in zip(reports, offsets, strict=True)
        for row in _renamed(r, "passages", offset)
    }
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
        parts = [_renamed(r, name, at) for r, at in zip(reports, offsets, strict=True)]
        return [row for part in parts for row in part]

    passages, tokens, windows = rows("passages"), rows("tokens"), rows("windows")
    return ReplayReport.of(passages, tokens, windows, plans, reports[0].facts | facts)


def _groups(r: ReplayReport) -> dict[Any, Any]:
    return {row["text"]: row["group"] for row in r.passages}


def _renamed(r: ReplayReport, name: str, offset: int) -> list[dict[str, Any]]:
    """The rows of a table with numbers of texts, and labels that are no more than these, that count
    on."""
    rows = [row | dict(text=row["text"] + offset) for row in getattr(r, name)]
    return rows if _grouped(r) else [row | dict(group=str(row["text"])) for row in rows]


def _grouped(r: ReplayReport) -> bool:
    """Whether the groups were given. Of an older file, which does not say: unless all of them are
    the texts' numbers."""
    said = r.facts.get("grouped")
    if said is None:
        return any(row["group"] != str(row["text"]) for row in r.passages)
    return bool(said)
