"""Which seed and request a completion is of: it can be repeated alone and found in a trace."""

import pytest

import deepinfer as di
from deepinfer import rng

SAMPLED = dict(max_tokens=8, ignore_eos=True)
PROMPT = [0, 300, 301, 302]


@pytest.fixture(scope="module")
def engine() -> di.Engine:
    return di.Engine.tiny(dtype="float64", max_model_len=96, max_num_seqs=6)


def test_one_seed_for_a_list_is_a_stream_for_each_prompt(engine):
    out = engine.generate([PROMPT] * 6, seed=7, **SAMPLED)
    assert len({c.token_ids for c in out}) == 6
    assert [c.seed for c in out] == [rng.prompt_seed(7, i) for i in range(6)] and out[0].seed == 7
    for c in out:
        assert engine.generate(PROMPT, seed=c.seed, **SAMPLED)[0].token_ids == c.token_ids
    params = di.SamplingParams(seed=7, **SAMPLED)
    assert [c.token_ids for c in engine.generate([PROMPT] * 6, params)] == [
        c.token_ids for c in out
    ]
    (only,) = engine.generate([PROMPT], seed=7, **SAMPLED)
    assert only.token_ids == out[0].token_ids
    assert out.provenance["sampling"] == [repr(params)]


def test_a_list_of_params_is_taken_as_it_is(engine):
    out = engine.generate([PROMPT] * 2, [di.SamplingParams(seed=7, **SAMPLED)] * 2)
    assert out[0].token_ids == out[1].token_ids and [c.seed for c in out] == [7, 7]


@pytest.mark.parametrize("seed", [0, 1, 7, 2**63, 2**64 - 1])
def test_derived_seeds_are_apart(seed):
    """From each other, from those of neighbouring seeds, and from unseeded requests."""
    derived = {rng.prompt_seed(s, i) for s in (seed, seed ^ 1) for i in range(20)}
    unseeded = {rng.request_seed(s, i) for s in (seed, seed ^ 1) for i in range(20)}
    assert len(derived) == 40 and not derived & unseeded
    assert all(0 <= s < 2**64 for s in derived)


def test_an_unseeded_completion_says_its_seed(engine):
    fresh = [engine.with_().generate([PROMPT] * 3, **SAMPLED) for _ in range(2)]
    assert [c.token_ids for c in fresh[0]] == [c.token_ids for c in fresh[1]]  # engine seed 0
    for c in fresh[0]:
        assert c.seed == rng.request_seed(0, c.request) and f"seed {c.seed}" in repr(c)
        again = engine.generate(PROMPT, seed=c.seed, **SAMPLED)[0]
        assert again.token_ids == c.token_ids
    assert fresh[0].table()["seed"] == [c.seed for c in fresh[0]]
    facts = fresh[0][1].table().provenance
    assert (facts["request"], facts["seed"]) == (1, fresh[0][1].seed)


def test_requests_of_completions_are_those_of_traces_and_statistics(engine):
    eng = engine.with_()
    eng.generate(PROMPT, max_tokens=1)  # from here on .index is not the request's id
    with eng.trace("layers.0.in") as t:
        out = eng.generate([PROMPT, [*PROMPT, 303]], temperature=0.0, max_tokens=2)
    assert [c.index for c in out] == [0, 1] and [c.request for c in out] == [1, 2]
    for c in out:
        by_id = t.at("layers.0.in", 2, request=c.request)
        assert (t.at("layers.0.in", 2, request=c) == by_id).all()
        rows = t["layers.0.in"][
            (t["layers.0.in"].request == c.request) & (t["layers.0.in"].position == 2)
        ]
        assert (by_id == rows[0]).all()
    assert eng.stats.by_request()["request"] == [0, 1, 2]
    (bad,) = eng.generate([[]], max_tokens=1)
    assert bad.request is None and bad.seed is None
    with pytest.raises(KeyError, match="item 0 never became a request"):
        t.at("layers.0.in", 2, request=bad)
    with eng.background() as bg:
        running = bg.add(PROMPT, max_tokens=2)
    assert running.result().request == running.id


def test_the_steps_of_a_table_are_the_engines(engine):
    eng = engine.with_()
    eng.generate(PROMPT, max_tokens=2)
    (c,) = eng.generate(PROMPT, max_tokens=2, ignore_eos=True)
    assert c.table()["engine_step"] == eng.stats.by_step(times=False)["step"][-2:]


def test_max_tokens_beyond_the_context_is_cut_and_said_once(engine):
    eng = engine.with_()
    with pytest.warns(UserWarning, match="max_tokens=100000 is more than max_model_len=96") as said:
        out = eng.generate([PROMPT] * 2, max_tokens=100_000, temperature=0.0, ignore_eos=True)
    assert len(said) == 1
    assert all(len(c.token_ids) == 96 - 4 and c.finish_reason == "length" for c in out)


def test_an_image_token_in_a_prompt_costs_its_own_request(engine):
    image = engine.config.image_token_id
    with pytest.raises(ValueError, match=rf"prompt\[1\] is {image}, the image token"):
        engine.add([0, image])
    good, bad = engine.generate([PROMPT, [0, image]], max_tokens=1)
    assert good.error is None and "no images yet" in str(bad.error)
    name = engine.tokenizer.id_to_token(image)
    with pytest.raises(ValueError, match="the image token"):
        engine.generate(f"a{name}", special=True)
    assert engine.generate(f"a{name}", max_tokens=1)[0].error is None  # ordinary text
    assert engine.logits([0, image, 5]).shape[0] == 3  # a model may have emitted it
