"""What ends, is preempted, forks or begins while a step is on its way, and what runs synchronously."""

from __future__ import annotations

import time

import pytest
import torch
from engine.step.test_grammar_mask import Cycle

from deepinfer.engine.device import WorkerDevice
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.engine.step import commit
from deepinfer.slots.verifier import Fixed
from support.overlapped import PARAMS, PROMPTS, engine, same, serial
from support.pool import check, check_empty
from support.small import small_engine

torch.set_num_threads(1)


# -------------------------------------------------------------------------- what ends while it flies


def test_a_stop_token_in_the_middle_of_accepted_drafts(knowing):
    """The host cuts there; the rows that are already on their way give nothing."""
    text = {p.seed: c.token_ids for p, c in zip(PARAMS, serial())}
    eng = engine(verifier=Fixed(5))
    stop = max(set(text[71]), key=lambda t: -text[71].index(t))  # comes late for the first time
    eos = eng.config.eos_token_id
    object.__setattr__(eng.config, "eos_token_id", stop)
    try:
        how = [
            SamplingParams(temperature=p.temperature, seed=p.seed, max_tokens=p.max_tokens)
            for p in PARAMS
        ]
        got = eng.generate(PROMPTS, how)
    finally:
        object.__setattr__(eng.config, "eos_token_id", eos)
    stopped = 0
    for c, p in zip(got, PARAMS):
        whole = text[p.seed]
        end = whole.index(stop) + 1 if stop in whole else len(whole)
        assert c.token_ids == whole[:end] and c.finish_reason == (
            "stop" if stop in whole else "length"
        )
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
                victim = max(running, key=lambda r: (len(r.in_flight), len(r.output), r.id))
                had, flying = list(victim.output), victim.in_flight
                assert flying
                if how == "abort":
                    done[victim.id] = eng.abort(victim.id)
                elif how == "timeout":
                    victim.deadline = time.monotonic() - 1
                else:
                    eng.runtime.scheduler.preempt(victim)
                    assert not victim.in_flight and victim.output == had
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
            step_in_flight = eng._loop.in_flight[0]
            eng.runtime.scheduler.preempt(request)
            output = list(request.output)
            done += eng.step()  # admits it and commits the flight that it was in
            assert request.output == output and request.in_flight[0].step > step_in_flight.step
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
    assert request.in_flight and request.num_tokens < request.optimistic_tokens
    child = eng.fork(parent, seed=PARAMS[4].seed)
    assert (
        eng.requests[child].num_tokens == request.num_tokens and not eng.requests[child].in_flight
    )
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
    eng = engine(
        verifier=Fixed(3), prefix_cache=True, page_size=4, max_num_seqs=1, num_snapshots=99
    )
    want = engine(overlap=False).generate(PROMPTS[4], PARAMS[4])
    same(eng.generate(PROMPTS[4], PARAMS[4]), want)
    eng.runtime.device = Slow(eng.model.device, eng.stats.clock)
    eng.runtime.prefix_cache.device = eng.runtime.device
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

    def late(rt, step_in_flight, result):
        rt.device.drain()
        whole(rt, step_in_flight, result)

    how = dict(prefix_cache=True, page_size=2, num_snapshots=999)
    other = engine(overlap=False, **how)
    other.generate(PROMPTS, PARAMS)
    monkeypatch.setattr(commit, "commit", late)
    want, shared = other.runtime.prefix_cache.snapshots._held, 0
    for knowing.right in (5, None):
        eng = engine(verifier=Fixed(5), **how)
        same(eng.generate(PROMPTS, PARAMS), serial())
        for key, snapshot in eng.runtime.prefix_cache.snapshots._held.items():
            assert snapshot.position == want[key].position
            torch.testing.assert_close(snapshot.windows, want[key].windows)
            shared += 1
    assert shared > 60


@pytest.mark.parametrize("overlap", [False, True])
def test_pages_of_rejected_drafts_go_back(knowing, monkeypatch, overlap):
    """Nobody is scheduled, waits or is preempted while another holds pages that only drafts which were
    rejected would have needed. Without a step on its way there are none of them."""
    knowing.right = 0
    eng = engine(overlap=overlap, verifier=Fixed(5), num_pages=40, page_size=2)
    resources, schedule, give = (
        eng.runtime.resources,
        eng.runtime.scheduler.schedule,
        eng.runtime.pages.give,
    )
    surplus, held = [], []

    def checked():
        for r in eng.runtime.scheduler.running:
            if r.decoding and not r.in_flight:
                held.append(len(r.pages))
                assert len(r.pages) <= resources.pages_of(r.optimistic_tokens + resources.lookahead)
        return schedule()

    def counted(pages) -> None:
        surplus.append(len(pages))
        give(pages)

    monkeypatch.setattr(eng.runtime.scheduler, "schedule", checked)
    trim = type(resources).trim

    def trimmed(self, request) -> None:
        eng.runtime.pages.give = counted
        trim(self, request)
        eng.runtime.pages.give = give

    monkeypatch.setattr(type(resources), "trim", trimmed)
    same(eng.generate(PROMPTS, PARAMS), serial())
    assert len(held) > 20 and bool(surplus) == overlap
    check_empty(eng)


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
        SamplingParams(
            temperature=1.0, seed=5, max_tokens=9, grammar=((7, 8, 9), 7), ignore_eos=True
        ),
    ]
    eng = small_engine(
        "2 and 1", overlap=True, verifier=Fixed(3), grammar=Cycles(), max_model_len=64
    )
    other = eng.with_(overlap=False)
    got, want = eng.generate(PROMPTS[:3], how), other.generate(PROMPTS[:3], how)
    same(got, want)
    assert got[2].token_ids == (7, 8, 9, 7, 8, 9, 7) and got[2].finish_reason == "stop"
    number = eng.add(PROMPTS[2], how[2])
    eng.step()
    assert not eng._loop.in_flight and len(eng.requests[number].output) == 1
    assert (
        eng.stats.synchronous["a grammar is asked on the host"] > 5 and not other.stats.synchronous
    )
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
                assert not e._loop.in_flight
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
