"""Resources: what a request gets, that it is given back once, and who gives it back."""

from __future__ import annotations

import sys
from collections import deque

import pytest

import deepinfer as di
from deepinfer.cache.pages import PageManager, Pool
from deepinfer.engine.request import InFlightTokens, Request
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.engine.scheduling.queue import RequestQueue
from deepinfer.engine.scheduling.resources import Resources
from deepinfer.engine.scheduling.scheduler import FCFS
from deepinfer.engine.stats.stats import Stats


def resources(pages=12, seqs=2, lookahead=3) -> Resources:
    return Resources(
        PageManager(pages),
        Pool("state ids", seqs + 1),
        Stats(),
        page_size=4,
        max_num_seqs=seqs,
        max_rows=16,
        lookahead=lookahead,
    )


def request(id: int, prompt: int, most: int = 8) -> Request:
    return Request(id, [5] * prompt, SamplingParams(max_tokens=most), seed=id)


def state(r: Resources) -> tuple[int, int]:
    return r.pages.free, r.states.free


# --------------------------------------------------------------------------------- giving, taking


def test_asking_changes_nothing_and_says_what_admit_does():
    r = resources()
    a, b, c = request(0, 20), request(1, 30), request(2, 60)
    before = state(r)
    assert [r.can_admit(x) for x in (a, b, c)] == ["ok", "ok", "never"]
    assert r.start_at(a) == 0 and state(r) == before
    assert r.admit(a) and (len(a.pages), a.status) == (5, "running") and a.state_id
    assert r.can_admit(b) == "later" and not r.admit(b)
    assert (b.pages, b.state_id, b.status) == ([], 0, "waiting")
    assert state(r) == (before[0] - 5, before[1] - 1)


def test_a_preempted_request_also_needs_the_pages_of_its_next_decode_step():
    r = resources()
    a = request(0, 8)
    assert r.pages_to_start(a) == 2
    a.output.append(7)
    assert r.pages_to_start(a) == r.pages_of(9 + 1 + 3) == 4
    assert r.pages_at_most(a) == r.pages_of(8 + 8 + 3)


def test_extend_gives_all_or_nothing():
    r = resources(pages=5)
    a = request(0, 8)
    assert r.admit(a) and r.extend(a) and len(a.pages) == 3  # 8 tokens and 3 drafts
    held = list(a.pages)
    assert not r.extend(a, 24) and a.pages == held
    assert r.extend(a, 20) and len(set(a.pages)) == 5 and r.pages.free == 0


def test_trim_gives_back_the_pages_of_rejected_drafts_alone():
    r = resources()
    a = request(0, 8)
    assert r.admit(a)
    a.output.append(7)
    a.num_computed = 8
    assert r.extend(a, 30)
    a.in_flight = (InFlightTokens(0, 1, 4, 12),)
    r.trim(a)
    assert len(a.pages) == 8  # a step in flight writes there
    a.in_flight = ()
    r.trim(a)
    assert len(a.pages) == r.pages_of(9 + 3) and r.pages.used == len(a.pages)


def test_a_second_free_is_harmless():
    r = resources()
    a, b = request(0, 8), request(1, 8)
    before = state(r)
    assert r.admit(a)
    r.free(a)
    assert r.admit(b)
    r.free(a)
    assert r.pages.used == len(b.pages)
    r.finish(b)
    r.free(b)
    assert state(r) == before and b.finish_reason == "abort"


def test_finish_counts_once_and_keeps_the_reason():
    r = resources()
    a = request(0, 8)
    r.stats.arrived(a)
    assert r.admit(a)
    a.finish("length")
    r.finish(a)
    r.finish(a)
    assert a.finish_reason == "length" and dict(r.stats.finished) == {"length": 1}


def test_a_requeued_request_holds_nothing_and_keeps_what_it_emitted():
    r = resources()
    a = request(0, 8)
    assert r.admit(a)
    a.output.extend((7, 8))
    r.preempt(a)
    assert (a.status, a.pages, a.state_id, a.output) == ("waiting", [], 0, [7, 8])
    assert (a.preemptions, r.stats.preemptions, r.pages.used) == (1, 1, 0)


def test_recover_leaves_whole_requests_running_and_takes_the_rest_back():
    r = resources()
    whole, half, done = request(0, 8), request(1, 8), request(2, 8)
    assert r.admit(whole) and r.admit(half)
    half.state_id = 0  # an interrupt in the middle of an admission
    done.finish("stop")
    done.pages = [11]
    r.recover([whole, half, done])
    assert whole.status == "running" and half.status == "waiting" and done.finished
    assert (half.pages, done.pages) == ([], [])
    assert r.pages.used == len(whole.pages) and r.states.free == 2


# ------------------------------------------------------------------------------------- one free


@pytest.fixture(scope="module")
def eng():
    with di.Engine.tiny(dtype="float64", device="cpu") as made:
        yield made


class FreesToo(FCFS):
    """A scheduler as it was written before `release` meant to forget only."""

    def release(self, request):
        super().release(request)
        self.resources.free(request)


@pytest.mark.parametrize("scheduler", [FCFS(), FreesToo()])
@pytest.mark.parametrize("overlap", [False, True])
def test_an_abort_gives_everything_back_once(eng, monkeypatch, overlap, scheduler):
    e = eng.with_(
        max_model_len=128, max_num_seqs=1, overlap=overlap, scheduler=scheduler, page_size=8
    )
    given = {"pages": 0, "states": 0, "free": 0}
    for kind, name in ((PageManager, "pages"), (Pool, "states")):
        give = kind.give

        def counted(self, numbers, give=give, name=name):
            given[name] += 1
            return give(self, numbers)

        monkeypatch.setattr(kind, "give", counted)
    free = Resources.free

    def counted_free(self, request):
        given["free"] += 1
        return free(self, request)

    monkeypatch.setattr(Resources, "free", counted_free)
    ids = [e.add([5] * 20, max_tokens=20) for _ in range(2)]
    for _ in range(3):
        e.step()
    frees = 1 if type(scheduler) is FCFS else 2
    given.update(pages=0, states=0, free=0)
    e.abort(ids[1])  # it waits and holds nothing
    assert given == {"pages": 0, "states": 0, "free": frees}
    given.update(pages=0, states=0, free=0)
    e.abort(ids[0])
    assert given == {"pages": 1, "states": 1, "free": frees}
    assert e.runtime.pages.used == 0 and e.unfinished == 0
    e.close()


# ------------------------------------------------------------------- the cost of an abort, a queue


class Work:
    """Calls of Python functions, and of C functions that walk a container."""

    def __init__(self):
        self.calls = 0

    def __call__(self, frame, event, arg):
        self.calls += event in ("call", "c_call")

    def __enter__(self):
        sys.setprofile(self)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)


class Watched(Request):
    """A request that counts how often it is compared: a list or deque is searched that way."""

    compared = 0

    def __eq__(self, other):
        Watched.compared += 1
        return self is other

    __hash__ = object.__hash__


def test_an_abort_costs_the_same_in_a_long_queue(eng):
    e = eng.with_(max_model_len=64, max_num_seqs=1, num_pages=8, page_size=8)
    spent = []
    ids = [e.add([5, 6], max_tokens=2) for _ in range(20)]
    for more in (0, 400):
        ids += [e.add([5, 6], max_tokens=2) for _ in range(more)]
        with Work() as work:
            e.abort(ids.pop(len(ids) // 2))
        spent.append(work.calls)
    assert spent[1] <= spent[0] + 5
    e.close()


def test_no_request_is_looked_at_to_release_another_one():
    s = FCFS().start(resources())
    many = [Watched(i, [5], SamplingParams(max_tokens=2), seed=0) for i in range(300)]
    for r in many:
        s.add(r)
    Watched.compared = 0
    for r in many[::-3]:
        s.release(r)
    assert Watched.compared <= len(many) and s.unfinished == 200
    assert list(s.waiting) == [r for i, r in enumerate(many) if i % 3 != 2]


def test_a_queue_is_a_list_and_a_deque():
    chance, queue, model = __import__("random").Random(3), RequestQueue(), []
    stock = [request(i, 1) for i in range(60)]
    for _ in range(2000):
        r = chance.choice(stock)
        move = chance.choice(["append", "appendleft", "insert", "remove", "pop", "popleft", "del"])
        if move in ("append", "appendleft", "insert"):
            at = {"append": len(stock), "appendleft": 0}.get(move, chance.randint(-5, 30))
            if r in model:
                model.remove(r)
            model.insert(at, r)
            queue.insert(at, r) if move == "insert" else getattr(queue, move)(r)
        elif move == "remove":
            if r in model:
                model.remove(r)
                queue.remove(r)
            else:
                with pytest.raises(ValueError, match="is not in the queue"):
                    queue.remove(r)
        elif model:
            at = {"pop": -1, "popleft": 0}.get(move, chance.randrange(-len(model), len(model)))
            assert queue[at] is model[at]
            took = model.pop(at)
            if move == "del":
                del queue[at]
            else:
                assert getattr(queue, move)() is took
        assert queue == model and list(reversed(queue)) == model[::-1]
        assert len(queue) == len(model) and (r in queue) == (r in model)
    assert queue[1:4] == model[1:4]
    with pytest.raises(IndexError, match="index 99 of a queue of"):
        queue[99]


def test_a_subclass_may_assign_any_order():
    """As in tutorial 2: the queue is still the engine's afterwards."""
    s = FCFS().start(resources())
    for i, n in enumerate((4, 9, 2)):
        s.add(request(i, n))
    s.waiting = deque(sorted(s.waiting, key=lambda r: r.optimistic_tokens))
    assert [r.id for r in s.waiting] == [2, 0, 1] and isinstance(s.waiting, RequestQueue)
    assert s.waiting[0].id == 2 and s.waiting[-1].id == 1
    s.waiting[0], s.waiting[2] = s.waiting[2], s.waiting[0]
    assert s.schedule().scheduled[0].id == s.running[0].id
