"""Resources: the pages, state ids and rows that a scheduler hands out, and which request holds what.

The scheduler decides which request runs next and which is preempted. The accounting is here, so that
a scheduler of your own cannot lose a page. A request holds the pages of its tokens so far, and for a
decode step also those that its drafts may be written to.

    can_admit, start_at    ask about a waiting request; the prefix cache is looked up once
    admit, extend          give pages; False if they are not there
    preempt, requeue       take everything back; the request waits again
    finish                 takes everything back for good; nothing else frees a finished request
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from deepinfer.cache.addressing import pages_of
from deepinfer.cache.pages import PageManager, Pool
from deepinfer.engine.prefix.admission import Admission
from deepinfer.engine.prefix.manager import PrefixCacheManager
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
    step, drafts included; lookahead: most drafts of a sequence in one step; prefix_cache: None if
    the engine has none."""

    pages: PageManager
    states: Pool
    stats: Stats
    page_size: int
    max_num_seqs: int
    max_rows: int
    lookahead: int = 0
    prefix_cache: PrefixCacheManager | None = None

    def pages_of(self, tokens: int) -> int:
        """Pages that hold so many tokens."""
        return pages_of(tokens, self.page_size)

    def pages_at_most(self, request: Request) -> int:
        """Pages of the longest sequence that this request can become, drafts included."""
        return self.pages_of(request.max_length + self.lookahead)

    def pages_to_start(self, request: Request) -> int:
        """Pages that a waiting request needs to start: those of its tokens. One that was preempted
        also needs those of its next decode step, or it would be preempted again at once."""
        again = 1 + self.lookahead if request.output else 0
        return self.pages_of(request.optimistic_tokens + again)

    def match(self, request: Request) -> Admission | None:
        """How a waiting request would start with what the prefix cache has; None without a prefix
        cache. Looked up once, and again only after the cache or the request has changed. Raises
        AdmissionError, which ends this request alone, if that cannot be said."""
        if self.prefix_cache is None:
            return None
        try:
            return self.prefix_cache.match(request)
        except Exception as error:
            raise AdmissionError(request) from error

    def start_at(self, request: Request) -> int:
        """Position of the first row that a waiting request would run."""
        found = self.match(request)
        return request.optimistic_computed if found is None else found.plan.start

    def can_admit(self, request: Request) -> str:
        """Whether a waiting request can start now: 'ok', 'later' (pages or a state id have to come
        back first) or 'never'."""
        return self._ask(request, self.match(request))

    def _ask(self, request: Request, found: Admission | None) -> str:
        hit = () if found is None else found.pages
        answer = self.pages.ask(self.pages_to_start(request) - len(hit), hit)
        return "later" if answer == "ok" and not self.states.free else answer

    def admit(self, request: Request) -> bool:
        """Start a waiting request: it gets its pages, those of a hit first, and a state id.
        `request.num_computed` is then the position of its first row. False, changing nothing, if it
        has to wait."""
        found = self.match(request)
        if self._ask(request, found) != "ok":
            return False
        hit = [] if found is None else [*found.pages]
        self.pages.pin(hit)  # first: taking the others may reclaim cached pages
        request.pages = hit + self.pages.take(self.pages_to_start(request) - len(hit))
        request.state_id = self.states.take(1)[0]
        if self.prefix_cache is not None and found is not None:
            try:
                self.prefix_cache.adopt(request, found)
            except Exception as error:
                raise AdmissionError(request) from error
            self.stats.found(request, request.optimistic_computed)
        request.status = "running"
        return True

    def extend(self, request: Request, tokens: int | None = None) -> bool:
        """Give a running request the pages of this many tokens (None: of all that its next decode
        step may write). False, changing nothing, if they are not there."""
        tokens = request.optimistic_tokens + self.lookahead if tokens is None else tokens
        missing = self.pages_of(tokens) - len(request.pages)
        if missing > 0:
            if self.pages.ask(missing) != "ok":
                return False
            request.pages += self.pages.take(missing)
        return True

    def trim(self, request: Request) -> None:
        """Give back pages of rejected drafts that the next decode step does not write again. A
        request has such pages only after steps in flight were committed; while another step of it
        is in flight, that step still writes them, so they stay."""
        keep = self.pages_of(request.optimistic_tokens + self.lookahead)
        idle = request.status == "running" and request.decoding and not request.in_flight
        if idle and len(request.pages) > keep:
            surplus, request.pages = request.pages[keep:], request.pages[:keep]
            self.pages.give(surplus)

    def free(self, request: Request) -> None:
        """Take back what a request holds. Harmless if it holds nothing. Pages that the prefix cache
        knows stay cached until their room is needed."""
        pages, request.pages = request.pages, []
        if pages:
            self.pages.give(pages)
        state_id, request.state_id = request.state_id, 0
        if state_id:
            self.states.give([state_id])

    def requeue(self, request: Request) -> None:
        """Take back what a running request holds and let it wait. Its prompt and output are computed
        again later; no token is emitted twice."""
        self.free(request)
        request.restart()
        request.status = "waiting"

    def preempt(self, request: Request) -> None:
        """`requeue` a request, and count the preemption."""
        self.requeue(request)
        request.preemptions += 1
        self.stats.preemptions += 1

    def recover(self, requests: Iterable[Request]) -> None:
        """After an error or an interrupt anywhere in a step: every request either runs with its
        pages and state id, or holds nothing; nothing else is held. requests: all of the engine."""
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
        """Count a request that has finished, or finishes now for this reason, and take back what it
        holds. Every end comes here, and this alone frees a finished request. Call the scheduler's
        `release` before, unless the scheduler itself ends the request."""
        if not request.finished:
            request.finish(reason)
        self.stats.ended(request)
        self.free(request)
