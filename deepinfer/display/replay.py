"""How a ReplayReport looks: a row a policy, and its pictures."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from deepinfer.display import html, plots
from deepinfer.display.html import PALETTE
from deepinfer.display.numbers import counted, fmt
from deepinfer.display.text import grid
from deepinfer.measure.bootstrap import FEWEST, RESAMPLES, SEED
from deepinfer.measure.replay.cost import OPS
from deepinfer.measure.replay.report import check_meter

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from deepinfer.measure.replay.report import ReplayReport
    from deepinfer.tables.table import Table

DASHES = ((0, (8, 3)), (0, (4, 2)), (0, (1, 2)), (0, (8, 2, 1, 2)), (0, (4, 2, 1, 2, 1, 2)))
ZERO = 1e-15  # what is below is a sum's rounding in float64
NOISE = 1e-9  # what is below differs between machines and means nothing: shown as such
NOWRAP = "white-space:nowrap"
COLUMNS = (
    "policy",
    "keep",
    "KL nats",
    "KL p99",
    "KL max",
    "top-1 agreement",
    "perplexity, %",
    "rows x layers",
    "FLOPs",
)
X_WORDS = {
    "keep": "keep (prompt rows above the cut)",
    "windows": "keep / window",
    "depth": "(keep - W) / ((n - 1)(W - 1))",
    "rows_share": "rows x layers of the prefill, share of exact",
    "flops_share": "FLOPs of the prefill, share of exact",
}
METER_WORDS = {
    "kl": "KL(exact || replay), nats",
    "agreement": "top-1 agreement",
    "dlogprob": "|log q - log p| of the next token, nats",
    "perplexity_ratio": "perplexity / exact's",
    "length_change": "tokens of a step, less exact's",
    "window_rel_l2": "relative L2 of window keys",
}


def report_text(r: ReplayReport) -> str:
    """One line a policy; nothing in it is a time."""
    s = r.summary()
    columns = _columns(r)
    rows = [[_cells(row)[i] for i in columns] for row in _rows(s)]
    names = [COLUMNS[i] for i in columns]
    return "\n".join([grid(names, rows, ["keep"], title=s.title, width=160), *_notes(r)])


def report_html(r: ReplayReport) -> str:
    s = r.summary()
    columns = _columns(r)
    rows = [[_html_cells(row)[i] for i in columns] for row in _rows(s)]
    body = [html.table([COLUMNS[i] for i in columns], rows, numeric=["keep"])]
    body += [html.block(html.muted(note)) for note in _notes(r)]
    title = r.compared[0].upper() + r.compared[1:]
    return html.card(title, *body, note=s.title.removeprefix(r.compared + " "))


def _rows(table: Table) -> list[dict[str, Any]]:
    return [dict(row) for row in table]


def _columns(r: ReplayReport) -> list[int]:
    """Places of COLUMNS that a report has: engines have no keep and no cost."""
    return [i for i in range(len(COLUMNS)) if len(r.plans) or i not in (1, 7, 8)]


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        row["policy"],
        number(row["keep"]),
        _with_interval(row, "kl"),
        number(row["kl_p99"]),
        number(row["kl_max"]),
        _with_interval(row, "agreement"),
        _perplexity(row),
        share(row["rows_share"]),
        share(row["flops_share"]),
    ]


def _html_cells(row: dict[str, Any]) -> list[object]:
    cells: list[Any] = list(_cells(row))
    cells[0] = html.code(row["policy"])
    for i in (2, 5, 6):
        value, _, interval = cells[i].partition(" ")
        cells[i] = html.join(html.block(x, style=NOWRAP) for x in (value, html.muted(interval)))
    return cells[:1] + [html.block(x, style=NOWRAP) for x in cells[1:]]


def _with_interval(row: dict[str, Any], name: str) -> str:
    return f"{number(row[name])} {_interval(row, name)}".rstrip()


def _perplexity(row: dict[str, Any]) -> str:
    """How much higher than exact's, with its interval."""
    value, low, high = (
        None if x is None else 100 * (x - 1)
        for x in (row[f"perplexity_ratio{end}"] for end in ("", "_low", "_high"))
    )
    interval = "" if low is None or high is None else f"[{number(low)}, {number(high)}]"
    return f"{number(value)} {interval}".rstrip()


def _interval(row: dict[str, Any], name: str) -> str:
    low, high = row[f"{name}_low"], row[f"{name}_high"]
    if low is None or max(abs(low), abs(high)) < NOISE:
        return ""
    return f"[{number(low)}, {number(high)}]"


def number(x: float | None) -> str:
    if x is None:
        return ""
    if isinstance(x, int):
        return fmt(x)
    return "<1e-9" if abs(x) < NOISE else fmt(float(x))  # 0 too: another machine may have 1e-17


def share(x: float | None) -> str:
    return "" if x is None else f"{100 * x:.1f} %"


def _uncut(r: ReplayReport) -> list[str]:
    """A line where a policy had nothing to do: its error of 0 says nothing. At most four names."""
    names = [p["policy"] for p in _rows(r.plans) if not p["cut_layers"] and p["policy"] != "exact"]
    if not names:
        return []
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    hit = f"with a hit of {r.facts['hit']}" if r.facts.get("hit") else "without a hit"
    at = f"a prompt of {r.facts['prompt']} tokens {hit}"
    return [f"Nothing is cut or replayed at {at} by {', '.join(names[:4])}{more}"]


def _notes(r: ReplayReport) -> list[str]:
    n = r.facts["groups"]
    said = "KL(first || other) of the tokens behind the prompt"
    if len(r.plans):
        said = (
            "KL(exact || replay) of the tokens behind the prompt; rows x layers and FLOPs: of the "
            "prompt's prefill, share of exact"
        )
    notes = [said, *_uncut(r)]
    if n < FEWEST:
        return [*notes, f"{counted(n, 'group')}: too few for an interval, {FEWEST} are needed"]
    return [*notes, f"[low, high]: 95 % over groups, {RESAMPLES} bootstrap resamples, seed {SEED}"]


# --------------------------------------------------------------------------------------- pictures


def plot_error(
    r: ReplayReport,
    meter: str,
    x: str,
    of: str,
    ax: Axes | None,
    floors: ReplayReport | None,
    by: Callable[[str], str] | None = None,
) -> Axes:
    """A meter of every policy over keep or another measure of the cut, with 95 % bars."""
    if x not in X_WORDS:
        raise ValueError(f"x={x!r}: {', '.join(X_WORDS)}")
    check_meter(meter, of)
    series: dict[str, list[tuple[float, Any]]] = {}  # (x, Estimate)
    for row in _rows(r.summary()):
        if row[x] is not None:
            name = str(row["policy"])
            e = r.estimate(name, meter, of)
            if e.value is not None:
                line = family(r, name) if by is None else by(name)
                series.setdefault(line, []).append((row[x], e))
    ax = plots.axes(ax)
    for i, (label, points) in enumerate(series.items()):
        points.sort(key=lambda p: p[0])
        xs, ys = [p[0] for p in points], [p[1].value for p in points]
        ends = [(e.value - e.low, e.high - e.value) for _, e in points if e.low is not None]
        bars = None
        if len(ends) == len(points):
            bars = [[max(end, 0) for end in side] for side in zip(*ends, strict=True)]
        ax.errorbar(
            xs,
            ys,
            yerr=bars,
            label=label,
            color=PALETTE[i % len(PALETTE)],
            capsize=2,
            marker=plots.MARKERS[i % len(plots.MARKERS)],
            markersize=4,
        )
    drawn = _floors(ax, floors, meter, of)
    values = [e.value for points in series.values() for _, e in points]
    if meter in ("kl", "dlogprob", "window_rel_l2") and max(values, default=0) > ZERO:
        ax.set_yscale("log")
        ax.set_ylim(bottom=min(v for v in values if v > ZERO) / 4)
    said = "" if of == "mean" else f", {of}"
    ax.set_xlabel(X_WORDS[x])
    ax.set_ylabel(METER_WORDS[meter] + said)
    ax.spines[["top", "right"]].set_visible(False)
    if len(series) > 1 or drawn:
        ax.legend(frameon=False, fontsize="small")
    return ax


def family(r: ReplayReport, name: str) -> str:
    """A policy without its keep: policies of one family are points of one line."""
    said = str(r.facts["policies"].get(name, name))
    said = re.sub(r"\bkeep=[^,)]*(, )?|mode='compact'(, )?", "", said)
    return re.sub(r", \)", ")", said).removesuffix("()")


def _floors(ax: Axes, floors: ReplayReport | None, meter: str, of: str) -> bool:
    if floors is None:
        return False
    left = ax.get_xlim()[0]
    for i, name in enumerate(floors.policies):
        value = floors.estimate(name, meter, of).value
        if value is None:
            continue
        ax.axhline(value, color="0.4", linestyle=DASHES[i % len(DASHES)], linewidth=1, label=name)
    ax.set_xlim(left=left)
    return True


def plot_layers(r: ReplayReport, ax: Axes | None, policies: Iterable[str] | None) -> Axes:
    ax = _lines(_rows(r.by_layer()), "layer", ax, known(r, policies))
    ax.set_xlabel("decoder layer")
    ax.set_xticks(sorted({row["layer"] for row in _rows(r.by_layer())}))
    return ax


def plot_distance(r: ReplayReport, ax: Axes | None, policies: Iterable[str] | None) -> Axes:
    rows = [
        row | dict(middle=(row["distance"] + row["until"] - 1) / 2)
        for row in _rows(r.by_distance())
    ]
    ax = _lines(rows, "middle", ax, known(r, policies))
    ax.set_xlabel("distance from the cut, tokens (position - lo)")
    return ax


def known(r: ReplayReport, policies: Iterable[str] | None, *more: str) -> list[str] | None:
    """The policies asked for. KeyError for one that was not measured."""
    if policies is None:
        return None
    asked = [policies] if isinstance(policies, str) else list(policies)
    for name in asked:
        if name not in (*r.policies, *more):
            raise KeyError(f"no policy {name!r} was measured: {', '.join(r.policies)} were")
    return asked


def _lines(
    rows: list[dict[str, Any]], x: str, ax: Axes | None, policies: Iterable[str] | None
) -> Axes:
    """Relative L2 over a column, a line a policy with a band of 95 %; policies without error are
    left out."""
    ax = plots.axes(ax)
    by: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by.setdefault(row["policy"], []).append(row)
    by = {n: g for n, g in by.items() if any(row["rel_l2"] for row in g)}
    shown = [n for n in (by if policies is None else policies) if n in by][: len(PALETTE)]
    for i, name in enumerate(shown):
        points = sorted((row for row in by[name] if row["rel_l2"]), key=lambda row: row[x])
        at, ys = [row[x] for row in points], [row["rel_l2"] for row in points]
        ax.plot(at, ys, label=name, color=PALETTE[i], marker=plots.MARKERS[i], markersize=4)
        if points and points[0]["rel_l2_low"] is not None:
            low, high = ([row[f"rel_l2_{end}"] for row in points] for end in ("low", "high"))
            ax.fill_between(at, low, high, color=PALETTE[i], alpha=0.15, linewidth=0)
    if shown:
        ax.set_yscale("log")
        left_out = len(by) - len(shown) if policies is None else 0
        title = f"policy ({len(shown)} of {len(by)} shown)" if left_out else "policy"
        ax.legend(title=title, frameon=False, fontsize="small")
    ax.set_ylabel(METER_WORDS["window_rel_l2"])
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def plot_cost(r: ReplayReport, ax: Axes | None, policies: Iterable[str] | None) -> Axes:
    """Bars of FLOPs by op, the largest ops of exact first; what rows x layers say as a mark."""
    ax, plans = plots.axes(ax), {row["policy"]: row for row in _rows(r.plans)}
    asked = known(r, policies, "exact")
    shown = ["exact", *(n for n in (r.policies if asked is None else asked) if n in plans)]
    shown = list(dict.fromkeys(shown))
    whole: dict[str, Any] = plans["exact"]
    order = sorted(OPS, key=lambda op: -whole[f"flops_{op}"])[: len(PALETTE) - 1]
    left = [0.0] * len(shown)
    parts = {op: [plans[n][f"flops_{op}"] / whole["flops"] for n in shown] for op in order}
    rest = [sum(plans[n][f"flops_{op}"] for op in OPS if op not in order) for n in shown]
    parts["other"] = [x / whole["flops"] for x in rest]
    for i, (op, widths) in enumerate(parts.items()):
        ax.barh(range(len(shown)), widths, left=left, height=0.7, label=op, color=PALETTE[i])
        left = [a + b for a, b in zip(left, widths, strict=True)]
    rows = [plans[n]["rows_share"] for n in shown]
    ax.plot(rows, range(len(shown)), "k|", markersize=12, label="rows x layers")
    ax.set_yticks(range(len(shown)), shown)
    ax.invert_yaxis()
    ax.set_xlabel("prefill of the prompt, FLOPs as a share of exact")
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
    return ax
