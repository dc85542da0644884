"""Teacher-forced passes through the engine's own cache and slots: logits and scores of given ids."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from deepinfer.engine.runtime import Runtime
from deepinfer.engine.step.batch import Work, build
from deepinfer.engine.text import byte_count, encode_prompt, silent
from deepinfer.model.context import Tap
from deepinfer.slots.protocols import Prompt, ReplayPlan

if TYPE_CHECKING:
    from deepinfer.engine.engine import Engine
    from deepinfer.tables.table import Table


def forced_logits(
    rt: Runtime, ids: list[int], prompt: int | None, chunks: list[int] | None, tap_of=None
) -> Tensor:
    """[t, v] logits of every row. The first `prompt` ids are the replay policy's prompt (default all);
    the rest is fed as decode rows. Rows a policy drops are NaN; under an exact policy that drops rows
    so are all prompt rows but the last, which come from windows that are cut. See Engine.logits."""
    prompt = len(ids) if prompt is None else prompt
    if not 1 <= prompt <= len(ids):
        raise ValueError(f"prompt={prompt}: the first rows to treat as the prompt, 1..{len(ids)}")
    sizes = chunk_sizes(len(ids), prompt, chunks, rt.limits.rows)
    plan = rt.replay_plan(Prompt(prompt))
    need = rt.resources.pages_of(len(ids))
    if need > rt.pages.available or not rt.states.free:
        raise RuntimeError(
            f"a teacher-forced pass of {len(ids)} tokens needs {need} pages and a state slot; "
            f"{rt.pages.available} pages are free of {rt.pages.size}: finish or abort running requests, "
            "or make the engine with more num_pages"
        )
    pages, (slot,) = rt.pages.take(need), rt.states.take(1)
    try:
        return torch.cat(list(_chunks(rt, ids, prompt, sizes, plan, pages, slot, tap_of)))
    finally:
        rt.pages.give(pages)
        rt.states.give([slot])


def chunk_sizes(total: int, prompt: int, chunks: list[int] | None, most: int) -> list[int]:
    """Rows per step; default: as few steps as the row limit allows, the prompt's apart from the rest's."""
    if chunks is None:
        cuts = [*range(0, prompt, most), *range(prompt, total, most), total]
        return [b - a for a, b in zip(cuts, cuts[1:])]
    if sum(chunks) != total or any(c < 0 for c in chunks):
        raise ValueError(
            f"chunks={chunks} are {sum(chunks)} rows, the ids are {total}: give rows per step"
        )
    return list(chunks)


def _chunks(rt: Runtime, ids, prompt, sizes, plan: ReplayPlan, pages, slot, tap_of):
    vocab, back = rt.config.vocab_size, rt.config.engram_max_ngram_size - 1
    start = 0
    for size in sizes:
        if size == 0:
            continue
        before = ids[max(start - back, 0) : start]
        work = Work(ids[start : start + size], start, before, pages, slot, plan, "all")
        batch = build(
            [work],
            rt.config,
            rt.model.device,
            decode=start >= prompt and size <= rt.limits.backtracking,
        )
        tap: Tap | None = None if tap_of is None else tap_of(batch)
        logits = rt.model(rt.context(batch, tap)).logits
        dropped = size - logits.shape[0]
        if (
            plan.exact and plan.rows_from[-1]
        ):  # of prompt rows it promises the last one's numbers only
            logits[: max(min(prompt - 1, start + size) - start - dropped, 0)] = math.nan
        yield torch.cat([logits.new_full((dropped, vocab), math.nan), logits])
        start += size


# ----------------------------------------------------------------------------------------- scores


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
