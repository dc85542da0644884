"""compare: zeros for what is equal, counted drops, intervals over prompts, clear refusals."""

import math
import re

import pytest
import torch

import deepinfer as di
from deepinfer.measure import bootstrap
from deepinfer.measure import compare as compare_module
from deepinfer.measure.comparison import row_values

PROMPTS = ["The walk of a token", "A cache remembers", "Every page holds entries of keys"]


class Window:
    """A replay policy that runs the last `keep` rows only past the first decoder layer."""

    exact = False

    def __init__(self, keep: int) -> None:
        self.keep = keep

    def plan(self, prompt, config):
        from deepinfer.slots.protocols import ReplayPlan

        cut = max(prompt.length - self.keep, 0)
        first, layers = config.first_decoder_layer, config.num_layers
        rows_from = tuple(cut if layer >= first else 0 for layer in range(layers))
        kv_from = tuple(cut if layer > first else 0 for layer in range(layers))
        return ReplayPlan(0, 0, kv_from, rows_from, kv_from, exact=False, why="the last rows")


@pytest.fixture(scope="module")
def several(engine):
    """The same engine, one that drafts, one that attends to everything, one to too little."""
    others = {
        "same": engine.with_(),
        "drafts": engine.with_(verifier="fixed"),
        "dense": engine.with_(attention="dense"),
        "few": engine.with_(attention=di.attention.CSA2(topk=2)),
    }
    return di.compare(engine, others, PROMPTS, continuation=16)


def test_identical_engines_differ_in_nothing(several):
    same = several.table().where(engine="same")[0]
    assert same["rows"] > 0 and same["dropped"] == 0 and same["changes"] == ""
    assert same["max_dlogit"] == same["mean_dlogit"] == same["kl"] == 0.0
    assert same["agreement"] == 1.0 and same["texts_differ"] == 0
    assert same["first_diff"] is None and same["margin"] is None
    drafts = several.table().where(engine="drafts")[0]
    assert drafts["max_dlogit"] < 1e-9 and drafts["texts_differ"] == 0
    assert "verifier=Fixed" in drafts["changes"]


def test_a_selection_differs_only_beyond_what_it_can_hold(engine, several):
    """Dense and CSA2 see the same entries until there are more than top-k of them."""
    c = engine.config
    last_equal = min(c.index_topk * c.ratio(layer) for layer in c.kv_source_layers)
    rows = several.per_token.where(engine="dense")
    near = [r["max_dlogit"] for r in rows if r["position"] < last_equal - 1]
    far = [r["max_dlogit"] for r in rows if r["position"] >= last_equal]
    assert max(near) < 1e-9 and max(far) > 1e-3
    dense, few = several.table()[2], several.table()[3]
    assert 0 < dense["kl"] < few["kl"] and few["agreement"] < 1
    assert several.approximate["dense"] == ("attention",) and several.approximate["a"] == ()


def test_figures_are_those_of_the_logits(engine, several):
    few = engine.with_(attention=di.attention.CSA2(topk=2))
    sums = {"rows": 0, "agree": 0, "kl": 0.0, "mean": 0.0, "max": 0.0}
    for i, text in enumerate(PROMPTS):
        prompt = engine.encode(text)
        said = engine.generate(prompt, max_tokens=16, temperature=0.0)[0].token_ids
        fed = [*prompt, *said[:-1]]
        a, b = engine.logits(fed, prompt=len(prompt)), few.logits(fed, prompt=len(prompt))
        p, q = a.softmax(-1), b.softmax(-1)
        sums["rows"] += len(fed)
        sums["agree"] += int((a.argmax(-1) == b.argmax(-1)).sum())
        sums["kl"] += float((p * (p / q).log()).sum())
        sums["mean"] += float((a - b).abs().mean(-1).sum())
        sums["max"] = max(sums["max"], float((a - b).abs().max()))
        own = few.generate(prompt, max_tokens=len(said), temperature=0.0)[0].token_ids
        row = several.per_prompt.where(engine="few")[i]
        first = next((k for k, (x, y) in enumerate(zip(said, own)) if x != y), None)
        assert row["first_diff"] == first and row["tokens"] == len(prompt)
        if first is not None:
            at = a[len(prompt) - 1 + first]
            assert row["margin"] == pytest.approx(float(at[said[first]] - at[own[first]]), rel=1e-6)
            assert row["margin"] > 0 and row["says_a"] == several.text(said[first])
    got = several.table().where(engine="few")[0]
    assert got["rows"] == sums["rows"] and got["texts_differ"] > 0
    assert got["agreement"] == pytest.approx(sums["agree"] / sums["rows"])
    assert got["kl"] == pytest.approx(sums["kl"] / sums["rows"], rel=1e-6)
    assert got["mean_dlogit"] == pytest.approx(sums["mean"] / sums["rows"], rel=1e-6)
    assert got["max_dlogit"] == pytest.approx(sums["max"], rel=1e-9)


def test_parts_of_the_rows(several):
    whole, before, after = (
        several.table(part)["rows"] for part in ("all", "prompt", "continuation")
    )
    assert [x + y for x, y in zip(before, after)] == whole
    tokens = several.per_prompt.where(engine="same")
    assert after[0] == sum(tokens["continuation"])
    with pytest.raises(ValueError, match="rows='late'.*'continuation'"):
        several.table("late")


def test_dropped_rows_are_counted_and_left_out(engine):
    cut = engine.with_(replay=Window(3))
    got = di.compare(engine, {"cut": cut, "same": engine.with_()}, PROMPTS, continuation=8)
    lengths = [len(engine.encode(p)) for p in PROMPTS]
    row = got.table().where(engine="cut")[0]
    assert row["dropped"] == sum(n - 3 for n in lengths)
    assert row["rows"] + row["dropped"] == got.table().where(engine="same")[0]["rows"]
    assert all(math.isfinite(row[m]) for m in ("max_dlogit", "mean_dlogit", "kl", "agreement"))
    assert [
        r["position"] for r in got.per_token.where(engine="cut", prompt=0) if r["kl"] is None
    ] == list(range(lengths[0] - 3))
    shown = repr(got)
    assert f"(+{row['dropped']} dropped)" in shown and "did not compute" in shown
    assert "approximate: replay" in shown
    back = di.compare(cut, engine.with_(), PROMPTS[:1], continuation=8)  # a itself drops them
    assert back.table()["dropped"] == [
        lengths[0] - 3
    ] and "a itself is approximate: replay" in repr(back)
    gone = di.compare(engine, cut, PROMPTS[:1], continuation=0)
    assert gone.table("continuation")["rows"] == [0] and gone.table("continuation")["kl"] == [None]
    assert gone.table()["texts_differ"] == [0]


def test_a_single_engine_is_b(engine):
    one = di.compare(engine, engine.with_(fidelity=0), "The walk of a token", continuation=4)
    assert one.names == ("b",) and one.table()["changes"] == ["fidelity=0"]
    assert len(one.per_prompt) == 1
    again = di.compare(engine, engine.with_(fidelity=0), "The walk of a token", continuation=4)
    assert repr(again) == repr(one) and again._repr_html_() == one._repr_html_()


def test_refusals(engine):
    with pytest.raises(TypeError, match="'b' is str"):
        di.compare(engine, "dense", PROMPTS)
    with pytest.raises(ValueError, match="empty dict"):
        di.compare(engine, {}, PROMPTS)
    with pytest.raises(ValueError, match="the name 'a'"):
        di.compare(engine, {"a": engine.with_()}, PROMPTS)
    with pytest.raises(ValueError, match="continuation=-1"):
        di.compare(engine, engine.with_(), PROMPTS, continuation=-1)
    with pytest.raises(ValueError, match="prompt 1: .*token ids"):
        di.compare(engine, engine.with_(), ["ok", [5000]])
    with pytest.raises(ValueError, match="no prompts"):
        di.compare(engine, engine.with_(), [])
    with pytest.raises(ValueError, match="ids, this engine holds max_model_len=16"):
        di.compare(engine, engine.with_(max_model_len=16), ["a token " * 4], continuation=8)


def test_other_vocabularies_are_refused(engine):
    import dataclasses

    other, texts = engine.with_(), engine.with_()
    config = engine.config.replace(vocab_size=2048)
    other._shared = dataclasses.replace(engine._shared, model=type("M", (), {"config": config})())
    with pytest.raises(ValueError, match="'other' has 2048 tokens in its vocabulary, a has 1024"):
        di.compare(engine, {"other": other}, PROMPTS)
    from deepinfer.checkpoint.tiny_tokenizer import tiny_tokenizer

    changed = tiny_tokenizer()
    changed.add_special_tokens(["<another>"])
    texts._shared = dataclasses.replace(engine._shared, tokenizer=changed)
    with pytest.raises(ValueError, match="different texts to the same token ids"):
        di.compare(engine, {"texts": texts}, PROMPTS)


def test_what_is_not_finite_is_an_error(engine):
    broken = engine.with_()
    with broken.trace(
        "logits", edit=lambda x, at: torch.where((at.position == 2)[:, None], torch.inf, x)
    ):
        with pytest.raises(ArithmeticError, match="prompt 0, position 2 are not finite"):
            di.compare(engine, broken, ["The walk of a token"], continuation=0)


def test_reprs_hold_no_time_and_speed_does(several):
    shown = repr(several) + several._repr_html_() + repr(several.table()) + repr(several.per_prompt)
    assert not re.search(r"second|tokens/s|rows/s|\bms\b|0x[0-9a-f]{6}", shown)
    speed = several.speed()
    assert speed["engine"] == ["a", "same", "drafts", "dense", "few"]
    assert all(s > 0 for s in speed["tokens_per_second"] + speed["rows_per_second"])


def test_texts_are_escaped(engine):
    c = di.compare(engine, engine.with_(fidelity=0), "x", continuation=2)
    c.text = lambda token: "<script>alert(1)</script>"
    assert "<script" not in c._repr_html_() and "&lt;script" in c._repr_html_()


# ---------------------------------------------------------------------------------- intervals


def test_too_few_prompts_get_no_interval(several):
    assert several.table()["kl_low"] == [None] * 4
    assert "3 prompts with rows: too few for an interval, 8 are needed" in repr(several)
    assert "too few" in several._repr_html_()


def values(*prompts):
    return [
        (torch.tensor(p, dtype=torch.float64), torch.ones(len(p), dtype=torch.bool))
        for p in prompts
    ]


def test_intervals_cover_as_often_as_they_say():
    """Of 400 worlds whose prompts are coins of mean 0.7, about 95 % of the intervals hold 0.7."""
    generator = torch.Generator().manual_seed(0)
    held = 0
    for _ in range(400):
        prompts = (torch.rand(40, 5, generator=generator) < 0.7).double()
        e = bootstrap.ratio(values(*prompts.tolist()))
        held += e.low <= 0.7 <= e.high
    assert 0.90 < held / 400 < 0.98


def test_intervals_are_over_prompts_not_rows():
    """Rows that repeat one another make no interval narrower."""
    once = [[float(i % 3)] for i in range(12)]
    often = [p * 50 for p in once]
    assert bootstrap.ratio(values(*once)) == bootstrap.ratio(values(*often))
    assert bootstrap.ratio(values(*once[:7])).low is None
    assert bootstrap.ratio(values(*[[2.0]] * 9)) == bootstrap.Estimate(2.0, 2.0, 2.0)
    assert bootstrap.ratio([]) == bootstrap.Estimate(None)


def test_resamples_are_fixed_and_even():
    at = bootstrap.resamples(10)
    assert torch.equal(at, bootstrap.resamples(10)) and at.min() == 0 and at.max() == 9
    expected = bootstrap.RESAMPLES
    chi = float(((at.flatten().bincount() - expected) ** 2 / expected).sum())
    assert chi < 27.9  # 9 degrees of freedom, 0.1 %


def test_differences_are_paired(engine):
    """Two engines that err alike differ by nothing, however much prompts vary."""
    prompts = [
        "a",
        "cache",
        "The walk",
        "of a token",
        "Experts vote",
        "keys and values",
        "k",
        "two words",
    ]
    few = engine.with_(attention=di.attention.CSA2(topk=2))
    c = di.compare(
        engine, {"x": few, "y": few.with_(verifier="fixed"), "same": engine.with_()}, prompts, 4
    )
    alike = c.difference("x", "y").where(metric="kl")[0]
    assert abs(alike["difference"]) < 1e-12 and abs(alike["high"] - alike["low"]) < 1e-12
    row = c.table().where(engine="x")[0]
    assert row["kl_low"] < row["kl"] < row["kl_high"]
    gap = c.difference("x", "same").where(metric="kl")[0]
    assert gap["low"] > 0 and gap["difference"] == pytest.approx(row["kl"], abs=1e-12)
    assert "bootstrap resamples" in repr(c)
    with pytest.raises(KeyError, match="no engine 'z'"):
        c.difference("x", "z")


def test_rows_of_one_engine_that_are_missing_are_missing():
    x = torch.tensor([[0.0, 1.0], [math.nan, math.nan], [2.0, 0.0]], dtype=torch.float64)
    y = torch.tensor([[0.0, 1.0], [0.0, 1.0], [0.0, 2.0]], dtype=torch.float64)
    got = row_values(x, y)
    assert got["agreement"].tolist()[0::2] == [1, 0] and got["agreement"][1].isnan()
    assert got["kl"][0] == 0 and got["kl"][1].isnan() and got["max_dlogit"][2] == 2
    assert got["top_a"].tolist() == [1, -1, 0]


def test_the_engines_are_left_as_they_were(engine):
    """Not their counters, cache, seeds nor requests: copies run, and nothing of them is left."""
    a, b = engine.with_(prefix_cache=True), engine.with_(attention="dense")
    waiting = a.add("The walk", max_tokens=4, seed=1)
    before = (a.stats.to_json(), a.cache, a.kernels, b.stats.to_json(), list(a.requests))
    made = []
    with pytest.MonkeyPatch.context() as patch:
        real = compare_module.copy_of
        patch.setattr(compare_module, "copy_of", lambda e: made.append(real(e)) or made[-1])
        again = di.compare(a, {"b": b, "a too": a}, PROMPTS[:2], continuation=4)
        patch.setattr(compare_module, "measured", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            di.compare(a, b, PROMPTS[:1])
    assert (a.stats.to_json(), a.cache, a.kernels, b.stats.to_json(), list(a.requests)) == before
    assert b._runtime is None and len(made) == 5 and all(e.closed for e in made)
    assert a.step() == [] and list(a.requests) == [waiting]
    same = again.table().where(engine="a too")[0]
    assert same["changes"] == "" and same["max_dlogit"] == 0


def test_what_a_trace_edits_counts_in_the_copy_too(engine):
    b = engine.with_()
    assert di.compare(engine, b, PROMPTS[:1], 0).table()[0]["max_dlogit"] == 0
    with b.trace("layers.0.ffn.out", edit=lambda x, at: x * 0) as trace:
        assert di.compare(engine, b, PROMPTS[:1], 0).table()[0]["max_dlogit"] > 1e-3
    assert trace.table()["accepted"] == [len(engine.encode(PROMPTS[0]))]


def test_its_tables_say_every_setting_of_every_engine(engine):
    b = engine.with_(scheduler=di.engine.scheduling.scheduler.Mixed(max_context=99), fidelity=0)
    got = di.compare(engine, {"mixed": b}, PROMPTS[:1], continuation=2)
    for table in (got.table(), got.per_prompt, got.per_token, got.speed()):
        assert table.provenance["settings"]["scheduler"] == "fcfs"
        assert table.provenance["weights"] == engine.fingerprint
        other = table.provenance["engines"]["mixed"]["settings"]
        assert other["scheduler"] == "Mixed(max_context=99)" and other["fidelity"] == 0
