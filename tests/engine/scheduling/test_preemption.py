"""Pages on demand: who is preempted is computed again, and nobody can tell it from its text."""

from __future__ import annotations

import itertools
import random
import sys

import pytest
import torch
from engine.step.test_grammar_mask import Cycle

from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.slots.replay import Exact
from deepinfer.slots.verifier import Fixed
from support.pool import check, check_empty
from support.small import poison, small_engine, stream

PROMPTS = [stream(n, 20 + n, high=90) for n in (9, 17, 5, 12)]
torch.set_num_threads(1)
PARAMS = [
    SamplingParams(temperature=t, seed=7 + i, max_tokens=26 - 2 * i, ignore_eos=True)
    for i, t in enumerate((0.0, 1.0, 0.7, 0.0))
]


def engine(layout: str = "2 and 1", **changes):
    settings = {"max_model_len": 64, "page_size": 8, "max_num_seqs": 4, **changes}
    return small_engine(layout, vocab=97, **settings)


@pytest.fixture(scope="module")
def clean():
    return engine().generate(PROMPTS, PARAMS)


def same(got, want) -> None:
    assert [c.token_ids for c in got] == [c.token_ids for c in want]
    for a, b in zip(got, want):
        assert a.finish_reason == b.finish_reason and a.error is None
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-9)
        assert len(a.steps) == len(a.token_ids)
        assert [s.step for s in a.steps] == sorted(s.step for s in a.steps)


# ------------------------------------------------------------------------------ the same text


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "scheduler, drafts",
    [
        ("fcfs", 3),
        ("mixed", 0),
        pytest.param("fcfs", 0, marks=SLOW),
        pytest.param("decode_order", 3, marks=SLOW),
        pytest.param("mixed", 3, marks=SLOW),
    ],
)
def test_a_pool_one_third_as_large_gives_the_same_text(clean, scheduler, drafts):
    eng = engine(num_pages=6, scheduler=scheduler, verifier=Fixed(drafts))
    poison(eng.runtime.cache)
    same(eng.generate(PROMPTS, PARAMS), clean)
    assert eng.stats.preemptions > 2
    check_empty(eng)


@pytest.mark.parametrize("rows", [5, pytest.param(1, marks=SLOW)])
def test_a_recompute_runs_in_chunks(clean, rows):
    """Chunks of any size, and of one row: the last row of a recompute gives the next token."""
    eng = engine(num_pages=6, max_num_batched_tokens=rows, verifier=Fixed(2))
    same(eng.generate(PROMPTS, PARAMS), clean)
    assert eng.stats.preemptions > 0
    check_empty(eng)


def test_a_request_may_give_way_at_any_moment(clean):
    """After every number of steps, in a prompt as well, once or every second step."""
    for drafts, at in ((0, 2), (3, 4)):
        eng = engine(max_num_batched_tokens=7, verifier=Fixed(drafts))
        poison(eng.runtime.cache)
        numbers, done = [eng.add(p, q) for p, q in zip(PROMPTS, PARAMS)], {}
        for n in itertools.count():
            if not eng.unfinished:
                break
            done |= {c.index: c for c in eng.step()}
            running = eng.runtime.scheduler.running
            if running and (n == at or at < n < at + 20 and n % 7 == 0):
                eng.runtime.scheduler.preempt(running[n % len(running)])
            check(eng)
        same([done[i] for i in numbers], clean)
        assert eng.stats.preemptions >= 3


def test_no_log_probability_is_said_twice():
    how = dict(max_tokens=20, seed=3, ignore_eos=True, top_logprobs=2, prompt_logprobs=True)
    want = engine().generate(PROMPTS, **how)
    eng = engine(num_pages=6, max_num_batched_tokens=6, verifier=Fixed(2))
    got = eng.generate(PROMPTS, **how)
    same(got, want)
    for a, b in zip(got, want):
        assert a.prompt_logprobs[1:] == pytest.approx(b.prompt_logprobs[1:], abs=1e-9)
        assert len(a.prompt_logprobs) == len(a.prompt_token_ids)
        assert [list(t) for t in a.top_logprobs] == [list(t) for t in b.top_logprobs]
    assert eng.stats.preemptions > 0


class Cycles:
    """A grammar slot for any vocabulary: spec is the tokens that come, in order and again."""

    version, exact = 1, True

    def compile(self, spec, vocab):
        class Compiled:
            def start(self):
                return Cycle(spec)

        return Compiled()


@pytest.mark.parametrize("drafts", [0, 3])
def test_a_grammar_goes_on_where_it_was(drafts):
    """Its state is the host's: a recompute shows it no token twice."""
    eng = small_engine(
        "one layer",
        max_model_len=64,
        page_size=8,
        num_pages=6,
        grammar=Cycles(),
        verifier=Fixed(drafts),
    )
    cycle = (11, 24, 35, 9, 77)
    out = eng.generate(PROMPTS, grammar=cycle, max_tokens=22, ignore_eos=True).raise_for_errors()
    assert [c.token_ids for c in out] == [(cycle * 5)[:22]] * 4 and eng.stats.preemptions > 0


def test_prompt_logprobs_of_a_prompt_that_gave_way_half_way():
    how = dict(max_tokens=3, seed=3, prompt_logprobs=True)
    (want,) = engine().generate([PROMPTS[1]], **how)
    eng = engine(max_num_batched_tokens=5)
    number = eng.add(PROMPTS[1], **how)
    for _ in range(2):
        eng.step()
    eng.runtime.scheduler.preempt(eng.requests[number])
    done = []
    while eng.unfinished:
        done += eng.step()
    assert done[0].prompt_logprobs[1:] == pytest.approx(want.prompt_logprobs[1:], abs=1e-9)
    assert len(done[0].prompt_logprobs) == len(want.prompt_logprobs)


class Cut(Exact):
    """Drops all prompt rows but the last 6 above layer 1: what a bounded replay does."""

    exact = False

    def plan(self, prompt, config):
        from dataclasses import replace

        cut = max(prompt.length - 6, 0)
        floors = tuple(0 if layer < 2 else cut for layer in range(config.num_layers))
        made = super().plan(prompt, config)
        return replace(made, rows_from=floors, kv_from=floors, floor=floors, exact=False)


@pytest.mark.parametrize("drafts", [3, pytest.param(0, marks=SLOW)])
def test_the_cut_of_a_plan_stays_that_of_the_prompt(drafts):
    """A recompute drops the rows that the prompt dropped, and none of the output's."""
    want = engine(replay=Cut()).generate(PROMPTS, PARAMS)
    assert [c.token_ids for c in want] != [c.token_ids for c in engine().generate(PROMPTS, PARAMS)]
    rows = 7 if drafts else None
    eng = engine(replay=Cut(), num_pages=6, max_num_batched_tokens=rows, verifier=Fixed(drafts))
    poison(eng.runtime.cache)
    same(eng.generate(PROMPTS, PARAMS), want)
    assert eng.stats.preemptions > 0


# ------------------------------------------------------------------------------------ the order


def test_the_longest_output_gives_way_and_waits_in_front():
    eng = engine("one layer", num_pages=5, max_num_seqs=2)
    a = eng.add(stream(8, 1, high=90), max_tokens=20, ignore_eos=True)
    for _ in range(4):
        eng.step()
    b = eng.add(stream(16, 2, high=90), max_tokens=20, ignore_eos=True)
    c = eng.add([5], max_tokens=2)
    seen = []
    while not eng.stats.preemptions:
        eng.step()
        check(eng)
        seen.append({r.id: len(r.output) for r in eng.requests.values()})
    longest = eng.requests[a]
    assert longest.preemptions == 1 and longest.status == "waiting" and not longest.pages
    assert (
        longest.optimistic_computed == 0
        and longest.draft is None
        and len(longest.output) == seen[-1][a]
    )
    assert seen[-1][a] > seen[-1][b]
    assert [r.id for r in eng.runtime.scheduler.waiting] == [a, c]  # c never ran: it stays behind
    assert eng.requests[b].status == "running"
    order = []
    while eng.unfinished:
        order += [x.index for x in eng.step()]
        check(eng)
    assert order.index(b) < order.index(a)
    check_empty(eng)


def test_a_request_alone_never_gives_way():
    eng = engine("one layer", num_pages=4, verifier=Fixed(5))
    (out,) = eng.generate(stream(9, 1, high=90), max_tokens=18, ignore_eos=True)
    assert len(out.token_ids) == 18 and eng.stats.preemptions == 0


def test_pages_come_one_by_one():
    eng = engine("one layer")
    number = eng.add(stream(8, 1, high=90), max_tokens=20, ignore_eos=True)
    held = []
    while eng.unfinished:
        eng.step()
        held += [len(r.pages) for r in eng.requests.values()]
    assert held == [1] * 1 + [2] * 8 + [3] * 8 + [4] * 2 and number == 0


def test_giving_way_may_end_a_request():
    from deepinfer.engine.scheduling.scheduler import FCFS

    eng = engine(num_pages=6, scheduler=FCFS(stop_preempted=True))
    out = eng.generate(PROMPTS, PARAMS)
    reasons = [c.finish_reason for c in out]
    want = engine().generate(PROMPTS, PARAMS)
    assert {"length", "preempted"} == set(reasons) and not any(c.error for c in out)
    assert eng.stats.finished["preempted"] == reasons.count("preempted")
    for c, w in zip(out, want):
        assert 0 < len(c.token_ids) and c.token_ids == w.token_ids[: len(c.token_ids)]
    check_empty(eng)


def test_abort_of_one_that_gave_way():
    eng = engine("one layer")
    numbers = [eng.add(p, q) for p, q in zip(PROMPTS, PARAMS)]
    for _ in range(4):
        eng.step()
    eng.runtime.scheduler.preempt(eng.requests[numbers[1]])
    out = eng.abort(numbers[1])
    assert out.finish_reason == "abort" and len(out.token_ids) == 4
    check(eng)
    while eng.unfinished:
        eng.step()
    check_empty(eng)


@pytest.mark.parametrize("name", ["logits", pytest.param("mtp.base", marks=SLOW)])
def test_a_step_that_fails_in_a_recompute_runs_again(clean, name):
    """Also a chunk longer than the ring's backtracking: the recompute starts over, its text goes on."""
    eng = engine(num_pages=6, max_num_batched_tokens=13, verifier=Fixed(2))
    numbers, done, failed = [eng.add(p, q) for p, q in zip(PROMPTS, PARAMS)], {}, []

    def sometimes(x, at):
        if at.step % 3 == 2 and at.step not in failed:
            failed.append(at.step)
            raise KeyboardInterrupt

    with eng.trace(name, edit=sometimes):
        while eng.unfinished:
            try:
                done |= {c.index: c for c in eng.step()}
            except KeyboardInterrupt:
                pass
            check(eng)
    assert len(failed) > 5 and eng.stats.preemptions > 0
    same([done[i] for i in numbers], clean)
    check_empty(eng)


# ------------------------------------------------------------------------------ an interrupt, anywhere

PARTS = (
    "scheduling/scheduler.py",
    "scheduling/resources.py",
    "step/commit.py",
    "step/execute.py",
    "prefix/manager.py",
    "prefix/snapshot_capture.py",
    "cache/pages.py",
    "cache/prefix_index.py",
    "cache/snapshots.py",
)
CLEANUP = ("release", "free", "give", "_check", "recover", "recount", "know")


class InterruptAt:
    """KeyboardInterrupt before the n-th line that runs in the parts of a step."""

    def __init__(self, n: int) -> None:
        self.left = n

    def __call__(self, frame, event, arg):
        if not frame.f_code.co_filename.endswith(PARTS):
            return None
        if frame.f_code.co_name in CLEANUP:
            return None  # giving back, after an interrupt too, is not interrupted
        if event == "line":
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt("at a line")
        return self


def test_an_interrupt_at_any_line_of_a_step_leaves_the_engine_usable():
    how = dict(max_tokens=9, seed=1, ignore_eos=True)
    eng = engine("one layer", num_pages=5, max_num_batched_tokens=12, verifier=Fixed(2))
    want = [c.token_ids for c in eng.generate(PROMPTS, **how)]
    assert eng.stats.preemptions > 0
    chance, interrupted = random.Random(0), 0
    for _ in range(40):
        before = sys.gettrace()
        sys.settrace(InterruptAt(int(10 ** chance.uniform(0.5, 3.8))))
        try:
            eng.generate(PROMPTS, **how)
        except KeyboardInterrupt as error:
            interrupted += "at a line" in str(error)
        finally:
            sys.settrace(before)
        check_empty(eng)
    assert interrupted > 25
    assert [c.token_ids for c in eng.generate(PROMPTS, **how)] == want


def test_what_was_lost_is_found_again():
    eng = engine("one layer", max_num_seqs=2)
    numbers = [eng.add(p, max_tokens=9) for p in PROMPTS[:3]]
    eng.step()
    rt = eng.runtime
    rt.pages.take(3), rt.states.take(1)  # on the way to nobody
    rt.scheduler.running.pop()
    rt.scheduler.waiting.appendleft(rt.scheduler.running[0])
    rt.resources.recover(eng.requests.values())
    rt.scheduler.recover(eng.requests.values())
    check(eng)
    assert [r.id for r in rt.scheduler.running] == [numbers[1], numbers[0]]
    eng.requests[numbers[0]].state_id = 0
    rt.resources.recover(eng.requests.values())
    rt.scheduler.recover(eng.requests.values())
    check(eng)
    assert [r.id for r in rt.scheduler.waiting] == [numbers[0], numbers[2]]
    while eng.unfinished:
        eng.step()
    check_empty(eng)


def test_tokens_of_an_interrupted_commit_may_need_one_page_more():
    """All drafts and the target's own token were appended, then the interrupt came: those rows run
    again as prefill rows, and the last lies behind the pages that the step had."""
    eng = engine("one layer", verifier=Fixed(2), num_pages=4, max_num_seqs=2)
    how = dict(max_tokens=12, seed=4, ignore_eos=True)
    (want,) = eng.generate(PROMPTS[2], **how)
    number, other = eng.add(PROMPTS[2], **how), eng.add(PROMPTS[2], **how)
    eng.step()
    eng.step()  # both hold what a decode step writes
    r = eng.requests[number]
    while len(r.output) < 4:
        at = len(r.output)
        r.output.append(want.token_ids[at])
        r.logprobs.append(want.logprobs[at])
        r.steps.append(want.steps[at])
    assert r.optimistic_tokens == 9 and r.optimistic_computed <= 6 and len(r.pages) == 1
    assert eng.requests[other].optimistic_tokens <= 8
    done = {}
    while eng.unfinished:
        done |= {c.index: c for c in eng.step()}
        check(eng)
    assert done[number].token_ids == done[other].token_ids == want.token_ids
    check_empty(eng)


def test_after_an_interrupt_at_any_line_the_loop_goes_on_to_the_same_text():
    each = [SamplingParams(max_tokens=9 + i, seed=i, ignore_eos=True) for i in range(4)]
    how = dict(num_pages=6, max_num_batched_tokens=12, verifier=Fixed(2))
    want = [c.token_ids for c in engine("one layer").generate(PROMPTS, each)]
    chance, interrupted = random.Random(1), 0
    eng = engine("one layer", **how)
    for _ in range(6):
        numbers, done = [eng.add(p, q) for p, q in zip(PROMPTS, each)], {}
        while eng.unfinished:
            sys.settrace(InterruptAt(int(10 ** chance.uniform(0.3, 3.3))))
            try:
                done |= {c.index: c for c in eng.step()}
            except KeyboardInterrupt:
                interrupted += 1
            finally:
                sys.settrace(None)
            check(eng)
        assert [done[i].token_ids for i in numbers] == want
        assert all(len(c.logprobs) == len(c.steps) == len(c.token_ids) for c in done.values())
        check_empty(eng)
    assert interrupted > 40
