"""Pages and state slots: admitted in order, held by one request each, all given back."""

import functools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.cache.pages import Pool
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.slots.verifier import Fixed
from support.pool import check, check_empty
from support.small import small_engine, stream

VOCAB = 97


def engine(**changes):
    return small_engine(
        "one layer", vocab=VOCAB, **{"max_model_len": 64, "page_size": 8, **changes}
    )


# ---------------------------------------------------------------------------------------- the pool


@given(st.integers(1, 9), st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=40))
def test_free_and_held_make_up_the_pool(size, moves):
    pool, held = Pool("things", size), []
    for take, n in moves:
        if take and n > pool.free:
            with pytest.raises(RuntimeError, match=f"{n} things asked, {pool.free} of {size} free"):
                pool.take(n)
        elif take:
            held += pool.take(n)
        else:
            back, held = held[:n], held[n:]
            pool.give(back)
            for number in back[:1]:
                with pytest.raises(
                    RuntimeError, match=f"things {number} is given back but is not held"
                ):
                    pool.give([number])
        assert pool.free + len(held) == size and len(set(held)) == len(held)
        assert set(held) <= set(range(1, size + 1)) and 0 not in pool._free


# ------------------------------------------------------------------------------- a pool too small


@pytest.mark.parametrize("drafts", [0, 5])
@pytest.mark.parametrize(
    "changes",
    [dict(num_pages=6), dict(max_num_seqs=1), dict(num_pages=9, max_num_batched_tokens=3)],
)
def test_a_pool_too_small_for_all_finishes_all_in_order(changes, drafts):
    """First come, first served: small ones wait behind large ones, texts are those of a big pool."""
    lengths = [20, 3, 17, 1, 9, 25, 2]
    prompts = [stream(n, 50 + n, high=90) for n in lengths]
    each = [SamplingParams(seed=i, max_tokens=6 + i, ignore_eos=True) for i in range(7)]
    want = [engine().generate(p, q)[0].token_ids for p, q in zip(prompts, each)]
    eng = engine(verifier=Fixed(drafts), **changes)
    numbers = [eng.add(p, q) for p, q in zip(prompts, each)]
    started, done = [], []
    while eng.unfinished:
        done += eng.step()
        check(eng)
        started += [
            r.id for r in eng.requests.values() if r.status == "running" and r.id not in started
        ]
    seen = [n for n in numbers if n in started]
    assert started == sorted(seen)  # admitted in order of arrival
    assert {c.index: c.token_ids for c in done} == dict(zip(numbers, want))
    assert [c.token_ids for c in eng.generate(prompts, each)] == want
    check_empty(eng)


def test_nobody_overtakes_the_head_of_the_queue():
    eng = engine(num_pages=6)
    large, small = SamplingParams(max_tokens=8), SamplingParams(max_tokens=2)
    a = eng.add(stream(32, 1, high=90), large)  # 4 of 6 pages
    b = eng.add(stream(32, 2, high=90), large)
    c = eng.add([5], small)  # would fit beside a
    eng.step()
    assert [eng.requests[i].status for i in (a, b, c)] == ["running", "waiting", "waiting"]
    eng.abort(a)
    eng.step()
    assert [eng.requests[i].status for i in (b, c)] == ["running", "running"]


def test_a_request_that_can_never_fit_is_refused_with_both_numbers():
    eng = engine(num_pages=3)
    words = r"needs 4 pages of 8 tokens, the pool has 3: lower max_tokens or raise num_pages"
    with pytest.raises(ValueError, match=words):
        eng.generate(stream(9, 1, high=90), max_tokens=16)
    out = eng.generate([[5], stream(9, 1, high=90), [6]], max_tokens=16)
    assert [c.error is None for c in out] == [True, False, True] and "needs 4 pages" in str(
        out[1].error
    )
    drafting = engine(num_pages=3, verifier=Fixed(5))  # drafts are written past the last token
    with pytest.raises(ValueError, match="needs 4 pages"):
        drafting.generate(stream(9, 1, high=90), max_tokens=11)
    assert (
        len(drafting.generate(stream(9, 1, high=90), max_tokens=10, ignore_eos=True)[0].token_ids)
        == 10
    )
    check_empty(eng)


def test_teacher_forcing_takes_pages_only_while_it_runs():
    eng = engine(num_pages=4, max_num_seqs=1)
    number = eng.add(stream(17, 1, high=90), max_tokens=8)  # 3 pages
    eng.step()
    assert eng.logits([5, 6, 7]).shape == (3, VOCAB)
    with pytest.raises(RuntimeError, match="needs 2 pages and a state slot; 1 pages are free of 4"):
        eng.logits(stream(9, 2, high=90))
    check(eng)
    eng.abort(number)
    assert eng.logits(stream(32, 2, high=90)).isfinite().all()
    with pytest.raises(ZeroDivisionError), eng.trace("logits", edit=lambda x, at: 1 / 0):
        eng.logits([5, 6])
    check_empty(eng)


# ---------------------------------------------------------------------------- random operations

KINDS = [(1, 0.0), (3, 1.0), (8, 0.0), (9, 0.7), (17, 1.0), (24, 0.0)]
LONGEST = 14


@functools.cache
def expected(kind: int) -> tuple[int, ...]:
    length, temperature = KINDS[kind]
    params = SamplingParams(temperature=temperature, seed=kind, max_tokens=LONGEST, ignore_eos=True)
    return engine().generate(prompt(kind), params)[0].token_ids


def prompt(kind: int) -> list[int]:
    return stream(KINDS[kind][0], 70 + kind, high=90)


def walk(seed: int, operations: int, **changes) -> None:
    """Random add, step, abort, stream and teacher-forced calls; invariants after each, and each
    text is what its request gives alone."""
    chance, eng = random.Random(seed), engine(**changes)
    added: dict[int, tuple[int, int]] = {}
    streams: list[list] = []

    def settle(c, kind: int, most: int) -> None:
        assert c.error is None and c.token_ids == expected(kind)[: len(c.token_ids)]
        assert c.finish_reason == "abort" or len(c.token_ids) == most

    for _ in range(operations):
        move = chance.choices(
            ["add", "step", "abort", "stream", "read", "close", "logits"], [20, 50, 6, 4, 14, 3, 3]
        )[0]
        kind, most = chance.randrange(len(KINDS)), chance.randint(1, LONGEST)
        length, temperature = KINDS[kind]
        params = SamplingParams(
            temperature=temperature, seed=kind, max_tokens=most, ignore_eos=True
        )
        if move == "add" and len(added) < 12:
            added[eng.add(prompt(kind), params)] = kind, most
        elif move == "step":
            for c in eng.step():
                if c.index in added:
                    settle(c, *added.pop(c.index))
        elif move == "abort" and added:
            number = chance.choice(sorted(added))
            settle(eng.abort(number), *added.pop(number))
        elif move == "stream" and len(streams) < 3:
            streams.append([eng.stream(prompt(kind), params), kind, most, []])
        elif move in ("read", "close") and streams:
            one = chance.choice(streams)
            tokens, of, upto, got = one
            token = next(tokens, None) if move == "read" else tokens.close()
            if token is None:
                streams.remove(one)
                assert tuple(got) == expected(of)[: len(got)] and (
                    move == "close" or len(got) == upto
                )
            else:
                got.append(token.id)
        elif move == "logits" and eng.runtime.pages.available >= 2:
            assert eng.logits(prompt(2)).isfinite().all()
        check(eng)
    for tokens, *_ in streams:
        tokens.close()
    while eng.unfinished or eng.requests:
        for c in eng.step():
            if c.index in added:
                settle(c, *added.pop(c.index))
        check(eng)
    assert not added
    check_empty(eng)


def test_two_thousand_random_operations():
    walk(1, 2000, num_pages=12, max_num_seqs=3)


@pytest.mark.parametrize("drafts, rows", [(3, None), (5, 4)])
def test_random_operations_with_drafts(drafts, rows):
    walk(2, 300, num_pages=14, max_num_seqs=4, verifier=Fixed(drafts), max_num_batched_tokens=rows)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [3, 5])
def test_random_operations_at_length(seed):
    walk(seed, 2000, num_pages=6 + seed, max_num_seqs=2 + seed % 3, verifier=Fixed(seed % 6))
