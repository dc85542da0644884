"""The headline figures: target, measured, reached or not, and a second seed's beside them."""

from __future__ import annotations

from collections.abc import Mapping

from deepinfer.measure.table import Table
from experiments.nano.calibration import Observed, errors
from experiments.nano.drafts import Runs, accepted
from experiments.nano.findings import Finding
from experiments.nano.evaluation import AGREE
from experiments.nano.study import Study

OF_XZ, STORED, GREEDY, EXPECTED, ECE = 0.62, 1.0, 3.0, 2.3, 0.05  # the targets


def worst_ece(seen: Observed, bins: int) -> float:
    """The largest error over the positions of a draft."""
    return max(row["ece"] for row in errors(seen, bins))


def figures(
    of_xz: float | None, runs: Runs, length: float | None, text: Observed, bins: int
) -> dict[str, float | None]:
    """The figures that a second seed has too."""
    return {
        "of_xz": of_xz,
        "greedy": accepted(runs.greedy).value,
        "expected": length,
        "ece": worst_ece(text, bins),
        "ece_sampled": worst_ece(Observed.of_steps(runs.sampled), bins),
        "ece_greedy": worst_ece(Observed.of_steps(runs.greedy, cut=True), bins),
    }


def _number(cell: object) -> float:
    """A cell that holds a number; 0 where it is empty."""
    return float(cell) if isinstance(cell, (int, float)) else 0.0


def finding(
    study: Study, tables: Mapping[str, Table], mine: Mapping[str, float | None],
    second: Mapping[str, float | None] | None,
) -> Finding:  # fmt: skip
    """One row a target. tables: what the sections found; a section that was left out has no row."""
    rows = []

    def row(what: str, target: str, measured, reached: bool | None, key: str = "") -> None:
        other = second.get(key) if second and key else None
        known = "" if reached is None else "yes" if reached else "NO"
        rows.append(
            dict(figure=what, target=target, measured=measured, reached=known, second_seed=other)
        )

    def most(what: str, key: str, target: float) -> None:
        x = mine[key]
        row(what, f"<= {target}", x, None if x is None else x <= target, key)

    def least(what: str, key: str, target: float) -> None:
        x = mine[key]
        row(what, f">= {target}", x, None if x is None else x >= target, key)

    if "quality.held-out" in tables:
        row("bits per byte, stored", "", tables["quality.held-out"][0]["bits_per_byte"], None)
    most("bits per byte, of xz -9, stored", "of_xz", OF_XZ)
    if "quality.rounding" in tables:
        cost = _number(tables["quality.rounding"][0]["change_percent"])
        row("stored against unquantised, %", f"within {STORED}", cost, abs(cost) <= STORED)
    if "quality.position" in tables:
        rises = tables["quality.position"].where(lambda r: _number(r["low"]) > 0)
        row("buckets of position with a worse loss", "0", len(rises), len(rises) == 0)
    if "quality.prose" in tables:
        row("prose, of xz -9, stored", "reported", tables["quality.prose"][0]["of_xz"], None)
    if "paths" in tables:
        apart = max(abs(_number(x)) for x in tables["paths"]["change_percent"])
        row("evaluation paths apart, %", f"<= {AGREE}", apart, apart <= AGREE)
    least("accepted a step, temperature 0, not repeating", "greedy", GREEDY)
    least("expected length on text, temperature 1", "expected", EXPECTED)
    most("worst ECE, temperature 1, against 1 - TV", "ece", ECE)
    most("worst ECE, temperature 1, sampled", "ece_sampled", ECE)
    row("worst ECE, temperature 0", "reported", mine["ece_greedy"], None, "ece_greedy")
    if "routing.layers" in tables:
        unused = sum(map(_number, tables["routing.layers"]["unused"]))
        row("experts unused, all layers", "0", unused, unused == 0)
    for r in tables["ablations"] if "ablations" in tables else ():
        if r["removed"] != "nothing":
            row(f"without {r['removed']}, %", "worse", r["change_percent"], r["says"] == "worse")
    if "ablations.markov" in tables:
        for r in tables["ablations.markov"]:
            lost = _number(r["with_it"]) - _number(r["without"])
            row(f"Markov head: {r['figure']} lost", "> 0", lost, lost > 0)
    says = "Headline figures of the stored checkpoint beside their targets."
    if second is not None:
        says += " second_seed: the same figure of another training run, for the spread."
    return Finding("summary", says, study.table(rows, "targets"))
