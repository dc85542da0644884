"""How a ReplayPlan looks: which rows of the prompt each layer runs, and which window keys it
sees."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from deepinfer.display import html

if TYPE_CHECKING:
    from deepinfer.slots.protocols import ReplayPlan

RUN, KEYS, FOUND = (
    0,
    4,
    6,
)  # colours: rows run, window keys written only, read from the prefix cache
LONGER = 1.25  # the picture ends that much behind the last position that the plan names


def plan_text(p: ReplayPlan) -> str:
    """A head line, then a line for each run of layers with the same rows."""
    kind = "exact" if p.exact else "approximate"
    found = f", block KV below {p.write_from} is read" if p.write_from else ""
    lines = [f"ReplayPlan ({kind}): rows from {p.start} on{found}"]
    for layers, rows_from, kv_from, floor in _runs(p):
        rows = max(p.start, rows_from)
        said = f"  {layers:<14} rows {rows}..end"
        if kv_from > p.start or rows > kv_from:
            said += f", window keys from {max(kv_from, p.start)} on"
        lines.append(said + (f", sees windows down to {floor}" if floor else ""))
    return "\n".join([*lines, *([f"  {p.why}"] if p.why else [])])


def plan_html(p: ReplayPlan) -> str:
    """A bar for each run of layers along the positions of the prompt."""
    named = max(p.start, p.write_from, *p.rows_from, *p.kv_from, *p.floor, 1)
    end = named * LONGER
    rows = []
    for layers, rows_from, kv_from, floor in _runs(p):
        first = max(p.start, rows_from)
        spans = [
            (min(p.write_from, p.start), FOUND, f"0..{p.start - 1}: read from the prefix cache"),
            (max(kv_from, p.start), None, "not run"),
            (first, KEYS, f"{max(kv_from, p.start)}..{first - 1}: window keys are written"),
            (end, RUN, f"{first}..end: rows run"),
        ]
        rows.append((layers, _bar(spans, end), f"{first}..end", str(floor) if floor else ""))
    body = html.table(("layers", "prompt", "rows run", "window floor"), rows)
    legend = {"rows run": RUN, "window keys only": KEYS, "read from the prefix cache": FOUND}
    state = html.chip("exact" if p.exact else "approximate", None if p.exact else 5)
    note = [html.block(html.muted(p.why))] if p.why else []
    return html.card(html.join(["ReplayPlan ", state]), body, html.legend(legend), *note)


def _runs(p: ReplayPlan) -> list[tuple[str, int, int, int]]:
    """('layers 0-5', rows_from, kv_from, floor) of each run of layers with equal values."""
    values = list(zip(p.rows_from, p.kv_from, p.floor, strict=True))
    out, first = [], 0
    for value, run in groupby(values):
        n = len(list(run))
        last = first + n - 1
        name = f"layer {first}" if n == 1 else f"layers {first}-{last}"
        out.append((name, *value))
        first += n
    return out


def _bar(spans: list[tuple[float, int | None, str]], end: float) -> html.Html:
    """Pieces side by side; each ends at its position. Colour None is left empty."""
    parts, at = [], 0.0
    for stop, colour, title in spans:
        if stop <= at:
            continue
        wash = html.WASH if colour is None else html.PALETTE[colour] + "a0"
        style = f"display:inline-block;height:.8em;width:{(stop - at) / end:.2%};background:{wash}"
        parts.append(html.tag("span", style=style, title=title))
        at = stop
    style = "width:26em;white-space:nowrap;font-size:13px;line-height:1;overflow:hidden"
    return html.block(*parts, style=style)
