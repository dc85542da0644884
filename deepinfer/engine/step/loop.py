"""Loop: the requests of one engine and the steps that serve them."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deepinfer import rng
from deepinfer.engine.prompt_length import too_long
from deepinfer.engine.request import PrefixState, Request
from deepinfer.engine.runtime import Runtime
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.engine.scheduling.output import SchedulerOutput
from deepinfer.engine.scheduling.resources import AdmissionError
from deepinfer.engine.scheduling.scheduler import require_runnable
from deepinfer.engine.stats.records import StepRecord
from deepinfer.engine.step import commit, launch, overlap, recovery, teacher_forced
from deepinfer.engine.step.in_flight import InFlightStep
from deepinfer.engine.text import token_bytes
from deepinfer.slots.protocols import Prompt

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from deepinfer.engine.trace import Trace

# what a request has emitted so far
SO_FAR = ("output", "logprobs", "top_logprobs", "prompt_logprobs", "steps")
MOST_IDLE = (
    1000  # steps in a row without a row, while requests wait, before the scheduler is blamed
)


class Loop:
    """requests: those that are not done with, by id; steps: run so far, teacher-forced passes and
    steps that failed among them; flights: those on their way, oldest first; traces: the engine's
    list, innermost last; calls: the requests that end with the call that made them, by a lock that the
    call holds while it runs (`drop_abandoned`). An error or interrupt at any line, a second one while the first is cleaned
    up too, leaves the loop usable: what is not done yet the next call does first (`_recover`)."""

    def __init__(self, rt: Runtime, tokenizer: Tokenizer | None, traces: list[Trace]) -> None:
        self.rt, self.tokenizer, self.traces = rt, tokenizer, traces
        self.requests: dict[int, Request] = {}
        self.in_flight: list[InFlightStep] = []
        self.steps = 0
        self._count = 0
        self._idle = 0
        self.calls: dict[threading.Lock, list[Request]] = {}
        self._gone: list[Request] = []  # dropped, and maybe not counted and released
        self._dirty = False  # a step was broken off, and not all is where it belongs yet
        if rt.prefix_cache is not None:
            rt.prefix_cache.traces = traces

    # -------------------------------------------------------------------------------- requests

    def add(
        self,
        ids: list[int],
        params: SamplingParams,
        deadline: float | None = None,
        salt: str | None = None,
        call: threading.Lock | None = None,
    ) -> Request:
        """Queue the prompt `ids`. salt: requests with another one share no pages; call: the request
        ends with this call. Raises ValueError for what this engine cannot run."""
        self._recover()
        rt, vocab = self.rt, self.rt.config.vocab_size
        params.validate_for(vocab)
        limit = rt.limits.model_len
        if len(ids) >= limit:
            raise too_long(str(len(ids)), limit)
        params = dataclasses.replace(params, max_tokens=min(params.max_tokens, limit - len(ids)))
        seed = params.seed
        if seed is None:
            seed = rng.request_seed(rt.settings.seed, self._count)
        request = Request(self._count, ids, params, seed, deadline=deadline)
        request.prefix.salt = salt
        if params.grammar is not None:
            words = token_bytes(self.tokenizer, vocab)
            request.compiled = rt.slots["grammar"].compile(params.grammar, words)
            request.grammar = request.compiled.start()
        prompt = Prompt(len(ids), wants_all_logits=params.prompt_logprobs)
        request.plan = rt.replay_plan(prompt)
        request.prefix.cold = (prompt, request.plan)
        if params.prompt_logprobs and request.plan.rows_from[-1] > 0:
            raise ValueError(
                f"prompt_logprobs: the replay policy {rt.replay!r} drops rows below "
                f"{request.plan.rows_from[-1]}, whose log-probabilities do not exist; use "
                "replay='exact'"
            )
        return self._queue(request, call)

    def fork(
        self, parent: Request, params: SamplingParams, call: threading.Lock | None = None
    ) -> Request:
        """Queue a request that goes on from all that this one has so far, in the pages of it that
        are known. Raises ValueError where nothing is left to generate, and for what the tokens so
        far do not have."""
        self._recover()
        done = len(parent.output)
        params.validate_for(self.rt.config.vocab_size)
        for name in ("top_logprobs", "prompt_logprobs"):
            had, asked = getattr(parent.params, name), getattr(params, name)
            if done and asked != had:
                raise ValueError(
                    f"fork of request {parent.id}: {name}={asked} was given, and the {done} tokens "
                    f"so far were computed with {name}={had}; leave it out"
                )
        if params.grammar != parent.params.grammar:
            raise ValueError(
                f"fork of request {parent.id}: another grammar was given, and what is written so far "
                "went by its own; leave grammar out"
            )
        room = self.rt.limits.model_len - len(parent.prompt)
        params = dataclasses.replace(params, max_tokens=min(params.max_tokens, room))
        if params.max_tokens <= done:
            raise ValueError(
                f"fork of request {parent.id}: it has {done} tokens and max_tokens is "
                f"{params.max_tokens}: the count includes those, give more"
            )
        seed = params.seed
        if seed is None:
            seed = rng.request_seed(self.rt.settings.seed, self._count)
        child = dataclasses.replace(
            parent,
            id=self._count,
            params=params,
            seed=seed,
            status="waiting",
            pages=[],
            state_id=0,
            draft=None,
            preemptions=0,
            deadline=None,
            finish_reason=None,
            error=None,
            prefix=PrefixState(parent.prefix.salt, parent.prefix.images),
            grammar=None if parent.grammar is None else parent.grammar.fork(),
            **{name: list(getattr(parent, name)) for name in SO_FAR},
        )
        child.restart()
        return self._queue(child, call)

    def _queue(self, request: Request, call: threading.Lock | None) -> Request:
        rt, need = self.rt, self.rt.resources.pages_at_most(request)
        if rt.pages.ask(need) == "never":
            raise ValueError(
                f"the request needs {need} pages of {rt.limits.page_size} tokens, the pool has "
                f"{rt.pages.size}: lower max_tokens or raise num_pages"
            )
        self._count += 1
        if call is not None:
            self.calls.setdefault(call, []).append(request)
        try:
            with self._transaction():
                self.requests[request.id] = request
                rt.stats.arrived(request)
                rt.scheduler.add(request)
            return request
        except BaseException:  # an interrupt: whoever asked does not know its id
            self.forget(request)
            raise

    def forget(self, request: Request, error: Exception | None = None) -> None:
        """Drop a request; one that has not finished is aborted, or ends with the error, and gives
        back what it held."""
        reason = "abort" if error is None else "error"
        try:
            with self._transaction():
                self.requests.pop(request.id, None)
                self._end(request, reason, error)
        except BaseException:  # an interrupt at any line: it is gone all the same
            self.requests.pop(request.id, None)
            if not request.finished:
                request.finish(reason, error)
            self._gone.append(request)
            self._dirty = True
            self._recover()
            raise

    def end_call(self, call: threading.Lock) -> None:
        """Drop the requests of a call."""
        for request in self.calls.get(call, ()):
            self.forget(request)
        self.calls.pop(call, None)

    def drop_abandoned(self) -> None:
        """Drop what a call has left that no longer runs: interrupts, one in the middle of the other,
        kept it from dropping its requests, and nobody else knows their ids."""
        for call in [c for c in self.calls if not c.locked()]:
            self.end_call(call)

    def hand_out(self) -> list[Request]:
        """Take out the requests that have finished."""
        finished = [r for r in self.requests.values() if r.finished]
        for request in finished:
            self.forget(request)
        return finished

    def _end(self, request: Request, reason: str, error: Exception | None = None) -> None:
        """Finish a request and tell its scheduler, if it has not finished; nothing of it is left."""
        if not request.finished:
            request.finish(reason, error)
            self.rt.scheduler.release(request)
        self.rt.resources.finish(request)

    @property
    def unfinished(self) -> int:
        """Requests waiting or running; a scheduler of your own may have lost some."""
        return sum(not r.finished for r in self.requests.values())

    # ----------------------------------------------------------------------------------- steps

    def step(self) -> None:
        """SchedulerOutput and launch the next step, then commit the one that was on its way: with
        overlap=True the one before, else this one. An error or interrupt at any line loses no page,
        slot or request."""
        rt = self.rt
        pending = bool(self.in_flight)
        with self._transaction():  # wherever it breaks off: no page, slot or request is lost
            record = rt.stats.begin(self.steps)
            self._expire()
            schedule = self._schedule(record)
            if schedule.scheduled:
                self._launch(schedule, record)
            else:
                rt.stats.drop(record)
            while len(self.in_flight) > bool(schedule.scheduled):
                self._commit_oldest()
            if self.in_flight and (why := overlap.why_synchronous(rt, self.in_flight[0])):
                if rt.settings.overlap:
                    rt.stats.synchronous[why] += 1
                self._commit_oldest()
        idle = not schedule.scheduled and not pending and self.unfinished
        self._idle = self._idle + 1 if idle else 0
        if self._idle >= MOST_IDLE:
            raise RuntimeError(
                f"{rt.scheduler!r} scheduled nothing in {self._idle} steps while "
                f"{self.unfinished} requests wait or run; {rt.pages!r}. Abort them, or look at its "
                "schedule() and add()"
            )

    def settle(self) -> None:
        """Commit what is on its way."""
        with self._transaction():
            while self.in_flight:
                self._commit_oldest()

    def close(self) -> None:
        """Wait for the device; what is on its way comes to nothing."""
        self.in_flight.clear()
        self.rt.device.close()

    def _schedule(self, record: StepRecord) -> SchedulerOutput:
        rt = self.rt
        if self.in_flight and overlap.short_of_pages(rt, self.requests.values()):
            self._commit_in_flight(record, "pages are short")
        schedule = self._ask_scheduler()
        if overlap.needs_the_step_before(schedule, self.requests, self.in_flight):
            self._commit_in_flight(record, "a mixed step")
            schedule = self._ask_scheduler()
        return schedule

    def _ask_scheduler(self) -> SchedulerOutput:
        """The scheduler's next step. A request that cannot be admitted ends with its own error, and
        the scheduler is asked again without it."""
        rt = self.rt
        while True:
            try:
                schedule = rt.scheduler.schedule()
            except AdmissionError as error:
                request, cause = error.request, error.__cause__
                assert isinstance(cause, Exception)
                if request.finished:  # the scheduler keeps asking for a request that has ended
                    raise cause from None
                self._end(request, "error", cause)
                rt.resources.recover(self.requests.values())  # it may hold half of what it needs
                rt.scheduler.recover(self.requests.values())
            else:
                return require_runnable(schedule, rt.scheduler, rt.resources, self.requests)

    def _commit_in_flight(self, record: StepRecord, why: str) -> None:
        """Commit what is on its way; then the host goes on scheduling."""
        while self.in_flight:
            self._commit_oldest()
            self.rt.stats.synchronous[why] += 1
        self.rt.stats.turn(record, "schedule")

    @torch.inference_mode()
    def _launch(self, schedule: SchedulerOutput, record: StepRecord) -> None:
        number, before = self.steps, self.in_flight[-1] if self.in_flight else None
        self.steps += 1  # no two steps have one number, not even if a step fails
        step = InFlightStep(
            step=number,
            kind=schedule.kind,
            record=record,
            scheduled=schedule.scheduled,
            requests=tuple(self.requests[s.id] for s in schedule.scheduled),
            traced=bool(self.traces),
        )
        self.in_flight.append(step)
        launch.launch(self.rt, schedule, step, before, lambda ids: self.tap(ids, number))

    @torch.inference_mode()
    def _commit_oldest(self) -> None:
        """Commit the oldest step in flight."""
        rt, step = self.rt, self.in_flight[0]
        rt.stats.wait(step.record)
        commit.commit(rt, step, rt.device.wait(step.job))
        if step.traced:
            computed = {r.id: r.num_computed for r in step.requests}
            for trace in self.traces:
                trace.settle(step.step, computed)
        self.in_flight.pop(0)
        rt.stats.close(step.record, rt.scheduler.unfinished)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """What is broken off in here, by an error or interrupt at any line, is put right."""
        self._recover()
        self._dirty = True
        try:
            yield
            self._dirty = False
        except BaseException:
            self._recover()
            raise

    def _recover(self) -> None:
        """Put right what was broken off: nothing is on its way any more, and every page, slot and
        request is where it belongs. Each part may be broken off too and is then done again."""
        if not self._dirty:
            return
        recovery.recover(self.rt, self.in_flight, self.requests.values(), self._gone)
        self._dirty = False

    def _expire(self) -> None:
        """End the requests whose time is up. Without a timeout no clock is read."""
        timed = [r for r in self.requests.values() if r.deadline is not None and not r.finished]
        if not timed:
            return
        now = time.monotonic()
        for request in timed:
            if request.deadline is not None and now >= request.deadline:
                self._end(request, "timeout")

    # -------------------------------------------------------------------------- teacher forcing

    @torch.no_grad()
    def logits(self, ids: list[int], prompt: int | None, chunks: Sequence[int] | None) -> Tensor:
        """[t, v] teacher-forced logits; see Engine.logits."""
        most = self.rt.limits.model_len
        if len(ids) > most:
            raise ValueError(f"{len(ids)} ids, this engine holds max_model_len={most}")
        sizes = None if chunks is None else list(chunks)
        self.settle()
        tap_of = (lambda batch: self.tap([-1] * batch.num_seqs)) if self.traces else None
        try:
            with self._transaction():
                out = teacher_forced.forced_logits(self.rt, ids, prompt, sizes, tap_of)
                for trace in self.traces:
                    trace.settle(self.steps, {-1: len(ids)})
        finally:
            self.steps += 1
        return out

    # ---------------------------------------------------------------------------------- traces

    def tap(self, request_ids: list[int], number: int | None = None) -> Callable | None:
        """What shows every named value of step `number` (None: the next) to the traces; None where
        there are none."""
        if not self.traces:
            return None
        requests = torch.tensor(request_ids, dtype=torch.long, device=self.rt.model.device)
        number = self.steps if number is None else number

        def tap(name: str, x: Tensor, rows) -> Tensor:
            for trace in list(self.traces):
                x = trace.see(name, x, rows, requests, number)
            return x

        return tap
