"""Loop: requests come in, steps run in order, and nothing is held when they are gone."""

from __future__ import annotations

import pytest
import torch

import deepinfer as di
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.engine.step.loop import Loop
from support.pool import check_empty

torch.set_num_threads(1)
HOW = dict(max_tokens=4, temperature=0.0, ignore_eos=True)


def loop_of(eng: di.Engine) -> Loop:
    """A loop as the engine makes it, with no text and no trace."""
    return Loop(eng.runtime, None, [])


@pytest.fixture(scope="module")
def tiny() -> di.Engine:
    return di.Engine.tiny(dtype="float64")


@pytest.mark.parametrize("overlap", [False, True])
def test_steps_are_numbered_and_committed_in_order(tiny, overlap):
    eng = tiny.with_(overlap=overlap)
    loop = loop_of(eng)
    request = loop.add([1, 2, 3], SamplingParams(**HOW))
    seen = []
    while loop.unfinished:
        loop.step()
        assert len(loop.in_flight) <= overlap
        seen += [s.step for s in loop.in_flight]
    assert [t.step for t in request.steps] == [0, 1, 2, 3] and seen == sorted(set(seen))
    assert loop.hand_out() == [request] and not loop.requests
    check_empty(eng)


def test_settle_commits_what_is_in_flight(tiny):
    eng = tiny.with_(overlap=True)
    loop = loop_of(eng)
    request = loop.add([1, 2, 3], SamplingParams(**HOW))
    loop.step()
    assert (len(loop.in_flight), request.output) == (1, [])
    loop.settle()
    assert (loop.in_flight, len(request.output), request.in_flight) == ([], 1, ())
    loop.forget(request)
    assert request.finish_reason == "abort"
    check_empty(eng)


def test_a_dropped_request_gets_nothing_of_the_step_in_flight(tiny):
    eng = tiny.with_(overlap=True)
    loop = loop_of(eng)
    one, two = (loop.add([1, 2, n], SamplingParams(**HOW)) for n in (3, 4))
    loop.step()
    loop.forget(one)
    while loop.unfinished:
        loop.step()
    assert (one.output, one.finish_reason) == ([], "abort") and len(two.output) == 4
    loop.hand_out()
    check_empty(eng)


def test_a_prompt_that_is_too_long_is_refused_before_it_counts(tiny):
    loop = loop_of(tiny)
    with pytest.raises(ValueError, match="prompt has 9999 tokens"):
        loop.add([1] * 9999, SamplingParams(**HOW))
    assert not loop.requests
