"""The headline figures: target, measured, reached or not, and a second seed's beside them.

Reached is 'yes', 'NO', or 'not shown': where there is nothing to judge by, no target is reached.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from deepinfer.tables.table import Table
from experiments.nano.report.calibration import Observed, errors
from experiments.nano.report.drafts import Runs, accepted
from experiments.nano.report.evaluation import AGREE
from experiments.nano.report.findings import Finding
from experiments.nano.report.quality import NOT_SHOWN
from experiments.nano.report.study import Study

OF_XZ, STORED, GREEDY, EXPECTED, ECE = 0.62, 1.0, 3.0, 2.3, 0.05  # the targets


@dataclass(frozen=True)
class Figure:
    """value: None where nothing was measured; but: what it leaves out, in words."""

    value: float | None
    but: str = ""


def worst_ece(seen: Observed, bins: int) -> Figure:
    """The largest error over the positions of a draft that have an outcome; others are named."""
    rows = errors(seen, bins)
    found = [row["ece"] for row in rows if row["observed"]]
    never = [str(row["draft"]) for row in rows if not row["observed"]]
    if not found:
        return Figure(None, "no draft has an outcome")
    word = "draft" if len(never) == 1 else "drafts"
    return Figure(max(found), f"{word} {', '.join(never)} never reached" if never else "")


def figures(
    of_xz: float | None, runs: Runs, length: float | None, text: Observed, bins: int
) -> dict[str, Figure]:
    """The figures that a second seed has too."""
    return {
        "of_xz": Figure(of_xz),
        "greedy": Figure(_number(accepted(runs.greedy).value)),
        "expected": Figure(_number(length)),
        "ece": worst_ece(text, bins),
        "ece_sampled": worst_ece(Observed.of_steps(runs.sampled), bins),
        "ece_greedy": worst_ece(Observed.of_steps(runs.greedy, cut=True), bins),
    }


def _number(cell: object) -> float | None:
    """A cell that holds a number; None where it is empty or NaN."""
    good = isinstance(cell, (int, float)) and not math.isnan(cell)
    return float(cell) if good else None


def _known(reached: bool | None) -> str:
    return NOT_SHOWN if reached is None else "yes" if reached else "NO"


def finding(
    study: Study,
    tables: Mapping[str, Table],
    mine: Mapping[str, Figure],
    second: Mapping[str, Figure] | None,
) -> Finding:
    """One row a target. tables: what the sections found; a section that was left out has no row."""
    rows = [*_of_model(tables, mine, second), *_of_drafter(mine, second), *_of_removals(tables)]
    says = "Headline figures of the stored checkpoint beside their targets."
    if any(row["reached"] == NOT_SHOWN for row in rows):
        says += f" {NOT_SHOWN}: too little was measured to say."
    if second is not None:
        says += " second_seed: the same figure of another training run, for the spread."
    return Finding("summary", says, study.table(rows, "targets"))


Row = dict[str, object]


def _row(what: str, target: str, measured: float | None, reached: str = "") -> Row:
    return dict(figure=what, target=target, measured=measured, reached=reached, second_seed=None)


def _compared(
    what: str,
    key: str,
    sign: str,
    target: float | None,
    mine: Mapping[str, Figure],
    second: Mapping[str, Figure] | None,
) -> Row:
    """A figure that must be at most ('<=') or at least ('>=') the target; None: it is reported."""
    figure, other = mine[key], second[key] if second else Figure(None)
    notes = [figure.but, f"second seed: {other.but}" if other.but else ""]
    if any(notes):
        what += f" ({'; '.join(filter(None, notes))})"
    row = _row(what, "reported" if target is None else f"{sign} {target}", figure.value)
    if target is not None:
        x = figure.value
        reached = None if x is None else x <= target if sign == "<=" else x >= target
        row["reached"] = _known(None if reached and figure.but else reached)
    return row | {"second_seed": other.value}


def _of_model(
    tables: Mapping[str, Table], mine: Mapping[str, Figure], second: Mapping[str, Figure] | None
) -> Iterator[Row]:
    """The backbone and its storage."""
    if "quality.held-out" in tables:
        yield _row("bits per byte, stored", "", tables["quality.held-out"][0]["bits_per_byte"])
        yield _compared("bits per byte, of xz -9, stored", "of_xz", "<=", OF_XZ, mine, second)
    if "quality.rounding" in tables:
        cost = _number(tables["quality.rounding"][0]["change_percent"])
        reached = None if cost is None else abs(cost) <= STORED
        what = "stored against unquantised, %"
        yield _row(what, f"within {STORED}", cost, _known(reached))
    if "quality.position" in tables:
        later = [str(says) for says in tables["quality.position"]["says"][1:]]
        worse, empty = later.count("worse"), [x for x in later if x.startswith(NOT_SHOWN)]
        reached = False if worse else None if empty or not later else True
        yield _row("buckets of position with a worse loss", "0", worse, _known(reached))
    if "quality.prose" in tables:
        yield _row("prose, of xz -9, stored", "reported", tables["quality.prose"][0]["of_xz"])
    if "paths" in tables:
        apart = _largest(tables["paths"]["change_percent"])
        reached = None if apart is None else apart <= AGREE
        yield _row("evaluation paths apart, %", f"<= {AGREE}", apart, _known(reached))
    if "routing.layers" in tables:
        unused = [_number(x) for x in tables["routing.layers"]["unused"]]
        total = None if None in unused or not unused else sum(x for x in unused if x)
        reached = None if total is None else total == 0
        yield _row("experts unused, all layers", "0", total, _known(reached))


def _largest(cells: Sequence[object]) -> float | None:
    """The largest of the sizes; None where one is unknown."""
    numbers = [_number(x) for x in cells]
    return None if None in numbers or not numbers else max(abs(x) for x in numbers if x is not None)


def _of_drafter(mine: Mapping[str, Figure], second: Mapping[str, Figure] | None) -> Iterator[Row]:
    for what, key, sign, target in (
        ("accepted a step, temperature 0, not repeating", "greedy", ">=", GREEDY),
        ("expected length on text, temperature 1", "expected", ">=", EXPECTED),
        ("worst ECE, temperature 1, against 1 - TV", "ece", "<=", ECE),
        ("worst ECE, temperature 1, sampled", "ece_sampled", "<=", ECE),
        ("worst ECE, temperature 0", "ece_greedy", "<=", None),
    ):
        yield _compared(what, key, sign, target, mine, second)


def _of_removals(tables: Mapping[str, Table]) -> Iterator[Row]:
    """What must hurt when it is taken away."""
    for r in tables["ablations"] if "ablations" in tables else ():
        if r["removed"] != "nothing":
            few = str(r["says"]).startswith(("too few", NOT_SHOWN))
            reached = None if few else r["says"] == "worse"
            yield _row(f"without {r['removed']}, %", "worse", r["change_percent"], _known(reached))
    for r in tables["ablations.markov"] if "ablations.markov" in tables else ():
        both = _number(r["with_it"]), _number(r["without"])
        lost = None if None in both else both[0] - both[1]
        reached = None if lost is None else lost > 0
        yield _row(f"Markov head: {r['figure']} lost", "> 0", lost, _known(reached))
