"""DataParallel: ranks agree on the kind of each step, prefill or decode, the same on every rank.

If ranks waited for each other's prompts, they would decode at half speed. If they never waited, they
would prefill one after another while the others idle. So the ranks vote on prefill, and only at some
steps (DeepInfer 0.1.0, csrc/engine/scheduler.hpp):

    ALL point   the number of decode steps since the last prefill is divisible by 70, 0 included:
                prefill if every rank wants to
    ANY point   the number is not 0 and divisible by 100: prefill if some rank wants to; at a step
                that is both, this one counts

A second vote asks whether any rank that wanted to prefill really has rows. If no rank has, the step
is a decode step and the count goes on. An empty prefill step would set the count back to 0, the next
step would vote again, and no rank would ever decode.

Added here: if no rank has anything to decode, every step is an ANY point. Counting to 100 without a
row would only pass the time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from deepinfer.engine.request import Request
from deepinfer.engine.scheduling.output import SchedulerOutput
from deepinfer.engine.scheduling.resources import Resources
from deepinfer.engine.scheduling.scheduler import FCFS


@dataclass(slots=True)
class DataParallelVotes:
    """Counts the votes on one rank: a pure state machine, in the same state on every rank.

    all_every, any_every: steps between ALL points and between ANY points; decode_steps: since the
    last prefill step. Raises ValueError for a distance below 1.
    """

    all_every: int = 70
    any_every: int = 100
    decode_steps: int = 0

    def __post_init__(self) -> None:
        if self.all_every < 1 or self.any_every < 1:
            raise ValueError(f"{self}: votes are at least 1 step apart")

    def point(self, busy: Sequence[bool]) -> str:
        """'any', 'all' or 'none'. busy: for each rank whether it has decode rows."""
        if not any(busy) or (self.decode_steps and self.decode_steps % self.any_every == 0):
            return "any"
        return "none" if self.decode_steps % self.all_every else "all"

    def attempt(self, wants: Sequence[bool], busy: Sequence[bool]) -> bool:
        """The first vote: whether the ranks that want to prefill try to. wants, busy: by rank."""
        point = self.point(busy)
        return any(wants) if point == "any" else point == "all" and all(wants)

    def settle(self, scheduled: Sequence[bool]) -> str:
        """The second vote, after an attempt (all False without one): the step's kind. scheduled: for
        each rank whether it has prefill rows."""
        if any(scheduled):
            self.decode_steps = 0
            return "prefill"
        self.decode_steps += 1
        return "decode"


Gather = Callable[[bool], Sequence[bool]]


def alone(vote: bool) -> Sequence[bool]:
    """The votes of a single rank."""
    return [vote]


class DataParallel:
    """A scheduler of one rank whose steps are of the kind that all ranks agree on.

    inner: the rank's own scheduler, an FCFS or a subclass that does not mix. gather: sends this
    rank's vote and returns the votes of all ranks, in the same order on each (an all-gather); every
    rank calls `schedule` once a step, even if it has nothing to do. full: share of the pages in use
    above which a rank wants no new prompt.
    """

    def __init__(
        self,
        inner: FCFS | None = None,
        gather: Gather = alone,
        votes: DataParallelVotes | None = None,
        full: float = 0.9,
    ) -> None:
        self.inner, self.gather = inner or FCFS(), gather
        self.votes, self.full = votes or DataParallelVotes(), full

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r}, votes={self.votes!r})"

    def start(self, resources: Resources) -> DataParallel:
        return DataParallel(
            self.inner.start(resources), self.gather, copy.copy(self.votes), self.full
        )

    def want_prefill(self) -> bool:
        """Whether a prompt that has begun goes on, or a new one can start while enough pages are left
        for running requests to grow."""
        resources = self.inner.resources
        return self.inner.prefilling() or (
            resources.pages.used <= self.full * resources.pages.size and self.inner.next_fits()
        )

    def schedule(self) -> SchedulerOutput:
        """The next step. It has no requests if only other ranks have rows of its kind."""
        inner, rows = self.inner, self.inner.resources.max_rows
        wants = self.want_prefill()
        busy = self.gather(any(r.decoding for r in inner.running))
        scheduled = []
        if self.votes.attempt(self.gather(wants), busy) and wants:
            scheduled = inner.prefill(rows)
        if self.votes.settle(self.gather(bool(scheduled))) == "prefill":
            return SchedulerOutput("prefill", tuple(scheduled))
        return SchedulerOutput("decode", tuple(inner.decode(rows)))

    def add(self, request: Request) -> None:
        self.inner.add(request)

    def preempt(self, request: Request) -> None:
        self.inner.preempt(request)

    def release(self, request: Request) -> None:
        self.inner.release(request)

    def recover(self, requests: Iterable[Request]) -> None:
        self.inner.recover(requests)

    @property
    def unfinished(self) -> int:
        return self.inner.unfinished

    @property
    def waiting(self):
        return self.inner.waiting

    @property
    def running(self) -> list[Request]:
        return self.inner.running
