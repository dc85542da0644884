"""Resources: the pages, state slots and row limit that a scheduler hands out, and who holds what.

Policy (which request runs next, which is preempted) is the scheduler's; the accounting is here, so that a
scheduler of your own cannot lose a page. A request holds the pages of its tokens so far; a decode
step also those that its drafts may be written to.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from deepinfer.cache.addressing import pages_of
from deepinfer.cache.pages import PageManager, Pool
from deepinfer.engine.prefix.manager import Admission, PrefixCacheManager
from deepinfer.engine.request import Request
from deepinfer.engine.stats.stats import Stats


class AdmissionError(Exception):
    """What went wrong with one request while a scheduler asked how it would start. The engine ends
    that request with `__cause__` and asks the scheduler again (`Loop._ask_scheduler`)."""

    def __init__(self, request: Request) -> None:
        super().__init__(f"request {request.id} cannot be admitted")
        self.request = request


@dataclass(frozen=True)
class Resources:
    """page_size: tokens of a page; max_num_seqs: sequences that run at once; max_rows: rows of a
    step, drafts included; lookahead: most drafts of a sequence in one step; prefix_cache: the prefix
    cache, None without one."""

    pages: PageManager
    states: Pool
    stats: Stats
    page_size: int
    max_num_seqs: int
    max_rows: int
    lookahead: int = 0
    prefix_cache: PrefixCacheManager | None = None

    def pages_of(self, tokens: int) -> int:
        return pages_of(tokens, self.page_size)

    def pages_at_most(self, request: Request) -> int:
        """Pages of the longest sequence that this request can become, drafts included."""
        return self.pages_of(request.max_length + self.lookahead)

    def pages_to_start(self, request: Request) -> int:
        """Pages with which a waiting request may start: those of its tokens. One that was preempted before
        also wants those of its next decode step, or it would be preempted again at once."""
        again = 1 + self.lookahead if request.output else 0
        return self.pages_of(request.optimistic_tokens + again)

    def match(self, request: Request) -> Admission | None:
        """How a waiting request would start with what the prefix cache has; None without one. Raises
        AdmissionError where that cannot be said, which ends this request alone."""
        if self.prefix_cache is None:
            return None
        try:
            return self.prefix_cache.match(request)
        except Exception as error:
            raise AdmissionError(request) from error

    def start_at(self, request: Request) -> int:
        """Position of the first row that a waiting request would run."""
        start = self.match(request)
        return request.optimistic_computed if start is None else start.plan.start

    def can_admit(self, request: Request) -> str:
        """Whether a waiting request can start: 'ok', 'later' or 'never'."""
        return self._ask(request, self.match(request))

    def _ask(self, request: Request, start: Admission | None) -> str:
        hit = () if start is None else start.pages
        answer = self.pages.ask(self.pages_to_start(request) - len(hit), hit)
        return "later" if answer == "ok" and not self.states.free else answer

    def admit(self, request: Request) -> bool:
        """Start a waiting request: its pages, those of a hit in front, and a state slot; False where
        it has to wait. `request.computed` is then where its rows begin."""
        start = self.match(request)
        if self._ask(request, start) != "ok":
            return False
        hit = [] if start is None else [*start.pages]
        self.pages.pin(hit)  # before the others are taken, which may reclaim cached pages
        request.pages = hit + self.pages.take(self.pages_to_start(request) - len(hit))
        request.state_id = self.states.take(1)[0]
        if self.prefix_cache is not None and start is not None:
            try:
                self.prefix_cache.adopt(request, start)
            except Exception as error:
                raise AdmissionError(request) from error
            self.stats.found(request, request.optimistic_computed)
        request.status = "running"
        return True

    def extend(self, request: Request, tokens: int | None = None) -> bool:
        """Pages for this many tokens of a running request (None: for all that its next decode step may
        write); False, changing nothing, where they are not there."""
        tokens = request.optimistic_tokens + self.lookahead if tokens is None else tokens
        missing = self.pages_of(tokens) - len(request.pages)
        if missing > 0:
            if self.pages.ask(missing) != "ok":
                return False
            request.pages += self.pages.take(missing)
        return True

    def trim(self, request: Request) -> None:
        """Give back the pages of drafts that were rejected, as far as the next decode step does not
        write there again. Only one behind which steps on their way were committed has such pages,
        and while another is on its way they are written to."""
        keep = self.pages_of(request.optimistic_tokens + self.lookahead)
        flying = request.in_flight or not request.decoding
        if request.status == "running" and not flying and len(request.pages) > keep:
            surplus, request.pages = request.pages[keep:], request.pages[:keep]
            self.pages.give(surplus)

    def free(self, request: Request) -> None:
        """Take back what a request holds; nothing where it holds nothing. Pages that the prefix
        cache knows stay cached until their room is needed."""
        pages, request.pages = request.pages, []
        if pages:
            self.pages.give(pages)
        slot, request.state_id = request.state_id, 0
        if slot:
            self.states.give([slot])

    def requeue(self, request: Request) -> None:
        """Take back what a running request holds and let it wait: its prompt and its output are
        computed again later, and nothing of the output is emitted twice."""
        self.free(request)
        request.restart()
        request.status = "waiting"

    def preempt(self, request: Request) -> None:
        """`requeue` of a preempted request, counted."""
        self.requeue(request)
        request.preemptions += 1
        self.stats.preemptions += 1

    def recover(self, requests: Iterable[Request]) -> None:
        """After a step that an error or an interrupt ended anywhere: every request either runs with
        its pages and slot or holds nothing, and nothing else is held. requests: all there are."""
        held = []
        for request in requests:
            if request.status == "running" and request.pages and request.state_id:
                held.append(request)
                continue
            request.pages, request.state_id = [], 0
            if request.status != "finished":
                request.restart()
                request.status = "waiting"
        if self.prefix_cache is not None:
            self.prefix_cache.recover()
        self.pages.recount(r.pages for r in held)
        self.states.recount(r.state_id for r in held)
        for request in held:
            self.trim(request)

    def finish(self, request: Request, reason: str = "abort") -> None:
        """Count a request that has finished, or finishes here for this reason, and take back what it
        holds. Every end comes here, whatever a scheduler forgets; who is not its scheduler tells
        that before (`release`)."""
        if not request.finished:
            request.finish(reason)
        self.stats.ended(request)
        self.free(request)
