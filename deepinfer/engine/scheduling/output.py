"""What a scheduler decides: ScheduledRequest and SchedulerOutput, as plain records."""

from __future__ import annotations

from dataclasses import dataclass, field

from deepinfer.engine.request import Request


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """One request's rows of a step: positions start..stop-1. Drafts come on top in a decode request.

    emits: whether its last row gives the next token; decode: whether it is the one row behind the
    last token, to which drafts are added. Both as they are when the scheduled request is made. While a step is
    on its way, start and stop of a decode request are upper bounds (see `Request`).
    """

    request: Request
    start: int
    stop: int
    emits: bool = field(default=None, compare=False)  # type: ignore[assignment]
    decode: bool = field(default=None, compare=False)  # type: ignore[assignment]

    def __post_init__(self) -> None:
        r = self.request
        if self.emits is None:
            object.__setattr__(self, "emits", self.stop == r.optimistic_tokens)
        if self.decode is None:
            one = self.stop - self.start == 1 and r.optimistic_tokens > len(r.prompt)
            object.__setattr__(self, "decode", self.emits and one)


KINDS = ("prefill", "decode", "mixed", "idle")


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """kind: one of KINDS; 'idle' has no requests."""

    kind: str
    scheduled: tuple[ScheduledRequest, ...] = ()
