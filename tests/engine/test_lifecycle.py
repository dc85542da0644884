"""Engines come and go: nothing is shared but weights, and nothing is left behind."""

import dataclasses
import gc

import pytest
import torch

import deepinfer as di
from deepinfer import kernels
from deepinfer.checkpoint import names
from deepinfer.checkpoint.tiny import tiny_state
from deepinfer.checkpoint.writer import write
from deepinfer.engine.engine import Engine
from deepinfer.slots.attention import CSA2
from deepinfer.slots.sampler import Philox
from deepinfer.slots.verifier import Fixed
from support.pool import check_empty
from support.small import small_engine, stream

PROMPT = stream(9, 4, high=90)
GREEDY = dict(temperature=0.0, max_tokens=6)


def engine(**changes):
    return small_engine("one layer", vocab=97, **{"max_model_len": 64, **changes})


def live_bytes() -> int:
    """Of the storages of all tensors that the collector can reach."""
    gc.collect()
    storages = {}
    for x in gc.get_objects():
        if issubclass(type(x), torch.Tensor) and x.device.type != "meta":
            storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
    return sum(storages.values())


def test_made_and_closed_five_times_leaves_nothing():
    """Weights, cache and traced values included: live bytes grow by less than 1 %."""

    def once():
        eng = Engine.tiny(device="cpu", verifier=Fixed(2), max_model_len=64, max_num_seqs=2)
        with eng, eng.trace("layers.*.attn.out"):
            eng.generate(["hello", [5, 6]], max_tokens=3)
            next(eng.stream("the", max_tokens=5))
            eng.add([5, 6], max_tokens=5)
            eng.step()

    once()
    before = live_bytes()
    for _ in range(5):
        once()
    assert live_bytes() <= before * 1.01
    kept = Engine.tiny(device="cpu")
    assert live_bytes() > before * 1.01 and kept  # the measure sees an engine that stays


def test_an_interrupted_engine_leaves_nothing():
    def once():
        eng = engine(max_num_seqs=8)
        try:
            with eng.trace("logits", edit=lambda x, at: 1 / 0 if at.step == 2 else None):
                eng.generate([PROMPT] * 4, **GREEDY)
        except ZeroDivisionError as error:
            held = error  # as a notebook does
            del held

    once()
    before = live_bytes()
    for _ in range(5):
        once()
    assert live_bytes() <= before * 1.01


def test_closing():
    eng = engine()
    text = eng.generate(PROMPT, **GREEDY)[0].token_ids
    tokens = eng.stream(PROMPT, **GREEDY)
    next(tokens)
    eng.add(PROMPT)
    assert sum(r["bytes"] for r in eng.memory.rows if r["part"] == "cache") > 0
    eng.close()
    eng.close()
    assert sum(r["bytes"] for r in eng.memory.rows if r["part"] == "cache") == 0
    for use in (
        lambda: eng.generate(PROMPT),
        lambda: eng.add(PROMPT),
        lambda: eng.stream(PROMPT),
        lambda: eng.step(),
        lambda: eng.logits(PROMPT),
        lambda: eng.score([PROMPT]),
        lambda: next(tokens),
    ):
        with pytest.raises(RuntimeError, match="closed: make another, or eng.with_"):
            use()
    assert eng.unfinished == 0 and "closed" in repr(eng)
    with eng.with_() as again:  # the weights are still there
        assert again.generate(PROMPT, **GREEDY)[0].token_ids == text
    with pytest.raises(RuntimeError, match="closed"):
        again.step()


def test_an_engine_costs_nothing_until_it_runs():
    eng = engine(max_model_len=100_000, max_num_seqs=1000)
    assert (
        eng._runtime is None and eng.stats.steps == 0 and eng.unfinished == 0 and eng.requests == {}
    )
    assert eng.exact and "one layer" in repr(eng)
    assert eng._runtime is None


# ------------------------------------------------------------------------------- two engines


def test_two_engines_share_nothing_but_weights():
    """Other layouts, slots, lengths and kernels, steps interleaved: each as if it were alone."""
    makers = [
        lambda: engine(verifier=Fixed(2)),
        lambda: engine(kernels={"sparse_attend": "reference"}, page_size=8, max_num_seqs=2),
        lambda: small_engine(
            "4 and 2 and 1", vocab=97, attention=CSA2(topk=3), max_num_batched_tokens=3
        ),
        lambda: small_engine("2 and 1", vocab=97, seed=5, weights_seed=5, packed_cache=True),
    ]
    alone = [make().generate([PROMPT, PROMPT[:4]], max_tokens=6) for make in makers]
    engines = [make() for make in makers]
    for eng in engines:
        eng.add(PROMPT, max_tokens=6)
        eng.add(PROMPT[:4], max_tokens=6)
    done = [{} for _ in engines]
    while any(eng.unfinished for eng in engines):
        for eng, mine in zip(engines, done):
            mine.update({c.index: c for c in eng.step()})
    for eng, mine, want in zip(engines, done, alone):
        assert [mine[i].token_ids for i in range(2)] == [c.token_ids for c in want]
        assert [mine[i].logprobs for i in range(2)] == [c.logprobs for c in want]
        check_empty(eng)
    assert engines[0].stats.drafted and not engines[1].stats.drafted
    shared, other = engines[0], engines[1]
    assert shared.model is other.model and shared.runtime.cache is not other.runtime.cache
    a = {s.data_ptr() for s in shared.runtime.cache.stores().values()}
    assert a.isdisjoint(s.data_ptr() for s in other.runtime.cache.stores().values())


def test_kernels_used_in_one_are_not_used_in_the_other():
    a, b, c = engine(), engine(kernels={"topk": "reference"}), engine()
    with kernels.use(experts="reference", sparse_attend="reference"):
        a.generate(PROMPT, **GREEDY)
    for eng in (b, c):
        eng.generate(PROMPT, **GREEDY)

    def ran(eng, op):
        return {r["implementation"] for r in eng.kernels.rows if r["op"] == op}

    assert ran(a, "experts") == {"reference"} == ran(a, "sparse_attend")
    automatic = ran(c, "experts")
    assert "reference" not in automatic and ran(b, "experts") == automatic
    a.generate(PROMPT, **GREEDY)  # outside the block: automatic again
    assert ran(a, "experts") == {"reference"} | automatic


def test_a_slot_object_is_settings_and_each_engine_has_its_own_copy():
    class Counting(Philox):
        drawn = 0

        def draw(self, dist, keys):
            self.drawn += len(keys.seed)
            return super().draw(dist, keys)

    sampler = Counting()
    a, b = engine(sampler=sampler), engine(sampler=sampler)
    a.generate(PROMPT, **GREEDY)
    b.generate([PROMPT] * 2, **GREEDY)
    assert sampler.drawn == 0
    assert (a.runtime.sampler.drawn, b.runtime.sampler.drawn) == (6, 12)


def test_stats_are_of_one_engine():
    a = engine()
    a.generate(PROMPT, **GREEDY)
    b = a.with_()
    assert b.stats.steps == 0 and a.stats.steps == 6 and a.stats.tokens == 6
    b.generate([PROMPT, PROMPT], **GREEDY)
    assert (a.stats.tokens, b.stats.tokens) == (6, 12)


# ------------------------------------------------------------------------------------- settings


def test_with_refuses_another_copy_of_the_weights():
    for name, value in (("device", "cpu"), ("dtype", "float32")):
        with pytest.raises(
            ValueError, match=rf"with_\({name}=...\).*copy.*from_pretrained\(..., {name}=...\)"
        ):
            engine().with_(**{name: value})


@pytest.mark.parametrize(
    "wrong, right",
    [
        ("verifer", "verifier"),
        ("max_model_length", "max_model_len"),
        ("atention", "attention"),
        ("num_page", "num_pages"),
    ],
)
def test_an_unknown_keyword_is_refused_with_the_nearest(wrong, right):
    for make in (engine, Engine.tiny, lambda **k: Engine.from_pretrained("/nowhere", **k)):
        with pytest.raises(TypeError, match=f"{wrong!r}: did you mean {right!r}"):
            make(**{wrong: 1})
    with pytest.raises(TypeError, match="'zzz': slots: attention"):
        engine(zzz=1)


@pytest.mark.parametrize(
    "bad, words",
    [
        (dict(page_size=3), "page_size=3 is no multiple of compress ratio 2"),
        (dict(page_size=0), "page_size"),
        (dict(num_pages=0), "num_pages"),
        (dict(max_num_seqs=0), "max_num_seqs"),
        (dict(max_model_len=0), "max_model_len"),
        (dict(fidelity=3), "fidelity"),
        (dict(seed=-1), "seed"),
        (dict(verifier=Fixed(6)), r"Fixed\(6\).*at most 5"),
        (dict(kernels={"topk": "refrence"}), "did you mean 'reference'"),
        (dict(kernels={"topkk": "reference"}), "no op 'topkk'.*'topk'"),
        (dict(sampler="philoxx"), "philox"),
        (dict(attention=Philox()), "attention"),
    ],
)
def test_a_setting_that_does_not_fit_says_so(bad, words):
    with pytest.raises((ValueError, TypeError, KeyError), match=words):
        small_engine("2 and 1", vocab=97, **bad).generate(PROMPT, max_tokens=1)


@pytest.mark.parametrize(
    "given, words",
    [
        (("nano",), r"Engine\('nano'\) makes no engine: call Engine.nano\(\)"),
        (("tiny",), r"call Engine.tiny\(\)"),
        (("models/x",), r"call Engine.from_pretrained\('models/x'\)"),
        ((), r"Engine\(\) makes no engine: call Engine.nano\(\), Engine.tiny\(\) or"),
    ],
)
def test_the_constructor_says_what_to_call(given, words):
    with pytest.raises(TypeError, match=words):
        Engine(*given)


def tiny_that_drafts(folder, drafts: int) -> str:
    """The tiny model with another block size, or (0) without its drafter."""
    config, state, tokenizer = tiny_state()
    if drafts:
        config = dataclasses.replace(config, dspark_block_size=drafts)
    else:
        ratios = config.compress_ratios[: config.num_hidden_layers]
        config = dataclasses.replace(config, num_nextn_predict_layers=0, compress_ratios=ratios)
        state = {w.name: state[w.name] for w in names.weights(config)}
    return str(write(folder, config, state, tokenizer=tokenizer))


@pytest.mark.parametrize("drafts", [2, 0])
def test_fixed_is_taken_alike_wherever_it_is_given(tmp_path, drafts):
    """By with_ and by from_pretrained, on a model that drafts another number than the release's."""
    folder = tiny_that_drafts(tmp_path / "tiny", drafts)
    for make in (
        lambda: Engine.from_pretrained(folder, verifier=Fixed()),
        lambda: Engine.from_pretrained(folder).with_(verifier=Fixed()),
    ):
        if drafts:
            eng = make()
        else:
            with pytest.warns(UserWarning, match=r"Fixed\(None\): this model has no drafter"):
                eng = make()
        assert eng.slots["verifier"].max_draft == drafts
        assert any(n.startswith("mtp") for n in eng.trace_names()) == bool(drafts)


def test_engines_in_one_notebook_are_those_of_the_package():
    assert di.Engine is Engine
