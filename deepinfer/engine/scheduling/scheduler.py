"""Schedulers: which requests run in the next step, prefill or decode, with how many rows each.

Schedulers are plain classes over a `Resources`.

    FCFS         first come, first served; a step is all prefill or all decode, prefill goes first
    DecodeOrder  the same, and decode takes the shortest outputs first, as DeepInfer does
    Mixed        decode rows and prefill rows in one step

A request is admitted with the pages of its prompt and gets more page by page. If no page is left,
the request with the longest output is preempted: it loses its pages and state id, waits in front of
those that never ran, and its prompt and output are computed again (DeepInfer 0.1.0, csrc/engine/
scheduler.hpp: the comment says the shortest, the code takes the longest).

    class Mine(di.engine.scheduling.scheduler.FCFS): ...      eng.with_(scheduler=Mine())
"""

from __future__ import annotations

import copy
import difflib
import inspect
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, Self

from deepinfer.engine.request import Request
from deepinfer.engine.scheduling.output import KINDS, ScheduledRequest, SchedulerOutput
from deepinfer.engine.scheduling.queue import RequestQueue
from deepinfer.engine.scheduling.resources import Resources


class SchedulerProtocol(Protocol):
    """What an engine asks of a scheduler; everything else is up to the scheduler."""

    def start(self, resources: Resources) -> SchedulerProtocol:
        """The copy that one engine runs, over the engine's resources."""
        ...

    def add(self, request: Request) -> None:
        """A new request. It would fit the resources alone."""
        ...

    def schedule(self) -> SchedulerOutput:
        """The next step. Every scheduled request runs and has the pages that its rows are written to
        (`resources.admit`, `resources.extend`). Leave out a request without a row left
        (optimistic_computed == optimistic_tokens): its last token is in flight."""
        ...

    def preempt(self, request: Request) -> None:
        """This running request is preempted."""
        ...

    def release(self, request: Request) -> None:
        """This request has finished or was aborted, whether it ran or waited: forget it. The engine
        frees what it holds (`resources.finish`)."""
        ...

    def recover(self, requests: Iterable[Request]) -> None:
        """A step ended in an error or an interrupt, at any line. These are all requests; their
        status, pages and state ids are right (`resources.recover`). Set the queues right."""
        ...

    @property
    def unfinished(self) -> int:
        """Requests waiting or running."""
        ...


class FCFS:
    """First come, first served: if the head of the queue does not fit, all behind it wait.

    max_context: most tokens of context of a prefill step, summed over its requests (None: no limit;
    one request always runs). stop_preempted: a request that is preempted ends with reason
    'preempted' instead of being computed again, as DeepInfer's servers do.

    waiting, running: the requests, in order; a subclass may reorder them or assign a new list.
    """

    resources: Resources

    def __init__(self, *, max_context: int | None = None, stop_preempted: bool = False) -> None:
        if max_context is not None and max_context < 1:
            raise ValueError(f"max_context={max_context}: want None or at least 1 token")
        self.max_context, self.stop_preempted = max_context, stop_preempted
        self.waiting = RequestQueue()
        self.running: list[Request] = []

    @property
    def waiting(self) -> RequestQueue:
        """The requests that wait, the next one first."""
        return self._waiting

    @waiting.setter
    def waiting(self, requests: Iterable[Request]) -> None:
        same = isinstance(requests, RequestQueue)
        self._waiting = requests if same else RequestQueue(requests)

    def __repr__(self) -> str:
        names = inspect.signature(type(self).__init__).parameters
        default = {n: p.default for n, p in names.items()}
        values = {n: getattr(self, n, d) for n, d in default.items()}
        given = [f"{n}={v!r}" for n, v in values.items() if v != default[n]]
        return f"{type(self).__name__}({', '.join(given)})"

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and repr(other) == repr(self)

    __hash__ = None  # type: ignore[assignment]

    def start(self, resources: Resources) -> Self:
        own = copy.copy(self)
        others = ("resources", "_waiting", "running")
        mine = {k: v for k, v in vars(self).items() if k not in others}
        own.__dict__ = copy.deepcopy(mine)
        own.waiting, own.running, own.resources = RequestQueue(), [], resources
        return own

    # ------------------------------------------------------------------------------ the queues

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def preempt(self, request: Request) -> None:
        self.running.remove(request)
        if self.stop_preempted:
            self.resources.finish(request, "preempted")
            return
        self.resources.preempt(request)
        self.wait_again(request)

    def wait_again(self, request: Request) -> None:
        """Queue a preempted request in front of those that never ran; preempted ones keep their order
        of arrival."""
        at = next((i for i, r in enumerate(self.waiting) if r.id > request.id), len(self.waiting))
        self.waiting.insert(at, request)

    def release(self, request: Request) -> None:
        if request in self.waiting:
            self.waiting.remove(request)
        if request in self.running:
            self.running.remove(request)

    def recover(self, requests: Iterable[Request]) -> None:
        """Put each of these requests into the queue of its status, once. Those that an interrupt
        caught between two queues go first."""
        alive = {r.id: r for r in requests}

        def in_state(state: str, queue: Iterable[Request]) -> tuple[list[Request], list[Request]]:
            kept = {r.id: r for r in queue if r.status == state and r.id in alive}
            lost = [r for r in alive.values() if r.status == state and r.id not in kept]
            return lost, [*kept.values()]

        lost, kept = in_state("running", self.running)
        self.running = [*lost, *kept]
        lost, kept = in_state("waiting", self.waiting)
        self.waiting = RequestQueue(kept)
        for request in lost:
            self.wait_again(request)

    @property
    def unfinished(self) -> int:
        return len(self.waiting) + len(self.running)

    # -------------------------------------------------------------------------------- the step

    def schedule(self) -> SchedulerOutput:
        """All prefill if there is any to do, else all decode."""
        rows = self.resources.max_rows
        if scheduled := self.prefill(rows):
            return SchedulerOutput("prefill", tuple(scheduled))
        if scheduled := self.decode(rows):
            return SchedulerOutput("decode", tuple(scheduled))
        return SchedulerOutput("idle")

    def want_prefill(self) -> bool:
        """Whether a prefill step would have rows; data-parallel ranks vote on this."""
        return self.prefilling() or self.next_fits()

    def prefilling(self) -> bool:
        """Whether a running request has prefill rows left."""
        return any(r.prefilling for r in self.running)

    def next_fits(self) -> bool:
        """Whether the head of the queue could start now."""
        return (
            bool(self.waiting)
            and len(self.running) < self.resources.max_num_seqs
            and self.resources.can_admit(self.waiting[0]) == "ok"
        )

    def prefill(self, rows: int, admit: bool = True) -> list[ScheduledRequest]:
        """Prefill chunks of running requests, then of waiting ones that can start, up to `rows`
        rows. admit: whether waiting ones may start."""
        scheduled: list[tuple[Request, ScheduledRequest]] = []
        context = 0
        begun = deque(r for r in self.running if r.prefilling)
        while rows > 0:
            head = begun[0] if begun else self.waiting[0] if admit and self.next_fits() else None
            if head is None:
                break
            start = head.optimistic_computed if begun else self.resources.start_at(head)
            context += min(head.optimistic_tokens, start + rows)
            if scheduled and self.max_context is not None and context > self.max_context:
                break
            if begun:
                begun.popleft()
                if not self.hold(head, min(head.optimistic_tokens, start + rows)):
                    continue
            elif self.resources.admit(head):
                self.running.append(head)  # an interrupt here leaves it in both queues
                self.waiting.popleft()
            start = head.optimistic_computed
            chunk = ScheduledRequest.of(head, start, min(head.optimistic_tokens, start + rows))
            scheduled.append((head, chunk))
            rows -= chunk.stop - chunk.start
        return [chunk for request, chunk in scheduled if request.status == "running"]

    def decode(self, rows: int) -> list[ScheduledRequest]:
        """One row and the pages of its drafts for each request, for as many as `rows` rows allow."""
        most = max(rows // (1 + self.resources.lookahead), 1)
        chosen: list[Request] = []
        for request in self.order([r for r in self.running if r.decoding]):
            if len(chosen) == most:
                break
            self.hold(request)
            chosen = [r for r in (*chosen, request) if r.status == "running"]
        return [ScheduledRequest.of(r) for r in chosen]

    def hold(self, request: Request, tokens: int | None = None) -> bool:
        """Give a request the pages of this many tokens (None: of a decode step), preempting others
        if there are too few. False if the request itself was preempted."""
        while request.status == "running" and not self.resources.extend(request, tokens):
            self.preempt(self.victim())
        return request.status == "running"

    def order(self, ready: list[Request]) -> list[Request]:
        """The order in which running requests take rows and pages of a decode step."""
        return sorted(ready, key=lambda r: r.id)

    def victim(self) -> Request:
        """The request to preempt: the one with the longest output, of equals the last that came."""
        return max(self.running, key=lambda r: (len(r.output), r.id))


class DecodeOrder(FCFS):
    """DeepInfer's order of decode: short outputs take rows and pages first, and the longest output is
    preempted. If rows are short, all sequences advance together. The batch itself is ordered by
    length, longest first."""

    def order(self, ready: list[Request]) -> list[Request]:
        return sorted(ready, key=lambda r: (len(r.output), r.id))

    def decode(self, rows: int) -> list[ScheduledRequest]:
        return sorted(super().decode(rows), key=lambda s: (-s.stop, s.id))


class Mixed(FCFS):
    """Every decode row first, then prefill chunks in the rows that are left, so that a new prompt
    does not stop running outputs. For comparison: DeepInfer never mixes."""

    def schedule(self) -> SchedulerOutput:
        before = self.resources.stats.preemptions
        decode = (
            self.decode(self.resources.max_rows) if any(r.decoding for r in self.running) else []
        )
        crowded = bool(decode) and self.resources.stats.preemptions > before
        left = self.resources.max_rows - len(decode) * (1 + self.resources.lookahead)
        prefill = self.prefill(left, admit=not crowded)
        if decode and prefill:
            return SchedulerOutput("mixed", (*decode, *prefill))
        kind = "decode" if decode else "prefill" if prefill else "idle"
        return SchedulerOutput(kind, (*decode, *prefill))


# ---------------------------------------------------------------------- which scheduler, and checks

SCHEDULERS: dict[str, type[FCFS]] = {"fcfs": FCFS, "decode_order": DecodeOrder, "mixed": Mixed}
METHODS = ("start", "add", "schedule", "preempt", "release", "recover")


def resolve(value: Any, max_context: int | None = None) -> SchedulerProtocol:
    """The scheduler that a name, a class or an instance stands for. max_context: from the engine's
    settings, in tokens. Raises ValueError for an unknown name and for two different values of
    max_context, TypeError for an object that is no scheduler."""
    if isinstance(value, str):
        if value not in SCHEDULERS:
            close = difflib.get_close_matches(value, SCHEDULERS, 1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            names = ", ".join(SCHEDULERS)
            raise ValueError(f"no scheduler is named {value!r}: {hint}the names are {names}")
        value = SCHEDULERS[value]
    if isinstance(value, type):
        try:
            value = value()
        except TypeError as error:
            raise TypeError(
                f"scheduler={value.__name__}: it cannot be made without arguments ({error}); pass an instance"
            ) from None
    missing = [m for m in METHODS if not callable(getattr(value, m, None))]
    try:  # looked up, not asked: before `start` it may have nothing to count
        inspect.getattr_static(value, "unfinished")
    except AttributeError:
        missing.append("unfinished")
    if missing:
        raise TypeError(
            f"scheduler={value!r}: want a name ({', '.join(SCHEDULERS)}), a class or an instance; a "
            f"{type(value).__name__} has no {', '.join(missing)} (subclass deepinfer.engine.scheduling.scheduler.FCFS)"
        )
    return value if max_context is None else _with_context(value, max_context)


def _with_context(scheduler: Any, max_context: int) -> SchedulerProtocol:
    """A copy of the scheduler with this limit."""
    if not hasattr(scheduler, "max_context"):
        raise ValueError(
            f"max_context={max_context}: scheduler={scheduler!r} has no max_context; leave it out, or "
            "subclass deepinfer.engine.scheduling.scheduler.FCFS"
        )
    if scheduler.max_context not in (None, max_context):
        raise ValueError(
            f"max_context={max_context} was given, and scheduler={scheduler!r} has its own: give one"
        )
    own = copy.copy(scheduler)
    own.max_context = max_context
    return own


def require_runnable(
    schedule: SchedulerOutput,
    scheduler: SchedulerProtocol,
    resources: Resources,
    requests: Mapping[int, Request],
) -> SchedulerOutput:
    """The schedule, if an engine can run it. requests: all of the engine, by id. Raises ValueError
    naming the scheduler and the first request that cannot run: it would write to a page that it does
    not hold, or twice."""
    if not isinstance(schedule, SchedulerOutput):
        raise TypeError(
            f"{scheduler!r}.schedule() returned {schedule!r}: want a SchedulerOutput, "
            "SchedulerOutput('idle') if nothing can run"
        )
    if schedule.kind not in KINDS:
        raise ValueError(f"{scheduler!r} scheduled a step {schedule.kind!r}: want one of {KINDS}")
    seen: set[int] = set()
    rows = 0
    for s in schedule.scheduled:
        if not isinstance(s, ScheduledRequest):
            raise TypeError(f"{scheduler!r} scheduled {s!r}: want ScheduledRequests")
        fault = _fault(s, requests.get(s.id), seen, resources)
        if fault is not None:
            raise ValueError(f"{scheduler!r} scheduled request {s.id}, which {fault}")
        seen.add(s.id)
        rows += s.stop - s.start
    if rows > max(resources.max_rows, 1):
        raise ValueError(
            f"{scheduler!r} scheduled {rows} rows, a step has at most {resources.max_rows}"
        )
    if schedule.scheduled and schedule.kind == "idle":
        raise ValueError(f"{scheduler!r} scheduled rows as 'idle': want prefill, decode or mixed")
    if schedule.kind == "decode" and not all(s.decode for s in schedule.scheduled):
        raise ValueError(f"{scheduler!r} scheduled prefill rows in a decode step: call it mixed")
    return schedule


def _fault(
    s: ScheduledRequest, request: Request | None, seen: set[int], resources: Resources
) -> str | None:
    """What keeps these rows from running, None if nothing does."""
    if request is None:
        return "is no request of this engine"
    if request.status != "running":
        return f"is {request.status}"
    if s.id in seen:
        return "is listed twice"
    tokens, computed = request.optimistic_tokens, request.optimistic_computed
    if not s.start == computed < s.stop <= tokens:
        return (
            f"has rows {s.start}..{s.stop - 1} scheduled, but {computed} of {tokens} tokens are "
            f"computed: the next row is {computed}"
        )
    emits = s.stop == tokens
    decode = emits and s.stop - s.start == 1 and tokens > len(request.prompt)
    if (s.emits, s.decode) != (emits, decode):
        return (
            f"has emits={s.emits}, decode={s.decode}: these rows have emits={emits}, "
            f"decode={decode}; make it with ScheduledRequest.of"
        )
    pages = resources.pages_of(s.stop + (resources.lookahead if decode else 0))
    if pages > len(request.pages):
        return f"holds {len(request.pages)} pages, {pages} are written to"
    return None
