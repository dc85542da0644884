"""How a Comparison looks: its figures, and where the other engine says something else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from deepinfer.display import html
from deepinfer.display.numbers import counted, fmt
from deepinfer.display.text import grid
from deepinfer.measure.bootstrap import FEWEST, RESAMPLES, SEED

if TYPE_CHECKING:
    from deepinfer.measure.comparison import Comparison, Pair

SHOWN_PROMPTS = 4  # of one engine
SHOWN_TOKENS = 120  # of one prompt
NOISE = 1e-9  # what is below differs between machines and means nothing: shown as such
OTHER, FIRST = 1, 5  # colours: a teacher-forced row, the first token of the free text
COLUMNS = (
    "engine",
    "rows",
    "max |dlogit|",
    "mean |dlogit|",
    "KL(a||b) nats",
    "top-1 agreement",
    "texts that differ",
)


def comparison_text(c: Comparison) -> str:
    """One line an engine, what each changes, and what the intervals are."""
    body = grid(
        COLUMNS, [_plain(row) for row in c.table()], COLUMNS[1:4], width=140, title=_title(c)
    )
    return "\n".join([body, *_changes(c), *_notes(c)])


def comparison_html(c: Comparison) -> str:
    """The same, with bars, and a's texts with the places where an engine would say otherwise."""
    rows = [_shown(c, row) for row in c.table()]
    body = [html.table(COLUMNS, rows, numeric=COLUMNS[1:4])]
    body += [html.block(html.muted(note)) for note in _notes(c)]
    if any(len(p.text_a) for pairs in c.pairs.values() for p in pairs):
        body.append(html.block(html.tag("b", "a's continuations"), style="margin-top:8px"))
        texts = [_texts(c, name, pairs) for name, pairs in c.pairs.items()]
        if len(texts) == 1:
            body += texts
        else:
            body += [
                html.folded(f"{name}: {_count(pairs)} differ", shown)
                for (name, pairs), shown in zip(c.pairs.items(), texts, strict=True)
            ]
        legend = {"b finds another token likelier": OTHER, "b's own text differs from here": FIRST}
        body.append(html.legend(legend))
    return html.card("Comparison with a", *body, note=_counts(c))


def _title(c: Comparison) -> str:
    return f"Comparison with a: {_counts(c)}"


def _counts(c: Comparison) -> str:
    pairs = next(iter(c.pairs.values()))
    rows, chosen = sum(p.rows for p in pairs), sum(len(p.text_a) for p in pairs)
    prompts, rows = counted(len(pairs), "prompt"), counted(rows, "teacher-forced row")
    return f"{prompts}, {rows}, {chosen} of them on a's continuation"


def _plain(row: dict[str, Any]) -> list[str]:
    """COLUMNS of one engine, as text."""
    where = _where(row)
    return [
        row["engine"],
        _rows(row),
        _number(row["max_dlogit"]),
        _number(row["mean_dlogit"]),
        f"{_number(row['kl'])} {_interval(row, 'kl')}".rstrip(),
        f"{_number(row['agreement'])} {_interval(row, 'agreement')}".rstrip(),
        f"{row['texts_differ']} of {row['prompts']}" + (f", {where}" if where else ""),
    ]


def _shown(c: Comparison, row: dict[str, Any]) -> list[object]:
    """COLUMNS of one engine, as HTML: a figure, and in a second line what qualifies it."""
    name = row["engine"]
    title = [html.code(name), *([html.chip("approximate", 5)] if c.approximate[name] else [])]
    changed = html.muted(html.code(c.changes[name] or "set up as a is"))
    bar = "" if row["agreement"] is None else html.bar(row["agreement"], 2, "5em")
    return [
        _two(html.join(title, " "), changed),
        _rows(row),
        _number(row["max_dlogit"]),
        _number(row["mean_dlogit"]),
        _two(_number(row["kl"]), _whole(_interval(row, "kl"))),
        _two(html.join([bar, " ", _number(row["agreement"])]), _whole(_interval(row, "agreement"))),
        _two(f"{row['texts_differ']} of {row['prompts']}", html.muted(_where(row))),
    ]


def _two(above: object, below: object) -> html.Html:
    return html.join([html.block(above, style="white-space:nowrap"), html.block(below)])


def _whole(interval: str) -> html.Html:
    return html.tag("span", html.muted(interval), style="white-space:nowrap")


def _rows(row: dict[str, Any]) -> str:
    return f"{row['rows']}" + (f" (+{row['dropped']} dropped)" if row["dropped"] else "")


def _number(x: float | None) -> str:
    if x is None:
        return "none"
    return "<1e-9" if 0 < abs(x) < NOISE else fmt(float(x))


def _interval(row: dict[str, Any], metric: str) -> str:
    low, high = row[f"{metric}_low"], row[f"{metric}_high"]
    if low is None or max(abs(low), abs(high)) < NOISE:
        return ""
    return f"[{_number(low)}, {_number(high)}]"


def _where(row: dict[str, Any]) -> str:
    if row["first_diff"] is None:
        return ""
    said = f"first at {row['first_diff']}"
    return said if row["margin"] is None else f"{said}, margin up to {_number(row['margin'])}"


def _count(pairs: Sequence[Pair]) -> str:
    return f"{sum(p.first is not None for p in pairs)} of {counted(len(pairs), 'text')}"


def _changes(c: Comparison) -> list[str]:
    out = []
    for name, change in c.changes.items():
        approximate = c.approximate[name]
        note = f" (approximate: {', '.join(approximate)})" if approximate else ""
        out.append(
            f"{name} is a with {change}{note}" if change else f"{name} is set up as a is{note}"
        )
    if c.approximate["a"]:
        out.append(f"a itself is approximate: {', '.join(c.approximate['a'])}")
    return out


def _notes(c: Comparison) -> list[str]:
    n = min(sum(bool(p.compared.any()) for p in pairs) for pairs in c.pairs.values())
    notes = [f"[low, high]: 95 % over prompts, {RESAMPLES} bootstrap resamples, seed {SEED}"]
    if n < FEWEST:
        notes = [f"{counted(n, 'prompt')} with rows: too few for an interval, {FEWEST} are needed"]
    if any((~p.compared).any() for pairs in c.pairs.values() for p in pairs):
        notes.append("dropped: rows that a replay policy did not compute in a or in that engine")
    return notes


# ------------------------------------------------------------------------------------------ texts


def _texts(c: Comparison, name: str, pairs: Sequence[Pair]) -> html.Html:
    """a's continuations, those that an engine would change first."""
    order = sorted(range(len(pairs)), key=lambda i: (pairs[i].first is None, i))
    shown = [_text(c, name, i, pairs[i]) for i in order[:SHOWN_PROMPTS]]
    hidden = len(pairs) - len(shown)
    more = counted(hidden, "more prompt") + "; .per_prompt has all"
    return html.block(*shown, *([html.block(html.muted(more))] if hidden else []))


def _text(c: Comparison, name: str, i: int, p: Pair) -> html.Html:
    start = p.rows - len(p.text_a)
    pieces = []
    for k, token in enumerate(p.text_a[:SHOWN_TOKENS]):
        t = start + k
        other = bool(p.compared[t]) and p.values["agreement"][t] == 0
        colour = FIRST if k == p.first else OTHER if other else None
        pieces.append((c.text(token), colour, _tooltip(c, p, k, t)))
    hidden = len(p.text_a) - len(pieces)
    more = html.muted(f" and {counted(hidden, 'more token')}; .per_token has all") if hidden else ""
    said = "the free text is the same"
    if p.first is not None:
        gap = "" if p.margin is None else f", a's margin {_number(p.margin)}"
        said = f"token {p.first}: {c.text(p.chosen_b(p.first))!r} instead of "
        said += f"{c.text(p.text_a[p.first])!r}{gap}"
    head = html.block(html.muted(f"prompt {i}: {said}"), style="margin-top:4px")
    return html.block(head, html.tokens(pieces), more, *_own(c, name, p))


def _own(c: Comparison, name: str, p: Pair) -> list[html.Html]:
    """The other engine's own text, if it differs: folded, from the first token that differs on."""
    if p.first is None:
        return []
    shown = p.text_b[:SHOWN_TOKENS]
    pieces = [
        (c.text(token), FIRST if k == p.first else None, f"output position {k}, id {token}")
        for k, token in enumerate(shown)
    ]
    return [html.folded(f"{name}'s own text", html.tokens(pieces))]


def _tooltip(c: Comparison, p: Pair, k: int, t: int) -> str:
    facts = [f"output position {k}, id {p.text_a[k]}"]
    if not p.compared[t]:
        return facts[0] + ", row dropped"
    facts.append(f"KL {_number(float(p.values['kl'][t]))} nats")
    if p.values["agreement"][t] == 0:
        facts.append(
            f"likeliest here: {c.text(int(p.top_b[t]))!r} instead of {c.text(int(p.top_a[t]))!r}"
        )
    return ", ".join(facts)
