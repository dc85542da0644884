"""The figures, drawn from the stored results alone. Each takes the parts and gives its axes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
from deepinfer.display.html import PALETTE
from deepinfer.display.plots import MARKERS
from deepinfer.display.replay import DASHES
from matplotlib.axes import Axes

from experiments.replay_error.files import Part

Parts = Mapping[str, Part]
Row = Mapping[str, Any]
FLOOR = 1e-10  # of a logarithmic axis: what is below is rounding
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
    ax: Axes, points: Sequence[Row], x: str, y: str, i: int, label: str, fmt: str = "-", size: int = 4
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
        xs, ys, yerr=bars, label=label, color=PALETTE[i % len(PALETTE)], capsize=2, linestyle=fmt,
        marker=MARKERS[i % len(MARKERS)], markersize=size, linewidth=1.2,
    )  # fmt: skip


def floor_lines(ax: Axes, found: Iterable[Row], column: str) -> None:
    for i, row in enumerate(found):
        if row[column] > FLOOR:
            ax.axhline(
                row[column], color="0.4", linestyle=DASHES[i % len(DASHES)], linewidth=1,
                label=str(row["policy"]),
            )  # fmt: skip


def finished(ax: Axes, x: str, y: str, title: str = "", log: bool = True, legend: bool = True) -> Axes:
    if log:
        ax.set_yscale("log")
        ax.set_ylim(bottom=FLOOR / 2)
    ax.set(xlabel=x, ylabel=y, title=title)
    ax.spines[["top", "right"]].set_visible(False)
    if legend:
        ax.legend(frameon=False, fontsize="small")
    return ax


def panels(count: int, width: float = 10, height: float = 4) -> list[Axes]:
    _, axes = plt.subplots(
        1, count, figsize=(width, height), dpi=65, layout="constrained", squeeze=False
    )  # a notebook is less than 400 kB
    return list(axes[0])


# -------------------------------------------------------------------------------------- figures


def keep(parts: Parts) -> list[Axes]:
    """Mean, median, p99 and maximum over keep, floors on the same tokens beside."""
    axes, main = panels(2, 11), deepest(parts, "keep")
    short = [r for r in rows(parts, "keep") if str(r["policy"]).startswith("short")]
    points = sorted([*short, *main], key=lambda r: r["keep"])
    refused = min(r["keep"] for r in main)
    for ax, columns in zip(axes, (("kl", "kl_median"), ("kl_p99", "kl_max"))):
        ax.axvspan(0, refused, color="0.93", label=f"keep < {refused}: an engine refuses")
        for i, column in enumerate(columns):
            name = {"kl": "mean", "kl_median": "median", "kl_p99": "p99", "kl_max": "maximum"}[column]
            line(ax, points, "keep", column, i, name)
        for i, name in enumerate(("vLLM", "halo")):
            (row,) = rows(parts, "keep", policy=name)
            line(ax, [row], "keep", columns[0], 2 + i, f"{name}, {'mean' if ax is axes[0] else 'p99'}", "", 7)
        floor_lines(ax, rows(parts, "floors"), columns[0])
        ax.set_xlim(left=0)
        finished(ax, "keep: prompt rows above the cut", KL, legend=False)
    axes[1].legend(frameon=False, fontsize="x-small", loc="upper left", bbox_to_anchor=(1, 1))
    handles, words = axes[0].get_legend_handles_labels()
    axes[0].legend(handles[-4:], words[-4:], frameon=False, fontsize="x-small", loc="lower left")
    return axes


def depth(parts: Parts) -> list[Axes]:
    """Cuts at later layers: over keep / window, and over the share of the way to the exact length."""
    axes, found = panels(2, 11), [r for r in rows(parts, "keep") if layers_of(r)]
    for ax, x in zip(axes, ("windows", "depth")):
        for i, n in enumerate(sorted({layers_of(r) for r in found}, reverse=True)):
            points = [r for r in found if layers_of(r) == n and r[x] is not None]
            if points:
                line(ax, sorted(points, key=lambda r: r[x]), x, "kl", i, f"n = {n}")
    floor_lines(axes[0], rows(parts, "floors", policy="fidelity 0"), "kl")
    floor_lines(axes[1], rows(parts, "floors", policy="fidelity 0"), "kl")
    finished(axes[0], "keep / window", KL)
    finished(axes[1], "(keep - W) / ((n - 1)(W - 1))", KL, legend=False)
    return axes


def windows(parts: Parts) -> list[Axes]:
    """Relative L2 of window keys by layer and by distance from the cut."""
    axes, main = panels(2, 11), [r["policy"] for r in deepest(parts, "keep")]
    for ax, table, x in ((axes[0], "layers", "layer"), (axes[1], "distance", "distance")):
        for i, name in enumerate(["short 1", "vLLM", *main[:2], *main[3:]][: len(PALETTE)]):
            points = [dict(r) for r in rows(parts, "keep", table, policy=name)]
            if table == "distance":
                points = [r | dict(distance=(r["distance"] + r["until"] - 1) / 2) for r in points]
            points = [r for r in sorted(points, key=lambda r: r[x]) if r["rel_l2"]]
            if points:
                line(ax, points, x, "rel_l2", i, str(name))
        ax.set_yscale("log")
    axes[0].set_xticks(sorted({r["layer"] for r in rows(parts, "keep", "layers")}))
    finished(axes[0], "layer", "relative L2 of window keys", log=False)
    finished(axes[1], "distance from the cut, tokens", "relative L2 of window keys", log=False, legend=False)
    return axes


def lengths(parts: Parts) -> Axes:
    """The same tokens behind prompts of several lengths."""
    (ax,), found = panels(1, 7), rows(parts, "length")
    names = list(dict.fromkeys(r["policy"] for r in found))
    for i, name in enumerate(names):
        points = [r for r in found if r["policy"] == name and r["keep"] < r["prompt"]]
        line(ax, points, "prompt", "kl", i, str(name))
    floor = rows(parts, "length", "floors summary")
    line(ax, floor, "prompt", "kl", len(names), "fidelity 0", "--")
    ax.set_xscale("log", base=2)
    ax.set_xticks(sorted({r["prompt"] for r in found}), sorted({r["prompt"] for r in found}))
    return finished(ax, "prompt, tokens", KL)


def turns(parts: Parts) -> list[Axes]:
    """Each turn of a conversation; chained: its pages stem from the turns before it."""
    axes, found = panels(2, 11), rows(parts, "turns")
    for ax, column in zip(axes, ("kl", "kl_p99")):
        for i, way in enumerate(dict.fromkeys(r["way"] for r in found)):
            fmt = "--" if way == "fidelity 0" else "-"
            points = [r for r in found if r["way"] == way and r[column] > 1e-5]  # turn 0 has no hit
            line(ax, points, "turn", column, i, str(way), fmt)
        ax.set_xticks(sorted({r["turn"] for r in found}))
        finished(ax, "turn", f"{KL}, {'mean' if column == 'kl' else 'p99'}", legend=ax is axes[0])
        ax.set_ylim(bottom=min(r[column] for r in found if r[column] > 1e-5) / 4)
    return axes


def sides(parts: Parts) -> list[Axes]:
    """Behind a hit without its state KV."""
    axes = panels(2, 11, 3.2)
    found, floors = rows(parts, "sides"), rows(parts, "floors", "summary sides")
    for ax, column in zip(axes, ("kl", "kl_p99")):
        for y, row in enumerate(found):
            low, high = (max(row[f"{column}_{end}"], FLOOR) for end in ("low", "high"))
            ax.plot([low, high], [y, y], color=PALETTE[0], linewidth=2)
            ax.plot([max(row[column], FLOOR)], [y], "o", color=PALETTE[0])
        for i, row in enumerate(floors):
            if row[column] > FLOOR:
                ax.axvline(row[column], color="0.4", linestyle=DASHES[i], linewidth=1, label=row["policy"])
        ax.set_yticks(range(len(found)), [str(r["policy"]) for r in found])
        ax.invert_yaxis()
        ax.set_xscale("log")
        finished(ax, f"{KL}, {'mean' if column == 'kl' else 'p99'}", "", log=False, legend=False)
    axes[1].legend(frameon=False, fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
    return axes


def domains(parts: Parts) -> Axes:
    """Python beside English prose."""
    (ax,) = panels(1, 7)
    for i, (part, floor) in enumerate((("keep", "floors"), ("prose", "prose"))):
        names = {r["policy"] for r in rows(parts, "prose")}
        points = [r for r in rows(parts, part) if r["policy"] in names]
        line(ax, sorted(points, key=lambda r: r["keep"]), "keep", "kl", i, "Python" if not i else "English")
        table = "summary" if not i else "floors summary"
        (row,) = rows(parts, floor, table, policy="fidelity 0")
        words = f"fidelity 0, {'English' if i else 'Python'}"
        ax.axhline(row["kl"], color=PALETTE[i], linestyle="--", linewidth=1, label=words)
    return finished(ax, "keep: prompt rows above the cut", KL)


def drafts(parts: Parts) -> Axes:
    """What the drafter loses: expected tokens of a step, less exact's."""
    (ax,) = panels(1, 7, 3.6)
    found = sorted(
        (r for r in rows(parts, "keep") if not 0 < layers_of(r) < layers_of(deepest(parts, "keep")[0])),
        key=lambda r: r["keep"],
    )
    for y, row in enumerate(found):
        ax.plot([row["length_change_low"], row["length_change_high"]], [y, y], color=PALETTE[0], linewidth=2)
        ax.plot([row["length_change"]], [y], "o", color=PALETTE[0])
    ax.axvline(0, color="0.6", linewidth=1)
    ax.set_yticks(range(len(found)), [str(r["policy"]) for r in found])
    ax.invert_yaxis()
    ax.set_xscale("symlog", linthresh=0.01)
    return finished(ax, "expected tokens of a draft step, less exact's", "", log=False, legend=False)


def divergence(parts: Parts) -> list[Axes]:
    """Share of texts that still are exact's, over the output position."""
    axes, found = panels(2, 10, 3.6), rows(parts, "free", "divergence")
    for ax, way in zip(axes, dict.fromkeys(r["way"] for r in found)):
        for i, name in enumerate(dict.fromkeys(r["policy"] for r in found)):
            some = [r for r in found if r["way"] == way and r["policy"] == name]
            most = some[0]["tokens"]
            ends = [most if r["diverged"] is None else r["diverged"] for r in some]
            left = [sum(e >= k for e in ends) / len(ends) for k in range(most + 1)]
            ax.step(range(most + 1), left, where="post", label=str(name), color=PALETTE[i])
        finished(ax, "output tokens", "share of texts that are exact's", str(way), log=False, legend=ax is axes[0])
        ax.set_ylim(0, 1.03)
    return axes


def error_and_cost(parts: Parts) -> Axes:
    """Error over the rows that a prefill runs."""
    (ax,) = panels(1, 7)
    main = [r for r in deepest(parts, "keep")]
    line(ax, sorted(main, key=lambda r: r["keep"]), "rows_share", "kl", 0, "cut at the first decoder layer")
    for i, (name, label) in enumerate((("vLLM", "vLLM's cut"), ("halo", "halo"), ("short 1", "no window"))):
        line(ax, rows(parts, "keep", policy=name), "rows_share", "kl", i + 1, label, "", 7)
    floor_lines(ax, rows(parts, "floors"), "kl")
    finished(ax, "rows x layers of the prefill, share of exact's", KL, legend=False)
    ax.legend(frameon=False, fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
    return ax


def seconds(parts: Parts) -> list[Axes]:
    """CPU milliseconds a token by length, and speedups beside what is predicted. Pale: with torch's top-k."""
    axes, found = panels(2, 11), [dict(r) for r in rows(parts, "cost", "seconds")]
    for r in found:
        r["ms"] = 1e3 * r["seconds"] / r["length"]
    names = list(dict.fromkeys((r["topk"], r["policy"]) for r in found))
    for i, (topk, name) in enumerate(names):
        points = [r for r in found if (r["topk"], r["policy"]) == (topk, name)]
        other = topk != names[0][0]
        label, fmt = (f"{name}, torch's top-k", "--") if other else (name, "-")
        line(axes[0], points, "length", "ms", i, label, fmt)
        if name != "exact":
            line(axes[1], points, "length", "speedup", i, label, fmt)
        if name == "compact" and not other:
            for column, words in (("predicted_flops", "FLOPs"), ("predicted_rows", "rows x layers")):
                style = dict(color="0.3", linestyle=":" if words == "FLOPs" else "-.", linewidth=1)
                axes[1].plot([r["length"] for r in points], [r[column] for r in points], label=f"compact, by {words}", **style)
    for ax in axes:
        ax.set_xscale("log", base=2)
        at = sorted({r["length"] for r in found})
        ax.set_xticks(at, at)
        ax.set_ylim(bottom=0)
    finished(axes[0], "prompt, tokens", "CPU ms a prompt token", log=False)
    finished(axes[1], "prompt, tokens", "speedup over exact", log=False)
    return axes


def where(parts: Parts) -> list[Axes]:
    """What the CPU time of a prefill goes into, and its FLOPs, a prompt token. Hatched: the decoder."""
    axes, found = panels(2, 12, 4.6), rows(parts, "cost", "parts")
    first = found[0]["topk"]
    keys = list(dict.fromkeys((r["topk"], r["length"], r["policy"]) for r in found))
    ops = list(dict.fromkeys(r["op"] for r in found))
    kinds = [(s, o) for s in ("encoder", "decoder") for o in ops if o != "other"]
    for ax, column, scale in ((axes[0], "seconds", 1e3), (axes[1], "flops", 1e-6)):
        left = [0.0] * len(keys)
        for side, op in [*kinds, ("outside", "other")]:
            some = {
                (r["topk"], r["length"], r["policy"]): r[column] for r in found if (r["side"], r["op"]) == (side, op)
            }
            widths = [scale * some.get(key, 0.0) / key[1] for key in keys]
            ax.barh(
                range(len(keys)), widths, left=left, height=0.7, color=PALETTE[ops.index(op) % len(PALETTE)],
                hatch="//" if side == "decoder" else None, edgecolor="white", linewidth=0.3,
                label=op if side != "decoder" else None,
            )  # fmt: skip
            left = [a + b for a, b in zip(left, widths)]
        names = [f"{p}, {n:,}{'' if k == first else ', torch' + chr(39) + 's top-k'}" for k, n, p in keys]
        ax.set_yticks(range(len(keys)), names if ax is axes[0] else [""] * len(keys))
        ax.invert_yaxis()
        words = "CPU ms a prompt token" if column == "seconds" else "MFLOP a prompt token (formula)"
        finished(ax, words, "", log=False, legend=False)
    axes[1].legend(frameon=False, fontsize="x-small", loc="upper left", bbox_to_anchor=(1, 1))
    return axes
