"""InFlightStep: a step between its launch and its commit, and what it leaves for the next one.

While step n is in flight the host knows only totals and upper bounds of it. What its acceptance
decides stays on the device: `Carried` is what step n+1 reads there, `StepOutput` what the commit of n
reads on the host. A result belongs to a request as it was when the step was launched: a request
that has finished or was preempted since then gets nothing (`Request.awaits`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from deepinfer.engine.request import InFlightTokens, Request
from deepinfer.engine.scheduling.output import ScheduledRequest
from deepinfer.engine.stats.records import StepRecord
from deepinfer.engine.step.speculation import DraftBatch

if TYPE_CHECKING:
    from deepinfer.engine.prefix.snapshot_capture import SnapshotCapture


@dataclass(frozen=True, slots=True)
class Carried:
    """The requests that a step samples for, as they are after it, on the device. recent: [e, g] the
    last ids of each, newest last, -1 if it has fewer; length: [e] its tokens; out: [e] those of its
    output; drafts: what comes next."""

    recent: Tensor
    length: Tensor
    out: Tensor
    drafts: DraftBatch


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step gave, for the host. Per request that it samples for: rows [e] that ran, asked [e]
    of the verifier, count [e] and tokens [e, w] emitted, logprobs and finite [e, w] of those rows,
    top [e, w, k] values and ids; drafts of what comes next. prompt: by number of the scheduled
    request, log-probabilities [rows] of the prompt tokens that its rows predict, and which rows are
    not finite. broken: [b] position of the first row of each chunk that is not finite, None in a
    decode step."""

    rows: Tensor
    asked: Tensor | None
    count: Tensor
    tokens: Tensor
    logprobs: Tensor
    finite: Tensor
    top: tuple[Tensor, Tensor] | None
    drafts: DraftBatch
    prompt: dict[int, tuple[Tensor, Tensor]]
    broken: Tensor | None


@dataclass(slots=True, eq=False)
class InFlightStep:
    """A launched step, as its commit needs it. scheduled, requests: what runs, b of each;
    sampling_requests: numbers of the scheduled requests that emit; drafting: numbers of the sampling
    requests whose next draft is made; budget: most rows of the sequences with drafts; capture: what
    collects window rows at page ends; grammar_errors: what grammars raised when they were asked, by
    request id; job: the launched work, which sets `carried`."""

    step: int
    kind: str
    record: StepRecord
    scheduled: tuple[ScheduledRequest, ...]
    requests: tuple[Request, ...]
    sampling_requests: tuple[int, ...] = ()
    drafting: tuple[int, ...] = ()
    budget: int = 0
    capture: SnapshotCapture | None = None
    grammar_errors: dict[int, Exception] = field(default_factory=dict)
    carried: Carried | None = None
    job: Any = None
    traced: bool = False
    _places: dict[int, int] = field(default_factory=dict)

    def place(self, request: Request) -> int:
        """The request's number among the sampling requests, -1 if this step gives it no token."""
        if not request.awaits(self.step):
            return -1
        if not self._places:
            self._places = {self.scheduled[i].id: e for e, i in enumerate(self.sampling_requests)}
        return self._places.get(request.id, -1)

    @property
    def wanted(self) -> bool:
        """Whether a request still waits for it."""
        return any(r.awaits(self.step) for r in self.requests)


def surely_last(request: Request) -> bool:
    """Whether the next emission, one token at least, is its last."""
    return (
        request.num_tokens + sum(a.tokens > 0 for a in request.in_flight) + 1 >= request.max_length
    )


def mark_in_flight(request: Request, s: ScheduledRequest, drafts: int, step: int) -> None:
    """Record in the request what this step may bring it, with up to `drafts` drafts on top."""
    tokens = InFlightTokens(
        step=step,
        rows=s.stop - s.start,
        tokens=1 + drafts if s.emits else 0,
        written=s.stop + drafts,
    )
    request.in_flight = (*request.in_flight, tokens)
