"""Schedulers: which rows run, in which order, within which limits; and votes between ranks."""

from __future__ import annotations

import json
import random
import threading
from dataclasses import replace

import pytest
import torch

from deepinfer.cache.pages import PageManager, Pool
from deepinfer.config import EngineConfig
from deepinfer.engine.completion import TokenStep
from deepinfer.engine.provenance import of_engine
from deepinfer.engine.request import Request
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.engine.scheduling.data_parallel import DataParallel, DataParallelVotes
from deepinfer.engine.scheduling.output import ScheduledRequest, SchedulerOutput
from deepinfer.engine.scheduling.resources import Resources
from deepinfer.engine.scheduling.scheduler import (
    FCFS,
    SCHEDULERS,
    DecodeOrder,
    Mixed,
    require_runnable,
)
from deepinfer.engine.stats.stats import Stats
from deepinfer.slots.verifier import Fixed
from support.pool import check_empty
from support.small import small_engine, stream

torch.set_num_threads(1)


def resources(pages=12, seqs=4, rows=16, page=4, lookahead=0) -> Resources:
    return Resources(
        PageManager(pages),
        Pool("state ids", seqs + 1),
        Stats(),
        page_size=page,
        max_num_seqs=seqs,
        max_rows=rows,
        lookahead=lookahead,
    )


def request(id: int, prompt: int, most: int = 8) -> Request:
    return Request(id, [5] * prompt, SamplingParams(max_tokens=most), seed=id)


def ran(schedule: SchedulerOutput) -> list[tuple[int, int, int]]:
    return [(s.id, s.start, s.stop) for s in schedule.scheduled]


def perform(schedule: SchedulerOutput, requests: dict[int, Request], drafts: int = 0) -> None:
    """What a model and a commit would do: every request that emits gets a token, or 1 + drafts."""
    for s in schedule.scheduled:
        r = requests[s.id]
        r.optimistic_computed = s.stop
        for _ in range((1 + drafts if s.decode else 1) if s.emits else 0):
            if len(r.output) < r.params.max_tokens:
                r.output.append(7)
                r.logprobs.append(0.0)
                r.steps.append(TokenStep(0, 0, "target"))
        if s.emits:
            r.optimistic_computed = r.optimistic_tokens - 1
        if len(r.output) >= r.params.max_tokens:
            r.finish("length")


def step(scheduler, drafts: int = 0) -> SchedulerOutput:
    resources = getattr(scheduler, "inner", scheduler).resources
    requests = {r.id: r for r in (*scheduler.running, *scheduler.waiting)}
    made = require_runnable(scheduler.schedule(), scheduler, resources, requests)
    perform(made, requests, drafts)
    for s in made.scheduled:
        if requests[s.id].finished:
            scheduler.release(requests[s.id])
            resources.finish(requests[s.id])
    return made


# ------------------------------------------------------------------------------------ which rows


def test_prefill_goes_first_in_chunks_and_in_order():
    s = FCFS().start(resources(rows=6))
    for i, n in enumerate((4, 9, 2)):
        s.add(request(i, n))
    said = [step(s) for _ in range(4)]
    assert [x.kind for x in said] == ["prefill", "prefill", "prefill", "decode"]
    assert [ran(x) for x in said[:3]] == [
        [(0, 0, 4), (1, 0, 2)],
        [(1, 2, 8)],
        [(1, 8, 9), (2, 0, 2)],
    ]
    assert ran(said[3]) == [(0, 4, 5), (1, 9, 10), (2, 2, 3)]
    s.add(request(3, 3))
    assert ran(step(s)) == [(3, 0, 3)]


def test_nobody_is_admitted_before_the_rows_are_there():
    s = FCFS().start(resources(rows=6))
    for i in range(3):
        s.add(request(i, 6))
    step(s)
    assert [r.id for r in s.running] == [0] and s.resources.pages.used == 2


def test_the_context_of_a_prefill_step_is_capped():
    s = FCFS(max_context=10).start(resources(pages=40, rows=16))
    for i, n in enumerate((4, 6, 1, 14, 2)):
        s.add(request(i, n))
    assert [ran(step(s)) for _ in range(2)] == [[(0, 0, 4), (1, 0, 6)], [(2, 0, 1)]]
    assert [len(s.waiting), step(s).kind] == [
        2,
        "prefill",
    ]  # 14 alone is more than 10: it goes alone


def test_the_cap_counts_context_and_not_rows():
    """The rows of a second chunk look at those of the first."""
    s = FCFS(max_context=10)
    s = s.start(resources(pages=40, rows=6))
    s.add(request(0, 9))
    s.add(request(1, 3))
    assert ran(step(s)) == [(0, 0, 6)]
    assert ran(step(s)) == [(0, 6, 9)]  # 3 rows, 9 of context: 3 more would be 12
    assert ran(step(s)) == [(1, 0, 3)]


def test_the_order_of_decode():
    """Two rows a step: FCFS finishes the first two, DeepInfer's order lets all advance together."""
    for kind, want in ((FCFS, [4, 4, 1, 1]), (DecodeOrder, [3, 3, 2, 2])):
        s = kind().start(resources(pages=40, rows=2))
        made = [request(i, 1) for i in range(4)]
        for r in made:
            s.add(r)
        for _ in range(2 + 3):
            step(s)
        assert [len(r.output) for r in made] == want
    s = DecodeOrder().start(resources(pages=40, rows=16))
    for i, n in enumerate((3, 9, 5)):
        s.add(request(i, n))
    step(s), step(s)
    assert [x.id for x in s.schedule().scheduled] == [1, 2, 0]  # the batch: longest first


def test_mixed_steps_have_decode_rows_and_then_prefill_rows():
    s = Mixed().start(resources(rows=6, lookahead=1, pages=40))
    s.add(request(0, 4))
    assert step(s).kind == "prefill"
    s.add(request(1, 9))
    made = step(s)
    assert made.kind == "mixed" and ran(made) == [
        (0, 4, 5),
        (1, 0, 4),
    ]  # a row is left for the draft
    assert ran(step(s)) == [(0, 5, 6), (1, 4, 8)]


@pytest.mark.parametrize("kind", [FCFS, DecodeOrder, Mixed])
@pytest.mark.parametrize("lookahead", [0, 3])
def test_every_random_load_ends(kind, lookahead):
    """No livelock, no leak and no overtaking for any sizes that fit alone."""
    for seed in range(60):
        chance = random.Random(seed)
        page = chance.choice((1, 4, 8))
        s = kind().start(
            resources(
                chance.randint(2, 14), chance.randint(1, 4), chance.randint(1, 12), page, lookahead
            )
        )
        todo = [request(i, chance.randint(1, 20), chance.randint(1, 12)) for i in range(12)]
        todo = [r for r in todo if s.resources.pages.ask(s.resources.pages_at_most(r)) != "never"]
        alive, first = [], []
        for steps in range(5000):
            if todo and chance.random() < 0.2:
                alive.append(todo.pop(0))
                s.add(alive[-1])
            made = step(s, chance.randint(0, lookahead))
            first += [x.id for x in made.scheduled if x.start == 0 and x.id not in first]
            held = [p for r in s.running for p in r.pages]
            assert len(held) == len(set(held)) == s.resources.pages.used
            assert [r.id for r in s.waiting] == sorted(r.id for r in s.waiting)
            assert made.scheduled or not s.unfinished
            rows = sum(x.stop - x.start + lookahead * x.decode for x in made.scheduled)
            assert rows <= max(s.resources.max_rows, 1 + lookahead)
            if not todo and not s.unfinished:
                break
        assert not s.unfinished and all(r.finished for r in alive)
        assert first == sorted(first) and s.resources.pages.free == s.resources.pages.size
        assert s.resources.states.free == s.resources.states.size


# ------------------------------------------------------------------------------- which scheduler


def engine(**changes):
    return small_engine("one layer", vocab=97, **{"max_model_len": 64, **changes})


PROMPTS = [stream(n, 40 + n, high=90) for n in (9, 3, 14)]
HOW = dict(max_tokens=8, seed=2, ignore_eos=True)


def test_a_name_a_class_or_an_instance():
    want = [c.token_ids for c in engine().generate(PROMPTS, **HOW)]
    mine = FCFS(max_context=12)
    for value in ("fcfs", "mixed", Mixed, DecodeOrder(), mine, DataParallel(), DataParallel):
        for drafts in (0, 2):
            eng = engine(scheduler=value, verifier=Fixed(drafts), max_num_batched_tokens=8)
            assert [c.token_ids for c in eng.generate(PROMPTS, **HOW)] == want
            check_empty(eng)
    assert engine().settings.scheduler == "fcfs" and not hasattr(mine, "resources")
    a, b = engine(scheduler=mine), engine(scheduler=mine)
    assert a.runtime.scheduler is not b.runtime.scheduler is not mine
    again = a.with_(max_num_seqs=2)
    assert again.settings.scheduler == mine and again.runtime.scheduler.max_context == 12
    assert repr(FCFS()) == "FCFS()" and "scheduler=FCFS(max_context=12)" in repr(a)
    assert "scheduler" not in repr(engine())
    assert json.dumps(of_engine(a)) and "FCFS(max_context=12)" in a.settings.to_json()
    assert (
        EngineConfig(scheduler=FCFS())
        == EngineConfig(scheduler=FCFS())
        != EngineConfig(scheduler=mine)
    )
    assert hash(a.settings) == hash(engine().settings)


@pytest.mark.parametrize(
    "value, error, words",
    [
        ("fcsf", ValueError, "no scheduler is named 'fcsf': did you mean 'fcfs'"),
        ("zzz", ValueError, "the names are fcfs, decode_order, mixed"),
        (None, TypeError, "want a name"),
        (3, TypeError, "has no start, add, schedule"),
        (Resources, TypeError, "cannot be made without arguments"),
    ],
)
def test_what_is_no_scheduler_is_refused_when_the_engine_is_made(value, error, words):
    with pytest.raises(error, match=words):
        engine(scheduler=value)
    assert list(SCHEDULERS) == ["fcfs", "decode_order", "mixed"]
    with pytest.raises(ValueError, match="max_context=0"):
        FCFS(max_context=0)


class OneByOne:
    """A whole scheduler of one's own: one request at a time, last in, first out."""

    def __init__(self):
        self.stack = []

    def start(self, resources):
        own = type(self)()
        own.resources = resources
        return own

    def add(self, request):
        self.stack.append(request)

    def schedule(self):
        if not self.stack:
            return SchedulerOutput("idle")
        running = [r for r in self.stack if r.status == "running"]
        r = running[0] if running else self.stack[-1]
        if not (self.resources.extend(r) if running else self.resources.admit(r)):
            return SchedulerOutput("idle")
        return SchedulerOutput(
            "decode" if r.decoding else "prefill",
            (ScheduledRequest.of(r),),
        )

    def preempt(self, request):
        self.resources.preempt(request)

    def release(self, request):
        self.stack.remove(request)
        self.resources.free(request)

    def recover(self, requests):
        self.stack = [r for r in requests if not r.finished]

    @property
    def unfinished(self):
        return len(self.stack)


def test_a_scheduler_from_nothing():
    want = [c.token_ids for c in engine().generate(PROMPTS, **HOW)]
    eng = engine(scheduler=OneByOne(), verifier=Fixed(2))
    out = eng.generate(PROMPTS, **HOW)
    assert [c.token_ids for c in out] == want
    assert eng.runtime.pages.used == 0 and eng.unfinished == 0
    assert (
        out[0].steps[0].step > out[1].steps[-1].step > out[1].steps[0].step > out[2].steps[-1].step
    )


def wild(change):
    class Wild(FCFS):
        def schedule(self):
            made = super().schedule()
            return change(self, made) if made.scheduled else made

    return Wild()


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda s, m: SchedulerOutput(m.kind, m.scheduled * 2), "which is listed twice"),
        (
            lambda s, m: SchedulerOutput(m.kind, (ScheduledRequest.of(s.running[0], 1, 2),)),
            "has rows 1..1 scheduled, but 0 of 9 tokens are computed: the next row is 0",
        ),
        (
            lambda s, m: SchedulerOutput(m.kind, (ScheduledRequest.of(s.running[0], 0, 99),)),
            "has rows 0..98 scheduled, but 0 of 9 tokens",
        ),
        (
            lambda s, m: SchedulerOutput(m.kind, (replace(m.scheduled[0], id=77),)),
            "request 77, which is no request of this engine",
        ),
        (lambda s, m: s.preempt(s.running[0]) or m, "which is waiting"),
        (lambda s, m: SchedulerOutput("decode", m.scheduled), "prefill rows in a decode step"),
        (lambda s, m: SchedulerOutput("both", m.scheduled), "a step 'both'"),
        (
            lambda s, m: (
                s.resources.pages.give(s.running[0].pages[1:])
                or s.running[0].pages.__delitem__(slice(1, None))
                or m
            ),
            "holds 1 pages, 3 are written to",
        ),
    ],
)
def test_a_schedule_that_cannot_run_names_its_scheduler(change, words):
    eng = engine(scheduler=wild(change), page_size=4)
    with pytest.raises(ValueError, match=rf"Wild\(\) scheduled.*{words}"):
        eng.generate(PROMPTS[0], **HOW)
    assert eng.runtime.pages.used == 0 and eng.unfinished == 0


def test_a_timeout_ends_a_request_and_no_clock_is_read_without_one(monkeypatch):
    now = [100.0]

    def clock() -> float:
        if now[0] < 0:
            raise AssertionError("a clock was read")
        return now[0]

    monkeypatch.setattr("deepinfer.engine.step.loop.time.monotonic", clock)
    eng = engine(max_num_seqs=2)
    want = eng.generate(PROMPTS, **HOW)
    running, waits = eng.add(PROMPTS[0], timeout=5, **HOW), None
    free = eng.add(PROMPTS[1], **HOW)
    waits = eng.add(PROMPTS[2], timeout=2.5, **HOW)
    done = [c for _ in range(3) for c in eng.step()]
    now[0] = 102.5
    done += eng.step()
    assert [(c.index, c.finish_reason, c.token_ids, c.error) for c in done] == [
        (waits, "timeout", (), None)
    ]
    eng.runtime.scheduler.preempt(eng.requests[running])
    now[0] = 105.0
    (late,) = eng.step()
    assert late.index == running and late.finish_reason == "timeout"
    assert late.token_ids == want[0].token_ids[:4] and eng.stats.finished["timeout"] == 2
    now[0] = -1.0
    while eng.unfinished:
        done += eng.step()
    assert {c.index: c.token_ids for c in done}[free] == want[1].token_ids
    check_empty(eng)
    for bad in (-1, True, "3", float("nan")):
        with pytest.raises(ValueError, match="timeout=.*seconds >= 0"):
            eng.add(PROMPTS[0], timeout=bad)
    now[0] = 7.0
    assert [c.finish_reason for c in eng.generate(PROMPTS, timeout=0, **HOW)] == ["timeout"] * 3
    assert list(eng.stream(PROMPTS[0], timeout=0, **HOW)) == []


class Scratch(OneByOne):
    """Makes its queue where the protocol says that its copy begins."""

    def __init__(self):
        pass

    def start(self, resources):
        own = type(self)()
        own.resources, own.stack = resources, []
        return own


def test_a_scheduler_may_make_its_queues_when_it_starts():
    out = engine(scheduler=Scratch).generate(PROMPTS[:2], max_tokens=3, temperature=0.0)
    assert [c.error for c in out] == [None, None]


@pytest.mark.parametrize(
    "made, error, words",
    [
        (None, TypeError, r"Slip\(\).schedule\(\) returned None: want a SchedulerOutput"),
        ([], TypeError, r"Slip\(\).schedule\(\) returned \[\]"),
        (SchedulerOutput("foo"), ValueError, "Slip.* scheduled a step 'foo': want one of"),
        (SchedulerOutput("decode", (3,)), TypeError, "Slip.* scheduled 3: want ScheduledRequests"),
        (SchedulerOutput("decode"), RuntimeError, "Slip.* scheduled nothing in 1000 steps"),
    ],
    ids=str,
)
def test_a_slip_in_a_schedule_is_named(made, error, words):
    class Slip(FCFS):
        def schedule(self):
            return made

    eng = engine(scheduler=Slip)
    with pytest.raises(error, match=words):
        eng.generate(PROMPTS[0], max_tokens=3)
    check_empty(eng)


def test_a_scheduler_that_never_schedules_is_blamed():
    eng = engine(scheduler=wild(lambda s, m: SchedulerOutput("idle")))
    with pytest.raises(
        RuntimeError, match=r"Wild\(\) scheduled nothing in 1000 steps while 1 requests"
    ):
        eng.generate(PROMPTS[0], **HOW)
    assert eng.unfinished == 0


# ------------------------------------------------------------------------------------ the votes


def test_points_are_those_of_the_document():
    v = DataParallelVotes()
    said = []
    for n in range(211):
        v.decode_steps = n
        said.append(v.point([True]))
    assert [n for n, p in enumerate(said) if p == "all"] == [0, 70, 140, 210]
    assert [n for n, p in enumerate(said) if p == "any"] == [100, 200]
    v.decode_steps = 700  # both: ANY
    assert v.point([True]) == "any"
    v.decode_steps = 3
    assert v.point([False, False]) == "any" and v.point([False, True]) == "none"


def test_an_attempt_that_schedules_nothing_is_a_decode_step():
    v = DataParallelVotes()
    assert v.attempt([True, True], [True, True]) and v.settle([False, False]) == "decode"
    assert v.decode_steps == 1
    assert not v.attempt([True, True], [True, True]) and v.settle([False, False]) == "decode"
    v.decode_steps = 70
    assert not v.attempt([True, False], [True, True])
    assert v.attempt([True, True], [True, True]) and v.settle([False, True]) == "prefill"
    assert v.decode_steps == 0
    with pytest.raises(ValueError, match="at least 1 step"):
        DataParallelVotes(all_every=0)


class Ranks:
    """Ranks as threads that gather votes at a barrier, as an all-gather does."""

    def __init__(self, n: int) -> None:
        self.n, self.votes, self.barrier = n, [False] * n, threading.Barrier(n, timeout=20)

    def gather_of(self, rank: int):
        def gather(vote: bool) -> list[bool]:
            self.votes[rank] = vote
            self.barrier.wait()
            got = list(self.votes)
            self.barrier.wait()
            return got

        return gather

    def run(self, make, loads, most: int) -> list[list[tuple[str, int]]]:
        """(kind, rows) of every step of every rank, until all are done. loads: per rank (step at
        which it comes, prompt length, output length)."""
        said: list[list] = [[] for _ in range(self.n)]

        def one(rank: int) -> None:
            gather = self.gather_of(rank)
            s = DataParallel(make(), gather, DataParallelVotes(all_every=7, any_every=10)).start(
                resources(pages=9, rows=8)
            )
            todo = sorted(loads[rank])
            try:
                for n in range(most):
                    while todo and todo[0][0] <= n:
                        _, length, out = todo.pop(0)
                        s.add(request(len(said[rank]) * 100 + len(s.waiting), length, out))
                    if not any(gather(bool(todo or s.unfinished))):
                        return
                    made = step(s)
                    said[rank].append((made.kind, len(made.scheduled)))
                said[rank].append(("never ends", 0))
            except BaseException:
                self.barrier.abort()
                raise

        threads = [threading.Thread(target=one, args=(i,)) for i in range(self.n)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        return said


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("make", [FCFS, DecodeOrder])
def test_ranks_take_steps_of_one_kind_and_finish(n, make):
    for seed in range(6):
        chance = random.Random(seed)
        loads = [
            [
                (chance.randint(0, 30), chance.randint(1, 14), chance.randint(1, 12))
                for _ in range(chance.randint(0, 6))
            ]
            for _ in range(n)
        ]
        said = Ranks(n).run(make, loads, 800)
        assert len({tuple(kind for kind, _ in one) for one in said}) == 1  # the same on every rank
        assert not any(kind == "never ends" for one in said for kind, _ in one)
        assert said[0] or not any(loads)


def test_a_rank_that_wants_in_vain_does_not_stop_decoding():
    """The livelock: every rank wants, none can start one. Decoding goes on and frees the room."""

    class Eager(FCFS):
        def next_fits(self):
            return bool(self.waiting) or super().next_fits()

        def prefill(self, rows, admit=True):
            return super().prefill(rows, admit and FCFS.next_fits(self))

    loads = [[(0, 12, 12), (1, 30, 2)], [(0, 12, 12), (1, 30, 2)]]
    said = Ranks(2).run(Eager, loads, 300)
    kinds = [kind for kind, _ in said[0]]
    assert "never ends" not in kinds and kinds == [kind for kind, _ in said[1]]
    assert all(rows for kind, rows in said[0] if kind == "prefill")
    assert kinds.count("decode") >= 11


def test_one_rank_alone_waits_for_any_not_for_all():
    """Rank 1 has no prompt: rank 0's second one waits for the ANY point, 10 decode steps on."""
    said = Ranks(2).run(FCFS, [[(0, 3, 30), (1, 3, 2)], [(0, 3, 30)]], 100)
    kinds = [kind for kind, _ in said[0]]
    assert kinds[:12] == ["prefill", *["decode"] * 10, "prefill"] and said[1][11] == ("prefill", 0)
