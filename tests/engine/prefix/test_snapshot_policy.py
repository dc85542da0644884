"""Where snapshots are left, as laws: branch, repeat, tail and spare page ends, and who makes room."""

from __future__ import annotations

import dataclasses
import functools
import random

import pytest
import torch
from engine.prefix.test_prefix import (
    LONG,
    PAGE,
    RESERVE,
    cold,
    engine,
    params,
    reclaim,
    run,
    same,
    usable,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.cache.prefix_index import SnapshotStore
from deepinfer.engine.prefix.snapshot_policy import SnapshotPolicy
from deepinfer.engine.request import Request
from deepinfer.slots.verifier import Fixed
from support.pool import check, check_empty
from support.small import small_engine, stream

torch.set_num_threads(1)
SLOW = pytest.mark.slow
TAIL = -(-RESERVE // PAGE) + 1  # page ends in the tail of one sequence, at most
OWN = TAIL + 1  # with repeat: what a request without others keeps
NEEDED = OWN + TAIL  # with the page ends of a branch
REST = [(23, 0), (23, 3), (70, 0)]


def tail(seed: int, length: int) -> list[int]:
    """Tokens of its own: the first one says whose."""
    return [91 + seed % 4, *stream(length, 300 + seed, high=90)][:length]


def positions(eng, ids=None) -> list[int]:
    """Where there are snapshots, of one sequence or of all."""
    held = eng.runtime.prefix_cache.snapshots._held
    keys = held if ids is None else eng.runtime.prefix_cache.index.keys(ids)
    return sorted(held[k].position for k in keys if k in held)


def bound(length: int) -> int:
    return max(length - RESERVE, 0) // PAGE * PAGE


# ---------------------------------------------------------------------------------------- branch


@settings(max_examples=3, deadline=None)
@given(
    shared=st.integers(9, 80),
    lengths=st.lists(st.integers(1, 60), min_size=3, max_size=4),
    rows=st.integers(6, 90),
    spare=st.integers(0, 12),
)
def test_from_the_third_on_prompts_hit_all_that_they_share(shared, lengths, rows, spare):
    """Whatever the order and length of their tails, and how they are cut into chunks: every page
    end that can be theirs and that the second or a later one has run through."""
    eng = engine(
        "one layer", max_num_batched_tokens=rows, max_num_seqs=1, num_snapshots=NEEDED + spare
    )
    starts = []
    for i, n in enumerate(lengths):
        out, took = run(eng, [*LONG[:shared], *tail(i, n)], params(most=1 + i))
        starts.append(out.cached_tokens)
        assert took == shared + n - out.cached_tokens
        want = usable(shared + n, shared)
        if i >= 2 and want > min(starts[1:i]):
            assert out.cached_tokens == want


@pytest.mark.parametrize("shared", [16, 40, 53])
def test_a_branch_is_kept_back_to_its_bound(shared):
    """With few tokens of its own a third prompt begins at its own bound, not at the end of what is
    shared: every page end between both is there, however long the prompt that left it was."""
    eng = engine("one layer", max_num_seqs=2, num_snapshots=2 * (TAIL + 2))  # no spare ones
    run(eng, [*LONG[:shared], *tail(0, 60)], params(most=1))
    run(eng, [*LONG[:shared], *tail(1, 61)], params(most=1))
    end = shared // PAGE * PAGE
    branch = [p for p in range(bound(end), end + 1, PAGE) if p]
    assert set(branch) <= set(positions(eng, LONG[:end]))
    for own in (1, PAGE, RESERVE - 1):
        n = shared + own
        out, _ = run(eng, [*LONG[:shared], *tail(2, own)], params(most=1))
        assert out.cached_tokens == usable(n, shared)


def test_the_second_computes_from_the_last_snapshot_and_says_what_it_lost():
    eng = engine("one layer", max_num_seqs=1, num_snapshots=TAIL + 2)  # no spare ones
    for i, (hit, lost) in enumerate(((0, 0), (0, 48), (48, 48))):
        out, _ = run(eng, [*LONG[:50], *tail(i, 60)], params(most=1))
        assert (out.cached_tokens, eng.cache.lost_tokens) == (hit, lost)


def test_a_fork_leaves_one_where_it_begins():
    eng = engine("two layers", verifier=Fixed(2), num_snapshots=40, max_num_seqs=4)
    parent = eng.add(LONG[:50], params(most=60))
    while len(eng.requests[parent].output) < 20:
        eng.step()
    child = eng.fork(parent, seed=9)
    request, ids = eng.requests[parent], [*LONG[:50], *eng.requests[parent].output]
    while request.num_computed < 100:
        eng.step()
        check(eng)
    eng.abort(child), eng.abort(parent)
    there = positions(eng, [*ids, *range(60)])
    assert len(ids) // PAGE * PAGE in there and usable(len(ids), len(ids)) in there


# ------------------------------------------------------------------------------- repeat and tail


@pytest.mark.parametrize("n, drafts", [(70, 3), *(pytest.param(n, d, marks=SLOW) for n, d in REST)])
def test_the_same_prompt_and_the_next_turn_find_one(n, drafts):
    """However long the output is, and it costs no more than a few."""
    how = dict(num_snapshots=NEEDED, max_num_seqs=1, num_pages=60)
    eng = engine("one layer", verifier=Fixed(drafts), **how)
    p = params(most=40)
    (first,) = eng.generate(LONG[:n], p)
    spare = eng.runtime.prefix_cache.snapshot_policy.spare
    assert eng.cache.snapshots - len(spare) <= OWN and bound(n) in (0, *positions(eng, LONG[:n]))
    last = (n + 39) // PAGE * PAGE  # the last token has no row
    turn = [*LONG[:n], *first.token_ids, *tail(1, 30)]
    assert run(eng, turn, params(most=1))[0].cached_tokens == last
    got, _ = run(eng, LONG[:n], p)
    assert got.cached_tokens == bound(n)
    same(got, cold("one layer", verifier=Fixed(drafts)).generate(LONG[:n], p)[0])


@pytest.mark.parametrize("overlap", [pytest.param(False, marks=SLOW), True])
def test_a_request_that_gave_way_anywhere_finds_its_tail(overlap):
    eng = engine(
        "one layer", num_snapshots=NEEDED, max_num_seqs=1, verifier=Fixed(3), overlap=overlap
    )
    number, chance, ways = eng.add(LONG[:40], params(most=80)), random.Random(3), 0
    while eng.unfinished:
        eng.step()
        check(eng)
        request = eng.requests.get(number)
        if request and request.status == "running" and chance.random() < 0.2 and request.decoding:
            eng.runtime.scheduler.preempt(request)
            length, before = request.optimistic_tokens, eng.stats.prefill_rows
            eng.step(), eng.step()
            assert eng.stats.prefill_rows - before == length - usable(length, length - 1)
            ways += 1
    assert ways > 3
    check_empty(eng)


@pytest.mark.parametrize(
    "page, rows", [(4, 6), pytest.param(8, 6, marks=SLOW), pytest.param(16, 7, marks=SLOW)]
)
def test_one_that_gave_way_and_lost_its_pages_is_computed_again_in_chunks(page, rows):
    """Its tail from before lies past what it has computed again, and its snapshots are there."""
    how = dict(page_size=page, max_num_batched_tokens=rows, max_num_seqs=1, num_snapshots=40)
    eng = engine("one layer", **how)
    number, p = eng.add(LONG[:40], params(most=60)), params(most=60)
    request = eng.requests[number]
    for most in (20, 45):
        while len(request.output) < most:
            eng.step()
        eng.runtime.scheduler.preempt(request)
        reclaim(eng)
        length, before = request.optimistic_tokens, eng.stats.prefill_rows
        while not request.decoding:
            eng.step()
            check(eng)
        assert length - eng.stats.prefill_rows + before in (0, 1)  # the last may be a decode row
        tail = sorted(request.prefix.tail)
        assert tail and len(set(tail)) == len(tail) and tail[-1] <= request.num_computed
    assert len(eng.requests) == 1
    while eng.unfinished:
        (done,) = eng.step() or [None]
        check(eng)
    same(done, cold("one layer").generate(LONG[:40], p)[0])
    check_empty(eng)


# ----------------------------------------------------------------------------------------- spare


@pytest.mark.parametrize(
    "per_request, stride", [(0, 0), (1, 8), (2, 8), (3, 4), (6, 4), (7, 2), (15, 1)]
)
def test_spare_ones_lie_at_powers_of_two_and_fit_the_share(per_request, stride):
    policy = SnapshotPolicy(SnapshotStore(0), PAGE, RESERVE, TAIL + 2 + per_request)
    assert policy.stride(15 * PAGE + 3) == stride * PAGE
    for length in range(0, 2000, 7):
        step = policy.stride(length)
        assert not step or length // step <= per_request
        if step > PAGE:  # no smaller one fits
            assert length // (step // 2) > per_request


@pytest.mark.parametrize("rows", [pytest.param(5, marks=SLOW), 13, pytest.param(120, marks=SLOW)])
def test_what_differs_first_anywhere_computes_less_than_a_stride_again(rows):
    """The places depend on the prompt, not on the chunks."""
    for most_spare in (0, 3, 7):
        eng = engine(
            "one layer",
            max_num_seqs=1,
            max_num_batched_tokens=rows,
            num_snapshots=TAIL + 2 + most_spare,
        )
        eng.generate(LONG[:120], params(most=1))
        stride = eng.runtime.prefix_cache.snapshot_policy.stride(120)
        spare = set(range(stride, 121, stride)) if stride else set()
        ends = set(range(bound(120), 121, PAGE))
        assert set(positions(eng)) == spare | ends and len(spare) <= most_spare
        for at in (57,):
            fresh = engine(
                "one layer",
                max_num_seqs=1,
                max_num_batched_tokens=rows,
                num_snapshots=TAIL + 2 + most_spare,
            )
            fresh.generate(LONG[:120], params(most=1))
            run(fresh, [*LONG[:at], *tail(2, 40)], params(most=1))
            assert fresh.cache.lost_tokens < (stride or at)


# ------------------------------------------------------------------------------------- who is preempted


def test_one_long_prompt_or_output_costs_others_no_more_than_its_own():
    """64 prompts' worth of page ends pass; what everybody shares is there all the time."""
    eng = engine("one layer", max_num_seqs=2, num_snapshots=2 * NEEDED + 2, num_pages=80)
    for i in range(3):
        run(eng, [*LONG[:40], *tail(i, 30)], params(most=1))
    others = set(eng.runtime.prefix_cache.snapshots._held)
    evicted = eng.cache.snapshot_evictions
    run(eng, stream(20, 9, high=90), params(most=130))
    assert len(others - eng.runtime.prefix_cache.snapshots._held.keys()) <= NEEDED
    assert eng.cache.snapshot_evictions - evicted <= NEEDED
    assert 40 in positions(eng, LONG[:40])


@dataclasses.dataclass
class Bytes:
    """What a store keeps, one byte long."""

    exact: bool = True
    nbytes: int = 1
    rank = (True, 1)


def test_a_spare_one_never_takes_the_place_of_another_kind():
    store = SnapshotStore(4)
    policy = SnapshotPolicy(store, PAGE, RESERVE, 20)
    request = Request(0, LONG[: 3 * PAGE + RESERVE], params(), 0)
    keys = request.prefix.keys = [bytes([i]) for i in range(12)]

    def keep(page: int, role: str) -> list[int]:
        policy.keep(request, keys, page * PAGE, role, Bytes())
        return sorted(key[0] + 1 for key in store._held)

    assert keep(1, "spare") == [1] and keep(2, "repeat") == [1, 2] and keep(3, "tail") == [1, 2, 3]
    assert keep(4, "spare") == [1, 2, 3, 4]
    assert keep(5, "spare") == [2, 3, 4, 5]  # the oldest spare one goes
    assert keep(6, "branch") == [2, 3, 5, 6]
    policy.begin(request, keys, 5 * PAGE, 0)  # now it is spare no more
    assert keep(7, "spare") == [2, 3, 5, 6] and store.evicted == 2
    assert keep(8, "tail") == [3, 5, 6, 8]  # the least recently used


def test_a_tail_falls_behind_unless_another_has_it_too():
    """Two of the same text: what the faster one leaves behind is still the slower one's."""
    eng = engine("one layer", max_num_seqs=2, num_snapshots=40, num_pages=60)
    a = eng.add(LONG[:40], params(most=60, temperature=0.0))
    while len(eng.requests[a].output) < 20:
        eng.step()
    b = eng.add(LONG[:40], params(most=60, temperature=0.0))
    request, held = eng.requests[b], eng.runtime.prefix_cache.snapshots
    while a in eng.requests:
        eng.step()
        check(eng)
        if request.status == "running" and request.decoding:
            full = request.prefix.keys[: request.num_computed // PAGE]
            assert (
                bound(request.num_tokens) == 0
                or full[bound(request.num_tokens) // PAGE - 1] in held
            )
    while eng.unfinished:
        eng.step()
    kept = positions(eng)
    assert len(kept) == len(set(kept))
    stride = eng.runtime.prefix_cache.snapshot_policy.stride(40)
    lonely = [p for p in kept if 40 < p < bound(99) and p % (stride or 1)]
    assert len(lonely) <= 1, kept  # where b began behind what a had written


# ------------------------------------------------------------------------------------ all at once

ROOT = stream(60, 77, high=90)


def prompt(kind: int) -> list[int]:
    return [*ROOT[: (13, 30, 47, 60)[kind % 4]], *tail(kind, (1, 17, 33)[kind // 4 % 3])]


@functools.cache
def alone(kind: int, drafts: int):
    eng = small_engine("two layers", vocab=97, max_model_len=160, page_size=PAGE)
    return eng.generate(prompt(kind), params(kind, 20, (0.0, 0.8)[kind % 2]))[0]


ANY = given(
    kinds=st.lists(st.integers(0, 11), min_size=2, max_size=7),
    budget=st.integers(0, 40),
    rows=st.integers(6, 80),
    seqs=st.integers(1, 3),
    drafts=st.sampled_from([0, 2, 5]),
    overlap=st.booleans(),
)


def holds(kinds, budget, rows, seqs, drafts, overlap) -> None:
    eng = engine(
        "two layers",
        max_num_batched_tokens=rows,
        max_num_seqs=seqs,
        num_snapshots=budget,
        verifier=Fixed(drafts),
        overlap=overlap,
        num_pages=90,
    )
    added = {eng.add(prompt(k), params(k, 20, (0.0, 0.8)[k % 2])): k for k in kinds}
    policy, store = eng.runtime.prefix_cache.snapshot_policy, eng.runtime.prefix_cache.snapshots
    while eng.unfinished:
        for c in eng.step():
            same(c, alone(added[c.index], drafts), False)
        check(eng)
        assert store.nbytes <= store.budget
        assert not policy.spare.keys() & policy.tails.keys()
        for r in eng.runtime.scheduler.running:
            assert len(r.prefix.tail) <= TAIL + (6 + 6 * overlap) // PAGE + 1
    ends = len(positions(eng))
    assert ends <= len(kinds) * (NEEDED + policy.most_spare + 1)
    for k in kinds[-1:]:
        if budget >= NEEDED * len(kinds):
            assert run(eng, prompt(k), params(most=1))[0].cached_tokens == bound(len(prompt(k)))
    check_empty(eng)


@settings(max_examples=2, deadline=None)
@ANY
def test_any_set_of_prompts_is_serial(kinds, budget, rows, seqs, drafts, overlap):
    holds(kinds, budget, rows, seqs, drafts, overlap)


@SLOW
@settings(max_examples=150, deadline=None)
@ANY
def test_any_of_many_sets_of_prompts_is_serial(kinds, budget, rows, seqs, drafts, overlap):
    holds(kinds, budget, rows, seqs, drafts, overlap)
