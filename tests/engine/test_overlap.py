"""Overlapped scheduling: the next step is launched before the last one is read, and nobody can tell
from the text. In float64, with drafts of which any number is accepted."""

from __future__ import annotations

import functools
import time

import pytest
import torch
from deepinfer.engine import commit, launch, overlap, step
from deepinfer.engine.device import Device, SimulatedDevice, WorkerDevice
from deepinfer.engine.flight import Flight
from deepinfer.engine.params import SamplingParams
from deepinfer.model.drafter import Drafter
from deepinfer.model.stack import Model
from deepinfer.slots.protocols import Draft
from deepinfer.slots.verifier import BaseVerifier, Fixed
from engine.pool import check, check_empty
from engine.test_legal import Cycle
from properties.small import poison, small_engine, stream

torch.set_num_threads(1)
VOCAB = 97
PROMPTS = [stream(n, 20 + n, high=90) for n in (9, 17, 5, 12, 30, 3)]
PARAMS = [
    SamplingParams(temperature=t, seed=70 + i, max_tokens=26 - 3 * i, ignore_eos=True)
    for i, t in enumerate((0.0, 1.0, 0.7, 0.0, 1.0, 0.0))
]


def engine(layout: str = "two layers", overlap: bool = True, **changes):
    settings = {"max_model_len": 64, "page_size": 8, "max_num_seqs": 6, **changes}
    eng = small_engine(layout, vocab=VOCAB, overlap=overlap, **settings)
    poison(eng.runtime.cache)
    return eng


@functools.cache
def serial(layout: str = "two layers"):
    return engine(layout, overlap=False).generate(PROMPTS, PARAMS)


def same(got, want) -> None:
    for a, b in zip(got, want, strict=True):
        assert a.error is None and a.token_ids == b.token_ids
        assert a.finish_reason == b.finish_reason
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-9)
        assert len(a.steps) == len(a.token_ids)


class Knowing:
    """A drafter that knows the text and is wrong behind a depth of its own choice, so that every
    number of drafts is accepted. Nobody has to look at the rows that it was asked with."""

    def __init__(self, patch, texts: dict[int, tuple[int, ...]]) -> None:
        self.texts, self.asked = texts, []
        self.right: int | None = None  # drafts that are right; None: as said
        patch.setattr(Drafter, "propose", self.propose)

    def propose(self, tokens, positions, n, ctx, sampler, params, keys, keep=False) -> Draft:
        drafts, confidence = [], []
        self.asked.append(len(tokens))
        for seed, out in zip(keys.seed.tolist(), keys.position.tolist()):
            text = (*self.texts[seed], *[0] * n)[out : out + n] if seed in self.texts else ()
            text = (*text, *[0] * (n - len(text)))
            depth = (seed + 5 * out) % (n + 1) if self.right is None else self.right
            drafts.append([t if k < depth else (t + 1) % 90 for k, t in enumerate(text)])
            confidence.append([0.95 if k < depth else 0.3 for k in range(n)])
        drafted, sure = torch.tensor(drafts), torch.tensor(confidence)
        return Draft(drafted, sure, torch.zeros_like(sure))


@pytest.fixture
def knowing(monkeypatch):
    texts = {p.seed: c.token_ids for p, c in zip(PARAMS, serial())}
    return Knowing(monkeypatch, texts)


class Half(BaseVerifier):
    """Half of the rows that it could have, the likeliest drafts first: depths differ by sequence."""

    max_draft = 5

    def budget(self, stale, cost):
        b, n = stale.shape
        return b + (b * n) // 2


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
    if changes.get("num_pages") == 9:  # those who give way do so with a result on the way
        monkeypatch.setattr(overlap, "short_of_pages", lambda *a: False)
    eng, want = engine(**{"verifier": Fixed(4), **changes}), serial()
    same(eng.generate(PROMPTS, PARAMS), want)
    same(eng.generate(PROMPTS, PARAMS), want)  # what is cached, freed and used again
    if changes.get("num_pages") == 9:
        assert eng.stats.preemptions > 3
    if changes.get("prefix_cache"):
        assert eng.cache.hits >= 1
    check_empty(eng)


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
            temperature=p.temperature, seed=p.seed, max_tokens=p.max_tokens, ignore_eos=True,
            top_logprobs=i % 4, prompt_logprobs=i % 2 == 0,
        )
        for i, p in enumerate(PARAMS)
    ]  # fmt: skip
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

    def launching(rt, schedule, flight, before, tap_of):
        seen.append(("launch", flight.step, None if before is None else before.step))
        whole[0](rt, schedule, flight, before, tap_of)

    def landed(rt, flight, result):
        seen.append(("commit", flight.step, None))
        whole[1](rt, flight, result)

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
        assert len(eng._loop.flights) == 1
        check(eng)
    request = eng.requests[number]
    assert [a.step for a in request.ahead] == [2]
    assert request.length == request.known + request.ahead[0].tokens > request.known


def test_counters_are_what_they_would_be_if_every_draft_were_accepted(knowing):
    """Never less than what is true once the step is committed, and pages for all of it are held."""
    eng = engine(verifier=Fixed(4))
    for p, q in zip(PROMPTS, PARAMS):
        eng.add(p, q)
    exact = over = 0
    while eng.unfinished:
        before = {r.id: (r.known, r.length, r.computed, len(r.ahead)) for r in eng.requests.values()}
        eng.step()
        check(eng)
        for r in eng.requests.values():
            known, length, computed, flights = before.get(r.id, (0, 0, 0, 0))
            if flights:
                assert known <= r.known <= length and r.stored <= computed
                exact += r.known == length
                over += r.known < length
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
    whole, cut = step.resolve, []

    def resolve(rt, d, before):
        batch, emitting = whole(rt, d, before)
        there = batch.seq >= 0
        assert (batch.positions < d.capacity[batch.row_set.owner])[there].all()
        assert there.sum() == batch.rows.sum() <= batch.num_rows
        cut.append(batch.num_rows - int(there.sum()))
        return batch, emitting

    monkeypatch.setattr(step, "resolve", resolve)
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


# -------------------------------------------------------------------------- what ends while it flies


def test_a_stop_token_in_the_middle_of_accepted_drafts(knowing):
    """The host cuts there; the rows that are already on their way give nothing."""
    text = {p.seed: c.token_ids for p, c in zip(PARAMS, serial())}
    eng = engine(verifier=Fixed(5))
    stop = max(set(text[71]), key=lambda t: -text[71].index(t))  # comes late for the first time
    eos = eng.config.eos_token_id
    object.__setattr__(eng.config, "eos_token_id", stop)
    try:
        how = [SamplingParams(temperature=p.temperature, seed=p.seed, max_tokens=p.max_tokens) for p in PARAMS]
        got = eng.generate(PROMPTS, how)
    finally:
        object.__setattr__(eng.config, "eos_token_id", eos)
    stopped = 0
    for c, p in zip(got, PARAMS):
        whole = text[p.seed]
        end = whole.index(stop) + 1 if stop in whole else len(whole)
        assert c.token_ids == whole[:end] and c.finish_reason == ("stop" if stop in whole else "length")
        stopped += stop in whole
    assert stopped
    check_empty(eng)


@pytest.mark.parametrize("drafts", [0, 4])
@pytest.mark.parametrize("how", ["abort", "preempt", "timeout"])
def test_what_ends_or_gives_way_in_flight_is_dropped(knowing, drafts, how):
    """At any step, with its result on the way: it gets no token of it, and nobody else's."""
    for at in (1, 2, 5):
        eng = engine(verifier=Fixed(drafts), num_pages=40, max_num_batched_tokens=40)
        numbers, done = [eng.add(p, q) for p, q in zip(PROMPTS, PARAMS)], {}
        for n in range(500):
            if not eng.unfinished:
                break
            done |= {c.index: c for c in eng.step()}
            running = list(eng.runtime.scheduler.running)
            if n == at and running:
                victim = max(running, key=lambda r: (len(r.ahead), len(r.output), r.id))
                had, flying = list(victim.output), victim.ahead
                assert flying
                if how == "abort":
                    done[victim.id] = eng.abort(victim.id)
                elif how == "timeout":
                    victim.deadline = time.monotonic() - 1
                else:
                    eng.runtime.scheduler.preempt(victim)
                    assert not victim.ahead and victim.output == had
            check(eng)
        for i, want in zip(numbers, serial()):
            c = done[i]
            assert c.token_ids == want.token_ids[: len(c.token_ids)] and c.error is None
            if c.finish_reason == "length":
                assert c.token_ids == want.token_ids
            else:
                assert i == victim.id and c.token_ids == tuple(had)
        check_empty(eng)


def test_who_gave_way_and_came_back_gets_nothing_of_its_life_before(knowing):
    """Preempted and admitted again before its result of that step is there."""
    eng = engine(verifier=Fixed(3))
    for p, q in zip(PROMPTS[:2], PARAMS):
        eng.add(p, q)
    done = []
    for n in range(400):
        if not eng.unfinished:
            break
        done += eng.step()
        running = eng.runtime.scheduler.running
        if n in (2, 3, 6, 7) and running:
            request = running[-1]
            flight = eng._loop.flights[0]
            eng.runtime.scheduler.preempt(request)
            output = list(request.output)
            done += eng.step()  # admits it and commits the flight that it was in
            assert request.output == output and request.ahead[0].step > flight.step
            assert request.draft is None
    same(sorted(done, key=lambda c: c.index), serial()[:2])
    check_empty(eng)


@pytest.mark.parametrize("cached", [False, True])
def test_a_fork_of_what_is_on_its_way_goes_on_from_what_is_known(knowing, cached):
    eng = engine(verifier=Fixed(3), prefix_cache=cached, page_size=4)
    parent = eng.add(PROMPTS[4], PARAMS[4])
    for _ in range(4):
        eng.step()
    request = eng.requests[parent]
    assert request.ahead and request.known < request.length
    child = eng.fork(parent, seed=PARAMS[4].seed)
    assert eng.requests[child].known == request.known and not eng.requests[child].ahead
    done = {}
    while eng.unfinished:
        done |= {c.index: c for c in eng.step()}
        check(eng)
    for i in (parent, child):
        same([done[i]], serial()[4:5])
    check_empty(eng)


class Slow(WorkerDevice):
    """Takes a while before it begins."""

    def run(self, work):
        time.sleep(0.02)
        return super().run(work)


def test_a_freed_slot_is_written_in_its_turn(knowing):
    """A request that begins with a snapshot in the slot of one whose prompt is still on its way:
    its window rows are put there behind those, though the slot is free long before."""
    eng = engine(verifier=Fixed(3), prefix_cache=True, page_size=4, max_num_seqs=1, num_snapshots=99)
    want = engine(overlap=False).generate(PROMPTS[4], PARAMS[4])
    same(eng.generate(PROMPTS[4], PARAMS[4]), want)
    eng.runtime.device = Slow(eng.model.device, eng.stats.clock)
    spare = eng.runtime.states.take(1)  # that of teacher-forced passes: now there is one slot
    first, second = eng.add(PROMPTS[3], PARAMS[3]), eng.add(PROMPTS[4], PARAMS[4])
    eng.step()
    eng.abort(first)
    done = []
    while eng.unfinished:
        done += eng.step()
    assert [c.index for c in done] == [second] and eng.cache.hits == 1
    same(done, want)
    eng.runtime.states.give(spare)
    check_empty(eng)


def test_snapshots_are_those_of_a_serial_run(knowing, monkeypatch):
    """Taken out of rings into which the step on its way has written already: as far as it may have
    come, always."""
    whole = commit.commit

    def late(rt, flight, result):
        rt.device.drain()
        whole(rt, flight, result)

    how = dict(prefix_cache=True, page_size=2, num_snapshots=999)
    other = engine(overlap=False, **how)
    other.generate(PROMPTS, PARAMS)
    monkeypatch.setattr(commit, "commit", late)
    want, shared = other.runtime.reuse.snapshots._held, 0
    for knowing.right in (5, None):
        eng = engine(verifier=Fixed(5), **how)
        same(eng.generate(PROMPTS, PARAMS), serial())
        for key, snapshot in eng.runtime.reuse.snapshots._held.items():
            assert snapshot.position == want[key].position
            torch.testing.assert_close(snapshot.windows, want[key].windows)
            shared += 1
    assert shared > 60


# ------------------------------------------------------------------------------- what runs at once


def test_a_grammar_is_never_ahead_of_its_tokens(knowing):
    class Cycles:
        version = 1
        exact = True

        def compile(self, spec, vocab):
            return type("Compiled", (), {"start": lambda self: Cycle(*spec)})()

    params = [*PARAMS[:3]]
    how = [
        *params[:2],
        SamplingParams(temperature=1.0, seed=5, max_tokens=9, grammar=((7, 8, 9), 7), ignore_eos=True),
    ]
    eng = small_engine("2 and 1", overlap=True, verifier=Fixed(3), grammar=Cycles(), max_model_len=64)
    other = eng.with_(overlap=False)
    got, want = eng.generate(PROMPTS[:3], how), other.generate(PROMPTS[:3], how)
    same(got, want)
    assert got[2].token_ids == (7, 8, 9, 7, 8, 9, 7) and got[2].finish_reason == "stop"
    number = eng.add(PROMPTS[2], how[2])
    eng.step()
    assert not eng._loop.flights and len(eng.requests[number].output) == 1
    assert eng.stats.synchronous["a grammar is asked on the host"] > 5 and not other.stats.synchronous
    eng.abort(number)
    check_empty(eng)


def test_a_traced_engine_runs_synchronously(knowing):
    eng, other = engine(verifier=Fixed(3)), engine(verifier=Fixed(3), overlap=False)
    for e in (eng, other):
        for p, q in zip(PROMPTS[:3], PARAMS):
            e.add(p, q)
        for _ in range(4):
            e.step()
    with eng.trace("logits", "final") as t, other.trace("logits", "final") as u:
        for e in (eng, other):
            while e.unfinished:
                e.step()
                assert not e._loop.flights
    for position in (26, 30):
        a, b = (x.at("logits", position, request=1) for x in (t, u))
        torch.testing.assert_close(a, b)
    assert t["logits"].accepted.sum() == len(t["logits"]) - (~t["logits"].accepted).sum() > 20


def test_teacher_forcing_comes_between_steps(knowing):
    eng = engine(verifier=Fixed(3), num_pages=60)
    for p, q in zip(PROMPTS, PARAMS):
        eng.add(p, q)
    want, done = engine(overlap=False).logits(PROMPTS[4]), []
    while eng.unfinished:
        done += eng.step()
        torch.testing.assert_close(eng.logits(PROMPTS[4]), want)
        check(eng)
    same(sorted(done, key=lambda c: c.index), serial())


def test_close_with_a_step_on_its_way():
    eng = engine()
    eng.add(PROMPTS[0], max_tokens=9)
    eng.step()
    device = eng.runtime.device
    eng.close()
    assert eng.unfinished == 0
    with pytest.raises(RuntimeError):
        device.launch(int)


# ---------------------------------------------------------------------------- the law can be broken


def by_row(self, request):
    """A result matched by its row, not by its request."""
    rows = [i for i, s in enumerate(self.shares) if s.emits]
    return min(request.id, len(rows) - 1) if request.in_flight(self.step) else -1


BUGS = {
    "a result matched by row": (Flight, "place", by_row),
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


# ------------------------------------------------------------------------------------- the device


def test_which_device_an_engine_runs_on():
    assert type(engine().runtime.device) is WorkerDevice
    assert type(engine(overlap=False).runtime.device) is Device
    with pytest.raises(ValueError, match="above 0"):
        SimulatedDevice(0)


def test_work_is_done_in_the_order_of_launching():
    device, seen = engine().runtime.device, []
    slow = device.launch(lambda: (time.sleep(0.05), seen.append("slow"))[1])
    device.post(lambda: seen.append("posted"))
    last = device.launch(lambda: seen.append("last") or torch.is_inference_mode_enabled())
    assert device.wait(last) and seen == ["slow", "posted", "last"]
    device.wait(slow)
    device.post(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        device.wait(device.launch(int))
    device.post(lambda: 1 / 0)
    device.drain()
    assert device.wait(device.launch(lambda: 3)) == 3


def test_a_device_of_twenty_milliseconds_is_never_idle():
    """On two lanes: with overlap the device goes from step to step; a synchronous engine lets it
    wait for schedule, launch and post-process. The best of some runs: others use this machine too."""

    def idle_share(on: bool) -> float:
        eng = engine("one layer", overlap=on, verifier="off")
        eng.generate(PROMPTS, max_tokens=3)
        eng.runtime.device.close()
        eng.runtime.device = SimulatedDevice(0.02)
        eng.stats.reset()
        eng.generate(PROMPTS, PARAMS)
        line = eng.stats.timeline()
        assert line.busy >= 0.02 * eng.stats.steps
        eng.close()
        return line.idle_share

    for _ in range(5):
        overlapped, synchronous = idle_share(True), idle_share(False)
        if overlapped <= 0.03 and overlapped < synchronous:
            break
    assert overlapped <= 0.03 and overlapped < synchronous, (overlapped, synchronous)
