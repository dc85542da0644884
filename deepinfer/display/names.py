"""How the names of a trace look: a foldable tree, one line a kind of value, with its shape."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from deepinfer.display import html

# part of a name -> (shape, what it is); t rows, m streams, d width, k chosen, v vocabulary
SHAPES: dict[str, tuple[str, str]] = {
    "in": ("t m d", "the residual streams as they come"),
    "engram.rows": ("t c", "rows of the n-gram table"),
    "engram.value": ("t d", "what the n-gram memory adds to the streams"),
    "engram.streams": ("t m d", "the streams behind the n-gram memory"),
    "attn.in": ("t d", "what attention reads: the streams, collapsed and normed"),
    "attn.window_keys": ("t d", "window keys"),
    "attn.entries": ("g d", "compressed entries"),
    "attn.index_keys": ("g d", "index keys of the entries"),
    "attn.selected": ("t k", "ids of the selected entries, -1 none"),
    "attn.candidates": ("t c", "candidate blocks"),
    "attn.out": ("t d", "what attention gives"),
    "attn.comb": ("t m m", "the matrix that mixes the streams behind it"),
    "ffn.in": ("t d", "what the experts read"),
    "ffn.experts": ("t k", "ids of the routed experts"),
    "ffn.weights": ("t k", "their weights"),
    "ffn.out": ("t d", "what the experts give"),
    "ffn.comb": ("t m m", "the matrix that mixes the streams behind it"),
    "features": ("t d", "what the drafter reads"),
    "final": ("t d", "the streams behind the last layer, collapsed"),
    "logits": ("t v", "logits of the rows that want them"),
    "mtp.base": ("t v", "logits of the drafter before its Markov head"),
}


def names_text(names: Sequence[str]) -> str:
    """One line for layers with the same values: 'layers.0, .2-.4  in  attn.in ...'."""
    lines = []
    for parts, layers in _alike(names):
        where = _where(layers)
        lines.append(f"{where}: {'  '.join(parts)}" if layers[0] else "  ".join(parts))
    head = f"{len(names)} names (t rows, m streams, d width, k chosen, g entries, v vocabulary)"
    return "\n".join([head, *(f"  {line}" for line in lines)])


def names_html(names: Sequence[str]) -> str:
    """A folded table for layers with the same values."""
    body = []
    for parts, layers in _alike(names):
        rows = [_row(part) for part in parts]
        table = html.table(("name", "shape", "what it is"), rows)
        body.append(
            html.folded(f"{_where(layers)}: {len(parts)} values", table) if layers[0] else table
        )
    note = f"{len(names)} names; t rows, m streams, d width, k chosen, g entries, v vocabulary"
    return html.card("Names of a trace", *body, note=note)


def _row(part: str) -> tuple[html.Html, html.Html, str]:
    shape, what = SHAPES[part]
    return html.code(part), html.code(shape), what


def _alike(names: Sequence[str]) -> list[tuple[tuple[str, ...], list[str]]]:
    """(parts, layers that have exactly these), in the order of the walk; '' for the model's own."""
    layers = [
        (layer, tuple(part for _, part in run))
        for layer, run in groupby(map(_split, names), lambda x: x[0])
    ]
    out: dict[tuple[bool, str, tuple[str, ...]], list[str]] = {}
    for layer, parts in layers:
        out.setdefault((not layer, layer.split(".")[0], parts), []).append(layer)
    return [(parts, found) for (_, _, parts), found in out.items()]


def _split(name: str) -> tuple[str, str]:
    """'layers.3.attn.out' -> ('layers.3', 'attn.out'); 'final' -> ('', 'final')."""
    words = name.split(".")
    return (".".join(words[:2]), ".".join(words[2:])) if len(words) > 2 else ("", name)


def _where(layers: list[str]) -> str:
    """'layers.0, 2-4' of ['layers.0', 'layers.2', 'layers.3', 'layers.4']."""
    if not layers[0]:
        return "model"
    numbers = [int(layer.split(".")[1]) for layer in layers]
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    said = ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)
    return f"{layers[0].split('.')[0]}.{said}"
