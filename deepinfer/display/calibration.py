"""How a Calibration looks: what was asked, the keeps that were tried, and the check."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deepinfer.display import html
from deepinfer.display.numbers import counted, fmt
from deepinfer.display.replay import number, share
from deepinfer.display.text import grid
from deepinfer.measure.bootstrap import RESAMPLES, SEED

if TYPE_CHECKING:
    from deepinfer.measure.replay.calibration import Calibration

METRICS = {"kl": "KL(exact || replay)", "dlogprob": "|log q - log p| of the next token"}
GOOD, BAD = 2, 5  # colours


def calibration_text(c: Calibration) -> str:
    """The policy, a line a fact, and a line a candidate, largest first as they were tried."""
    facts = [f"  {name:<8} {value}" for name, value in _facts(c).items()]
    columns = _columns(c)
    table = grid(columns, [_cells(c, row) for row in _rows(c)], columns[:1])
    return "\n".join([c.policy, *facts, *("  " + x for x in [*table.splitlines(), *_notes()])])


def calibration_html(c: Calibration) -> str:
    columns, rows = _columns(c), [_cells(c, row) for row in _rows(c)]
    shown = [
        [html.tag("b", x) for x in cells] if row["keep"] == c.keep else cells
        for row, cells in zip(_rows(c), rows, strict=True)
    ]
    verdict = html.chip(f"check: {_verdict(c)}", GOOD if c.holds else BAD)
    return html.card(
        html.join([html.code(c.policy), " ", verdict]),
        html.pairs(_facts(c)),
        html.table(columns, shown, numeric=columns[:1]),
        *(html.block(html.muted(note)) for note in _notes()),
    )


def _facts(c: Calibration) -> dict[str, str]:
    first, second = (len(names) for names in c.groups)
    row: dict[str, Any] = next(r for r in _rows(c) if r["keep"] == c.keep)
    facts = c.report.facts
    where = f"{facts['continuation']} tokens behind a prompt of {facts['prompt']}"
    if facts["hit"]:
        where += f", {facts['hit']} of it found"
    error = f"{METRICS[c.metric]} <= {fmt(c.tolerance)} nats"
    return {
        "asked": f"{error} for {percent(c.quantile)} of tokens",
        "chosen": f"on {counted(first, 'group')}: {percent(c.quantile)} quantile {_interval(row)}",
        "checked": f"on {counted(second, 'other group')}: held for {_held(c)}",
        "costs": f"{share(row['rows_share'])} of the rows x layers of exact's prefill, "
        f"{share(row['flops_share'])} of its FLOPs",
        "measured": f"{where}; weights {facts['weights']}, {facts['dtype']}",
    }


def _held(c: Calibration) -> str:
    """How often the tolerance held where the keep was not chosen."""
    rows: list[dict[str, Any]] = c.by_group().rows
    held, tokens = (sum(row[k] for row in rows) for k in ("held", "tokens"))
    if held == tokens:
        return f"all {tokens:,} tokens (without a miss there is no interval), {_verdict(c)}"
    least = min(row["held"] / row["tokens"] for row in rows)
    low, high = c.held.low, c.held.high
    ends = "" if low is None or high is None else f" [{100 * low:.2f}, {100 * high:.2f}]"
    return (
        f"{held:,} of {tokens:,} tokens, {100 * held / tokens:.2f} %{ends}, {_verdict(c)}; "
        f"{100 * least:.2f} % in the worst group"
    )


def _verdict(c: Calibration) -> str:
    if c.holds:
        return "as asked"
    within = c.held.high is not None and c.held.high >= c.quantile
    return "less than asked" + (", but within the interval" if within else "")


def _rows(c: Calibration) -> list[dict[str, Any]]:
    return sorted(c.candidates.rows, key=lambda row: -row["keep"])  # type: ignore[operator]


def _columns(c: Calibration) -> list[str]:
    return ["keep", f"{percent(c.quantile)} quantile, nats", "meets", "rows x layers", "FLOPs"]


def _cells(c: Calibration, row: dict[str, Any]) -> list[str]:
    meets = "yes" if row["meets"] else "no"
    if row["keep"] == c.keep:
        meets += ", chosen"
    return [
        fmt(row["keep"]),
        _interval(row),
        meets,
        share(row["rows_share"]),
        share(row["flops_share"]),
    ]


def _interval(row: dict[str, Any]) -> str:
    return f"{number(row['error'])} [{number(row['low'])}, {number(row['high'])}]"


def _notes() -> list[str]:
    return [
        "meets: the whole interval is within what was asked. From the top, the first no ends it",
        f"[low, high]: 95 % over groups, {RESAMPLES} bootstrap resamples, seed {SEED}",
    ]


def percent(x: float) -> str:
    """A share that was asked, in full. >>> percent(0.999) -> '99.9 %'"""
    return f"{100 * x:.6g} %"
