"""The nano report's headline figures: no target is reached without evidence."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch

from deepinfer.tables.table import Table
from experiments.nano.report import calibration, quality, summary
from experiments.nano.report.calibration import Observed
from experiments.nano.report.drafts import Runs, Step, Written
from experiments.nano.report.summary import Figure
from experiments.nano.report.texts import Scored

STUDY = SimpleNamespace(
    sizes=SimpleNamespace(piece=256), table=lambda rows, title="": Table(rows, title=title)
)
GOOD = {key: Figure(0.01) for key in ("of_xz", "ece", "ece_sampled", "ece_greedy")}
GOOD |= {"greedy": Figure(3.5), "expected": Figure(2.5)}


def scored(modules, size=256, length=256):
    """Documents of equal nats but for the second bucket, where they fall."""
    place = torch.arange(size)
    nats = torch.where(place < 64, 3.0, 2.0).double() + torch.rand(size).double() / 99
    whole = torch.full((size,), length)
    return [Scored(f"m{i}", 4 * size, nats, place, whole) for i in range(modules)]


def row_of(figure, tables=None, mine=GOOD, second=None):
    table = summary.finding(STUDY, tables or {}, mine, second).table
    return next(row for row in table if row["figure"].startswith(figure))


# ------------------------------------------------------------------------------------- position


def position(found):
    return {"quality.position": quality.by_position(STUDY, found).table}


@pytest.mark.parametrize(
    "found, reached",
    [
        (scored(8), "yes"),
        (scored(7), "not shown"),
        (scored(1), "not shown"),
        (scored(20, length=100), "not shown"),  # no whole piece
        (scored(7) + scored(20, length=100), "not shown"),  # modules without one are no evidence
    ],
)
def test_buckets_without_an_interval_show_nothing(found, reached):
    for i, s in enumerate(found):  # each its own module
        found[i] = Scored(f"n{i}", s.nbytes, s.nats, s.position, s.length)
    tables = position(found)
    assert row_of("buckets of position", tables)["reached"] == reached
    says = tables["quality.position"]["says"]
    assert says[0] == "" and all(x.startswith("not shown") == (reached != "yes") for x in says[1:])


def test_a_worse_bucket_is_worse_and_an_unknown_one_beside_it_does_not_hide_it():
    rising = [Scored(s.module, s.nbytes, -s.nats + 9, s.position, s.length) for s in scored(9)]
    tables = position(rising)
    row = row_of("buckets of position", tables)
    assert (row["measured"], row["reached"]) == (1, "NO")
    (table,) = tables.values()
    for says, reached in (("worse", "NO"), ("not shown: x", "not shown"), ("better", "yes")):
        rows = [*table.rows[:1], {"says": "better"}, {"says": says}, {"says": "null: 0 is inside"}]
        changed = {"quality.position": Table(rows)}
        assert row_of("buckets of position", changed)["reached"] == reached


def test_risen_is_over_modules_with_tokens_on_both_sides():
    full = {f"m{i}": [2.0 + i / 9, 1.0] for i in range(9)}
    more = {m: [1.1 * nats, n] for m, (nats, n) in full.items()}
    e = quality.risen(full, more)
    assert [e.value, e.low, e.high] == pytest.approx([10, 10, 10])
    empty = {f"e{i}": [0.0, 0.0] for i in range(9)}
    assert quality.risen(full | empty, more | empty) == e
    few = dict(list(full.items())[:7])
    assert quality.risen(few | empty, more | empty | few).low is None
    assert quality.risen(empty, empty).value is None


# ------------------------------------------------------------------------------------------ ECE


def observed(*columns):
    """Confidence 0.5 and these outcomes, one list a position."""
    accept = torch.tensor(columns, dtype=torch.float64).T
    return Observed(torch.full_like(accept, 0.5), accept.nan_to_num(), accept)


NEVER, EXACT, OFF = [math.nan] * 2, [0.0, 1.0], [1.0, 1.0]


@pytest.mark.parametrize("order", list(itertools.permutations((NEVER, EXACT, OFF))))
def test_a_position_that_was_never_reached_is_named_in_any_order(order):
    found = summary.worst_ece(observed(*order), 15)
    assert found.value == pytest.approx(0.5)
    assert found.but == f"draft {order.index(NEVER) + 1} never reached"
    row = row_of("worst ECE, temperature 1, sampled", mine=GOOD | {"ece_sampled": found})
    assert row["reached"] == "NO" and found.but in row["figure"]


def test_the_positions_reached_do_not_speak_for_the_others():
    found = summary.worst_ece(observed(EXACT, NEVER, NEVER), 15)
    assert found == Figure(0.0, "drafts 2, 3 never reached")
    mine = GOOD | {"ece": found}
    row = row_of("worst ECE, temperature 1, against", mine=mine)
    assert (row["measured"], row["reached"]) == (0.0, "not shown")
    assert summary.worst_ece(observed(EXACT, EXACT), 15) == Figure(0.0)
    row = row_of("worst ECE, temperature 1, against", mine=GOOD, second=mine)
    assert row["second_seed"] == 0.0 and row["reached"] == "yes"
    assert row["figure"].endswith("(second seed: drafts 2, 3 never reached)")


def test_no_outcome_at_all_reaches_nothing():
    none = Written("m", (1,), ())
    for seen in (observed(NEVER, NEVER), Observed.of_steps([none])):
        assert summary.worst_ece(seen, 15) == Figure(None, "no draft has an outcome")
    text = observed(EXACT, EXACT)
    mine = summary.figures(None, Runs([none], [none]), math.nan, text, 15)
    table = summary.finding(STUDY, {}, mine, None).table
    reached = {row["figure"].partition(" (")[0]: row["reached"] for row in table}
    assert reached.pop("worst ECE, temperature 1, against 1 - TV") == "yes"
    assert reached.pop("worst ECE, temperature 0") == ""
    assert set(reached.values()) == {"not shown"} and len(reached) == 3


def test_figures_of_steps_that_ended_early():
    runs = [Written("m", tuple(range(9)), (Step(1, 3, (0.5,) * 5), Step(4, 1, (0.5,) * 5)))] * 2
    mine = summary.figures(0.5, Runs(runs, runs), 2.0, observed(EXACT), 15)
    assert mine["ece_sampled"].but == "drafts 4, 5 never reached"
    assert mine["ece_sampled"].value == max(
        row["ece"] for row in calibration.errors(Observed.of_steps(runs), 15)[:3]
    )


# ---------------------------------------------------------------------------------------- others


@pytest.mark.parametrize(
    "figure, name, good, bad, empty",
    [
        (
            "stored against",
            "quality.rounding",
            {"change_percent": 0.5},
            {"change_percent": -1.5},
            {"change_percent": None},
        ),
        (
            "evaluation paths",
            "paths",
            {"change_percent": 0.0},
            {"change_percent": 99.0},
            {"change_percent": math.nan},
        ),
        ("experts unused", "routing.layers", {"unused": 0}, {"unused": 1}, {"unused": None}),
        (
            "without it",
            "ablations",
            {"removed": "it", "says": "worse", "change_percent": 1.0},
            {"removed": "it", "says": "null: 0 is inside", "change_percent": 1.0},
            {"removed": "it", "says": "too few modules", "change_percent": 1.0},
        ),
        (
            "Markov head",
            "ablations.markov",
            {"figure": "x", "with_it": 2.0, "without": 1.0},
            {"figure": "x", "with_it": 1.0, "without": 1.0},
            {"figure": "x", "with_it": 1.0, "without": None},
        ),
    ],
)
def test_an_empty_cell_is_no_evidence(figure, name, good, bad, empty):
    for cells, reached in ((good, "yes"), (bad, "NO"), (empty, "not shown")):
        assert row_of(figure, {name: Table([cells])})["reached"] == reached
    if name in ("paths", "routing.layers"):  # one row of many
        assert row_of(figure, {name: Table([good, empty, good])})["reached"] == "not shown"


def test_targets_are_compared_the_right_way_round():
    table = summary.finding(STUDY, {}, GOOD, None).table
    assert {row["reached"] for row in table} == {"yes", ""}
    bad = {key: Figure(9.0 if x.value < 1 else 0.1) for key, x in GOOD.items()}
    table = summary.finding(STUDY, {}, bad, None).table
    assert {row["reached"] for row in table} == {"NO", ""}
