"""How a Background and a RequestHandle look in a terminal and in a notebook. No clock value is
shown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfer.display import html
from deepinfer.display.numbers import counted

if TYPE_CHECKING:
    from deepinfer.engine.background.background import Background
    from deepinfer.engine.background.handle import RequestHandle
    from deepinfer.engine.request import Request

SHOWN_REQUESTS = 20
SHOWN_CHARACTERS = 60
COLUMNS = ("request", "state", "prompt", "tokens")
FAILED = 5  # colour of an error


def background_text(b: Background) -> str:
    """One line: what runs, waits and has ended; the last step's fault, if it had one."""
    return f"Background({_counts(b)})" + (f"\n{_failure(b)}" if b._failure else "")


def background_html(b: Background) -> str:
    """A table of what it runs."""
    requests = list(b._owned.values())
    rows = [
        (r.id, r.status, len(r.prompt), f"{len(r.output)} of at most {r.params.max_tokens}")
        for r in requests[:SHOWN_REQUESTS]
    ]
    hidden = len(requests) - SHOWN_REQUESTS
    note = f"and {counted(hidden, 'more request')}" if hidden > 0 else None
    numeric = ("request", "prompt", "tokens")
    body = [html.table(COLUMNS, rows, numeric=numeric, note=note)] if rows else []
    if b._failure:
        body.append(html.block(html.chip("error", FAILED), " ", _failure(b)))
    return html.card("Background", *body, note=_counts(b))


def running_text(r: RequestHandle) -> str:
    """Its state, and the end of its text so far."""
    text, head = r.text, f"RequestHandle {r.id}: {_status(r)}"
    return f"{head}, {_tail(text)!r}" if text else head


def running_html(r: RequestHandle) -> str:
    text = [html.code(_tail(r.text))] if r.text else []
    return html.card(f"RequestHandle {r.id}", *text, note=_status(r))


def _status(r: RequestHandle) -> str:
    state = f"finished ({r.status})" if r.done else r.status
    return f"{state}, {counted(len(r.token_ids), 'token')}"


def _tail(text: str) -> str:
    return text if len(text) <= SHOWN_CHARACTERS else "..." + text[-SHOWN_CHARACTERS:]


def _counts(b: Background) -> str:
    owned: list[Request] = list(b._owned.values())
    handle = sum(r.status == "running" for r in owned)
    ended = ", ".join(f"{n} {reason}" for reason, n in sorted(b._ended.items()))
    parts = [f"{handle} running", f"{len(owned) - handle} waiting"]
    return ", ".join([*(["closed"] if b.closed else parts), f"{b._ended.total()} ended"]) + (
        f" ({ended})" if ended else ""
    )


def _failure(b: Background) -> str:
    return f"the last step failed and ended what was added here: {b._failure}; the next add goes on"
