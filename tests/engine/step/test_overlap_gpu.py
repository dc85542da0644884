"""Serving on an accelerator: `pytest -m gpu`. In float64 the CPU engine, one request at a time, is the
reference, and a launch never waits for what the device does."""

from __future__ import annotations

import contextlib
import random

import pytest
import torch

import deepinfer as di
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.engine.step import launch
from support.overlapped import Half
from support.pool import check, check_empty

pytestmark = pytest.mark.gpu

PROMPTS = [[0, *range(3 + i, 3 + i + n)] for i, n in enumerate((9, 70, 25, 141, 2, 64, 40, 100))]
PARAMS = [
    SamplingParams(temperature=t, seed=90 + i, max_tokens=18 - i, ignore_eos=True)
    for i, t in enumerate((0.0, 1.0, 0.7, 0.0, 1.0, 0.0, 0.6, 0.0))
]
FEW = 10  # pages, of the 18 that all want at once


@pytest.fixture(scope="module")
def serial() -> list[tuple[int, ...]]:
    eng = di.Engine.tiny(device="cpu", dtype="float64")
    return [eng.generate(p, how)[0].token_ids for p, how in zip(PROMPTS, PARAMS)]


@pytest.fixture(scope="module")
def gpu():
    return di.Engine.tiny(
        device="cuda", dtype="float64", max_num_seqs=6, page_size=32, max_model_len=256
    )


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        dict(),
        dict(num_pages=FEW, max_num_batched_tokens=48),
        dict(prefix_cache=True, max_num_batched_tokens=48),
        dict(scheduler="mixed", max_num_batched_tokens=40),
    ],
    ids=str,
)
def test_tokens_are_the_serial_ones_of_the_cpu(gpu, serial, overlap, changes):
    for verifier in ("off", di.verifier.Fixed(5), Half()):
        with gpu.with_(overlap=overlap, verifier=verifier, **changes) as eng:
            for _ in range(2):  # again on pages and slots that others have left, or behind a hit
                out = eng.generate(PROMPTS, PARAMS)
                assert [c.token_ids for c in out] == serial
                check_empty(eng)
            if changes.get("num_pages"):
                assert eng.stats.preemptions
            if changes.get("prefix_cache"):
                assert eng.cache.hits


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    "policy", [di.replay.Bounded(), di.replay.Bounded(mode="mask"), di.replay.Halo()], ids=repr
)
def test_behind_a_cut_tokens_are_those_of_the_cpu_without_hits(gpu, policy, overlap):
    """The prompts that are cut leave the windows of the first layers; who begins there, also after
    it was preempted, has the numbers of a cold prompt that is cut alone."""
    cpu = di.Engine.tiny(device="cpu", dtype="float64", replay=policy)
    want = [cpu.generate(p, how)[0].token_ids for p, how in zip(PROMPTS, PARAMS)]
    how = dict(prefix_cache=True, num_pages=14, max_num_batched_tokens=48)
    with gpu.with_(replay=policy, overlap=overlap, verifier=di.verifier.Fixed(5), **how) as eng:
        for _ in range(3):
            assert [c.token_ids for c in eng.generate(PROMPTS, PARAMS)] == want
            check_empty(eng)
        assert eng.cache.hits and eng.stats.preemptions


def test_aborts_with_results_on_their_way_cost_nobody_a_token(gpu, serial):
    draw = random.Random(5)
    with gpu.with_(
        overlap=True, verifier=di.verifier.Fixed(5), num_pages=FEW, prefix_cache=True
    ) as eng:
        for _ in range(4):
            ids = [eng.add(p, how) for p, how in zip(PROMPTS, PARAMS)]
            gone, done = set(draw.sample(ids, 3)), {}
            while eng.unfinished:
                for c in eng.step():
                    done[c.index] = c.token_ids
                check(eng)
                if gone and draw.random() < 0.3:
                    last = gone.pop()
                    if last in eng.requests:
                        eng.abort(last)
            for i, want in zip(ids, serial):
                assert done.get(i, want) == want
            assert len(done) >= 5
            check_empty(eng)


@contextlib.contextmanager
def no_waiting():
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("verifier", ["off", "fixed"])
def test_a_decode_launch_never_waits_for_the_device(gpu, serial, monkeypatch, verifier):
    launched = []
    whole = launch.launch

    def watched(rt, schedule, step_in_flight, before, tap_of):
        if schedule.kind != "decode":
            return whole(rt, schedule, step_in_flight, before, tap_of)
        with no_waiting():
            whole(rt, schedule, step_in_flight, before, tap_of)
        launched.append(before is not None)

    monkeypatch.setattr(launch, "launch", watched)
    with gpu.with_(overlap=True, verifier=verifier) as eng:
        assert [c.token_ids for c in eng.generate(PROMPTS, PARAMS)] == serial
        assert sum(launched) > 5  # with the step before still on its way
        assert not any("promise" in why for why in eng.stats.synchronous)


CYCLES = 800_000_000  # about 0.4 s on an H200: more than its host needs to launch a step


def test_the_host_is_ahead_of_a_device_that_is_slower(gpu):
    """Synchronous, each launch comes when the step before it is over, and a step takes the time of
    both; overlapped, it comes while the device still works, and a step takes the device's time."""
    seconds = []
    for overlap in (False, True):
        with gpu.with_(overlap=overlap, verifier="fixed") as eng:
            eng.generate(PROMPTS, PARAMS)
            eng.runtime.device.finish = lambda: torch.cuda._sleep(CYCLES)
            eng.stats.reset()
            eng.generate(PROMPTS, PARAMS)
            t = eng.stats.timeline()
        assert t.busy + t.idle + t.no_work == pytest.approx(t.span)
        ends = {s.step: s.stop for s in t.device}
        begun = {s.step: s.start for s in t.host if s.what == "launch"}
        ahead = [n for n in begun if n - 1 in ends and begun[n] < ends[n - 1]]
        seconds.append(t.span / len(begun))
        print(f"overlap {overlap}: {seconds[-1]:.3f} s a step, {len(ahead)} of {len(begun)} ahead")
        if overlap:
            assert len(ahead) > 0.8 * (len(begun) - 1) and t.idle_share < 0.03
        else:
            assert not ahead
    assert seconds[1] < seconds[0]
