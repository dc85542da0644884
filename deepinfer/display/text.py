"""Tables for a terminal."""

from collections.abc import Collection, Sequence

SHOWN_CELL = 48  # characters of one cell; longer ones end in an ellipsis


def grid(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    numeric: Collection[str] = (),
    note: str = "",
    *,
    title: str = "",
    width: int = 110,
    cell: int | None = SHOWN_CELL,
) -> str:
    """Aligned text; the columns in `numeric` to the right. Columns past `width` are named below.
    cell: most characters of one cell, None: all.

    The first column is always shown. No line ends in blanks.
    """
    if not columns:
        return "\n".join(line for line in (title, note) if line)
    cells = [[_short(value, cell) for value in row] for row in [columns, *rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    fit, used = 0, 0
    while fit < len(columns) and (fit == 0 or used + widths[fit] + 2 <= width):
        used += widths[fit] + 2
        fit += 1
    lines = [title] if title else []
    for n, row in enumerate(cells):
        aligned = [
            text.rjust(widths[i]) if columns[i] in numeric else text.ljust(widths[i])
            for i, text in enumerate(row[:fit])
        ]
        lines.append("  ".join(aligned).rstrip())
        if n == 0:
            lines.append("  ".join("-" * widths[i] for i in range(fit)))
    if fit < len(columns):
        lines.append(f"columns not shown for width: {', '.join(columns[fit:])}")
    return "\n".join([*lines, note] if note else lines)


def _short(value: str, most: int | None) -> str:
    text = value.replace("\n", "\\n").replace("\t", "\\t").replace("\r", "\\r")
    return text if most is None or len(text) <= most else text[: most - 1] + "\u2026"
