"""Speculation on the host and on the device: the drafts that a step verifies, and the log of them.

    pending_draft    the draft that a request holds            DraftBatch      drafts of some sequences
    ask_budget       rows of a step, from survivals one step old
    allocate         rows of each sequence, from fresh ones    require_rows    are they possible
    proposed         what the drafter gave, as a DraftBatch    hold            each request's next draft
    draft_record     what became of one sequence's draft: an acceptance log is a list of DraftRecords

A survival is the running product of confidences: the drafter's own probability that a draft and all
before it are accepted. It is stale if it belongs to the draft before the one that is verified. A
budget may only look at stale survivals, because the host does not wait for fresh ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, takewhile
from operator import mul
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deepinfer.engine.device import put, to_host
from deepinfer.engine.request import Request
from deepinfer.slots.protocols import Dist, Draft
from deepinfer.slots.results import expect

if TYPE_CHECKING:
    from deepinfer.engine.runtime import Runtime


@dataclass(frozen=True, slots=True)
class PendingDraft:
    """A request's next draft on the host. at: tokens of the request that it continues; confidence:
    of each of its tokens; stale: survivals of the draft before it; dists: (probs, logprobs) of each
    token, kept for a verifier with rule 'rejection'."""

    at: int
    tokens: tuple[int, ...]
    confidence: tuple[float, ...]
    stale: tuple[float, ...]
    dists: tuple[tuple[Tensor, Tensor], ...] = ()

    @property
    def survival(self) -> tuple[float, ...]:
        return tuple(accumulate(self.confidence, mul))

    @property
    def whole(self) -> tuple[int, ...]:
        """Its tokens before the first that is none."""
        return tuple(takewhile(lambda token: token >= 0, self.tokens))


@dataclass(frozen=True, slots=True)
class DraftBatch:
    """Drafts of b sequences. tokens: [b, n], -1 if there is none; confidence: [b, n] float64, 0 if
    there is none; dists: n records of [b, v], for a verifier with rule 'rejection'."""

    tokens: Tensor
    confidence: Tensor
    dists: tuple[Dist, ...] = ()

    @property
    def survival(self) -> Tensor:
        """[b, n] float64 running product of the confidences."""
        return self.confidence.cumprod(-1)

    def to_host(self) -> DraftBatch:
        """Tokens and confidences in host memory; the distributions stay on the device."""
        return replace(self, tokens=to_host(self.tokens), confidence=to_host(self.confidence))

    def updated(self, new: DraftBatch, at: Tensor, chosen: Tensor) -> DraftBatch:
        """Sequence i is number at[i] of `new` if chosen[i], else it stays as it is here."""

        def pick(fresh: Tensor, old: Tensor) -> Tensor:
            return torch.where(chosen[:, None], fresh[at], old)

        def pick_dist(fresh: Dist, old: Dist) -> Dist:
            probs = pick(fresh.probs.double(), old.probs)
            return Dist(probs, pick(fresh.logprobs.double(), old.logprobs), old.finite)

        return DraftBatch(
            tokens=pick(new.tokens, self.tokens),
            confidence=pick(new.confidence, self.confidence),
            dists=tuple(map(pick_dist, new.dists, self.dists)) or self.dists,
        )


@dataclass(frozen=True, slots=True)
class DraftRecord:
    """What became of the draft of one sequence in one step. confidence, survival: of each of its
    tokens, () without a draft; stale: the survivals that the budget was made from; budget: rows
    that the step's sequences with drafts could have together; rows: rows of this sequence, the
    anchor row and a prefix of its draft; accepted: tokens of that prefix that were emitted."""

    step: int
    request: int
    confidence: tuple[float, ...]
    survival: tuple[float, ...]
    stale: tuple[float, ...]
    budget: int
    rows: int
    accepted: int


def pending_draft(request: Request) -> PendingDraft | None:
    """The draft of the request's next tokens; None if it holds none or one of an earlier place."""
    d = request.draft
    return d if d is not None and d.at == request.num_tokens else None


def stale_survival(request: Request, in_flight: bool) -> tuple[float, ...]:
    """Survivals of the draft before the one that is verified next, () if there is no such draft.
    in_flight: that next draft is on its way to the host, so the request still holds the one before."""
    if in_flight:
        return () if request.draft is None else request.draft.survival
    draft = pending_draft(request)
    return () if draft is None else draft.stale


def ask_budget(rt: Runtime, stale: Sequence[tuple[float, ...]], others: int) -> int:
    """Rows that the verifier gives to these sequences, beside `others` of the same step. stale: the
    `stale_survival` of each; a missing one counts as 1.0."""
    b, n = len(stale), rt.verifier.max_draft
    if n == 0:
        return b
    table = torch.tensor(
        [[*known[:n], *[1.0] * (n - len(known))] for known in stale], dtype=torch.float64
    ).view(b, n)
    return max(min(rt.verifier.budget(table, rt.cost), rt.limits.rows - others), b)


def draft_batch(
    rt: Runtime, held: Sequence[PendingDraft | None], device: torch.device | str
) -> DraftBatch:
    """The drafts that requests hold, None for one without."""
    n, b = rt.verifier.max_draft, len(held)
    tokens = [padded(() if d is None else d.tokens, n, -1) for d in held]
    confidence = [padded(() if d is None else d.confidence, n, 0.0) for d in held]
    return DraftBatch(
        tokens=put(tokens, device).view(b, n),
        confidence=put(confidence, device, torch.float64).view(b, n),
        dists=draft_dists(rt, held, n),
    )


def padded(values: tuple, n: int, filler: float) -> list:
    return [*values[:n], *[filler] * (n - len(values))]


def draft_dists(rt: Runtime, held: Sequence[PendingDraft | None], width: int) -> tuple[Dist, ...]:
    """The distributions of held drafts, one record a depth; zeros for a sequence without one."""
    if rt.verifier.rule != "rejection":
        return ()
    device = rt.model.device
    empty = torch.zeros(rt.config.vocab_size, dtype=torch.float64, device=device)
    dists = []
    for k in range(width):
        there = [(empty, empty) if d is None or k >= len(d.dists) else d.dists[k] for d in held]
        dists.append(
            Dist(
                torch.stack([p for p, _ in there]),
                torch.stack([lp.double() for _, lp in there]),
                torch.ones(len(there), dtype=torch.bool, device=device),
            )
        )
    return tuple(dists)


def allocate(
    rt: Runtime, drafts: DraftBatch, budget: int, width: int | None = None
) -> tuple[Tensor | None, Tensor]:
    """(rows that the verifier wants [b], None without speculation; rows [b] of each sequence: the
    anchor row and the drafts it verifies, at most `width`). The same for decode and mixed steps, on
    the device of `drafts`, without waiting for it. What the verifier wants is not checked here
    (`require_rows`). Raises TypeError or ValueError for a result of another shape."""
    tokens = drafts.tokens if width is None else drafts.tokens[:, :width]
    b, n = drafts.tokens.shape
    if n == 0:
        return None, torch.ones(b, dtype=torch.long, device=tokens.device)
    asked = rt.verifier.allocate(drafts.survival, budget)
    expect(asked, (b,), lambda: f"verifier {rt.verifier!r}.allocate", False)
    asked = asked.to(tokens.device)
    there = (tokens >= 0).long().cumprod(-1).sum(-1)
    return asked, torch.minimum(asked.clamp(1, 1 + n), 1 + there)


def require_rows(rt: Runtime, asked: list[int], budget: int) -> None:
    """Raise ValueError if the rows that a verifier wanted are impossible."""
    n = rt.verifier.max_draft
    if any(not 1 <= r <= 1 + n for r in asked):
        raise ValueError(
            f"verifier {rt.verifier!r}.allocate returned {asked}: each sequence runs 1 to {1 + n} rows"
        )
    if sum(asked) > budget:
        raise ValueError(
            f"verifier {rt.verifier!r}.allocate returned {asked}, {sum(asked)} rows: the budget is "
            f"{budget}"
        )


def proposed(draft: Draft | None, at: Tensor | None, like: Tensor, n: int) -> DraftBatch:
    """What the drafter gave for the sequences `at`, as drafts of all of them: [b, n], b and device
    those of `like`. Without a draft: of none."""
    b = like.shape[0]
    tokens = like.new_full((b, n), -1)
    confidence = torch.zeros(b, n, dtype=torch.float64, device=like.device)
    if draft is None or at is None:
        return DraftBatch(tokens=tokens, confidence=confidence)
    tokens[at] = draft.tokens
    confidence[at] = draft.confidence.double()
    return DraftBatch(
        tokens=tokens, confidence=confidence, dists=tuple(spread(d, at, b) for d in draft.dists)
    )


def spread(dist: Dist, at: Tensor, rows: int) -> Dist:
    """A distribution of the sequences `at` as one of `rows` sequences, zeros for the others."""

    def wide(x: Tensor) -> Tensor:
        return x.new_zeros(rows, *x.shape[1:]).index_copy(0, at, x)

    return replace(
        dist, probs=wide(dist.probs), logprobs=wide(dist.logprobs), finite=wide(dist.finite)
    )


def hold(requests: Mapping[int, Request], drafts: DraftBatch) -> None:
    """Give each request its next draft. requests: by number in `drafts`, which is on the host."""
    if not requests:
        return
    tokens, confidence = drafts.tokens.tolist(), drafts.confidence.tolist()
    for e, request in requests.items():
        request.draft = PendingDraft(
            at=request.num_tokens,
            tokens=tuple(tokens[e]),
            confidence=tuple(confidence[e]),
            stale=stale_survival(request, in_flight=True),
            dists=tuple((d.probs[e], d.logprobs[e]) for d in drafts.dists),
        )


def draft_record(
    draft: PendingDraft | None, step: int, request: int, budget: int, rows: int, accepted: int
) -> DraftRecord:
    """The record of the draft that a request held when the step was launched."""
    return DraftRecord(
        step=step,
        request=request,
        confidence=() if draft is None else draft.confidence,
        survival=() if draft is None else draft.survival,
        stale=() if draft is None else draft.stale,
        budget=budget,
        rows=rows,
        accepted=accepted,
    )
