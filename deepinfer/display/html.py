"""Small pieces of HTML. Everything else in the library that shows HTML is composed of these.

Text is escaped unless it is `Html` already. Colours are translucent or the page's own text colour,
so that a piece reads on a light and on a dark theme; there is no script and no style sheet, so it
survives in a saved notebook and a viewer that strips both. Equal arguments give equal output.
"""

import html as _html
from collections.abc import Iterable, Mapping, Sequence

# Okabe and Ito's palette, told apart with any common colour-blindness (jfly.uni-koeln.de/color).
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#999999", "#F0E442")

FONT = "font-family:ui-sans-serif,system-ui,sans-serif;font-size:13px;line-height:1.45"
MONO = "font-family:ui-monospace,SFMono-Regular,Menlo,monospace;font-size:12px"
LINE = "rgba(128,128,128,.35)"
WASH = "rgba(128,128,128,.12)"
LONG_CELL = 48  # characters: a longer text is set in lines
NO_MATHS = "mathjax_ignore tex2jax_ignore"  # a notebook would set text between dollars as maths
GRID = "border-collapse:collapse;margin:4px 0;font:inherit;color:inherit"


# Control characters as their pictures; a line break keeps its effect.
_VISIBLE = {code: chr(0x2400 + code) for code in range(32)} | {10: "\u21b5\n", 127: "\u2421"}
# The same in a cell of a table, where a token may be a line break and nothing else.
_SHORT = {code: chr(0x2400 + code) for code in range(32)} | {
    10: "\u21b5",
    9: "\u2192",
    127: "\u2421",
}


class Html(str):
    """Text that is HTML already and is not escaped again."""

    __slots__ = ()


def escape(value: object) -> Html:
    """`value` as HTML text; `Html` comes back as it is."""
    return value if isinstance(value, Html) else Html(_html.escape(str(value), quote=True))


def join(parts: Iterable[object], between: str = "") -> Html:
    return Html(escape(between).join(escape(part) for part in parts))


def tag(name: str, *children: object, style: str = "", **attributes: object) -> Html:
    """One element. `class_` and the like lose their underscore; attributes of None are left out."""
    given = {"style": style or None, **attributes}
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_html.escape(str(value), quote=True)}"'
        for key, value in given.items()
        if value is not None
    )
    return Html(f"<{name}{written}>{join(children)}</{name}>")


def block(*children: object, style: str = "") -> Html:
    return tag("div", *children, style=style)


def muted(text: object) -> Html:
    return tag("span", text, style="opacity:.65")


def code(text: object) -> Html:
    return tag("span", text, style=MONO)


def card(title: object, *children: object, note: object = None) -> Html:
    """The outer frame of what an object shows: a title, a muted note beside it, and a body."""
    head = block(tag("b", title), *([" ", muted(note)] if note is not None else []))
    style = f"{FONT};border:1px solid {LINE};border-radius:6px;padding:8px 12px;max-width:60em"
    return tag("div", head, *children, style=style, class_=NO_MATHS)


def chip(text: object, colour: int | None = None, title: str | None = None) -> Html:
    """A short label. `colour` counts into PALETTE; None is neutral."""
    wash = WASH if colour is None else PALETTE[colour % len(PALETTE)] + "40"
    style = f"{MONO};background:{wash};border-radius:4px;padding:1px 6px;margin:1px 2px"
    return tag("span", text, style=style + ";display:inline-block", title=title)


def tokens(pieces: Iterable[tuple[str, int | None, str | None]]) -> Html:
    """Running text, one piece a token: (text, colour into PALETTE or None, tooltip or None)."""
    spans = []
    for text, colour, title in pieces:
        wash = "transparent" if colour is None else PALETTE[colour % len(PALETTE)] + "40"
        style = f"background:{wash};border-bottom:1px solid {LINE};white-space:pre-wrap"
        spans.append(tag("span", text.translate(_VISIBLE), style=style, title=title))
    return block(*spans, style=f"{MONO};overflow-wrap:anywhere;margin:1px 0")


def legend(entries: Mapping[str, int | None]) -> Html:
    """What the colours of `tokens` or `bars` stand for."""
    return block(*(chip(name, colour) for name, colour in entries.items()), style="margin:4px 0")


def pairs(items: Mapping[str, object]) -> Html:
    """Names and values in two columns."""
    rows = [
        tag("tr", _cell("td", muted(name), "left"), _cell("td", value, "left"))
        for name, value in items.items()
    ]
    return tag("table", tag("tbody", *rows), style=GRID)


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    numeric: Iterable[str] = (),
    caption: object = None,
    note: object = None,
) -> Html:
    """A table; the columns named in `numeric` are set to the right. `note` stands below it."""
    right = set(numeric)
    sides = ["right" if name in right else "left" for name in columns]
    head = tag("tr", *(_cell("th", name, side) for name, side in zip(columns, sides, strict=True)))
    body = [
        tag("tr", *(_cell("td", value, side) for value, side in zip(row, sides, strict=True)))
        for row in rows
    ]
    grid = tag(
        "table",
        tag("thead", head, style=f"border-bottom:1px solid {LINE}"),
        tag("tbody", *body),
        style=GRID,
    )
    above = [block(tag("b", caption))] if caption else []
    below = [block(muted(note))] if note else []
    style = f"{FONT};overflow-x:auto"
    return tag("div", *above, grid, *below, style=style, class_=NO_MATHS)


def bar(fraction: float, colour: int = 0, width: str = "8em", title: str | None = None) -> Html:
    """A horizontal bar filled to `fraction`, which is cut to 0..1 (NaN is drawn empty)."""
    filled = 0.0 if fraction != fraction else min(1.0, max(0.0, float(fraction)))
    inner = block(
        style=f"background:{PALETTE[colour % len(PALETTE)]};width:{filled:.1%};height:100%"
    )
    outer = f"background:{WASH};width:{width};height:.7em;border-radius:3px;overflow:hidden"
    return tag("div", inner, style=outer + ";display:inline-block", title=title)


def folded(summary: object, *children: object) -> Html:
    """Details behind a line that opens on a click."""
    line = tag("summary", summary, style="cursor:pointer")
    return tag("details", line, *children, style="margin:4px 0")


def _blanks_count(value: object) -> bool:
    """Whether `value` is text that HTML would change: it folds blanks and drops outer ones."""
    if not isinstance(value, str) or isinstance(value, Html):
        return False
    return value != " ".join(value.split())


def _cell(kind: str, value: object, side: str) -> Html:
    style = f"text-align:{side};padding:2px 10px 2px 0;vertical-align:top"
    if kind == "td" and _blanks_count(value):
        style += ";white-space:pre"
    elif kind == "td" and type(value) is str and len(value) > LONG_CELL:  # no Html
        style += ";min-width:24em;white-space:normal;overflow-wrap:anywhere"
    if type(value) is str:
        value = value.translate(_SHORT)
    return tag(kind, value, style=style + (";font-weight:600" if kind == "th" else ""))
