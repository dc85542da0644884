"""Drawings with matplotlib, in one palette. matplotlib is imported when something is drawn."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from deepinfer.display.html import PALETTE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FILES = ("agg", "cairo", "pdf", "pgf", "ps", "svg", "template")  # backends that show no figure
MARKERS = "osD^vPX*"  # series differ by shape too, for print and for any kind of sight


def axes(ax: "Axes | None" = None) -> "Axes":
    """`ax`, or the axes of a new figure.

    pyplot keeps every figure that it makes until somebody closes it. So it makes the figure only if
    its backend shows figures (a notebook, which closes them after the cell, or a window). Otherwise
    the figure lives as long as its axes: save it with `ax.figure.savefig(path)`.
    """
    if ax is not None:
        return ax
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "drawing needs matplotlib, which is not installed; pip install 'deepinfer-lab[lab]', "
            "or take the numbers with .to_csv() or .to_pandas()"
        ) from error
    if matplotlib.get_backend().lower() in FILES:
        figure = Figure(layout="constrained")
        FigureCanvasAgg(figure)  # what draws it
        return figure.subplots()
    import matplotlib.pyplot as plt

    return plt.subplots(layout="constrained")[1]


def series(
    lines: Mapping[str, tuple[Sequence, Sequence]],
    *,
    x: str,
    y: str,
    by: str | None = None,
    title: str = "",
    ax: "Axes | None" = None,
) -> "Axes":
    """Lines of (xs, ys), or grouped bars where an x is not a number. At most 8 series are drawn.

    lines: one (xs, ys) a series, by name. x, y, by: the labels of the axes and of the legend.
    Returns the Axes; more than 8 series are cut and the legend says so.
    """
    ax = axes(ax)
    shown = dict(list(lines.items())[: len(PALETTE)])
    if all(_number(value) for xs, _ in shown.values() for value in xs):
        for i, (name, (xs, ys)) in enumerate(shown.items()):
            ax.plot(xs, ys, label=name, color=PALETTE[i], marker=MARKERS[i], markersize=4)
    else:
        _bars(ax, shown)
    ax.set_xlabel(x)
    ax.set_ylabel(y)
    if title:
        ax.set_title(_wrapped(title, ax))
    ax.spines[["top", "right"]].set_visible(False)
    if by is not None:
        cut = f" ({len(shown)} of {len(lines)} shown)" if len(shown) < len(lines) else ""
        ax.legend(title=by + cut, frameon=False)
    return ax


def _wrapped(title: str, ax: "Axes") -> str:
    """`title` in lines that fit over `ax`; matplotlib would cut what is wider than the figure."""
    points = ax.get_position().width * ax.figure.get_figwidth() * 72
    size = ax.title.get_fontsize()
    lines = title.splitlines()
    return "\n".join(textwrap.fill(line, max(10, int(points / (0.56 * size)))) for line in lines)


def _bars(ax: "Axes", lines: Mapping[str, tuple[Sequence, Sequence]]) -> None:
    names = list(dict.fromkeys(str(value) for xs, _ in lines.values() for value in xs))
    width = 0.8 / max(1, len(lines))
    for i, (name, (xs, ys)) in enumerate(lines.items()):
        places = [names.index(str(value)) + (i - (len(lines) - 1) / 2) * width for value in xs]
        ax.bar(places, ys, width=width, label=name, color=PALETTE[i])
    ax.set_xticks(range(len(names)), names)


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
