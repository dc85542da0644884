"""How the report of `di.check` and a text of `di.data` look in a notebook."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfer.display import html

if TYPE_CHECKING:
    from deepinfer.conformance.report import Report
    from deepinfer.data.texts import Text

COLOURS = {"ok": 2, "FAILED": 5}  # of a law's status; others are neutral
SHOWN_LINES = 40  # of a text


def report_html(r: Report) -> str:
    """One row a law: its status, the law, and the smallest failing case."""
    rows = [
        (html.chip(x.status, COLOURS.get(x.status)), x.law, html.code(x.case) if x.case else "")
        for x in r.results
    ]
    verdict = html.chip("holds" if r else f"{len(r.failures)} broken", 2 if r else 5)
    head = html.join([f"{r.subject} as {r.slot} ", verdict])
    return html.card(head, html.table(("status", "law", "case"), rows))


def passage_html(text: Text) -> str:
    """Where it is from, and its first lines."""
    lines = text.splitlines()
    shown = "\n".join(lines[:SHOWN_LINES])
    hidden = len(lines) - SHOWN_LINES
    place = f"{text.path} from {text.offset:,}" if text.offset else text.path
    body = html.tag("pre", shown, style=f"{html.MONO};white-space:pre-wrap;margin:4px 0")
    more = [html.block(html.muted(f"{hidden} more lines"))] if hidden > 0 else []
    return html.card(place, body, *more, note=f"{len(text):,} characters, {text.licence}")
