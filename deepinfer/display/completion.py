"""How a Completion and a list of them look in a terminal and in a notebook."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfer.display import html
from deepinfer.display.numbers import counted, fmt
from deepinfer.display.text import grid

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deepinfer.engine.completion import Completion

SHOWN_TOKENS = 400  # of one completion
SHOWN_ITEMS = 20  # of a list
SHOWN_CHARACTERS = 600
SHOWN_PROMPT = 200  # characters of a prompt, its end
FAILED = 5  # colour of an error
DRAFT = 0  # colour of a token that a draft proposed


def completion_text(c: Completion) -> str:
    """The head line, then the text (its first 600 characters, and how many more there are)."""
    text = repr(c.text[:SHOWN_CHARACTERS])
    hidden = len(c.text) - SHOWN_CHARACTERS
    more = f"\n{counted(hidden, 'more character')} in .text" if hidden > 0 else ""
    cut = "..." if len(c.prompt) > SHOWN_PROMPT else ""
    prompt = f"\nprompt {cut}{c.prompt[-SHOWN_PROMPT:]!r}" if c.prompt else ""
    return f"{_head(c)}{prompt}\n{text}{more}"


def completion_html(c: Completion) -> str:
    """The text token by token: what drafts proposed is coloured, the rest says where it is from."""
    body = [*_prompt(c), _tokens(c)]
    if c.accepted_drafts:
        body.append(html.legend({"accepted draft": DRAFT, "the target's own draw": None}))
    if c.error is not None:
        body.append(html.block(html.chip("error", FAILED), " ", c.error))
    return html.card(f"Completion {c.index}", *body, note=_facts(c))


def completions_text(items: Sequence[Completion]) -> str:
    """One line an item."""
    columns = ("item", "prompt", "tokens", "finish", "text")
    rows = [
        [
            str(c.index),
            str(len(c.prompt_token_ids)),
            str(len(c.token_ids)),
            c.finish_reason,
            _said(c),
        ]
        for c in items[:SHOWN_ITEMS]
    ]
    return grid(columns, rows, columns[:3], _hidden(items), title=counted(len(items), "completion"))


def completions_html(items: Sequence[Completion]) -> str:
    """One row an item, with its tokens coloured as in `completion_html`."""
    columns = ("item", "prompt", "tokens", "finish", "text")
    rows = [
        [c.index, len(c.prompt_token_ids), len(c.token_ids), _finish(c)]
        + [c.error if c.error is not None and not c.token_ids else _tokens(c)]
        for c in items[:SHOWN_ITEMS]
    ]
    body = [html.table(columns, rows, numeric=columns[:3], note=_hidden(items))]
    if any(c.accepted_drafts for c in items[:SHOWN_ITEMS]):
        body.append(html.legend({"accepted draft": DRAFT, "the target's own draw": None}))
    return html.card(counted(len(items), "completion"), *body)


def _prompt(c: Completion) -> list[html.Html]:
    """The end of the prompt, if its text is known."""
    if not c.prompt:
        return []
    cut = "\u2026" if len(c.prompt) > SHOWN_PROMPT else ""
    text = html.tokens([(cut + c.prompt[-SHOWN_PROMPT:], None, "prompt")])
    return [html.block(html.muted("prompt"), text), html.block(html.muted("output"))]


def _finish(c: Completion) -> object:
    return c.finish_reason if c.error is None else html.chip(c.finish_reason, FAILED)


def _head(c: Completion) -> str:
    error = f"\nerror: {c.error}" if c.error is not None else ""
    return f"Completion {c.index}: {_facts(c)}{error}"


def _facts(c: Completion) -> str:
    facts = [
        counted(len(c.prompt_token_ids), "prompt token"),
        counted(len(c.token_ids), "token"),
    ]
    if c.accepted_drafts:
        facts.append(f"{c.accepted_drafts} of them from drafts, {counted(_steps(c), 'step')}")
    if c.logprobs:
        facts.append(f"mean logprob {fmt(sum(c.logprobs) / len(c.logprobs))}")
    return ", ".join([*facts, f"finished: {c.finish_reason}"])


def _steps(c: Completion) -> int:
    return len({step.step for step in c.steps})


def _tokens(c: Completion) -> html.Html:
    pieces = c.pieces or ((c.text,) if c.text else ())
    shown = [
        (piece, DRAFT if _drafted(c, i) else None, _tooltip(c, i))
        for i, piece in enumerate(pieces[:SHOWN_TOKENS])
    ]
    hidden = len(pieces) - len(shown)
    more = counted(hidden, "more token") + "; .table() has all"
    note = [html.block(html.muted(more))] if hidden else []
    return html.join([html.tokens(shown), *note])


def _drafted(c: Completion, i: int) -> bool:
    return i < len(c.steps) and c.steps[i].source == "draft"


def _tooltip(c: Completion, i: int) -> str | None:
    if i >= len(c.steps) or len(c.pieces) != len(c.token_ids):
        return None
    step = c.steps[i]
    return (
        f"position {i}, id {c.token_ids[i]}, logprob {fmt(float(c.logprobs[i]))}, "
        f"step {step.step} row {step.row}, {step.source}"
    )


def _said(c: Completion) -> str:
    return f"error: {c.error}" if c.error is not None else repr(c.text)


def _hidden(items: Sequence[Completion]) -> str:
    hidden = len(items) - SHOWN_ITEMS
    return f"{hidden} of {len(items)} items hidden; .table() has all" if hidden > 0 else ""
