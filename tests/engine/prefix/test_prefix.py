"""Prefix reuse: a hit saves rows and changes nothing else. In float64, against engines without it."""

from __future__ import annotations

import dataclasses
import functools
import random
import re
import sys

import pytest
import torch
from engine.scheduling.test_preemption import InterruptAt
from hypothesis import given, settings
from hypothesis import strategies as st
from properties.test_serving import Unlucky, interrupted

from deepinfer.cache.page_keys import ImageSpan
from deepinfer.engine.engine import Engine
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.engine.step import commit, recovery
from deepinfer.slots.experts import Local
from deepinfer.slots.replay import Exact
from deepinfer.slots.sampler import Philox
from deepinfer.slots.verifier import Fixed
from support.pool import check, check_empty
from support.small import DRAFTS, LAYOUTS, WINDOW, poison, small_engine, stream

torch.set_num_threads(1)
SLOW = pytest.mark.slow
PAGE = 8
RESERVE = WINDOW + DRAFTS + 1  # what a hit never covers: window and backtracking
LONG = stream(120, 3, high=90)


def engine(layout: str = "2 and 1", **changes):
    how = {"max_model_len": 160, "page_size": PAGE, "max_num_seqs": 4, "prefix_cache": True}
    return small_engine(layout, vocab=97, **{**how, **changes})


def cold(layout: str = "2 and 1", **changes):
    return engine(layout, prefix_cache=False, **changes)


def params(seed: int = 5, most: int = 12, temperature: float = 0.7, **more) -> SamplingParams:
    return SamplingParams(
        seed=seed, max_tokens=most, temperature=temperature, ignore_eos=True, **more
    )


def usable(length: int, cached: int) -> int:
    """Tokens of a hit on a sequence whose first `cached` tokens are known."""
    return max(min(cached, length - RESERVE), 0) // PAGE * PAGE


def same(got, want, drafts: bool = True) -> None:
    """Tokens and log-probabilities, and which of them came from drafts in which rows."""
    assert got.error is None and got.token_ids == want.token_ids
    assert got.finish_reason == want.finish_reason
    assert got.logprobs == pytest.approx(want.logprobs, abs=1e-9)
    if drafts:
        assert [(s.row, s.source) for s in got.steps] == [(s.row, s.source) for s in want.steps]


def run(eng, prompt, p) -> tuple:
    """(completion, prefill rows it took)."""
    before = eng.stats.prefill_rows
    (out,) = eng.generate(prompt, p)
    check_empty(eng)
    return out, eng.stats.prefill_rows - before


# --------------------------------------------------------------------------------- a hit is nothing


@pytest.mark.parametrize(
    "layout, drafts, temperature",
    [
        *((layout, 4, 0.0) for layout in sorted(LAYOUTS)),
        *(pytest.param(x, d, t, marks=SLOW) for x in LAYOUTS for d, t in ((0, 0.0), (5, 1.0))),
    ],
)
def test_a_hit_saves_rows_and_changes_nothing(layout, drafts, temperature):
    """Same tokens, log-probabilities and drafts; rows computed = length - hit. Whatever is in the
    rings from before: of the drafter's nothing behind the hit is read."""
    how = dict(verifier=Fixed(drafts))
    reference, eng = cold(layout, **how), engine(layout, num_snapshots=60, **how)
    poison(eng.runtime.cache)
    eng.generate(LONG[:70], params(1, 4))
    for n in (70, 71, 93, 38, 30):
        p = params(n, 6, temperature)
        (want,) = reference.generate(LONG[:n], p)
        hit = usable(n, 70)
        with eng.trace("mtp.base" if drafts else "final") as seen:
            got, rows = run(eng, LONG[:n], p)
        assert all(seen[name].isfinite().all() for name in seen.names)
        same(got, want)
        assert got.cached_tokens == hit and rows == n - hit
    assert eng.cache.hits == 5


@pytest.mark.parametrize("n", [21, 29, 30, 31, 37, 38, 39, 64])
def test_the_longest_hit_leaves_window_and_backtracking(n):
    """L - (window + backtracking), in whole pages, with the drafter or without it."""
    for drafts in (0, 2, 5):
        eng = engine("one layer", verifier=Fixed(drafts))
        counts = [run(eng, LONG[:n], params(most=1))[0].cached_tokens for _ in range(2)]
        assert counts == [0, usable(n, n)]


@pytest.mark.parametrize("rows", [pytest.param(1, marks=SLOW), 5, 8, 13, 50])
def test_snapshots_do_not_depend_on_the_chunks(rows):
    """A chunk of any length leaves the window rows of every page end in it."""
    how = dict(num_snapshots=60)  # enough for every page end
    whole = engine(**how)
    eng = engine(max_num_batched_tokens=rows, verifier=Fixed(2 if rows > 5 else 0), **how)
    run(eng, [5], params(most=1))  # not in the first slot
    run(whole, LONG[:70], params(most=1)), run(eng, LONG[:70], params(most=1))
    a, b = (e.runtime.prefix_cache.snapshots._held for e in (whole, eng))
    assert a.keys() == b.keys()
    assert sorted(s.position for s in b.values()) == list(range(8, 71, 8))
    for x, y in ((a[k], b[k]) for k in a):
        for v, w in zip(x.windows, y.windows):
            torch.testing.assert_close(v, w, rtol=1e-9, atol=1e-9)
    same(run(eng, LONG[:70], params())[0], cold().generate(LONG[:70], params())[0], False)


@pytest.mark.parametrize("packed", [False, True])
def test_snapshots_are_the_bytes_of_the_rings(packed):
    how = dict(dtype="float32", packed_cache=packed)
    eng = engine(**how)
    out = [run(eng, LONG[:70], params(temperature=0.0))[0] for _ in range(3)]
    assert [c.cached_tokens for c in out] == [0, 48, 48]
    assert out[0].logprobs == pytest.approx(out[1].logprobs, abs=1e-4)
    same(out[2], out[1])


@pytest.mark.parametrize("drafts", [pytest.param(0, marks=SLOW), 3])
def test_the_next_turn_begins_behind_prompt_and_answer(drafts):
    """Pages that grew while tokens were written are known too: none with a rejected draft in it."""
    eng, reference = engine(verifier=Fixed(drafts)), cold(verifier=Fixed(drafts))
    ids, cached = LONG[:20], []
    for turn in range(4):
        p = params(turn, 14)
        got, rows = run(eng, ids, p)
        same(got, reference.generate(ids, p)[0])
        assert rows == len(ids) - got.cached_tokens
        cached.append(got.cached_tokens == usable(len(ids), len(ids) - 16))
        ids = [*ids, *got.token_ids, *stream(15, turn, high=90)]
    assert all(cached) and eng.cache.hits == 3


def test_requests_that_run_together_share_pages():
    eng = engine()
    eng.generate(LONG[:70], params(most=1))
    numbers = [eng.add([*LONG[:48], *stream(30, i, high=90)], params(i)) for i in range(3)]
    eng.step()
    check(eng)
    pages = [eng.requests[i].pages for i in numbers]
    assert pages[0][:6] == pages[1][:6] == pages[2][:6] and len({p for x in pages for p in x}) <= 18
    assert all(eng.runtime.pages.holders(p) == 3 for p in pages[0][:6])
    eng.abort(numbers[0])
    check(eng)
    assert all(eng.runtime.pages.holders(p) == 2 for p in pages[0][:6])
    done = {}
    while eng.unfinished:
        done |= {c.index: c for c in eng.step()}
        check(eng)
    for i in numbers[1:]:
        prompt = [*LONG[:48], *stream(30, i - numbers[0], high=90)]
        same(done[i], cold().generate(prompt, params(i - numbers[0]))[0])
        assert done[i].cached_tokens == 48
    check_empty(eng)


@pytest.mark.parametrize("drafts", [pytest.param(0, marks=SLOW), 3])
def test_a_fork_goes_on_from_the_same_tokens_in_the_same_pages(drafts):
    """With the seed of its parent it is its parent; with another it is what it is without a cache."""
    forks = {}
    for cached in (False, True):
        eng = engine(verifier=Fixed(drafts), prefix_cache=cached)
        parent = eng.add(LONG[:50], params(most=30))
        while len(eng.requests[parent].output) < 11:
            eng.step()
        had = list(eng.requests[parent].output)
        numbers = [parent, eng.fork(parent, seed=5), eng.fork(parent, seed=9), eng.fork(parent)]
        eng.step()
        check(eng)
        pages = [eng.requests[i].pages for i in numbers]
        shared = usable(50 + len(had), 50 + len(had) - 1) // PAGE
        assert all(p[:shared] == pages[0][:shared] for p in pages) == cached
        done = {}
        while eng.unfinished:
            done |= {c.index: c for c in eng.step()}
            check(eng)
        check_empty(eng)
        assert done[numbers[0]].token_ids == done[numbers[1]].token_ids
        assert all(list(c.token_ids[: len(had)]) == had for c in done.values())
        assert len({c.token_ids for c in done.values()}) == 3
        same(done[parent], cold(verifier=Fixed(drafts)).generate(LONG[:50], params(most=30))[0])
        forks[cached] = [(c.token_ids, c.steps) for c in done.values()]
    assert [t for t, _ in forks[False]] == [t for t, _ in forks[True]]


def test_a_fork_that_cannot_go_on_is_refused():
    eng = engine("one layer")
    number = eng.add(LONG[:9], params(most=8))
    for _ in range(4):
        eng.step()
    with pytest.raises(ValueError, match="it has 4 tokens and max_tokens is 4"):
        eng.fork(number, max_tokens=4)
    with pytest.raises(ValueError, match="another grammar was given"):
        eng.fork(number, grammar="a")
    with pytest.raises(KeyError, match="no request 7"):
        eng.fork(7)
    check(eng)
    eng.abort(number)
    check_empty(eng)


def test_behind_a_hit_a_trained_drafter_is_as_good():
    """Its window holds what it held the first time: as many drafts are accepted (a stale or empty
    one gets hardly any), as many tokens are cached as without it, and the text is the same."""
    text = "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self"
    accepted, texts = {}, set()
    with Engine.nano(
        dtype="float64", prefix_cache=True, page_size=16, max_model_len=160, max_num_seqs=1
    ) as off:
        ids = off.encode(text * 5)[:104]
        for most in (0, 5):
            eng = off.with_(verifier=Fixed(most))
            for turn in range(2):
                (c,) = eng.generate(ids, params(most=18, temperature=0.0))
                assert c.cached_tokens == (0, 32)[turn]
                accepted[most, turn] = c.accepted_drafts
                texts.add(c.token_ids)
    assert len(texts) == 1 and accepted[5, 0] >= 9
    assert abs(accepted[5, 1] - accepted[5, 0]) <= 0.2 * accepted[5, 0]


# ------------------------------------------------------------------------------ what is in the key


def test_another_salt_or_picture_shares_nothing():
    eng = engine("one layer", num_snapshots=60)
    for salt in (None, "a", "b"):
        assert eng.generate(LONG[:70], params(most=1), salt=salt)[0].cached_tokens == 0
    for salt in (None, "a", "b"):
        assert eng.generate(LONG[:70], params(most=1), salt=salt)[0].cached_tokens == 48
    assert eng.cache.pages == 24
    picture = (ImageSpan(20, 30, b"p" * 32),)
    for want in (16, 48):  # the text before the picture, then all
        number = eng.add(LONG[:70], params(most=1))
        eng.requests[number].prefix.images = picture
        assert [c.cached_tokens for c in eng.step()] == [want]
    with pytest.raises(TypeError, match="salt=7: want None or a string, got int"):
        eng.add(LONG[:9], salt=7)
    check_empty(eng)


# -------------------------------------------------------------------- values of the prefix are asked


def test_prompt_log_probabilities_are_computed_and_never_remembered():
    eng, p = engine(), params(most=3, prompt_logprobs=True)
    (want,) = cold().generate(LONG[:60], p)
    for _ in range(2):
        got, rows = run(eng, LONG[:60], p)
        assert got.cached_tokens == 0 and rows == 60 and got.prompt_logprobs[0] is None
        assert got.prompt_logprobs[1:] == pytest.approx(want.prompt_logprobs[1:], abs=1e-9)
        assert len(got.prompt_logprobs) == 60
    got, rows = run(eng, LONG[:60], params(most=3))  # what it left is there for others
    assert got.cached_tokens == 32 and rows == 28
    same(got, want)


def test_a_trace_sees_the_rows_that_ran():
    eng = engine()
    eng.generate(LONG[:70], params(most=1))
    with eng.trace("final", "layers.0.in") as t:
        (out,) = eng.generate(LONG[:70], params(most=1))
    assert out.cached_tokens == 48 and t["layers.0.in"].position.tolist() == list(range(48, 70))
    with pytest.raises(KeyError, match="no accepted row at position 47"):
        t.at("layers.0.in", 47)


def test_what_an_edit_has_changed_is_not_served_and_serves_nobody():
    eng = engine()
    (want,) = cold().generate(LONG[:70], params())

    def louder(x, at):
        return 1.5 * x

    with eng.trace("layers.1.in", edit=louder):
        (edited,) = eng.generate(LONG[:70], params())
    assert eng.cache.pages == eng.cache.snapshots == 0 and edited.logprobs != want.logprobs
    with eng.trace("layers.1.in", edit=louder):  # an edit that ends in the middle
        number = eng.add(LONG[:70], params())
        eng.step(), eng.step()
    while number in eng.requests:
        eng.step()
    assert eng.cache.pages == 0
    same(eng.generate(LONG[:70], params())[0], want)
    with eng.trace("layers.1.in", edit=louder):
        (again,) = eng.generate(LONG[:70], params())
    assert again.cached_tokens == 0 and again.logprobs == pytest.approx(edited.logprobs, abs=1e-9)
    same(eng.generate(LONG[:70], params())[0], want)


def test_teacher_forced_passes_take_pages_that_are_only_cached():
    eng = engine("one layer", num_pages=16, max_model_len=128)
    want = cold("one layer").logits(LONG[:100])
    eng.generate(LONG[:90], params(most=20))
    assert eng.runtime.pages.free < 13 <= eng.runtime.pages.available
    before = eng.cache
    torch.testing.assert_close(eng.logits(LONG[:100]), want, rtol=1e-9, atol=1e-9)
    assert eng.cache.page_evictions > 0 and eng.cache.hits == before.hits
    check_empty(eng)


# ---------------------------------------------------------------------------------------- evictions


@pytest.mark.parametrize("snapshots, hit", [(0, 0), (1, 0), (2, 64), (9, 64)])
def test_without_a_snapshot_a_hit_ends_at_the_last_one_below(snapshots, hit):
    """Of the prompt with 88 tokens at most the last ones are kept; a hit of 64 tokens is possible."""
    eng = engine(num_snapshots=snapshots)
    p = params(most=1)
    eng.generate(LONG[:72], p)  # page ends up to 72
    got, rows = run(eng, LONG[:88], p)
    assert got.cached_tokens == hit and rows == 88 - hit
    same(got, cold().generate(LONG[:88], p)[0])
    assert eng.cache.snapshots == min(snapshots, 11) or snapshots == 9
    assert eng.cache.snapshot_bytes <= eng.runtime.prefix_cache.snapshots.budget
    if not snapshots:
        assert eng.cache.pages == 11  # of known pages that were not adopted there is still one each


def test_old_prefixes_make_room():
    eng = engine("one layer", num_pages=14, max_model_len=96)
    for i in range(5):
        prompt = stream(80, i, high=90)
        same(run(eng, prompt, params(i))[0], cold("one layer").generate(prompt, params(i))[0])
    assert eng.cache.page_evictions > 20 and eng.runtime.pages.cached > 8
    assert run(eng, stream(80, 0, high=90), params(most=1))[0].cached_tokens == 0
    assert run(eng, stream(80, 4, high=90), params(most=1))[0].cached_tokens in (0, 32, 56)


@pytest.mark.parametrize("overlap", [False, True])
def test_drafts_take_the_room_of_pages_that_are_only_cached(overlap):
    """No page is free, six are cached: a decode step with drafts takes one, and nobody is preempted."""
    eng = engine(
        "one layer", num_pages=8, max_model_len=64, verifier=Fixed(DRAFTS), overlap=overlap
    )
    eng.generate(LONG[:48], params(most=1))  # leaves six full pages
    p = params(most=30, temperature=0.0)
    number = eng.add(stream(9, 7, high=90), p)
    eng.step()
    pages, request = eng.runtime.pages, eng.requests[number]
    assert (pages.free, pages.cached, len(request.pages)) == (0, 6, 2)
    while not eng.cache.page_evictions:
        eng.step()
        check(eng)
        assert request.status == "running"
    assert request.decoding and pages.free == 0 and len(request.pages) > 2
    while eng.unfinished:
        (done,) = eng.step() or [None]
        check(eng)
    assert eng.stats.preemptions == 0 and eng.cache.page_evictions >= 2
    same(done, cold("one layer", verifier=Fixed(DRAFTS)).generate(stream(9, 7, high=90), p)[0])
    check_empty(eng)


def test_a_request_that_gave_way_goes_on_from_what_it_left():
    """Prompt and output that were computed are found again, if nobody needed their room."""
    eng, p = engine(verifier=Fixed(3)), params(most=40)
    number = eng.add(LONG[:50], p)
    while len(eng.requests[number].output) < 30:
        eng.step()
    request = eng.requests[number]
    length, rows = request.optimistic_tokens, eng.stats.prefill_rows
    eng.runtime.scheduler.preempt(request)
    check(eng)
    eng.step()
    assert eng.stats.prefill_rows - rows == length - usable(length, length - 1)
    assert request.prefix.cached_tokens == 0 and eng.cache.hits == 1
    while eng.unfinished:
        done = eng.step()
        check(eng)
    same(done[0], cold(verifier=Fixed(3)).generate(LONG[:50], p)[0], False)


# --------------------------------------------------------------------------- failures and other slots


def test_what_a_failed_request_has_left_serves_nobody():
    eng = engine()

    class Wrong(Philox):
        def draw(self, dist, keys):
            drawn = super().draw(dist, keys)
            bad = keys.position == 30
            return dataclasses.replace(drawn, tokens=torch.where(bad, 97, drawn.tokens))

    bad = engine(sampler=Wrong())
    good, failing = bad.add(LONG[:40], params(most=9)), bad.add([*LONG[:40], 5], params(most=40))
    while bad.unfinished:
        for c in bad.step():
            assert (c.error is None) == (c.index == good)
        check(bad)
    assert failing and bad.cache.pages == 48 // PAGE  # those of the good one
    check_empty(bad), check_empty(eng)


class Once(Local):
    """Experts that return NaN once, in one layer and for one row; then they are well."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = self.row = -1

    def forward(self, layer, x, routing):
        y = super().forward(layer, x, routing)
        if layer.name.startswith(f"layers.{self.layer}."):
            self.layer = -1
            y[self.row] = torch.nan
        return y


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("layer, row", [(0, 0), (0, 7), (1, 15)])
def test_a_chunk_without_logits_that_is_not_finite_serves_nobody(layer, row, overlap):
    """Whoever began there would fail too."""
    eng = engine("2 and 1", experts=Once(), max_num_batched_tokens=16, overlap=overlap)
    experts = eng.runtime.slots["experts"]
    p = params(most=5)
    (want,) = cold("2 and 1").generate(LONG[:70], p)
    experts.layer, experts.row = layer, row
    eng.add(LONG[:70], p)
    failed = []
    while eng.unfinished:
        failed += eng.step()
        assert eng.cache.pages == eng.cache.snapshots == 0
        check(eng)
    assert isinstance(failed[0].error, ArithmeticError) and eng.stats.prefill_rows <= 32
    check_empty(eng)
    for _ in range(2):
        same(run(eng, LONG[:70], p)[0], want)
    assert eng.cache.hits and eng.cache.pages >= 70 // PAGE


@pytest.mark.parametrize("how", ["abort", "timeout", "is preempted"])
def test_a_request_that_ends_before_its_broken_chunk_is_seen_leaves_nothing(how):
    """The chunk is on its way: what it gives is for nobody."""
    eng = engine("2 and 1", experts=Once(), max_num_batched_tokens=16, overlap=True)
    experts = eng.runtime.slots["experts"]
    p = params(most=5)
    (want,) = cold("2 and 1").generate(LONG[:70], p)
    experts.layer, experts.row = 1, 15
    number = eng.add(LONG[:70], p)
    eng.step()
    request = eng.requests[number]
    eng.runtime.device.drain()
    assert request.in_flight and not request.num_computed and experts.layer == -1
    if how == "abort":
        eng.abort(number)
    elif how == "timeout":
        request.deadline = 0.0
    else:
        eng.runtime.scheduler.preempt(request)
    while eng.unfinished:
        for c in eng.step():
            assert c.error is None
            if how == "is preempted":
                same(c, want)
        check(eng)
    assert how == "is preempted" or eng.cache.pages == 0
    for _ in range(2):
        same(run(eng, LONG[:70], p)[0], want)


def test_of_two_chunks_in_a_step_the_broken_one_alone_leaves_nothing():
    eng = engine("2 and 1", experts=Once(), num_snapshots=60)
    experts = eng.runtime.slots["experts"]
    eng.generate(LONG[:24], params(most=1))
    before, other = eng.cache.pages, stream(40, 8, high=90)
    a, b = eng.add(LONG[:40], params(most=1)), eng.add(other, params(most=1))
    experts.layer, experts.row = 1, 40 - eng.runtime.resources.start_at(eng.requests[a]) + 3
    done = {c.index: c for c in eng.step()}
    assert done[a].error is None and isinstance(done[b].error, ArithmeticError)
    assert eng.cache.pages == before + 2
    prefix = eng.runtime.prefix_cache.index
    assert prefix.lookup(prefix.keys(LONG[:40]), 40).length == 40
    assert prefix.lookup(prefix.keys(other), 40).length == 0
    check_empty(eng)


def test_pages_behind_which_nobody_gets_finite_logits_are_given_up():
    """Whatever has spoiled a page that is known: who begins there fails once, and no other does."""
    eng, p = engine("2 and 1", num_snapshots=60), params(most=5)
    (want,) = cold("2 and 1").generate(LONG[:70], p)
    for what in ("pages", "snapshots"):
        eng.generate(LONG[:70], p)
        if what == "pages":
            for name, records in eng.runtime.cache.stores().items():
                if name.startswith("entries"):
                    records[1:] = torch.nan
        else:
            for snapshot in eng.runtime.prefix_cache.snapshots._held.values():
                for rows in snapshot.windows:
                    with torch.inference_mode():
                        rows.fill_(torch.nan)
        assert isinstance(eng.generate(LONG[:70], p)[0].error, ArithmeticError)
        check_empty(eng)
        for _ in range(2):
            same(run(eng, LONG[:70], p)[0], want)


def test_of_what_a_failed_request_has_left_no_snapshot_stays_either():
    class Wrong(Philox):
        def draw(self, dist, keys):
            drawn = super().draw(dist, keys)
            return dataclasses.replace(drawn, tokens=torch.full_like(drawn.tokens, 97))

    bad = engine("one layer", sampler=Wrong(), max_num_batched_tokens=16, num_snapshots=60)
    number = bad.add(LONG[:70], params(most=9))
    while bad.requests[number].num_computed < 64:
        bad.step()
    assert bad.cache.pages == bad.cache.snapshots == 8
    while bad.unfinished:
        for c in bad.step():
            assert c.error is not None
    assert bad.cache.pages == bad.cache.snapshots == 0
    check_empty(bad)


class Cut(Exact):
    """Layers from 2 on forget all but the last 6 prompt rows."""

    exact = False

    def plan(self, prompt, config):
        made = super().plan(prompt, config)
        cut = max(prompt.length - 6, 0)
        floors = tuple(0 if layer < 2 else cut for layer in range(config.num_layers))
        return dataclasses.replace(
            made, rows_from=floors, kv_from=floors, floor=floors, exact=False
        )


def test_what_an_approximate_window_has_left_says_so():
    eng = engine(replay=Cut(), verifier=Fixed(2))
    (want,) = cold(replay=Cut(), verifier=Fixed(2)).generate(LONG[:70], params(most=30))
    same(eng.generate(LONG[:70], params(most=30))[0], want)
    store, snapshots = eng.runtime.prefix_cache.pages, eng.runtime.prefix_cache.snapshots
    assert len(store) and not any(h.exact for h in store._held.values())
    # behind the cut no window is whole before the rows that were dropped are out of it
    assert snapshots._held and not any(s.exact for s in snapshots._held.values())
    layers = eng.config.num_layers
    whole = [s.position for s in snapshots._held.values() if s.layers == layers]
    first = {s.layers for s in snapshots._held.values() if s.position < 64 + WINDOW}
    assert min(whole) >= 64 + WINDOW and first == {eng.config.first_decoder_layer}
    hit = eng.runtime.prefix_cache.index
    keys = hit.keys(LONG[:64])
    assert hit.lookup(keys, 64).length == 0 and hit.lookup(keys, 64, exact=False).length == 64


class Halfway(Exact):
    def plan(self, prompt, config):
        made = super().plan(prompt, config)
        half = made.start // 2 + 3 if made.start else 0
        return dataclasses.replace(made, start=half, write_from=max(half, made.write_from))


def test_a_plan_that_reads_a_window_nobody_has_is_refused():
    eng = engine("one layer", replay=Halfway())
    eng.generate(LONG[:70], params(most=1))
    (out,) = eng.generate(LONG[:70], params(most=1))
    assert re.search(
        r"Prompt\(length=70.*below start 27, .* first 1 layers is available at 48", str(out.error)
    )
    check_empty(eng)


# ------------------------------------------------------------------------- many, with little room

ROOTS = [stream(40, 100 + i, high=90) for i in range(2)]


def prompt(kind: int) -> list[int]:
    """Prompts of shared beginnings: of one root 8, 24 or all 40 tokens, then tokens of their own."""
    root, at = ROOTS[kind % 2], (8, 24, 40)[kind // 2 % 3]
    return [*root[:at], *stream((1, 25, 34)[kind // 6 % 3], 200 + kind, high=90)]


def each(kind: int, most: int = 20) -> SamplingParams:
    return params(kind, most, (0.0, 1.0, 0.7)[kind % 3])


@functools.cache
def alone(layout: str, kind: int):
    return small_engine(layout, vocab=97, max_model_len=160).generate(prompt(kind), each(kind))[0]


def settle(layout: str, c, kind: int, most: int) -> None:
    want = alone(layout, kind)
    assert c.error is None and c.token_ids == want.token_ids[: len(c.token_ids)]
    assert c.finish_reason == "abort" or len(c.token_ids) == most
    assert c.logprobs == pytest.approx(want.logprobs[: len(c.token_ids)], abs=1e-9)


def steady(eng) -> list:
    return eng.step()


def reclaim(eng) -> None:
    """Somebody needs the room of every page that is only cached."""
    pages = eng.runtime.pages
    pages.give(pages.take(pages.available))


def crowd(
    chance: random.Random,
    eng,
    layout: str,
    count: int,
    gives_way: float = 0.03,
    step=steady,
    loses: float = 0.0,
) -> None:
    """`count` requests that arrive, are aborted and be preempted by chance, or (`loses`) their cached
    pages are gone when they begin again."""
    todo = [(chance.randrange(18), chance.randint(1, 20)) for _ in range(count)]
    added: dict[int, tuple[int, int]] = {}
    while todo or eng.unfinished:
        for _ in range(chance.choice((0, 0, 1, 4)) if eng.unfinished else 3):
            if todo:
                kind, most = todo.pop()
                added[eng.add(prompt(kind), each(kind, most))] = kind, most
        for c in step(eng):
            settle(layout, c, *added.pop(c.index))
        check(eng)
        if added and chance.random() < 0.04:
            number = chance.choice(sorted(added))
            settle(layout, eng.abort(number), *added.pop(number))
        running = eng.runtime.scheduler.running
        if running and chance.random() < gives_way:
            eng.runtime.scheduler.preempt(chance.choice(running))
        if loses and chance.random() < loses:
            reclaim(eng)
        check(eng)
    assert not added
    check_empty(eng)


@pytest.mark.parametrize(
    "layout, drafts, scheduler, rows",
    [
        pytest.param("2 and 1", 3, "decode_order", 32, marks=SLOW),
        ("two layers", 0, "fcfs", 40),
        ("two layers", 5, "mixed", 32),
        pytest.param("2 and 1", 0, "fcfs", 40, marks=SLOW),
        pytest.param("2 and 1", 5, "mixed", 48, marks=SLOW),
        pytest.param("all 2", 2, "fcfs", 11, marks=SLOW),
    ],
)
def test_sixty_four_requests_in_a_third_of_the_pages_are_serial(layout, drafts, scheduler, rows):
    """8 sequences want up to 8 * 13 pages; there are 34. Of two layers at least: the window rows of
    the last one are behind every hit and in no later key."""
    eng = engine(
        layout,
        num_pages=34,
        max_num_seqs=8,
        verifier=Fixed(drafts),
        scheduler=scheduler,
        max_num_batched_tokens=rows,
    )
    poison(eng.runtime.cache)
    crowd(random.Random(drafts), eng, layout, 64)
    assert eng.cache.hits > 10 and eng.cache.page_evictions > 10 and eng.stats.preemptions > 2


class Lucky(random.Random):
    def random(self) -> float:
        return 1.0


@pytest.mark.parametrize(
    "drafts, rows", [(2, 12), *(pytest.param(d, r, marks=SLOW) for d, r in ((0, 40), (5, 30)))]
)
def test_faults_and_interrupts_anywhere_leave_what_is_cached_right(monkeypatch, drafts, rows):
    """In slots, while a step is written down, and before any line of a step, giving back apart."""
    for kind in range(18):
        alone("two layers", kind)
    eng = engine(
        "two layers",
        num_pages=30,
        max_num_seqs=4,
        verifier=Fixed(drafts),
        sampler=Unlucky(),
        max_num_batched_tokens=rows,
        scheduler="mixed" if drafts else "fcfs",
    )
    poison(eng.runtime.cache)
    chance, faults = random.Random(drafts), [0, 0]
    whole, lucky, unlucky = commit.stops, Lucky(), random.Random(drafts)
    stops, undo = interrupted(random.Random(drafts))
    monkeypatch.setattr(
        commit, "stops", lambda *at: (whole if Unlucky.chance is lucky else stops)(*at)
    )
    monkeypatch.setattr(recovery, "undo", undo)

    def shaky(eng) -> list:
        """A step with one kind of bad luck: what comes while it recovers is another matter."""
        before, Unlucky.chance = sys.gettrace(), unlucky
        if chance.random() < 0.5:
            Unlucky.chance = lucky
            sys.settrace(InterruptAt(int(10 ** chance.uniform(0.3, 3.5))))
        try:
            return eng.step()
        except (ValueError, RuntimeError, KeyboardInterrupt) as error:
            assert "bad luck" in str(error) or "at a line" in str(error)
            faults["at a line" in str(error)] += 1
            return []
        finally:
            sys.settrace(before)

    crowd(random.Random(drafts), eng, "two layers", 40, step=shaky)
    assert min(faults) > 10 and eng.cache.hits > 15 and eng.cache.page_evictions > 5


CROWDS = given(
    seed=st.integers(0, 10**6),
    drafts=st.integers(0, 5),
    pages=st.integers(14, 40),
    seqs=st.integers(1, 6),
    rows=st.integers(6, 60),
    snapshots=st.integers(0, 30),
    scheduler=st.sampled_from(["fcfs", "decode_order", "mixed"]),
    page=st.sampled_from([4, 8, 16]),  # chunks are shorter than some
)


@settings(max_examples=5, deadline=None)
@CROWDS
def test_any_crowd_is_serial(seed, drafts, pages, seqs, rows, snapshots, scheduler, page):
    serial(seed, drafts, pages, seqs, rows, snapshots, scheduler, page)


@SLOW
@settings(max_examples=100, deadline=None)
@CROWDS
def test_any_of_many_crowds_is_serial(seed, drafts, pages, seqs, rows, snapshots, scheduler, page):
    serial(seed, drafts, pages, seqs, rows, snapshots, scheduler, page)


def serial(seed, drafts, pages, seqs, rows, snapshots, scheduler, page) -> None:
    """Small pools and chunks; some recompute prompt and output after their own pages are gone."""
    eng = engine(
        "two layers",
        num_pages=pages * PAGE // page,
        max_num_seqs=seqs,
        verifier=Fixed(drafts),
        max_model_len=100,
        max_num_batched_tokens=rows,
        num_snapshots=snapshots,
        scheduler=scheduler,
        page_size=page,
    )
    poison(eng.runtime.cache)
    crowd(random.Random(seed), eng, "two layers", 11, gives_way=0.1, loses=0.1)
