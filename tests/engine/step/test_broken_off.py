"""Errors and interrupts where it hurts: while an earlier one is put right, in the middle of a grammar,
and schedulers that are careless. In float64: the text is the one that comes without all this."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from deepinfer.engine.scheduling.output import ScheduledRequest, SchedulerOutput
from deepinfer.engine.scheduling.scheduler import FCFS
from deepinfer.engine.step import recovery
from deepinfer.engine.step.in_flight import InFlightTokens
from deepinfer.slots.sampler import Philox
from deepinfer.slots.verifier import Fixed
from support.overlapped import PARAMS, PROMPTS, engine, same, serial
from support.pool import check_empty

torch.set_num_threads(1)
HOW = dict(temperature=0.0, ignore_eos=True)
PARTS = ("deepinfer/engine/", "deepinfer/cache/")


class Falls(Philox):
    """The call that is named is interrupted."""

    def __init__(self) -> None:
        self.calls, self.at = 0, -1

    def draw(self, dist, keys):
        self.calls += 1
        if self.calls == self.at:
            raise KeyboardInterrupt("the first")
        return super().draw(dist, keys)


class AgainAt:
    """A second interrupt before the n-th line that runs from the beginning of `_recover` on, the parts
    that it calls included."""

    def __init__(self, n: int) -> None:
        self.left, self.healing = n, False

    def __call__(self, frame, event, arg):
        if not any(part in frame.f_code.co_filename for part in PARTS):
            return None
        self.healing |= frame.f_code.co_name == "_recover" and frame.f_locals["self"]._dirty
        if self.healing and event == "line":
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt("the second")
        return self


def interrupted_twice(n: int, overlap: bool) -> bool:
    """Whether the second interrupt came; checks that nobody can tell afterwards."""
    eng = engine(
        overlap=overlap,
        sampler=Falls(),
        verifier=Fixed(2),
        max_num_batched_tokens=30,
        prefix_cache=True,
        num_pages=30,
    )
    for p, q in zip(PROMPTS, PARAMS):
        eng.add(p, q)
    done = [c for _ in range(4) for c in eng.step()]
    falls = eng.runtime.sampler
    falls.at = falls.calls + 1
    second, before = False, sys.gettrace()
    while falls.calls < falls.at:
        sys.settrace(AgainAt(n))
        try:
            done += eng.step()
        except KeyboardInterrupt as error:
            second = "second" in str(error)
        finally:
            sys.settrace(before)
    while eng.unfinished:
        done += eng.step()
    same(sorted(done, key=lambda c: c.index), serial())
    assert sum(eng.stats.finished.values()) == len(PROMPTS) and not eng.stats._live
    check_empty(eng)
    eng.close()
    return second


@pytest.mark.parametrize("overlap", [False, True])
def test_a_second_interrupt_while_the_first_is_put_right(overlap):
    assert all(interrupted_twice(n, overlap) for n in (1, 3, 20, 60, 130))


@pytest.mark.slow
@pytest.mark.timeout(3600)  # about 700 lines, an engine each
@pytest.mark.parametrize("overlap", [False, True])
def test_a_second_interrupt_at_every_line(overlap):
    n = 1
    while interrupted_twice(n, overlap):
        n += 1
    assert n > 200


# ------------------------------------------------------------------------------------- a grammar


class Words:
    """A state that allows one text, and can be interrupted where it is asked."""

    def __init__(self, spec: tuple[int, ...], at: Iterator[int]) -> None:
        self.spec, self.told, self.at = spec, 0, at

    def _line(self) -> None:
        if next(self.at) == 0:
            raise KeyboardInterrupt("in a grammar")

    @property
    def done(self) -> bool:
        self._line()
        return self.told >= len(self.spec)

    def allowed(self) -> list[int]:
        self._line()
        return [self.spec[min(self.told, len(self.spec) - 1)]]

    def accept(self, token: int) -> bool:
        self._line()
        right = self.told < len(self.spec) and token == self.spec[self.told]
        self.told += right
        self._line()
        return right

    def rollback(self, n: int) -> None:
        self.told -= n
        self._line()

    def fork(self) -> Words:
        other = Words(self.spec, self.at)
        other.told = self.told
        return other


class OneText:
    version, exact, batch_invariant, on_device = 1, True, True, False

    def __init__(self, at: Iterator[int]) -> None:
        self.at = at

    def start(self, info):
        return self

    def compile(self, spec, vocab):
        return SimpleNamespace(start=lambda: Words(spec, self.at))


@pytest.mark.parametrize("drafts", [0, 3])
def test_an_interrupt_in_a_grammar_repeats_and_loses_no_token(drafts):
    """At each of its calls: nobody can know whether it was told the token or not."""
    text, calls = (7, 8, 9, 10, 11), 0
    while True:
        left = iter(range(calls, -10_000, -1))
        eng = engine("one layer", overlap=False, verifier=Fixed(drafts), grammar=OneText(left))
        eng.add(PROMPTS[0], max_tokens=12, grammar=text, **HOW)
        done, fell = [], False
        while eng.unfinished:
            try:
                done += eng.step()
            except KeyboardInterrupt:
                fell = True
        assert [(c.token_ids, c.finish_reason, c.error) for c in done] == [(text, "stop", None)]
        check_empty(eng)
        if not fell:
            break
        calls += 1
    assert calls > 15


# ------------------------------------------------------------------------------ what is undone


@pytest.mark.parametrize("beyond, state", [(0, "running"), (1, "waiting")])
def test_rows_that_the_rings_cannot_step_back_over_cost_the_place(beyond, state):
    eng = engine(overlap=False)
    eng.add(PROMPTS[0], PARAMS[0])
    for _ in range(3):
        eng.step()
    (request,), rt = eng.requests.values(), eng.runtime
    at = request.optimistic_computed
    item = ScheduledRequest.of(request, at, at + 1)
    written = request.num_computed + rt.limits.backtracking + beyond
    request.in_flight = (InFlightTokens(3, 1, 1, written),)
    recovery.undo(rt, [SimpleNamespace(scheduled=(item,), requests=(request,))])
    assert (request.status, request.in_flight) == (state, ())


def test_what_a_fork_cannot_have_is_refused_by_name():
    eng = engine(overlap=False)
    id = eng.add(PROMPTS[0], max_tokens=9, top_logprobs=2, **HOW)
    for _ in range(4):
        eng.step()
    for field, value in (("top_logprobs", 0), ("top_logprobs", 3), ("prompt_logprobs", True)):
        with pytest.raises(ValueError, match=f"fork of request {id}: {field}={value} was given"):
            eng.fork(id, **{field: value})
    other = eng.fork(id, temperature=0.0)
    done = {}
    while eng.unfinished:
        done |= {c.index: c for c in eng.step()}
    assert done[other].token_ids == done[id].token_ids
    for a, b in zip(done[other].top_logprobs, done[id].top_logprobs, strict=True):
        assert a == pytest.approx(b)


def test_a_fork_of_what_has_finished_goes_on():
    eng = engine(overlap=False)
    tokens = eng.stream(PROMPTS[0], max_tokens=4, **HOW)
    (id,) = eng.requests
    text = [next(tokens).id for _ in range(4)]
    assert eng.requests[id].finished
    child = eng.fork(id, max_tokens=9)
    assert (eng.requests[child].status, eng.requests[child].finish_reason) == ("waiting", None)
    list(tokens)
    done = []
    while eng.unfinished:
        done += eng.step()
    want = engine(overlap=False).generate(PROMPTS[0], max_tokens=9, **HOW)[0].token_ids
    assert done[0].token_ids == want and list(want[:4]) == text


# --------------------------------------------------------------------------- careless schedulers


class Keeps(FCFS):
    """Forgets a request and not what it holds."""

    def release(self, request):
        for queue in (self.running, self.waiting):
            if request in queue:
                queue.remove(request)


class Ends(FCFS):
    """Ends a request by itself after three tokens."""

    def schedule(self):
        for r in list(self.running):
            if len(r.output) == 3:
                self.running.remove(r)
                r.finish("length")
        return super().schedule()


@pytest.mark.parametrize("scheduler", [Keeps, Ends])
@pytest.mark.parametrize("by_hand", [False, True])
def test_a_scheduler_that_frees_nothing_loses_no_page(scheduler, by_hand):
    eng = engine(scheduler=scheduler, overlap=False)
    if by_hand:
        for p, q in zip(PROMPTS, PARAMS):
            eng.add(p, q)
        while eng.unfinished:
            eng.step()
    else:
        eng.generate(PROMPTS, PARAMS)
    assert sum(eng.stats.finished.values()) == len(PROMPTS)
    check_empty(eng)


class Loses(FCFS):
    def add(self, request):
        pass


class Forges(FCFS):
    def schedule(self):
        made = super().schedule()
        return SchedulerOutput(
            made.kind,
            tuple(dataclasses.replace(s, emits=True) for s in made.scheduled),
        )


def test_a_request_that_a_scheduler_loses_is_missed():
    eng = engine(scheduler=Loses, overlap=False)
    with pytest.raises(RuntimeError, match=r"Loses\(\) scheduled nothing in 1000 steps while 1 "):
        eng.generate(PROMPTS[0], max_tokens=3)
    check_empty(eng)


def test_a_share_says_what_follows_from_its_rows():
    eng = engine(scheduler=Forges, overlap=False, max_num_batched_tokens=8)
    with pytest.raises(ValueError, match="Forges.* scheduled request 0, which has emits=True"):
        eng.generate(PROMPTS[0], max_tokens=3)
    check_empty(eng)
