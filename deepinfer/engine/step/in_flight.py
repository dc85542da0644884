"""InFlightStep: a step between its launch and its commit, and what it leaves for the next one.

While step n is on its way the host knows of it only totals and upper bounds. What its acceptance
decides stays on the device: `Carried` is what step n+1 reads there, `StepOutput` what the commit of n
reads on the host. A result belongs to a request as it was when the step was launched: one that has
finished or been preempted since then gets nothing (`Request.awaits`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from deepinfer.engine.request import InFlightTokens, Request
from deepinfer.engine.scheduling.output import ScheduledRequest
from deepinfer.engine.stats.records import StepRecord

if TYPE_CHECKING:
    from deepinfer.engine.prefix.snapshot_capture import SnapshotCapture
    from deepinfer.slots.protocols import Dist


@dataclass(frozen=True, slots=True)
class Carried:
    """The emitters of a step behind it, on the device. recent: [e, g] the last ids of each, newest
    last, -1 where it has fewer; length: [e] its tokens; out: [e] those of its output; drafts,
    survival: [e, n] what comes next (-1 and 0 where nothing was drafted); dists: of the drafts, for
    rule 'rejection'."""

    recent: Tensor
    length: Tensor
    out: Tensor
    drafts: Tensor
    survival: Tensor
    dists: tuple[Dist, ...] = ()


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step gave, for the host. Per emitter: rows [e] that ran, asked [e] of the verifier,
    count [e] and tokens [e, w] emitted, logprobs and finite [e, w] of those rows, top [e, w, k]
    values and ids; drafts, confidence, survival [e, n] of what comes next. prompt: by number of the
    share, log-probabilities [rows] of the prompt tokens that its rows predict, and which rows are
    not finite. broken: [requests] position of the first row of each chunk that is not finite, of a
    prefill or mixed step. errors: of grammars, by request id."""

    rows: Tensor
    asked: Tensor | None
    count: Tensor
    tokens: Tensor
    logprobs: Tensor
    finite: Tensor
    top: tuple[Tensor, Tensor] | None
    drafts: Tensor
    confidence: Tensor
    survival: Tensor
    prompt: dict[int, tuple[Tensor, Tensor]]
    broken: Tensor | None
    errors: dict[int, Exception]


@dataclass(slots=True, eq=False)
class InFlightStep:
    """scheduled: what runs; emitters: numbers of the scheduled requests that emit; drafting: numbers of the
    emitters whose next draft is made; budget: most rows of a decode step; capture: what collects
    window rows at page ends; job: the launched work, which sets `carried`."""

    step: int
    kind: str
    record: StepRecord
    scheduled: tuple[ScheduledRequest, ...]
    sampling_requests: tuple[int, ...] = ()
    drafting: tuple[int, ...] = ()
    budget: int = 0
    capture: SnapshotCapture | None = None
    carried: Carried | None = None
    job: Any = None
    traced: bool = False
    _places: dict[int, int] = field(default_factory=dict)

    def place(self, request: Request) -> int:
        """The request's number among the emitters, -1 where this step gives it no token."""
        if not request.awaits(self.step):
            return -1
        if not self._places:
            self._places = {
                self.scheduled[i].request.id: e for e, i in enumerate(self.sampling_requests)
            }
        return self._places.get(request.id, -1)

    @property
    def wanted(self) -> bool:
        """Whether anybody still waits for it."""
        return any(s.request.awaits(self.step) for s in self.scheduled)


def surely_last(request: Request) -> bool:
    """Whether the next emission, one token at least, is its last."""
    return (
        request.num_tokens + sum(a.tokens > 0 for a in request.in_flight) + 1 >= request.max_length
    )


def mark_in_flight(item: ScheduledRequest, drafts: int, step: int) -> None:
    """Record in the request what this step may bring it, with up to `drafts` drafts on top."""
    tokens = 1 + drafts if item.emits else 0
    tokens_in_flight = InFlightTokens(step, item.stop - item.start, tokens, item.stop + drafts)
    item.request.in_flight = (*item.request.in_flight, tokens_in_flight)
