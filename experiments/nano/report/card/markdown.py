"""Markdown that is read in a terminal as well: aligned tables, short numbers."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import fill

from deepinfer.display.numbers import fmt

WIDTH = 100


def paragraph(text: str) -> list[str]:
    return [_filled(text), ""]


def bullet(text: str) -> str:
    return _filled(text, "- ", "  ")


def _filled(text: str, first: str = "", later: str = "") -> str:
    """`text` in lines, no number parted from its percent sign."""
    tied = " ".join(text.split()).replace(" %", "\u00a0%")
    lines = fill(
        tied,
        WIDTH,
        initial_indent=first,
        subsequent_indent=later,
        break_on_hyphens=False,
        break_long_words=False,
    )
    return lines.replace("\u00a0%", " %")


def code(lines: Sequence[str]) -> list[str]:
    return ["```", *lines, "```", ""]


def number(x: object, digits: int = 3, signed: bool = False) -> str:
    """A cell: integers with separators, floats with `digits` significant ones, nothing for None."""
    if x is None or x == "":
        return ""
    if isinstance(x, bool):
        return "yes" if x else "NO"
    if isinstance(x, int):
        return f"{x:+,}" if signed else f"{x:,}"
    if isinstance(x, float):
        text = fmt(x, digits)
        return "+" + text if signed and x > 0 and text != "0" else text
    return str(x)


def interval(low: object, high: object, digits: int = 3) -> str:
    return "" if low is None or high is None else f"{number(low, digits)} to {number(high, digits)}"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Cells are text already; those that look like numbers stand to the right."""
    cells = [list(columns), *map(list, rows)]
    cells = [[cell.replace("|", "\\|") for cell in row] for row in cells]
    widths = [max(3, *(len(row[i]) for row in cells)) for i in range(len(columns))]
    right = [
        all(_numeric(row[i]) for row in cells[1:]) and any(row[i] for row in cells[1:])
        for i in range(len(columns))
    ]
    rule = ["-" * (w - 1) + (":" if r else "-") for w, r in zip(widths, right)]
    lines = []
    for row in [cells[0], rule, *cells[1:]]:
        aligned = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right))
        lines.append("| " + " | ".join(aligned) + " |")
    return [*lines, ""]


def _numeric(cell: str) -> bool:
    return cell == "" or cell.lstrip("+-")[:1].isdigit()
