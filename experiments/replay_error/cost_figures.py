"""The figures of what a reader and a machine see, from the stored results alone: drafts, free text,
costs."""

from __future__ import annotations

from matplotlib.axes import Axes

from deepinfer.display.html import PALETTE
from experiments.replay_error.figures import (
    FLOORS,
    KL,
    Parts,
    deepest,
    finished,
    floor_lines,
    from_zero,
    gray,
    layers_of,
    legend,
    line,
    panels,
    rows,
    starting,
)


def drafts(parts: Parts) -> Axes:
    """What the drafter loses: expected tokens of a step, less exact's."""
    (ax,) = panels(1, 7, 3.6)
    found = sorted(
        (
            r
            for r in rows(parts, "keep")
            if not 0 < layers_of(r) < layers_of(deepest(parts, "keep")[0])
        ),
        key=lambda r: r["keep"],
    )
    for y, row in enumerate(found):
        ax.plot(
            [row["length_change_low"], row["length_change_high"]],
            [y, y],
            color=PALETTE[0],
            linewidth=2,
        )
        ax.plot([row["length_change"]], [y], "o", color=PALETTE[0])
    ax.axvline(0, color="0.6", linewidth=1)
    ax.set_yticks(range(len(found)), [str(r["policy"]) for r in found])
    ax.invert_yaxis()
    ax.set_xscale("symlog", linthresh=0.01)
    return finished(ax, "expected tokens of a draft step, less exact's", "", log=False)


def divergence(parts: Parts) -> list[Axes]:
    """Share of texts that still equal exact's, over the output position."""
    axes, found = panels(2, 12, 3.8), rows(parts, "free", "divergence")
    names = list(dict.fromkeys(str(r["policy"]) for r in found))
    names = [n for n in names if n not in FLOORS] + [n for n in FLOORS if n in names]
    for ax, way in zip(axes, dict.fromkeys(r["way"] for r in found)):
        for i, name in enumerate(names):
            some = [r for r in found if r["way"] == way and r["policy"] == name]
            most = some[0]["tokens"]
            ends = [most if r["diverged"] is None else r["diverged"] for r in some]
            left = [sum(e >= k for e in ends) / len(ends) for k in range(most + 1)]
            style = gray(name) if name in FLOORS else dict(color=PALETTE[i], label=name)
            ax.step(range(most + 1), left, where="post", **style)
        finished(ax, "output tokens", "share of texts that are exact's", str(way), log=False)
        ax.set_ylim(0, 1.03)
    legend(axes)
    return axes


def error_and_cost(parts: Parts) -> Axes:
    """Error over the rows that a prefill runs: boxes, vLLM's boxes, stairs."""
    axes = panels(1, 8.5)
    (ax,), main = axes, deepest(parts, "keep")
    line(ax, sorted(main, key=lambda r: r["keep"]), "rows_share", "kl", 0, "box: Bounded(keep)")
    for i, (word, label) in enumerate((("vLLM", "box, vLLM's cut"), ("stairs", "stairs"))):
        points = sorted(starting(parts, "keep", word), key=lambda r: r["rows_share"])
        line(ax, points, "rows_share", "kl", i + 1, label)
    for i, (name, label) in enumerate((("halo", "halo"), ("short 1", "no window"))):
        line(ax, rows(parts, "keep", policy=name), "rows_share", "kl", i + 3, label, "", 7)
    floor_lines(ax, rows(parts, "floors"), "kl")
    finished(ax, "rows x layers of the prefill, share of exact's", KL)
    from_zero(ax, [r["kl"] for r in main])
    legend(axes)
    return ax


def seconds(parts: Parts) -> list[Axes]:
    """CPU milliseconds a token by length, and speedups beside what is predicted. Dashed: with
    torch's top-k."""
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
            for column, words in (
                ("predicted_flops", "FLOPs"),
                ("predicted_rows", "rows x layers"),
            ):
                style = dict(color="0.3", linestyle=":" if words == "FLOPs" else "-.", linewidth=1)
                axes[1].plot(
                    [r["length"] for r in points],
                    [r[column] for r in points],
                    label=f"compact, by {words}",
                    **style,
                )
    for ax in axes:
        ax.set_xscale("log", base=2)
        at = sorted({r["length"] for r in found})
        ax.set_xticks(at, [f"{n:,}" for n in at])
        ax.minorticks_off()
        ax.set_ylim(bottom=0)
    finished(axes[0], "prompt, tokens", "CPU ms a prompt token", log=False)
    finished(axes[1], "prompt, tokens", "speedup over exact", log=False)
    legend(axes)
    return axes


def where(parts: Parts) -> list[Axes]:
    """What the CPU time of a prefill goes into, and its FLOPs, a prompt token."""
    axes, found = panels(2, 12, 4), rows(parts, "cost", "parts")
    keys = list(dict.fromkeys((r["length"], r["policy"]) for r in found))
    ops = [op for op in dict.fromkeys(str(r["op"]) for r in found) if op != "other"]
    kinds = [(s, o) for s in ("encoder", "decoder") for o in ops]
    for ax, column, scale in ((axes[0], "seconds", 1e3), (axes[1], "flops", 1e-6)):
        left = [0.0] * len(keys)
        for side, op in [*kinds, ("outside", "other")]:
            some = {
                (r["length"], r["policy"]): r[column]
                for r in found
                if (r["side"], r["op"]) == (side, op)
            }
            widths = [scale * some.get(key, 0.0) / key[0] for key in keys]
            ax.barh(
                range(len(keys)),
                widths,
                left=left,
                height=0.7,
                color=PALETTE[ops.index(op) % len(PALETTE)] if op in ops else "0.2",
                hatch="//" if side == "decoder" else None,
                edgecolor="white",
                linewidth=0.3,
                label=op if side != "decoder" else None,
            )
            left = [a + b for a, b in zip(left, widths)]
        ax.barh(
            [0],
            [0],
            height=0.7,
            color="0.7",
            hatch="//",
            edgecolor="white",
            linewidth=0,
            label="hatched: decoder layers",
        )
        ax.set_yticks(range(len(keys)), [f"{p}, {n:,}" if ax is axes[0] else "" for n, p in keys])
        ax.invert_yaxis()
        words = "CPU ms a prompt token" if column == "seconds" else "MFLOP a prompt token (formula)"
        finished(ax, words, "", log=False)
    legend(axes[1:])
    return axes
