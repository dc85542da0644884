"""Drafts on the host: what a request holds of its next draft, and who drafts."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from deepinfer.engine.request import Request


@dataclass(frozen=True, slots=True)
class PendingDraft:
    """A request's next draft on the host. at: tokens of the request that it continues; survival:
    running product of confidences; stale: the survival of the draft before it (what a budget may look
    at); dists: (probs, logprobs) of each token, kept for rule 'rejection'."""

    at: int
    tokens: tuple[int, ...]
    confidence: tuple[float, ...]
    survival: tuple[float, ...]
    stale: tuple[float, ...]
    dists: tuple[tuple[Tensor, Tensor], ...] = ()


def pending_draft(request: Request) -> PendingDraft | None:
    """The draft of what comes next; None also where only that of an earlier place is there."""
    d = request.draft
    return d if d is not None and d.at == request.num_tokens else None
