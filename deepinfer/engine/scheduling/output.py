"""What a scheduler decides: ScheduledRequest and SchedulerOutput, plain records of numbers.

They hold no request, so they can be sent to another rank or process as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepinfer.engine.request import Request


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """One request's rows of a step: positions start..stop-1. Drafts come on top in a decode request.

    id: of the request; emits: whether its last row gives the next token; decode: whether it is the
    one row of the last token, to which drafts are added. Make it with `ScheduledRequest.of`, which
    fills those two in. While a step is in flight, start and stop of a decode request are upper
    bounds (see `Request`).
    """

    id: int
    start: int
    stop: int
    emits: bool
    decode: bool

    @staticmethod
    def of(request: Request, start: int | None = None, stop: int | None = None) -> ScheduledRequest:
        """The rows start..stop-1 of a request; None: from its first row that is not computed, up to
        its last."""
        start = request.optimistic_computed if start is None else start
        tokens = request.optimistic_tokens
        stop = tokens if stop is None else stop
        emits = stop == tokens
        decode = emits and stop - start == 1 and tokens > len(request.prompt)
        return ScheduledRequest(id=request.id, start=start, stop=stop, emits=emits, decode=decode)


KINDS = ("prefill", "decode", "mixed", "idle")


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """kind: one of KINDS; 'idle' has no requests."""

    kind: str
    scheduled: tuple[ScheduledRequest, ...] = ()
