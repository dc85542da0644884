"""The figures of errors, from the stored results alone. Each takes the parts, gives its axes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from deepinfer.display.html import PALETTE
from deepinfer.display.plots import MARKERS
from deepinfer.display.replay import DASHES
from experiments.replay_error.files import Part

Parts = Mapping[str, Part]
Row = Mapping[str, Any]
FLOOR = 1e-10  # of a logarithmic axis: what is below is rounding
LEAST = 1e-8  # of a picture of turns
FLOORS = ("chunks", "fidelity 0", "fidelity 2", "top-k halved")
KL = "KL(exact || replay), nats"


def rows(parts: Parts, part: str, table: str = "summary", **equal: object) -> list[Row]:
    return [r for r in parts[part].tables[table] if all(r[k] == v for k, v in equal.items())]


def layers_of(row: Row) -> int:
    """n of a policy "n6 keep 76", 0 of another."""
    name = str(row["policy"])
    return int(name[1:].split()[0]) if name.startswith("n") and " keep " in name else 0


def deepest(parts: Parts, part: str) -> list[Row]:
    """The policies by keep that are cut at the first decoder layer."""
    found = [r for r in rows(parts, part) if layers_of(r)]
    most = max(layers_of(r) for r in found)
    return [r for r in found if layers_of(r) == most]


# ---------------------------------------------------------------------------------------- lines


def line(
    ax: Axes,
    points: Sequence[Row],
    x: str,
    y: str,
    i: int,
    label: str,
    fmt: str = "-",
    size: int = 4,
    color: str | None = None,
) -> None:
    """A column over another with its interval."""
    if not points:
        return
    xs, ys = [r[x] for r in points], [max(r[y], FLOOR) for r in points]
    bars = None
    if f"{y}_low" in points[0] and all(r[f"{y}_low"] is not None for r in points):
        low, high = ([max(r[f"{y}_{end}"], FLOOR) for r in points] for end in ("low", "high"))
        bars = [
            [max(a - b, 0) for a, b in zip(ys, low)],
            [max(b - a, 0) for a, b in zip(ys, high)],
        ]
    ax.errorbar(
        xs,
        ys,
        yerr=bars,
        label=label,
        color=color or PALETTE[i % len(PALETTE)],
        capsize=2,
        linestyle=fmt,
        marker=MARKERS[i % len(MARKERS)],
        markersize=size,
        linewidth=1.2,
    )


def gray(name: str) -> dict[str, Any]:
    """How a floor is drawn, the same one in the same way in every picture."""
    dashes = DASHES[FLOORS.index(name) % len(DASHES)]
    return dict(color="0.45", linestyle=dashes, linewidth=1.1, label=f"floor: {name}")


def floor_lines(ax: Axes, found: Iterable[Row], column: str) -> None:
    """Floors as lines across the picture; one that is rounding alone is left out."""
    for row in found:
        if row[column] > FLOOR:
            ax.axhline(row[column], **gray(str(row["policy"])))


def floor_curves(ax: Axes, found: Sequence[Row], x: str, y: str) -> None:
    """Floors that were measured at every x."""
    for name in dict.fromkeys(str(r["policy"]) for r in found):
        points = sorted((r for r in found if r["policy"] == name), key=lambda r: r[x])
        ax.plot([r[x] for r in points], [max(r[y], FLOOR) for r in points], **gray(name))


def finished(ax: Axes, x: str, y: str, title: str = "", log: bool = True) -> Axes:
    if log:
        ax.set_yscale("log")
    ax.set(xlabel=x, ylabel=y, title=title)
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def from_zero(ax: Axes, found: Iterable[float]) -> None:
    """A logarithmic axis that begins below the least of what is drawn."""
    ax.set_ylim(bottom=max(min(x for x in found if x > FLOOR) / 3, FLOOR / 2))


def legend(axes: Sequence[Axes]) -> None:
    """One legend of all panels, beside them, where it covers nothing; floors are last."""
    held: dict[str, Any] = {}
    for ax in axes:
        for handle, label in zip(*ax.get_legend_handles_labels()):
            held.setdefault(label, handle)
    held = dict(sorted(held.items(), key=lambda x: x[0].startswith("floor")))
    axes[0].figure.legend(
        held.values(), held, loc="outside right upper", frameon=False, fontsize="small"
    )


def panels(count: int, width: float = 11, height: float = 4) -> list[Axes]:
    _, axes = plt.subplots(
        1, count, figsize=(width, height), dpi=65, layout="constrained", squeeze=False
    )  # a notebook is less than 400 kB
    return list(axes[0])


# -------------------------------------------------------------------------------------- figures


def keep(parts: Parts) -> list[Axes]:
    """Mean, median, p99 and maximum over keep, floors on the same tokens beside."""
    axes, main = panels(2, 12), deepest(parts, "keep")
    short = [r for r in rows(parts, "keep") if str(r["policy"]).startswith("short")]
    points = sorted([*short, *main], key=lambda r: r["keep"])
    refused = min(r["keep"] for r in main)
    words = {"kl": "mean", "kl_median": "median", "kl_p99": "p99", "kl_max": "maximum"}
    for ax, columns, first in zip(axes, (("kl", "kl_median"), ("kl_p99", "kl_max")), (0, 4)):
        ax.axvspan(0, refused, color="0.93", label=f"keep < {refused}: refused")
        for i, column in enumerate(columns):
            line(ax, points, "keep", column, first + i, words[column])
        line(ax, starting(parts, "keep", "vLLM"), "keep", columns[0], 2, "vLLM's cut", "", 6)
        line(ax, rows(parts, "keep", policy="halo"), "keep", columns[0], 3, "halo", "", 7)
        floor_lines(ax, rows(parts, "floors"), columns[0])
        ax.set_xlim(left=0)
        finished(
            ax,
            "keep: prompt rows above the cut",
            KL,
            f"{words[columns[0]]} and {words[columns[1]]}",
        )
        ax.set_ylim(bottom=FLOOR / 2)
    legend(axes)
    return axes


def starting(parts: Parts, part: str, word: str) -> list[Row]:
    """The policies "WORD 76", "WORD 96", ... of a part, by keep."""
    found = [r for r in rows(parts, part) if str(r["policy"]).startswith(f"{word} ")]
    return sorted(found, key=lambda r: r["keep"])


def depth(parts: Parts) -> list[Axes]:
    """Cuts at later layers: over keep / window, and over the share of the exact length."""
    axes, found = panels(2, 12), [r for r in rows(parts, "keep") if layers_of(r)]
    others = (
        ("short 1", "no window"),
        (starting(parts, "keep", "vLLM")[0]["policy"], "vLLM's cut"),
        ("halo", "halo"),
    )
    for ax, x in zip(axes, ("windows", "depth")):
        layers = sorted({layers_of(r) for r in found}, reverse=True)
        for i, n in enumerate(layers):
            points = [
                r for r in found if layers_of(r) == n and r[x] is not None and r["kl"] > FLOOR
            ]
            line(ax, sorted(points, key=lambda r: r[x]), x, "kl", i, f"n = {n}")
        for i, (name, label) in enumerate(others):
            points = [
                r
                for r in rows(parts, "keep", policy=name)
                if r[x] is not None and (r[x] > 0 or x == "windows")
            ]
            line(ax, points, x, "kl", len(layers) + i, label, "", 7, "black")
        floor_lines(ax, rows(parts, "floors"), "kl")
    finished(axes[0], "keep / window", KL)
    finished(axes[1], "(keep - W) / ((n - 1)(W - 1))", KL)
    for ax in axes:
        from_zero(ax, [r["kl"] for r in (*found, *rows(parts, "keep", policy="halo"))])
    legend(axes)
    return axes


def windows(parts: Parts) -> list[Axes]:
    """Relative L2 of window keys by layer and by distance from the cut, floors beside."""
    axes, main = panels(2, 12), [r["policy"] for r in deepest(parts, "keep")]
    shown = ["short 1", starting(parts, "keep", "vLLM")[0]["policy"], main[1], main[-3], main[-1]]
    for ax, table, x in ((axes[0], "layers", "layer"), (axes[1], "distance", "distance")):
        for i, name in enumerate(dict.fromkeys(shown)):
            points = [
                r for r in middles(rows(parts, "keep", table, policy=name), table) if r["rel_l2"]
            ]
            line(ax, points, x, "rel_l2", i, str(name))
        floors = middles(rows(parts, "floors", table), table)
        floor_curves(ax, floors, x, "rel_l2")
    axes[0].set_xticks(sorted({r["layer"] for r in rows(parts, "keep", "layers")}))
    axes[0].set_ylim(bottom=min(r["rel_l2"] for r in rows(parts, "floors", "layers")) / 4)
    finished(axes[0], "layer", "relative L2 of window keys, all distances")
    finished(axes[1], "distance from the cut, tokens", "relative L2 of window keys, all layers")
    legend(axes)
    return axes


def middles(found: Iterable[Row], table: str) -> list[dict[str, Any]]:
    """Rows by layer, or by the middle of their distance bin."""
    points = [dict(r) for r in found]
    if table == "distance":
        points = [r | dict(distance=(r["distance"] + r["until"] - 1) / 2) for r in points]
    return sorted(points, key=lambda r: r["layer" if table == "layers" else "distance"])


def lengths(parts: Parts) -> list[Axes]:
    """The same tokens behind prompts of several lengths."""
    axes, found = panels(2, 12), rows(parts, "length")
    floors = rows(parts, "length", "floors summary")
    prompts = sorted({r["prompt"] for r in found})
    for ax, column, words in ((axes[0], "kl", "mean"), (axes[1], "kl_p99", "p99")):
        for i, name in enumerate(dict.fromkeys(r["policy"] for r in found)):
            points = [r for r in found if r["policy"] == name and r["keep"] < r["prompt"]]
            line(ax, points, "prompt", column, i, str(name))
        floor_curves(ax, floors, "prompt", column)
        ax.set_xscale("log", base=2)
        ax.set_xticks(prompts, [f"{p:,}" for p in prompts])
        ax.minorticks_off()
        finished(ax, "prompt, tokens", KL, words)
        from_zero(ax, [r[column] for r in (*found, *floors)])
    legend(axes)
    return axes


def turns(parts: Parts) -> list[Axes]:
    """Each turn of a conversation; chained: on pages of the turns before. Right: what that adds."""
    axes, found = panels(3, 14), rows(parts, "turns")
    ways = list(dict.fromkeys(r["way"] for r in found))
    floors = [w for w in ways if w in FLOORS]
    for ax, column, words in ((axes[0], "kl", "mean"), (axes[1], "kl_p99", "p99")):
        seen = [r for r in found if r[column] > LEAST]  # what is exact in turn 0 is rounding
        for i, way in enumerate(w for w in ways if w not in floors):
            line(ax, [r for r in seen if r["way"] == way], "turn", column, i, str(way))
        floor_curves(
            ax, [dict(r, policy=r["way"]) for r in seen if r["way"] in floors], "turn", column
        )
        ax.set_xticks(sorted({r["turn"] for r in found}))
        finished(ax, "turn", KL, words)
    numbers = sorted({r["turn"] for r in found})
    added = [
        dict(r, turn=k)
        for k in numbers
        for r in rows(parts, "turns", "pairs", first=f"fresh turn {k}", second=f"chained turn {k}")
    ]
    axes[2].axhline(0, color="0.6", linewidth=1)
    signed(axes[2], added, "turn", "difference")
    axes[2].set_xticks(numbers)
    finished(axes[2], "turn", "nats", "chained less fresh, mean", log=False)
    legend(axes)
    return axes


def signed(ax: Axes, points: Sequence[Row], x: str, y: str) -> None:
    """A column that may be below zero, with its interval."""
    xs, ys = [r[x] for r in points], [r[y] for r in points]
    if all(r[f"{y}_low"] is not None for r in points):
        ax.vlines(
            xs, [r[f"{y}_low"] for r in points], [r[f"{y}_high"] for r in points], color=PALETTE[0]
        )
    ax.plot(xs, ys, "o-", color=PALETTE[0], markersize=4, linewidth=1.2)


def sides(parts: Parts) -> list[Axes]:
    """Behind a hit without its state KV."""
    axes = panels(2, 12, 3.4)
    found, floors = rows(parts, "sides"), rows(parts, "floors")
    for ax, column in zip(axes, ("kl", "kl_p99")):
        for y, row in enumerate(found):
            low, high = (max(row[f"{column}_{end}"], FLOOR) for end in ("low", "high"))
            ax.plot([low, high], [y, y], color=PALETTE[0], linewidth=2)
            ax.plot([max(row[column], FLOOR)], [y], "o", color=PALETTE[0])
        for row in floors:
            if row[column] > FLOOR:
                ax.axvline(row[column], **gray(str(row["policy"])))
        ax.set_yticks(range(len(found)), [str(r["policy"]) if ax is axes[0] else "" for r in found])
        ax.invert_yaxis()
        ax.set_xscale("log")
        finished(ax, KL, "", "mean" if column == "kl" else "p99", log=False)
    legend(axes)
    return axes


def domains(parts: Parts) -> list[Axes]:
    """Python beside English prose, each with floors on its own tokens."""
    axes = panels(2, 12)
    names = {r["policy"] for r in rows(parts, "prose")}
    both = (
        ("keep", "floors", "summary", "Python"),
        ("prose", "prose", "floors summary", "English"),
    )
    for ax, (part, floor, table, title) in zip(axes, both):
        points = [r for r in rows(parts, part) if r["policy"] in names]
        kept = [r for r in points if layers_of(r) or r["policy"] == "short 1"]
        line(ax, sorted(kept, key=lambda r: r["keep"]), "keep", "kl", 0, "by keep")
        line(
            ax,
            [r for r in points if str(r["policy"]).startswith("vLLM")],
            "keep",
            "kl",
            2,
            "vLLM's cut",
            "",
            6,
        )
        line(ax, [r for r in points if r["policy"] == "halo"], "keep", "kl", 3, "halo", "", 7)
        floor_lines(ax, rows(parts, floor, table), "kl")
        finished(ax, "keep: prompt rows above the cut", KL, title)
    low = min(ax.get_ylim()[0] for ax in axes)
    high = max(ax.get_ylim()[1] for ax in axes)
    for ax in axes:
        ax.set_ylim(max(low, FLOOR / 2), high)
    legend(axes)
    return axes
