"""Refusals in words: what was asked, what was found, what to do."""

import re

import pytest

import deepinfer as di
from deepinfer.engine.scheduling.scheduler import FCFS, Mixed
from support.pool import check_empty
from support.small import small_engine, stream

PROMPT = stream(5, 30, high=90)


@pytest.fixture(scope="module")
def eng():
    return small_engine("one layer", vocab=97, max_model_len=64, page_size=8, max_num_seqs=3)


def test_a_request_that_has_ended_is_told_from_one_that_never_was(eng):
    for act in (eng.abort, eng.fork):
        with pytest.raises(KeyError, match="no request 0 is waiting or running; none is"):
            act(0)
    first, second = (eng.add(PROMPT, max_tokens=n, ignore_eos=True) for n in (1, 20))
    assert [c.index for c in eng.step()] == [first]  # the id that `add` returned
    for act in (eng.abort, eng.fork):
        there = f"no request {first}: it has ended and was handed out or aborted; those that are: {second} "
        with pytest.raises(KeyError, match=there):
            act(first)
        with pytest.raises(KeyError, match=f"no request 99 is waiting or running; .*: {second}"):
            act(99)
    assert eng.abort(second).index == second
    with pytest.raises(KeyError, match=f"no request {second}: it has ended.*; none is"):
        eng.abort(second)
    check_empty(eng)


@pytest.mark.parametrize("make", [di.LLM, di.Engine.from_pretrained])
@pytest.mark.parametrize("name", ["nano", "tiny"])
def test_the_models_of_the_package_are_named_where_a_path_is_wanted(
    make, name, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=re.escape(f"is di.Engine.{name}()")):
        make(name)
    with pytest.raises(FileNotFoundError) as caught:
        make("mine")
    assert "di.Engine" not in str(caught.value)


@pytest.mark.parametrize("scheduler", [FCFS, FCFS(), Mixed()])
def test_a_scheduler_is_no_slot(scheduler):
    with pytest.raises(TypeError, match="is a scheduler, which is a setting and not a slot"):
        di.check(scheduler)
    assert di.check(di.verifier.Fixed(2), only="its methods fit")


def test_snapshots_belong_to_the_prefix_cache(eng):
    for make in (di.EngineConfig, eng.with_):
        for n in (0, 8):
            with pytest.raises(ValueError, match=f"num_snapshots: found {n}.*prefix_cache=True"):
                make(num_snapshots=n)
            assert make(num_snapshots=n, prefix_cache=True)
    cached = eng.with_(prefix_cache=True, num_snapshots=8)
    plain = cached.with_(prefix_cache=False)  # what belongs to it goes with it
    assert plain.settings == eng.settings and cached.with_().settings.num_snapshots == 8


@pytest.mark.parametrize("name", ["greedy", "foo", "attn", "batch_size", "num_beams"])
def test_no_far_name_is_suggested(eng, name):
    """A wrong guess sends a reader the wrong way: where nothing is near, what there is is said."""
    for make in (
        eng.with_,
        lambda **k: eng.add(PROMPT, **k),
        lambda **k: di.LLM(eng, **k),
        di.SamplingParams,
        di.LLM.SamplingParams,
    ):
        with pytest.raises(TypeError, match=name) as caught:
            make(**{name: 1})
        assert "did you mean" not in str(caught.value)
    with pytest.raises(TypeError, match="did you mean 'max_num_seqs'"):
        eng.with_(max_seqs=3)
    with pytest.raises(TypeError, match="did you mean 'temperature'"):
        eng.add(PROMPT, temprature=1)
