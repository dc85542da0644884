"""Serving is serial: with arrivals, aborts, too few pages and faults, each request gets the tokens
that it gets alone. In float64. After every operation every page and slot is accounted for."""

from __future__ import annotations

import functools
import random

import pytest
import torch

from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.engine.step import commit, recovery
from deepinfer.slots.sampler import Philox
from deepinfer.slots.verifier import Fixed
from support.pool import check, check_empty
from support.small import poison, small_engine, stream

torch.set_num_threads(1)
VOCAB = 97
KINDS = 24  # distinct requests; each has its own prompt, temperature and seed
SHARED = 100  # kinds from here on are the same ones behind one of three beginnings of 28 tokens
LONGEST = 14


def engine(layout: str, **changes):
    settings = {"max_model_len": 80, "page_size": 4, "max_num_seqs": 8, **changes}
    return small_engine(layout, vocab=VOCAB, **settings)


def prompt(kind: int) -> list[int]:
    if kind >= SHARED:
        return stream(28, 500 + kind % 3, high=90) + prompt(kind - SHARED)
    return stream([1, 3, 8, 9, 17, 24, 5, 12][kind % 8], 70 + kind, high=90)


def params(kind: int, most: int = LONGEST) -> SamplingParams:
    return SamplingParams(
        temperature=(0.0, 1.0, 0.7)[kind % 3], seed=kind, max_tokens=most, ignore_eos=True
    )


@functools.cache
def alone(layout: str, kind: int):
    """The request by itself, one row at a time after its prompt."""
    return engine(layout).generate(prompt(kind), params(kind))[0]


def settle(layout: str, c, kind: int, most: int) -> None:
    want = alone(layout, kind)
    assert c.error is None and c.token_ids == want.token_ids[: len(c.token_ids)]
    assert c.finish_reason == "abort" or len(c.token_ids) == most
    assert c.logprobs == pytest.approx(want.logprobs[: len(c.token_ids)], abs=1e-9)
    assert len(c.steps) == len(c.token_ids)


# ------------------------------------------------------------------------- many, and too few pages


SIXTY_FOUR = [
    ("2 and 1", 3, "decode_order", 32),
    ("one layer", 0, "fcfs", 40),
    ("one layer", 3, "mixed", 32),
    pytest.param("2 and 1", 0, "fcfs", 40, marks=pytest.mark.slow),
    pytest.param("2 and 1", 5, "mixed", 48, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("layout, drafts, scheduler, rows", SIXTY_FOUR)
def test_sixty_four_requests_in_a_third_of_the_pages_are_serial(layout, drafts, scheduler, rows):
    sixty_four(layout, verifier=Fixed(drafts), scheduler=scheduler, max_num_batched_tokens=rows)


def sixty_four(layout: str, seed: int = 0, first: int = 0, **changes):
    """Random arrivals and aborts of requests of kinds from `first` on. 8 sequences want up to 8 * 10
    pages, shared ones 8 * 17 (drafts apart); there are a third. Returns the engine, empty again."""
    chance = random.Random(seed)
    eng = engine(layout, num_pages=45 if first else 26, **changes)
    poison(eng.runtime.cache)
    todo = [(first + i % KINDS, chance.randint(4, LONGEST)) for i in range(64)]
    chance.shuffle(todo)
    added: dict[int, tuple[int, int]] = {}
    settled = aborted = 0
    while todo or eng.unfinished:
        for _ in range(chance.choice((0, 0, 1, 4)) if eng.unfinished else 3):
            if todo:
                kind, most = todo.pop()
                added[eng.add(prompt(kind), params(kind, most))] = kind, most
        for c in eng.step():
            settle(layout, c, *added.pop(c.index))
            settled += 1
        if added and chance.random() < 0.04:
            number = chance.choice(sorted(added))
            settle(layout, eng.abort(number), *added.pop(number))
            aborted += 1
        check(eng)
    assert settled + aborted == 64 and aborted and not added
    assert eng.stats.preemptions >= (1 if eng.settings.prefix_cache else 5)  # hits leave room
    check_empty(eng)
    return eng


# ------------------------------------------------------------------------------ random operations


class Unlucky(Philox):
    """Fails now and then, before or after the draw, or by an interrupt."""

    chance = random.Random(0)

    def draw(self, dist, keys):
        if Unlucky.chance.random() < 0.04:
            raise Unlucky.chance.choice([ValueError, KeyboardInterrupt])("bad luck")
        drawn = super().draw(dist, keys)
        if Unlucky.chance.random() < 0.02:
            raise RuntimeError("bad luck")
        return drawn


def interrupted(chance: random.Random):
    """`commit.stops` that is interrupted now and then: in the middle of writing a step down."""
    whole, undoing = commit.stops, [0]

    def stops(rt, request):
        if not undoing[0] and chance.random() < 0.01:
            raise KeyboardInterrupt("bad luck")
        return whole(rt, request)

    def undo(rt, in_flight, undone=recovery.undo):
        undoing[0] += 1
        try:
            undone(rt, in_flight)
        finally:
            undoing[0] -= 1

    return stops, undo


def walk(seed: int, operations: int, patch=None, layout: str = "one layer", **changes):
    """Random add, step, abort, preempt and teacher-forced calls, with faults in slots and in commits;
    invariants after each, and each text is what its request gives alone."""
    for kind in range(KINDS):
        alone(layout, kind)
    chance, eng = random.Random(seed), engine(layout, sampler=Unlucky(), **changes)
    Unlucky.chance = random.Random(seed)
    if patch is not None:
        stops, undo = interrupted(random.Random(seed))
        patch.setattr(commit, "stops", stops)
        patch.setattr(recovery, "undo", undo)
    added: dict[int, tuple[int, int]] = {}
    faults = 0

    def guarded(call) -> None:
        """What fails is done again later; an overlapped engine may commit a step in any call."""
        nonlocal faults
        try:
            done = call()
        except (ValueError, RuntimeError, KeyboardInterrupt) as error:
            assert "bad luck" in str(error)
            faults += 1
            return
        for c in done:
            settle(layout, c, *added.pop(c.index))

    def scored() -> list:
        assert eng.logits(prompt(2)).isfinite().all()
        return []

    for _ in range(operations):
        move = chance.choices(["add", "step", "abort", "preempt", "logits"], [22, 66, 5, 4, 3])[0]
        kind, most = chance.randrange(KINDS), chance.randint(1, LONGEST)
        running = eng.runtime.scheduler.running
        if move == "add" and len(added) < 14:
            added[eng.add(prompt(kind), params(kind, most))] = kind, most
        elif move == "step":
            guarded(eng.step)
        elif move == "abort" and added:
            number = chance.choice(sorted(added))
            settle(layout, eng.abort(number), *added.pop(number))
        elif move == "preempt" and running:
            eng.runtime.scheduler.preempt(chance.choice(running))
        elif move == "logits" and eng.runtime.pages.available >= 2:
            guarded(scored)
        check(eng)
    while eng.unfinished:
        guarded(eng.step)
        check(eng)
    assert not added and faults > operations // 60
    assert eng.stats.preemptions > operations // 50
    check_empty(eng)
    return eng


@pytest.mark.parametrize(
    "drafts, scheduler, pages, rows", [(0, "fcfs", 11, None), (3, "mixed", 12, 12)]
)
def test_random_operations_with_faults(monkeypatch, drafts, scheduler, pages, rows):
    walk(
        drafts + 1,
        500,
        monkeypatch,
        num_pages=pages,
        max_num_seqs=4,
        verifier=Fixed(drafts),
        scheduler=scheduler,
        max_num_batched_tokens=rows,
    )


@pytest.mark.slow
@pytest.mark.parametrize("scheduler", ["fcfs", "decode_order", "mixed"])
@pytest.mark.parametrize("seed", range(4))
def test_random_operations_with_faults_at_length(monkeypatch, scheduler, seed):
    walk(
        seed,
        4000,
        monkeypatch,
        num_pages=11 + seed,
        max_num_seqs=3 + seed,
        verifier=Fixed(seed),
        scheduler=scheduler,
        max_num_batched_tokens=(None, 7, 12, 25)[seed],
        layout=("one layer", "2 and 1")[seed % 2],
    )
