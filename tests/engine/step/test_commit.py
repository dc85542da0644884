"""Commit: what is written into a request, and what ends it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from deepinfer.engine.completion import TokenStep
from deepinfer.engine.request import Request
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.engine.scheduling.output import ScheduledRequest
from deepinfer.engine.step import commit
from deepinfer.engine.step.non_finite import NONE

RT = SimpleNamespace(
    config=SimpleNamespace(vocab_size=10, eos_token_id=1),
    limits=SimpleNamespace(model_len=8),
    sampler="S",
    verifier="V",
)


def request(output=(), **params) -> Request:
    params = SamplingParams(**{"max_tokens": 4, **params})
    return Request(3, [5, 6, 7], params, seed=0, status="running", output=list(output))


@pytest.mark.parametrize(
    "output, params, reason",
    [
        ([4], {}, None),
        ([4, 1], {}, "stop"),
        ([4, 1], {"ignore_eos": True}, None),
        ([4, 4, 4, 4], {}, "length"),
        ([4] * 5, {"max_tokens": 9}, "length"),  # the model's length
    ],
)
def test_what_ends_a_request(output, params, reason):
    r = request(output, **params)
    assert commit.stops(RT, r) == (reason is not None) and r.finish_reason == reason


def test_append_writes_every_list_or_raises():
    r = request(top_logprobs=2)
    top = ([-0.1, -0.2, -0.3], [4, 5, 6])
    commit.append(RT, r, 4, -0.1, top, TokenStep(0, 0, "target"))
    assert (r.output, r.logprobs, r.top_logprobs) == ([4], [-0.1], [{4: -0.1, 5: -0.2}])
    for token in (-1, 10):
        with pytest.raises(ValueError, match=rf"request 3: .* emitted token {token}; .* 0..9"):
            commit.append(RT, r, token, -0.1, top, TokenStep(0, 0, "target"))
    assert r.output == [4] and len(r.steps) == 1


def test_an_error_ends_its_request_and_an_interrupt_goes_on():
    def fail(error):
        raise error

    r, error = request(), ValueError("bad")
    commit.contain_errors(r, fail, error)
    assert (r.finish_reason, r.error) == ("error", error)
    with pytest.raises(KeyboardInterrupt):
        commit.contain_errors(request(), fail, KeyboardInterrupt())


def test_a_decode_request_is_settled_where_it_really_was():
    r = request([4])
    bound = ScheduledRequest(id=3, start=6, stop=7, emits=True, decode=True)
    chunk = ScheduledRequest(id=3, start=0, stop=2, emits=False, decode=False)
    assert commit.settled(bound, r) == ScheduledRequest.of(r, 3, 4)
    assert commit.settled(chunk, r) is chunk


def test_only_rows_of_chunks_are_looked_at():
    r = request([4])
    scheduled = [ScheduledRequest.of(r, 0, 2), ScheduledRequest.of(r, 3, 4)]
    assert [s.decode for s in scheduled] == [False, True]
    lowest = torch.tensor([1, 3])
    assert commit.broken_chunks(scheduled, SimpleNamespace(broken=lowest)) == [(0, 1)]
    clean = SimpleNamespace(broken=torch.tensor([NONE, 3]))
    assert commit.broken_chunks(scheduled, clean) == []
    commit.end_broken(r, scheduled[0], 1, step=7)
    assert "step 7, row 1 (prompt position 1) is not finite" in str(r.error)
