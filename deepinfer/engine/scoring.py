"""Scores: log-probabilities of given texts, by teacher-forced passes through an engine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from deepinfer.engine.text import byte_count, encode_prompt

if TYPE_CHECKING:
    from deepinfer.engine.engine import Engine
    from deepinfer.tables.table import Table


@dataclass(frozen=True)
class Score:
    """One text: logprobs[i], in nats, is that of token_ids[first + i]; nbytes: of the text that the
    scored tokens spell (0 without a tokenizer)."""

    token_ids: tuple[int, ...]
    first: int
    logprobs: tuple[float, ...]
    nbytes: int

    @property
    def nats(self) -> float:
        return -math.fsum(self.logprobs)

    @property
    def perplexity(self) -> float:
        """exp of the mean nats of a token."""
        return math.exp(self.nats / len(self.logprobs)) if self.logprobs else math.nan

    @property
    def bits_per_byte(self) -> float:
        """NaN where no byte was scored."""
        return self.nats / math.log(2) / self.nbytes if self.nbytes else math.nan


def score(logits: Tensor, ids: list[int], first: int, tokenizer) -> Score:
    """The Score of ids[first:], whose distributions are the rows of logits [len(ids) - first, v]."""
    wanted = torch.tensor(ids[first:], device=logits.device)
    logprobs = logits.log_softmax(-1).gather(1, wanted[:, None])[:, 0]
    return Score(tuple(ids), first, tuple(logprobs.tolist()), byte_count(tokenizer, ids[first:]))


def score_text(
    eng: Engine, index: int, text: str | Sequence[int], first: int, tokenizer: Any
) -> Score:
    """The Score of what follows the first `first` tokens of text number `index` of a list. Raises
    ValueError naming it where nothing follows, or where a scored row has no logits."""
    ids = encode_prompt(eng, text)
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
        return self._transaction.perplexity

    @property
    def bits_per_byte(self) -> float:
        return self._transaction.bits_per_byte

    @property
    def _transaction(self) -> Score:
        logprobs = tuple(x for s in self.items for x in s.logprobs)
        return Score((), 0, logprobs, sum(s.nbytes for s in self.items))

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
        together = f"perplexity {fmt(self.perplexity)}, bits per byte {fmt(self.bits_per_byte)}"
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
