"""Overlapped scheduling: the next step is launched before the last one is read, and nobody can tell
from the text. In float64, with drafts of which any number is accepted."""

from __future__ import annotations

import pytest
import torch

from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.engine.step import commit, execute, launch, overlap
from deepinfer.engine.step.in_flight import InFlightStep
from deepinfer.model.stack import Model
from deepinfer.slots.verifier import Fixed
from support.overlapped import PARAMS, PROMPTS, VOCAB, Half, Knowing, engine, same, serial
from support.pool import check, check_empty
from support.small import small_engine

torch.set_num_threads(1)


# ---------------------------------------------------------------------------------- the same text


@pytest.mark.parametrize("drafts", range(6))
def test_drafts_of_any_depth_give_the_serial_text(knowing, drafts):
    eng = engine(verifier=Fixed(drafts))
    same(eng.generate(PROMPTS, PARAMS), serial())
    accepted = eng.stats.accepted
    assert all(0 < accepted[k] < eng.stats.drafted[k] for k in range(drafts))
    check_empty(eng)


@pytest.mark.parametrize(
    "changes",
    [
        dict(num_pages=9),
        dict(verifier=Half()),
        dict(verifier=Half(), num_pages=9, max_num_batched_tokens=11),
        dict(scheduler="mixed", max_num_batched_tokens=20),
        dict(scheduler="decode_order", max_num_batched_tokens=7, num_pages=9),
        dict(max_num_seqs=2, prefix_cache=True, page_size=4, num_pages=70, num_snapshots=99),
    ],
    ids=str,
)
def test_any_engine_gives_the_text_that_it_gives_synchronously(knowing, monkeypatch, changes):
    if changes.get("num_pages") == 9:  # those who be preempted do so with a result on the way
        monkeypatch.setattr(overlap, "short_of_pages", lambda *a: False)
    eng, want = engine(**{"verifier": Fixed(4), **changes}), serial()
    same(eng.generate(PROMPTS, PARAMS), want)
    same(eng.generate(PROMPTS, PARAMS), want)  # what is cached, freed and used again
    if changes.get("num_pages") == 9:
        assert eng.stats.preemptions > 3
    if changes.get("prefix_cache"):
        assert eng.cache.hits >= 1
    check_empty(eng)


@pytest.mark.parametrize("on", [False, True])
def test_drafts_behind_the_last_token_are_not_counted_as_accepted(knowing, on):
    """A drafter that is always right: texts end in the middle of its drafts."""
    knowing.right = 5
    eng = engine(overlap=on, verifier=Fixed(5))
    out = eng.generate(PROMPTS, PARAMS)
    same(out, serial())
    assert sum(eng.stats.accepted.values()) == sum(c.accepted_drafts for c in out) > 40


def test_rejection_too_where_nothing_but_the_order_of_work_differs():
    """Its text depends on how many drafts are verified where, so with pages enough for all."""
    verifier = Fixed(4, rule="rejection")
    eng, other = engine(verifier=verifier), engine(overlap=False, verifier=verifier)
    want = other.generate(PROMPTS, PARAMS)
    assert other.stats.acceptance > 0.02
    same(eng.generate(PROMPTS, PARAMS), want)


def test_every_count_is_the_synchronous_one_where_no_stop_comes_unforeseen():
    """Without drafts and early stops the host knows as much: not one row more is run."""
    eng, other = engine(verifier="off"), engine(overlap=False, verifier="off")
    a, b = eng.generate(PROMPTS, PARAMS), other.generate(PROMPTS, PARAMS)
    same(a, b)
    assert [c.steps for c in a] == [c.steps for c in b]
    assert eng.stats.table().rows == other.stats.table().rows
    late = ("running", "waiting", "kv_usage", "state_usage")  # who has all its tokens stays a step
    rows = [
        [{k: v for k, v in r.items() if k not in late} for r in e.stats.by_step(times=False).rows]
        for e in (eng, other)
    ]
    assert rows[0] == rows[1]


def test_budgets_are_the_synchronous_ones(knowing):
    """Budgets look at survivals that the host has in both: who verifies how much is the same."""
    asked = []

    class Asking(Half):
        def budget(self, stale, cost):
            asked[-1].append(stale.tolist())
            return super().budget(stale, cost)

    for on in (False, True):
        asked.append([])
        eng = engine(overlap=on, verifier=Asking(), max_num_seqs=1)
        eng.generate(PROMPTS[0], PARAMS[0])
    most = len(asked[0])
    assert most > 6 and asked[1][:most] == asked[0] and len(asked[1]) <= most + 1
    assert len({str(s) for s in asked[0]}) > 2


def test_log_probabilities_are_the_same_too(knowing):
    how = [
        SamplingParams(
            temperature=p.temperature,
            seed=p.seed,
            max_tokens=p.max_tokens,
            ignore_eos=True,
            top_logprobs=i % 4,
            prompt_logprobs=i % 2 == 0,
        )
        for i, p in enumerate(PARAMS)
    ]
    changes = dict(verifier=Fixed(4), max_num_batched_tokens=9, num_pages=12)
    got, want = (engine(overlap=on, **changes).generate(PROMPTS, how) for on in (True, False))
    same(got, want)
    for a, b in zip(got, want):
        assert [list(t) for t in a.top_logprobs] == [list(t) for t in b.top_logprobs]
        assert a.prompt_logprobs == pytest.approx(b.prompt_logprobs, abs=1e-9)
    assert len(got[0].prompt_logprobs) == len(PROMPTS[0]) and len(got[3].top_logprobs[0]) == 3


def test_the_ids_in_front_of_a_row_come_from_the_device_too(monkeypatch):
    """With n-gram memory, which looks back at ids that the host does not know yet."""
    how = [
        SamplingParams(temperature=t, seed=70 + i, max_tokens=14, ignore_eos=True)
        for i, t in enumerate((0.0, 1.0, 0.7))
    ]
    settings = dict(max_model_len=64, page_size=8)
    want = small_engine("2 and 1", **settings).generate(PROMPTS[2:5], how)
    Knowing(monkeypatch, {p.seed: c.token_ids for p, c in zip(how, want)})
    for drafts in (0, 3):
        eng = small_engine("2 and 1", overlap=True, verifier=Fixed(drafts), **settings)
        assert eng.config.engram_layer_ids
        same(eng.generate(PROMPTS[2:5], how), want)


# ------------------------------------------------------------------------------ order and counters


@pytest.mark.parametrize("on", [True, False])
def test_the_next_step_is_launched_before_the_last_one_is_committed(monkeypatch, on):
    """schedule(1) launch(1) commit(0) schedule(2) launch(2) commit(1) ..."""
    seen = []
    whole = launch.launch, commit.commit

    def launching(rt, schedule, step_in_flight, before, tap_of):
        seen.append(("launch", step_in_flight.step, None if before is None else before.step))
        whole[0](rt, schedule, step_in_flight, before, tap_of)

    def landed(rt, step_in_flight, result):
        seen.append(("commit", step_in_flight.step, None))
        whole[1](rt, step_in_flight, result)

    monkeypatch.setattr(launch, "launch", launching)
    monkeypatch.setattr(commit, "commit", landed)
    eng = engine(overlap=on)
    eng.generate(PROMPTS[0], max_tokens=4)
    launched = [("launch", n, n - 1 if on and n else None) for n in range(4)]
    done = [("commit", n, None) for n in range(4)]
    pairs = [x for pair in zip(launched[1:], done) for x in pair] if on else []
    assert seen == (
        [launched[0], *pairs, done[3]] if on else [x for p in zip(launched, done) for x in p]
    )


def test_the_first_step_gives_nothing_yet_and_the_host_never_waits_for_its_own():
    eng = engine(verifier=Fixed(2))
    number = eng.add(PROMPTS[0], max_tokens=5, ignore_eos=True, seed=3)
    for steps in range(3):
        assert eng.step() == [] and len(eng.requests[number].output) >= steps
        assert len(eng._loop.in_flight) == 1
        check(eng)
    request = eng.requests[number]
    assert [a.step for a in request.in_flight] == [2]
    assert (
        request.optimistic_tokens
        == request.num_tokens + request.in_flight[0].tokens
        > request.num_tokens
    )


def test_counters_are_what_they_would_be_if_every_draft_were_accepted(knowing):
    """Never less than what is true once the step is committed, and pages for all of it are held."""
    eng = engine(verifier=Fixed(4))
    for p, q in zip(PROMPTS, PARAMS):
        eng.add(p, q)
    exact = over = 0
    while eng.unfinished:
        before = {
            r.id: (r.num_tokens, r.optimistic_tokens, r.optimistic_computed, len(r.in_flight))
            for r in eng.requests.values()
        }
        eng.step()
        check(eng)
        for r in eng.requests.values():
            known, length, computed, in_flight = before.get(r.id, (0, 0, 0, 0))
            if in_flight:
                assert known <= r.num_tokens <= length and r.num_computed <= computed
                exact += r.num_tokens == length
                over += r.num_tokens < length
    assert exact > 5 and over > 20
    check_empty(eng)


def test_nobody_runs_behind_its_last_token(knowing):
    """Where the host knows that a token is the last, no row follows it; where it cannot know (a
    draft may bring it), at most one step does, and its rows write to no page of another."""
    eng = engine(verifier="off")
    eng.generate(PROMPTS, PARAMS)
    assert eng.stats.decode_rows == sum(p.max_tokens - 1 for p in PARAMS)
    eng = engine(verifier=Fixed(5))
    eng.generate(PROMPTS, PARAMS)
    other = engine(verifier=Fixed(5), overlap=False)
    other.generate(PROMPTS, PARAMS)
    extra = eng.stats.decode_rows - other.stats.decode_rows
    assert 0 < extra <= 6 * len(PROMPTS)
    assert eng.stats.tokens == other.stats.tokens


def test_rows_behind_the_pages_of_a_sequence_are_padding(knowing, monkeypatch):
    """Every draft is right, so the device is as far behind the end as it can be."""
    whole, cut = execute.resolve, []

    def resolve(rt, d, before):
        batch, sampling_rows = whole(rt, d, before)
        there = batch.seq >= 0
        assert (batch.positions < d.capacity[batch.row_set.owner])[there].all()
        assert there.sum() == batch.rows.sum() <= batch.num_rows
        cut.append(batch.num_rows - int(there.sum()))
        return batch, sampling_rows

    monkeypatch.setattr(execute, "resolve", resolve)
    knowing.right = 5
    eng = engine(verifier=Fixed(5), page_size=2)
    same(eng.generate(PROMPTS, PARAMS), serial())
    assert eng.stats.acceptance > 0.7 and sum(cut) >= 1
    check_empty(eng)


def test_nobody_drafts_what_surely_comes_behind_the_end(knowing):
    eng = engine(verifier=Fixed(3))
    eng.generate(PROMPTS, max_tokens=1)
    assert not knowing.asked
    eng.generate(PROMPTS[0], max_tokens=2)
    assert knowing.asked == [1]


def test_no_id_that_is_none_reaches_the_embedding(knowing, monkeypatch):
    whole, seen = Model.embed_rows, []

    def embed(self, ids):
        assert 0 <= int(ids.min()) and int(ids.max()) < VOCAB
        seen.append(len(ids))
        return whole(self, ids)

    monkeypatch.setattr(Model, "embed_rows", embed)
    same(engine(verifier=Half(), num_pages=9).generate(PROMPTS, PARAMS), serial())
    knowing.right = 5  # padding rows too
    same(engine(verifier=Fixed(5), page_size=2).generate(PROMPTS, PARAMS), serial())
    assert len(seen) > 20


@pytest.mark.parametrize("drafts", [0, 4])
def test_nobody_gives_way_who_would_not_do_so_synchronously(knowing, drafts):
    changes = dict(num_pages=10, verifier=Fixed(drafts))
    eng, other = engine(**changes), engine(overlap=False, **changes)
    for e in (eng, other):
        same(e.generate(PROMPTS, PARAMS), serial())
    assert 0 < eng.stats.preemptions <= other.stats.preemptions + 1
    assert 0 < eng.stats.synchronous["pages are short"] < eng.stats.steps / 2


# ---------------------------------------------------------------------------- the law can be broken


def by_row(self, request):
    """A result matched by its row, not by its request."""
    rows = [i for i, s in enumerate(self.scheduled) if s.emits]
    return min(request.id, len(rows) - 1) if request.awaits(self.step) else -1


BUGS = {
    "a result matched by row": (InFlightStep, "place", by_row),
    "a mixed step that is not made anew": (overlap, "needs_the_step_before", lambda *a: False),
}


@pytest.mark.parametrize("bug", BUGS)
def test_the_laws_see_a_planted_bug(knowing, monkeypatch, bug):
    where, name, wrong = BUGS[bug]
    monkeypatch.setattr(where, name, wrong)
    scheduler = "mixed" if "mixed" in bug else "decode_order"
    eng = engine(verifier=Fixed(4), scheduler=scheduler, max_num_batched_tokens=20)
    with pytest.raises((AssertionError, ValueError, RuntimeError, IndexError)):
        same(eng.generate(PROMPTS, PARAMS), serial())
