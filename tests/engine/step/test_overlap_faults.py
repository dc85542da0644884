"""Overlapped scheduling under faults, interrupts, aborts and too few pages: nothing is lost, nothing
leaks, and each request still gets the tokens that it gets alone."""

from __future__ import annotations

import random
import signal
import sys

import pytest
import torch
from engine.scheduling.test_preemption import InterruptAt
from properties import test_serving

from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.engine.step import overlap
from deepinfer.slots.sampler import Philox
from deepinfer.slots.verifier import Fixed
from support.overlapped import PARAMS, PROMPTS, Half, Knowing, engine, same, serial
from support.pool import check, check_empty

torch.set_num_threads(1)
SLOW = pytest.mark.slow


class Falls(Philox):
    """Its call number `at` fails."""

    def __init__(self, at: int, error=ValueError) -> None:
        self.at, self.error, self.calls = at, error, 0

    def draw(self, dist, keys):
        self.calls += 1
        if self.calls == self.at:
            raise self.error("bad luck")
        return super().draw(dist, keys)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_step_that_fails_behind_the_host_is_undone_with_the_one_behind_it(error):
    for at in (1, 2, 6):
        eng = engine(sampler=Falls(at, error), verifier=Fixed(0), max_num_batched_tokens=30)
        for p, q in zip(PROMPTS, PARAMS):
            eng.add(p, q)
        done, failed = [], 0
        while eng.unfinished:
            try:
                done += eng.step()
            except error as caught:
                assert "bad luck" in str(caught)
                failed += 1
                assert not eng._loop.in_flight and not any(
                    r.in_flight for r in eng.requests.values()
                )
            check(eng)
        assert failed == 1
        same(sorted(done, key=lambda c: c.index), serial())
        check_empty(eng)


def test_an_interrupt_at_any_line_of_the_host_goes_on_to_the_same_text():
    each = [SamplingParams(max_tokens=9 + i, seed=i, ignore_eos=True) for i in range(4)]
    want = [c.token_ids for c in engine("one layer", overlap=False).generate(PROMPTS[:4], each)]
    chance, interrupted = random.Random(3), 0
    eng = engine("one layer", num_pages=6, max_num_batched_tokens=12, verifier=Fixed(2))
    for _ in range(2):
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
        check_empty(eng)
    assert interrupted > 12


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timers of signals here")
def test_an_interrupt_by_a_signal_while_the_host_waits():
    """As Ctrl-C comes: at any moment, most of them while the device works."""

    def interrupt(*_):
        raise KeyboardInterrupt("by a signal")

    eng = engine(num_pages=12, verifier=Fixed(2), max_num_batched_tokens=30, prefix_cache=True)
    chance, interrupted, before = random.Random(5), 0, signal.signal(signal.SIGALRM, interrupt)
    numbers, done = [eng.add(p, q) for p, q in zip(PROMPTS, PARAMS)], {}
    try:
        while eng.unfinished:
            if chance.random() < 0.5:
                signal.setitimer(signal.ITIMER_REAL, chance.uniform(0.0005, 0.02))
            try:
                done |= {c.index: c for c in eng.step()}
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                interrupted += 1
            check(eng)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    lost = [
        i for i in numbers if i not in done
    ]  # finished in a call that was interrupted at its end
    assert interrupted > 4 and len(lost) <= 1
    same(
        [done[i] for i in numbers if i in done], [c for i, c in zip(numbers, serial()) if i in done]
    )
    check_empty(eng)


@pytest.mark.parametrize(
    "drafts, scheduler, pages, rows", [(0, "fcfs", 11, None), (3, "mixed", 12, 12)]
)
def test_random_operations_with_faults(monkeypatch, drafts, scheduler, pages, rows):
    test_serving.walk(
        drafts + 1,
        250,
        monkeypatch,
        num_pages=pages,
        max_num_seqs=4,
        verifier=Fixed(drafts),
        scheduler=scheduler,
        max_num_batched_tokens=rows,
        overlap=True,
        prefix_cache=drafts == 0,
    )


@SLOW
@pytest.mark.parametrize("scheduler", ["fcfs", "decode_order", "mixed"])
@pytest.mark.parametrize("seed", range(2))
def test_ten_thousand_steps_with_faults_leave_nothing_behind(monkeypatch, scheduler, seed):
    eng = test_serving.walk(
        seed,
        18000,
        monkeypatch,
        num_pages=11 + seed,
        max_num_seqs=4,
        verifier=Fixed(3 * seed),
        scheduler=scheduler,
        max_num_batched_tokens=(None, 12)[seed],
        overlap=True,
        prefix_cache=seed == 0,
    )
    assert eng._loop.steps >= 10_000


# ------------------------------------------------------------------------- many, and too few pages


@pytest.mark.parametrize(
    "layout, cached, verifier, scheduler, rows",
    [
        ("one layer", True, Fixed(3), "fcfs", 40),
        ("one layer", False, Half(), "decode_order", 32),
        pytest.param("2 and 1", True, Fixed(5), "decode_order", 48, marks=SLOW),
        pytest.param("2 and 1", False, Fixed(1), "fcfs", 40, marks=SLOW),
        pytest.param("2 and 1", True, Fixed(2), "mixed", 40, marks=SLOW),
        pytest.param("2 and 1", False, Fixed(4), "fcfs", 48, marks=SLOW),
        pytest.param("2 and 1", True, Fixed(0), "fcfs", 24, marks=SLOW),
    ],
)
@pytest.mark.parametrize("careful", [True, False])
def test_sixty_four_requests_in_a_third_of_the_pages_are_serial(
    monkeypatch, layout, cached, verifier, scheduler, rows, careful
):
    """careful=False: who is preempted does so with its result on the way, as often as it happens."""
    if not careful:
        monkeypatch.setattr(overlap, "short_of_pages", lambda *a: False)
    first = test_serving.SHARED if cached else 0
    kinds = range(first, first + test_serving.KINDS)
    texts = {k: test_serving.alone(layout, k).token_ids for k in kinds}
    Knowing(monkeypatch, texts)
    eng = test_serving.sixty_four(
        layout,
        first=first,
        overlap=True,
        prefix_cache=cached,
        verifier=verifier,
        scheduler=scheduler,
        max_num_batched_tokens=rows,
    )
    assert not verifier.max_draft or 0.2 < eng.stats.acceptance < 0.9
    assert not cached or eng.cache.hits > 20
