"""Who runs, prefill or decode, and how many rows each: first come, first served.

    a step is all prefill or all decode; prefill goes first, so that decode batches are full
    a request is admitted when a state slot and ALL pages it can ever need are free: it is never
    preempted, and an admitted request always finishes
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from deepinfer.cache.pages import Pool
from deepinfer.engine.request import Request


@dataclass(frozen=True, slots=True)
class Share:
    """One request's rows of a step: positions start..stop-1 (a decode step's drafts included)."""

    request: Request
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """kind: 'prefill', 'decode' or 'idle'."""

    kind: str
    shares: tuple[Share, ...] = ()


class Scheduler:
    """First come, first served over a pool of pages and of state slots.

    max_rows: rows of a step; lookahead: positions past a request's last token that a step may write
    (drafts).
    """

    def __init__(
        self, pages: Pool, states: Pool, *, page_size: int, max_num_seqs: int, max_rows: int, lookahead: int
    ) -> None:
        self.pages, self.states = pages, states
        self.page_size, self.max_num_seqs, self.max_rows = page_size, max_num_seqs, max_rows
        self.lookahead = lookahead
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def pages_for(self, request: Request) -> int:
        """Pages of the longest sequence this request can become."""
        tokens = len(request.prompt) + request.params.max_tokens + self.lookahead
        return -(-tokens // self.page_size)

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def schedule(self) -> Schedule:
        """The next step. Admission is in order of arrival: the head waits for room, nobody overtakes."""
        self._admit()
        budget, shares = self.max_rows, []
        for r in self.running:
            left = len(r.prompt) - r.computed
            if left > 0 and budget > 0:
                rows = min(left, budget)
                shares.append(Share(r, r.computed, r.computed + rows))
                budget -= rows
        if shares:
            return Schedule("prefill", tuple(shares))
        if not self.running:
            return Schedule("idle")
        most = max(self.max_rows // (1 + self.lookahead), 1)  # each brings its drafts
        return Schedule(
            "decode", tuple(Share(r, r.computed, r.length) for r in self.running[:most])
        )

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.max_num_seqs and self.states.free:
            need = self.pages_for(self.waiting[0])
            if need > self.pages.free:
                return
            request = self.waiting.popleft()
            request.pages = self.pages.take(need)
            request.slot = self.states.take(1)[0]
            request.state = "running"
            self.running.append(request)

    def release(self, request: Request) -> None:
        """Give back what a finished request held, whether it ran or still waited."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        if request.pages:
            self.pages.give(request.pages)
            request.pages = []
        if request.slot:
            self.states.give([request.slot])
            request.slot = 0

    @property
    def unfinished(self) -> int:
        return len(self.waiting) + len(self.running)
