"""Scores: log-probabilities of given texts, by teacher-forced passes through an engine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from deepinfer.engine.text import byte_count, encode_prompt, silent

if TYPE_CHECKING:
    from deepinfer.engine.engine import Engine
    from deepinfer.tables.table import Table


@dataclass(frozen=True)
class Score:
    """One text: logprobs[i], in nats, is that of token_ids[first + i]; nbytes: of the text that the
    scored tokens spell (0 without a tokenizer). silent: (position in token_ids, name) of the scored
    tokens that spell no bytes, such as the end token: they count in nats and perplexity, and
    bits_per_byte leaves them out."""

    token_ids: tuple[int, ...]
    first: int
    logprobs: tuple[float, ...]
    nbytes: int
    silent: tuple[tuple[int, str], ...] = ()

    @property
    def nats(self) -> float:
        return -math.fsum(self.logprobs)

    @property
    def perplexity(self) -> float:
        """exp of the mean nats of a token."""
        return math.exp(self.nats / len(self.logprobs)) if self.logprobs else math.nan

    @property
    def bits_per_byte(self) -> float:
        """Of the tokens that spell bytes; NaN if no byte was scored."""
        return self.spelt_nats / math.log(2) / self.nbytes if self.nbytes else math.nan

    @property
    def spelt_nats(self) -> float:
        """Nats of the tokens that spell bytes."""
        left_out = {position - self.first for position, _ in self.silent}
        return -math.fsum(x for i, x in enumerate(self.logprobs) if i not in left_out)


def score(logits: Tensor, ids: list[int], first: int, tokenizer) -> Score:
    """The Score of ids[first:], whose distributions are the rows of logits [len(ids) - first, v]."""
    wanted = torch.tensor(ids[first:], device=logits.device)
    logprobs = logits.log_softmax(-1).gather(1, wanted[:, None])[:, 0]
    places = [first + at for at in silent(tokenizer, ids[first:])]
    return Score(
        token_ids=tuple(ids),
        first=first,
        logprobs=tuple(logprobs.tolist()),
        nbytes=byte_count(tokenizer, ids[first:]),
        silent=tuple((at, tokenizer.id_to_token(ids[at]) or str(ids[at])) for at in places),
    )


def score_text(
    eng: Engine,
    index: int,
    text: str | Sequence[int],
    first: int,
    tokenizer: Any,
    special: bool = False,
) -> Score:
    """The Score of what follows the first `first` tokens of text number `index` of a list. Raises
    ValueError naming it where nothing follows, or where a scored row has no logits."""
    ids = encode_prompt(eng, text, special)
    if first >= len(ids):
        raise ValueError(
            f"score: text {index} has {len(ids)} tokens and prompt={first}: nothing follows to be "
            "scored; give a longer text or a smaller prompt"
        )
    logits = eng.logits(ids, prompt=first)[first - 1 : -1]
    if not (finite := logits.isfinite().all(-1)).all():
        at = first - 1 + int((~finite).nonzero()[0])
        raise ValueError(
            f"score: text {index}, position {at}: the replay policy {eng.slots['replay']!r} "
            "dropped that row, or its logits are not finite; try replay='exact'"
        )
    return score(logits, ids, first, tokenizer)


@dataclass(frozen=True)
class Scores:
    """What `eng.score` returns: scores[i] belongs to text i. The properties are over all texts."""

    items: tuple[Score, ...]
    provenance: dict[str, object] | None = None

    @property
    def perplexity(self) -> float:
        """exp of the mean nats of a token, over all texts."""
        nats = math.fsum(s.nats for s in self.items)
        tokens = sum(len(s.logprobs) for s in self.items)
        return math.exp(nats / tokens) if tokens else math.nan

    @property
    def bits_per_byte(self) -> float:
        """Of the tokens that spell bytes, over all texts."""
        nats = math.fsum(s.spelt_nats for s in self.items)
        nbytes = sum(s.nbytes for s in self.items)
        return nats / math.log(2) / nbytes if nbytes else math.nan

    def table(self) -> Table:
        """One row per text: tokens, bytes, nats, perplexity, bits_per_byte."""
        from deepinfer.display.numbers import counted, fmt
        from deepinfer.tables.table import Table

        rows = [
            {
                "index": i,
                "tokens": len(s.logprobs),
                "bytes": s.nbytes,
                "nats": s.nats,
                "perplexity": s.perplexity,
                "bits_per_byte": s.bits_per_byte,
            }
            for i, s in enumerate(self.items)
        ]
        silent = [name for s in self.items for _, name in s.silent]
        left_out = ""
        if silent:
            names = ", ".join(sorted(set(silent)))
            left_out = f", {counted(len(silent), 'silent token')} left out of it ({names})"
        together = (
            f"perplexity {fmt(self.perplexity)}, bits per byte {fmt(self.bits_per_byte)}{left_out}"
        )
        return Table(
            rows, title=f"{counted(len(rows), 'text')}: {together}", provenance=self.provenance
        )

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, i: int) -> Score:
        return self.items[i]

    def __repr__(self) -> str:
        return repr(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()
