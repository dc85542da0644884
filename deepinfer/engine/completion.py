"""Completion and Completions: what comes back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deepinfer.engine.text import Detokenizer

if TYPE_CHECKING:
    from pandas import DataFrame

    from deepinfer.engine.request import Request
    from deepinfer.tables.table import Table


@dataclass(frozen=True, slots=True)
class TokenStep:
    """Where an output token came from: engine step, row within the sequence's rows of that step, and
    whether a draft put it there ('draft') or the target's own draw ended the step ('target')."""

    step: int
    row: int
    source: str


@dataclass(frozen=True)
class Completion:
    """The result of one prompt. text and token_ids are the output alone; logprobs[i] is the model's
    log-probability (temperature 1, after masks) of token i; steps[i] says where it came from.
    index: the place of its prompt in what `generate` was given; from `step`, `abort` or a RequestHandle,
    the request id. error is set, and finish_reason 'error', where the request failed; what it had
    emitted stays. cached_tokens: tokens of the prompt that the prefix cache had, so that they were
    not computed. prompt: its text without special tokens, '' without a tokenizer."""

    index: int
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    logprobs: tuple[float, ...]
    steps: tuple[TokenStep, ...]
    error: Exception | None = None
    top_logprobs: tuple[dict[int, float], ...] = ()
    prompt_logprobs: tuple[float | None, ...] = ()
    pieces: tuple[str, ...] = ()
    cached_tokens: int = 0
    prompt: str = ""

    @property
    def accepted_drafts(self) -> int:
        """Output tokens that a draft put there."""
        return sum(s.source == "draft" for s in self.steps)

    def table(self) -> Table:
        """One row per output token: position, id, text, logprob, step, row, source."""
        from deepinfer.tables.table import Table

        return Table(
            [
                dict(position=i, id=t, text=p, logprob=lp, step=s.step, row=s.row, source=s.source)
                for i, (t, p, lp, s) in enumerate(
                    zip(self.token_ids, self.pieces, self.logprobs, self.steps)
                )
            ]
        )

    def __repr__(self) -> str:
        from deepinfer.display.completion import completion_text

        return completion_text(self)

    def _repr_html_(self) -> str:
        from deepinfer.display.completion import completion_html

        return completion_html(self)


@dataclass(frozen=True, slots=True)
class StreamedToken:
    """One token of `eng.stream`: its id, the text it completes ('' inside a character), logprob."""

    id: int
    text: str
    logprob: float


def completion(index: int, r: Request, tokenizer: Any) -> Completion:
    """What a request gives back, as far as it has come."""
    text = Detokenizer(tokenizer)
    return Completion(
        index=index,
        prompt_token_ids=tuple(r.prompt),
        token_ids=tuple(r.output),
        text=text.all(r.output),
        finish_reason=r.finish_reason or "running",
        logprobs=tuple(r.logprobs),
        steps=tuple(r.steps),
        error=r.error,
        top_logprobs=tuple(r.top_logprobs),
        prompt_logprobs=tuple(r.prompt_logprobs),
        pieces=tuple(text.push(t) for t in r.output),
        cached_tokens=r.prefix.cached_tokens or 0,
        prompt=text.all(r.prompt),
    )


def failed(index: int, error: Exception) -> Completion:
    """The Completion of a prompt that never became a request."""
    return Completion(index, (), (), "", "error", (), (), error)


class Completions(list[Completion]):
    """What `generate` returns: out[i] belongs to input i, whatever happened to it."""

    provenance: Mapping[str, object] | None = None  # of the engine and sampling that made it

    def raise_for_errors(self) -> Completions:
        """Raise the first error (naming the item and how many failed); else return self."""
        failed = [c for c in self if c.error is not None]
        if failed:
            first = failed[0]
            raise RuntimeError(
                f"{len(failed)} of {len(self)} requests failed; the first is item {first.index}: {first.error}"
            ) from first.error
        return self

    @property
    def text(self) -> list[str]:
        """The output text of each item."""
        return [c.text for c in self]

    def to_pandas(self) -> DataFrame:
        """`table` as a DataFrame (needs pandas)."""
        return self.table().to_pandas()

    def table(self) -> Table:
        """One row per item: index, prompt and output lengths, finish reason, mean logprob, error, text."""
        from deepinfer.tables.table import Table

        return Table([_summary(c) for c in self], provenance=self.provenance)

    def __iter__(self) -> Iterator[Completion]:
        return super().__iter__()

    def __repr__(self) -> str:
        from deepinfer.display.completion import completions_text

        return completions_text(self)

    def _repr_html_(self) -> str:
        from deepinfer.display.completion import completions_html

        return completions_html(self)


def _summary(c: Completion) -> dict:
    n = len(c.token_ids)
    return dict(
        index=c.index,
        prompt_tokens=len(c.prompt_token_ids),
        tokens=n,
        finish_reason=c.finish_reason,
        mean_logprob=sum(c.logprobs) / n if n else None,
        accepted_drafts=c.accepted_drafts,
        error=None if c.error is None else str(c.error),
        text=c.text,
    )
