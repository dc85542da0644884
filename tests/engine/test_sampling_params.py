"""SamplingParams: edge values are refused by name, and nothing else is."""

import dataclasses
import inspect
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.engine.sampling_params import NOT_YET, SamplingParams

BAD = [
    ("temperature", [-1, -1e-9, math.nan, math.inf, -math.inf, True, "1", None, 1j]),
    ("top_p", [0, 0.0, 1.01, -0.5, math.nan, math.inf, True, "0.9", None]),
    ("top_k", [0, -2, 2.5, 0.4, True, False, "5", None, 2**31, math.nan]),
    ("max_tokens", [0, -1, 1.0, True, None]),
    ("top_logprobs", [-1, 1.5, True, None]),
    ("seed", [-1, 2**64, 1.0, 0.5, True, False, "7", math.nan]),
    ("ignore_eos", [1, 0, None, "yes"]),
    ("prompt_logprobs", [1, None]),
]


@pytest.mark.parametrize("name, value", [(n, v) for n, vs in BAD for v in vs])
def test_bad_values_are_refused_by_name(name, value):
    with pytest.raises(ValueError, match=rf"SamplingParams\({name}=.*{name} must be"):
        SamplingParams(**{name: value})


def test_edges_are_legal():
    p = SamplingParams(temperature=0, top_p=1e-9, top_k=2**31 - 1, max_tokens=1, seed=2**64 - 1)
    assert p.greedy and p.temperature == 0.0 and isinstance(p.temperature, float)
    assert not SamplingParams(temperature=1e-5).greedy and SamplingParams(temperature=9.9e-6).greedy
    q = SamplingParams(top_k=np.int64(3), seed=np.uint64(2**63), temperature=np.float32(0.5))
    assert (type(q.top_k), type(q.seed), type(q.temperature)) == (int, int, float)


def test_defaults_and_shape():
    assert dataclasses.asdict(SamplingParams()) == dict(
        temperature=1.0,
        top_p=1.0,
        top_k=-1,
        max_tokens=64,
        ignore_eos=False,
        top_logprobs=0,
        prompt_logprobs=False,
        seed=None,
        grammar=None,
    )
    assert list(inspect.signature(SamplingParams).parameters) == [
        f.name for f in dataclasses.fields(SamplingParams)
    ]
    p = SamplingParams(top_k=5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        p.top_k = 6
    with pytest.raises(ValueError, match="top_k"):
        dataclasses.replace(p, top_k=0)
    assert p == SamplingParams(top_k=5) and hash(p) == hash(SamplingParams(top_k=5))


@pytest.mark.parametrize("name", sorted(NOT_YET))
def test_what_does_not_work_yet_says_what_to_do(name):
    with pytest.raises(TypeError) as e:
        SamplingParams(**{name: 1})
    assert repr(name) in str(e.value) and NOT_YET[name] in str(e.value)


def test_unknown_names():
    with pytest.raises(TypeError, match="did you mean 'temperature'"):
        SamplingParams(temprature=1.0)
    with pytest.raises(TypeError, match="keywords only"):
        SamplingParams(0.7)


@given(st.integers(0, 2000), st.integers(1, 2000))
def test_top_logprobs_against_the_vocabulary(asked, vocab):
    p = SamplingParams(top_logprobs=asked)
    if asked <= vocab:
        assert p.validate_for(vocab) is p
    else:
        with pytest.raises(ValueError, match=f"vocabulary has {vocab}"):
            p.validate_for(vocab)
