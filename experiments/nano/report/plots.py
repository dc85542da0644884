"""Pictures of training and of what was measured, from the same files as the card.

    python -m experiments.nano.report.plots --log BACKBONE/log.jsonl DRAFTER/log.jsonl \\
        --results results.json --out DIR

Writes a PNG of 700 pixels' width for each figure whose data is there, and names the others.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepinfer.display.html import PALETTE
from deepinfer.display.plots import MARKERS
from experiments.nano.report.card.inputs import Results, Run, Runs, read_runs
from experiments.nano.report.summary import ECE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIZE, DPI = (7.0, 4.4), 100  # inches, and pixels of one
SMOOTH = 10  # logged steps of a running mean
BLUE, ORANGE, GREEN, PINK, SKY, RED, GREY = PALETTE[:7]


def main(arguments: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(
        prog="python -m experiments.nano.report.plots",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("--log", type=Path, nargs="*", default=[], help="log.jsonl of each stage")
    p.add_argument("--results", type=Path, help="the report's JSON")
    p.add_argument("--out", type=Path, required=True, help="folder of the PNG files")
    o = p.parse_args(arguments)
    try:
        runs, results = read_runs(o.log), Results(o.results)
        o.out.mkdir(parents=True, exist_ok=True)
        for name, figure in figures(runs, results):
            if figure is None:
                print(f"{name}: not drawn, its data is in none of the files")
            else:
                figure.savefig(o.out / f"{name}.png", dpi=DPI)
                print(o.out / f"{name}.png")
    except (OSError, ValueError) as error:
        print(f"plots: {error}", file=sys.stderr)
        return 2
    return 0


def figures(runs: Runs, results: Results) -> Iterator[tuple[str, Figure | None]]:
    """(name, the figure, or None where its data is not there)."""
    draws: dict[str, Callable[[], Figure | None]] = {
        "loss": lambda: loss(runs),
        "load": lambda: load(runs.backbone),
        "drafter": lambda: drafter(runs),
        "position": lambda: position(results),
        "acceptance": lambda: acceptance(results),
        "calibration": lambda: calibration(results),
        "routing": lambda: routing(results),
        "ablations": lambda: ablations(results),
    }
    for name, draw in draws.items():
        yield name, draw()


def panel(title: str, x: str, y: str, size: tuple[float, float] = SIZE) -> tuple[Figure, Axes]:
    """An empty figure of one pair of axes. It belongs to no window and no global state."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    ax = figure.add_subplot()
    ax.set_title(title, loc="left", fontsize=12)
    ax.set_xlabel(x)
    ax.set_ylabel(y)
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis="y", color="#dddddd", linewidth=0.6)
    ax.set_axisbelow(True)
    return figure, ax


# --------------------------------------------------------------------------------------- training


def tokens(run: Run, rows: Sequence[dict[str, Any]]) -> list[float]:
    """Millions of tokens at each row."""
    return [row["step"] * run.tokens_a_step / 1e6 for row in rows]


def running_mean(values: Sequence[float]) -> list[float]:
    return [
        sum(part) / len(part)
        for i in range(len(values))
        for part in [values[max(0, i - SMOOTH + 1) : i + 1]]
    ]


def loss(runs: Runs) -> Figure | None:
    if runs.backbone is None:
        return None
    figure, ax = panel("Training and dev loss of the backbone", "million tokens", "nats per token")
    others = [run for run in runs.others if run.stage == "backbone"]
    for i, run in enumerate([runs.backbone, *others][:4]):
        colours = ((BLUE, ORANGE), (SKY, RED), (GREEN, PINK), (GREY, GREY))[i]
        seed = f", seed {run.seed}" if others else ""
        x, nats = tokens(run, run.steps), [row["nats"] for row in run.steps]
        ax.plot(x, nats, color=colours[0], alpha=0.25, linewidth=0.8)
        ax.plot(x, running_mean(nats), color=colours[0], label=f"training, with dropout{seed}")
        ax.plot(
            tokens(run, run.dev),
            [row["nats"] for row in run.dev],
            color=colours[1],
            marker=MARKERS[i],
            markersize=5,
            label=f"dev modules{seed}",
        )
    ax.legend(frameon=False)
    return figure


def load(run: Run | None) -> Figure | None:
    if run is None:
        return None
    figure, ax = panel(
        "Load of the busiest and of the idlest expert, worst layer",
        "million tokens",
        "load / mean load (log scale)",
    )
    x = tokens(run, run.steps)
    for key, name, colour, style in (
        ("max_load", "busiest", BLUE, "-"),
        ("min_load", "idlest", ORANGE, "--"),
    ):
        ax.plot(x, [row[key] for row in run.steps], style, color=colour, label=name)
    ax.axhline(1, color=GREY, linewidth=0.8, linestyle=":", label="perfectly even")
    ax.set_yscale("log")
    plain_ticks(ax.yaxis)
    ax.legend(frameon=False)
    return figure


def drafter(runs: Runs) -> Figure | None:
    run = runs.drafted
    if run is None or runs.drafter is None:
        return None
    figure, ax = panel(
        "What is accepted of each draft while the drafter learns",
        "step",
        "overlap with the target's law (1 - TV)",
    )
    text = [row for row in run.steps if row.get("text", "corpus") == "corpus"]
    for k in range(len(run.steps[0]["overlap"])):
        colour = PALETTE[k % len(PALETTE)]
        means = running_mean([row["overlap"][k] for row in text])
        ax.plot([row["step"] for row in text], means, color=colour, alpha=0.35, linewidth=1)
        ax.plot(
            [row["step"] for row in run.dev],
            [row["overlap"][k] for row in run.dev],
            color=colour,
            marker=MARKERS[k % len(MARKERS)],
            label=f"draft {k + 1}, dev",
        )
    ax.plot([], [], color=GREY, alpha=0.5, linewidth=1, label="thin: training on the corpus")
    if runs.more is not None:
        ax.axvline(
            runs.drafter.last_step,
            color=GREY,
            linewidth=0.8,
            linestyle=":",
            label="went on, at the full rate again",
        )
    ax.set_ylim(bottom=0)
    ax.legend(frameon=False, ncols=2)
    return figure


# --------------------------------------------------------------------------------------- measured


def position(results: Results) -> Figure | None:
    rows = results.rows("quality.position", "positions", "nats_per_token", "whole_nats")
    if not rows:
        return None
    figure, ax = panel(
        "Loss by position in the context, held-out text", "position of the token", "nats per token"
    )
    names = [str(row["positions"]) for row in rows]
    for i, (key, label) in enumerate(
        (("nats_per_token", "all text"), ("whole_nats", "pieces of full length alone"))
    ):
        at = [j for j, row in enumerate(rows) if row[key] is not None]
        ax.plot(at, [rows[j][key] for j in at], color=PALETTE[i], marker=MARKERS[i], label=label)
    ax.set_xticks(range(len(names)), names)
    ax.margins(x=0.08, y=0.25)
    ax.legend(frameon=False)
    return figure


def acceptance(results: Results) -> Figure | None:
    columns = ("draft", "accept", "low", "high", "confidence", "same_first")
    rows = results.rows("acceptance.position", *columns)
    if not rows:
        return None
    figure, ax = panel(
        "Acceptance by position in the draft, held-out text, temperature 1",
        "draft",
        "probability, 95 % over modules",
    )
    x = [float(row["draft"]) for row in rows]
    bars(ax, x, rows, "accept", BLUE, "o", "accepted (1 - TV)")
    for key, label, colour, mark, aside in (
        ("confidence", "what the confidence says", ORANGE, "s", 0.1),
        ("same_first", "same likeliest token", GREEN, "D", -0.1),
    ):
        ax.plot([v + aside for v in x], [row[key] for row in rows], mark, color=colour, label=label)
    ax.set_xticks(x, [str(row["draft"]) for row in rows])
    ax.set_ylim(0, 1)
    ax.legend(frameon=False)
    return figure


def bars(
    ax: Axes,
    x: Sequence[float],
    rows: Sequence[dict[str, Any]],
    key: str,
    colour: str,
    mark: str,
    label: str,
) -> None:
    """Points with their intervals, where they have one."""
    for at, row in zip(x, rows):
        if row["low"] is not None:
            ax.plot([at, at], [row["low"], row["high"]], color=colour, linewidth=1.5)
    ax.plot(x, [row[key] for row in rows], mark, color=colour, label=label)


def calibration(results: Results) -> Figure | None:
    rows = results.rows("calibration", "outcome", "draft", "ece", "by_chance", "ece_after")
    if not rows:
        return None
    figure, ax = panel(
        "Calibration error of the confidence by position in the draft",
        "draft",
        "expected calibration error",
    )
    outcomes = list(dict.fromkeys(str(row["outcome"]) for row in rows))
    for i, name in enumerate(outcomes):
        mine = [row for row in rows if row["outcome"] == name]
        x = [row["draft"] + 0.22 * (i - (len(outcomes) - 1) / 2) for row in mine]
        for at, row in zip(x, mine):
            ax.plot([at, at], [row["ece"], row["ece_after"]], color=PALETTE[i], linewidth=1)
        ax.plot(x, [row["ece"] for row in mine], MARKERS[i], color=PALETTE[i], label=name)
        ax.plot(
            x,
            [row["ece_after"] for row in mine],
            MARKERS[i],
            color=PALETTE[i],
            markerfacecolor="white",
        )
        for at, row in zip(x, mine):
            if row["by_chance"]:
                ax.plot(
                    [at - 0.07, at + 0.07], [row["by_chance"]] * 2, color="#555555", linewidth=1.5
                )
    ax.plot([], [], "o", color=GREY, markerfacecolor="white", label="hollow: fitted temperatures")
    ax.plot([], [], color="#555555", linewidth=1.5, label="bar: by chance, so few outcomes")
    ax.axhline(ECE, color=GREY, linewidth=0.8, linestyle=":", label=f"target {ECE:g}")
    ax.set_xticks(sorted({row["draft"] for row in rows}))
    ax.set_ylim(bottom=0)
    figure.legend(frameon=False, fontsize=9, ncols=2, loc="outside lower center")
    return figure


def routing(results: Results) -> Figure | None:
    kinds = ("all", "prefill", "decode", "document")
    rows = results.rows("routing.layers", "layer", *kinds)
    if not rows:
        return None
    figure, ax = panel(
        "Load of the busiest expert by layer, held-out text", "layer", "max / mean load (median)"
    )
    names = {
        "all": "all text",
        "prefill": "prefill batch",
        "decode": "decode batch",
        "document": "document",
    }
    for i, kind in enumerate(kinds):
        ax.plot(
            [row["layer"] for row in rows],
            [row[kind] for row in rows],
            color=PALETTE[i],
            marker=MARKERS[i],
            markersize=5,
            label=names[kind],
        )
    ax.axhline(1, color=GREY, linewidth=0.8, linestyle=":", label="perfectly even")
    ax.set_xticks([row["layer"] for row in rows])
    ax.set_ylim(bottom=0)
    ax.legend(frameon=False, ncols=2)
    return figure


def ablations(results: Results) -> Figure | None:
    rows = results.rows("ablations", "removed", "change_percent", "low", "high", "says")
    if not rows:
        return None
    title = "More bits on held-out text without a mechanism"
    figure, ax = panel(
        title,
        "change in %, 95 % over modules (linear below 0.1, log above)",
        "",
        (SIZE[0], 1.6 + 0.3 * len(rows)),
    )
    rows = rows[::-1]
    for at, row in enumerate(rows):
        shown = str(row["says"]).startswith(("worse", "better"))
        colour = BLUE if shown else ORANGE
        if row["low"] is not None:
            ax.plot([row["low"], row["high"]], [at, at], color=colour, linewidth=1.5)
        ax.plot(
            [row["change_percent"]],
            [at],
            "o" if shown else "s",
            color=colour,
            markerfacecolor=colour if shown else "white",
        )
    ax.plot([], [], "o", color=BLUE, label="0 is outside the interval")
    ax.plot([], [], "s", color=ORANGE, markerfacecolor="white", label="a null: 0 is inside")
    ax.axvline(0, color=GREY, linewidth=0.8)
    ax.set_yticks(range(len(rows)), [str(row["removed"]) for row in rows])
    ax.set_xscale("symlog", linthresh=0.1, linscale=0.5)
    ax.set_xlim(left=1.5 * min(-0.05, *(row["low"] or 0 for row in rows)))
    plain_ticks(ax.xaxis)
    ax.grid(visible=False, axis="y")
    ax.grid(axis="x", color="#dddddd", linewidth=0.6)
    figure.legend(frameon=False, loc="outside lower center", ncols=2)
    return figure


def plain_ticks(axis: Any) -> None:
    """0.01, 0.1, 1, 10 in place of powers of ten."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
    axis.set_minor_formatter(NullFormatter())


if __name__ == "__main__":
    raise SystemExit(main())
