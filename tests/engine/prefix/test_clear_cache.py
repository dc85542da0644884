"""clear_cache: what was computed before it is served to nobody, whoever runs meanwhile."""

from __future__ import annotations

import random
import sys

import pytest
import torch
from engine.prefix.test_prefix import LONG, cold, crowd, engine, params, same
from engine.scheduling.test_preemption import InterruptAt

from deepinfer.slots.verifier import Fixed
from support.overlapped import PARAMS, PROMPTS
from support.overlapped import engine as overlapped
from support.pool import check, check_empty
from support.small import poison

torch.set_num_threads(1)


@pytest.fixture
def edited():
    """Edits weights of the shared model in place, and puts them back."""
    weights = engine("two layers").model.layers[0].attn.wo_b.weight
    before = weights.clone()

    def edit() -> None:
        with torch.inference_mode():
            weights.mul_(-1.5)

    yield edit
    with torch.inference_mode():
        weights.copy_(before)


def drain(eng) -> dict:
    done = {}
    while eng.unfinished:
        done |= {c.index: c for c in eng.step()}
        check(eng)
    return done


def test_nothing_is_left():
    eng = engine("two layers")
    eng.clear_cache()  # before the first step
    for _ in range(2):
        eng.generate(LONG[:70], params(most=20))
        assert eng.cache.pages == 11 and eng.cache.snapshots > 3
        counted = eng.cache.hit_tokens
        eng.clear_cache()
        report = eng.cache
        assert (report.pages, report.snapshots, report.snapshot_bytes) == (0, 0, 0)
        assert report.hit_tokens == counted and eng.runtime.pages.free == eng.runtime.pages.size
        assert (
            not eng.runtime.prefix_cache.snapshot_policy.spare
            and not eng.runtime.prefix_cache.snapshot_policy.tails
        )
        check_empty(eng)
    (again,) = eng.generate(LONG[:70], params(most=20))
    assert again.cached_tokens == 0
    eng.close()
    eng.clear_cache()  # a closed engine holds nothing either
    cold().clear_cache()


def test_old_keys_never_name_anything_again():
    eng = engine("two layers")
    eng.generate(LONG[:70], params(most=1))
    prefix = eng.runtime.prefix_cache.index
    old = prefix.keys(LONG[:64])
    assert prefix.lookup(old, 64).length == 64
    eng.clear_cache()
    eng.generate(LONG[:70], params(most=1))
    assert prefix.lookup(old, 64).length == 0
    assert prefix.lookup(prefix.keys(LONG[:64]), 64).length == 64


@pytest.mark.parametrize("at, overlap", [(1, False), (5, True), (30, False)])
def test_rows_of_old_weights_are_served_to_nobody(edited, at, overlap):
    """Cleared with requests in prefill, decode and waiting; all of them leave nothing. Then the
    text is that of an engine that has only known the new weights."""
    how = dict(max_num_batched_tokens=24, max_num_seqs=2, verifier=Fixed(2), overlap=overlap)
    eng = engine("two layers", **how)
    for i in range(4):
        eng.add(LONG[: 60 + 9 * i], params(i, 25))
    for _ in range(at):
        eng.step()
    began = [r for r in eng.requests.values() if r.status == "running"]
    edited()
    eng.clear_cache()
    waiting = [r.id for r in eng.requests.values() if r.status == "waiting"]
    check(eng)
    done = {}
    while any(not r.finished for r in began):
        done |= {c.index: c for c in eng.step()}
        check(eng)
        known = {key for r in began for key in r.prefix.keys}
        assert not known & eng.runtime.prefix_cache.pages._held.keys()
        assert not known & eng.runtime.prefix_cache.snapshots._held.keys()
    done |= drain(eng)
    for i in (*waiting, 4, 5):
        p = params(i, 25)
        prompt = LONG[: 60 + 9 * i] if i in waiting else LONG[: 100 + i]
        got = done[i] if i in waiting else eng.generate(prompt, p)[0]
        same(got, cold("two layers", verifier=Fixed(2)).generate(prompt, p)[0], False)
    assert eng.cache.hits
    check_empty(eng)


def test_one_that_gave_way_computes_all_anew(edited):
    eng = engine("two layers")
    number = eng.add(LONG[:70], params(most=30))
    for _ in range(12):
        eng.step()
    request, rows = eng.requests[number], eng.stats.prefill_rows
    edited()
    eng.clear_cache()
    eng.runtime.scheduler.preempt(request)
    length = request.optimistic_tokens
    eng.step()
    assert eng.stats.prefill_rows - rows == length and eng.cache.pages == length // 8
    check(eng)
    want = cold("two layers").logits([*LONG[:70], *request.output[:-1]])[-1].log_softmax(-1)
    assert request.logprobs[-1] == pytest.approx(float(want[request.output[-1]]), abs=1e-9)
    drain(eng)


def test_a_crowd_with_a_cache_that_is_cleared_now_and_then_is_serial():
    eng = engine(
        "two layers", num_pages=34, max_num_seqs=6, verifier=Fixed(3), max_num_batched_tokens=30
    )
    poison(eng.runtime.cache)
    chance, cleared = random.Random(1), []

    def step(eng) -> list:
        if chance.random() < 0.1:
            eng.clear_cache()
            cleared.append(eng.cache.hits)
            check(eng)
        return eng.step()

    crowd(random.Random(2), eng, "two layers", 20, step=step)
    assert len(cleared) > 6 and cleared[-1] > 2


def test_an_interrupt_at_any_line_leaves_the_pools_right():
    """No page is cached without a key, and the cache is cleared all the same."""
    eng = engine("one layer", num_pages=9, max_num_seqs=2, max_model_len=64, overlap=True)
    (want,), p = cold("one layer").generate(LONG[:24], params(most=4)), params(most=4)
    size, line, lines = eng.runtime.pages.size, 0, 0
    while not lines:
        line += 1
        number = eng.add(LONG[:24], p)
        for _ in range(3):
            eng.step()
        assert eng.cache.pages
        before = sys.gettrace()
        sys.settrace(InterruptAt(line))
        try:
            eng.clear_cache()
            lines = line
        except KeyboardInterrupt as error:
            assert "at a line" in str(error)
        finally:
            sys.settrace(before)
        check(eng)
        assert eng.cache.pages == eng.cache.snapshots == 0 or line == 1  # before it has begun
        done = drain(eng)
        same(done[number], want)
        if line % 7 == 0:
            eng.logits(LONG[:40])
        check_empty(eng)
        eng.runtime.pages.give(eng.runtime.pages.take(size))  # every page can be had
        check_empty(eng)
    assert lines > 30


def test_with_steps_on_their_way():
    """The commit of a step that was launched before registers nothing."""
    eng = overlapped(prefix_cache=True, page_size=4, max_num_batched_tokens=11)
    for p, q in zip(PROMPTS, PARAMS):
        eng.add(p, q)
    while eng.unfinished:
        eng.step()
        assert not eng.cache.pages
        eng.clear_cache()
        check(eng)
    check_empty(eng)
