"""Slots that raise or return nonsense: the error names them, and nothing else is harmed."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch

import deepinfer as di
from deepinfer.engine.engine import Engine
from deepinfer.slots.protocols import Accepted, Sampled

LONG = [(7 * i * i + 3 * i) % 200 + 3 for i in range(90)]
HOW = dict(max_tokens=6, seed=1, ignore_eos=True)


@pytest.fixture(scope="module")
def eng() -> Engine:
    return Engine.tiny(dtype="float64", max_num_batched_tokens=24)


def drained(eng: Engine) -> list:
    done = []
    while eng.unfinished:
        done += eng.step()
    assert eng.runtime.pages.free == eng.runtime.pages.size
    assert eng.runtime.states.free == eng.runtime.states.size
    return done


@pytest.mark.parametrize("steps", [1, 2, 3, 5])
@pytest.mark.parametrize("drafts", [0, 5])
def test_a_step_that_fails_leaves_every_request_as_it_was(eng, steps, drafts):
    """Also in the middle of a chunked prefill, whose rows overwrite the ring they came from."""
    e = eng.with_(verifier=di.verifier.Fixed(drafts))
    expected = eng.generate(LONG, **HOW)[0]
    e.add(LONG, **HOW)
    for _ in range(steps):
        e.step()

    def boom(x, at):
        raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"), e.trace("layers.9.ffn.out", edit=boom):
        e.step()
    (done,) = drained(e)
    assert done.token_ids == expected.token_ids
    assert max(abs(a - b) for a, b in zip(done.logprobs, expected.logprobs)) < 1e-9


def test_prompt_logprobs_survive_a_step_that_fails(eng):
    e = eng.with_()
    e.add(LONG, **HOW, prompt_logprobs=True)
    e.step()
    e.step()
    with pytest.raises(ValueError), e.trace("logits", edit=lambda x, at: x[:0]):
        e.step()
    (done,) = drained(e)
    expected = eng.generate(LONG, **HOW, prompt_logprobs=True)[0]
    assert done.prompt_logprobs[1:] == pytest.approx(expected.prompt_logprobs[1:], abs=1e-9)


@pytest.mark.parametrize("token", [-1, 1024, 1 << 40])
def test_a_token_that_is_none_ends_its_request_alone(eng, token):
    class Sometimes(di.sampler.Philox):
        def draw(self, dist, keys):
            drawn = super().draw(dist, keys)
            bad = (keys.seed == 99) & (keys.position == 2)
            return Sampled(drawn.tokens.masked_fill(bad, token), drawn.logprobs)

    e = eng.with_(sampler=Sometimes())
    out = e.generate(
        [LONG[:5], LONG[:6], LONG[:7]],
        [di.SamplingParams(max_tokens=5, seed=s, ignore_eos=True) for s in (1, 99, 2)],
    )
    assert [c.finish_reason for c in out] == ["length", "error", "length"]
    assert f"emitted token {token}" in str(out[1].error) and len(out[1].token_ids) == 2
    drained(e)


def test_a_verifier_that_accepts_too_many_ends_the_request(eng):
    class Greedy(di.verifier.Fixed):
        def accept(self, draft, target):
            a = super().accept(draft, target)
            return Accepted(a.tokens, a.count + 7)

    out = eng.with_(verifier=Greedy(2)).generate([LONG[:5]] * 2, max_tokens=4)
    assert all("accepted" in str(c.error) and "drafts" in str(c.error) for c in out)


@pytest.mark.parametrize("result", ["row", "vector", "column", "integers", "zero"])
def test_results_that_would_broadcast_are_refused_by_name(eng, result):
    class Wrong(di.experts.Local):
        def forward(self, layer, x, routing):
            y = super().forward(layer, x, routing)
            return {
                "row": y[:1],
                "vector": y[0],
                "column": y[:, :1],
                "integers": y.long(),
                "zero": 0,
            }[result]

    with pytest.raises((ValueError, TypeError), match="experts Wrong.forward returned"):
        eng.with_(experts=Wrong()).generate([LONG[:5]] * 2, max_tokens=2)


@pytest.mark.parametrize("rows", [0, -1, 9])
def test_a_verifier_that_allocates_impossible_rows_is_named(eng, rows):
    class Wild(di.verifier.Fixed):
        def allocate(self, fresh, budget):
            return torch.full((fresh.shape[0],), rows)

    with pytest.raises(ValueError, match=r"allocate returned \[.*each sequence runs 1 to 3 rows"):
        eng.with_(verifier=Wild(2)).generate(LONG[:5], max_tokens=4)


def test_drafts_are_cut_to_the_row_limit(eng):
    e = eng.with_(max_num_batched_tokens=2, verifier=di.verifier.Fixed(5), max_num_seqs=3)
    for n in (3, 4, 5):
        e.add(LONG[:n], max_tokens=4, temperature=0.0)
    rows = []
    while e.unfinished:
        before = e.stats.prefill_rows + e.stats.decode_rows
        e.step()
        rows.append(e.stats.prefill_rows + e.stats.decode_rows - before)
    assert max(rows) == 2


def test_requests_that_finish_inside_a_generate_are_handed_out_by_step(eng):
    e = eng.with_()
    e.add(LONG[:5], max_tokens=2)
    e.generate(LONG[:9], max_tokens=8)
    assert len(drained(e)) == 1


@pytest.mark.parametrize("plan", [dict(floor=10**6), dict(floor=2.5), dict(rows_from=-3)])
def test_plans_with_impossible_positions_are_refused(eng, plan):
    from dataclasses import replace

    class Odd(di.replay.Exact):
        def plan(self, prompt, config):
            made = super().plan(prompt, config)
            return replace(made, **{k: (v,) * config.num_layers for k, v in plan.items()})

    with pytest.raises(ValueError, match="ReplayPlan"):
        eng.with_(replay=Odd()).generate(LONG[:5], max_tokens=2)


def test_weights_go_with_their_last_engine_without_a_collection():
    gc.collect()
    gc.disable()
    try:
        with Engine.tiny() as e:
            e.generate([3, 4, 5], max_tokens=2)
            model = weakref.ref(e.model)
        del e
        assert model() is None
    finally:
        gc.enable()


def test_engines_are_not_copied_by_accident(eng):
    for wrong in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="with_|eng.source"):
            wrong(eng)


def test_a_trace_is_entered_once(eng):
    with eng.trace("logits") as t, pytest.raises(RuntimeError, match="already entered"):
        t.__enter__()


def test_a_tensor_where_a_record_is_wanted_is_named(eng):
    class Bare(di.attention.CSA2):
        def select(self, layer, index, kv, plan, carried):
            return super().select(layer, index, kv, plan, carried).ids

    with pytest.raises(TypeError, match="attention Bare.select returned Tensor: want a Selected"):
        eng.with_(attention=Bare()).generate(LONG[:5], max_tokens=2)


@pytest.mark.parametrize("most", [-1, 6])
def test_a_verifier_drafts_no_more_than_the_model(eng, most):
    class Mine(di.verifier.BaseVerifier):
        max_draft = most

    with pytest.raises((ValueError, TypeError), match="max_draft"):
        eng.with_(verifier=Mine())


def test_a_verifier_weighs_its_budget_against_a_cost_curve(eng):
    asked = []

    class Thrifty(di.verifier.BaseVerifier):
        max_draft = 5

        def budget(self, stale, cost):
            b, n = stale.shape
            expected = [
                b + stale.flatten().sort(descending=True)[0][:k].sum() for k in range(b * n + 1)
            ]
            worth = [e / cost.at(b + k) for k, e in enumerate(expected)]
            asked.append(cost)
            return b + worth.index(max(worth))

    text = eng.generate(LONG[:9], **HOW)[0].token_ids
    assert eng.with_(verifier=Thrifty()).generate(LONG[:9], **HOW)[0].token_ids == text
    own = Thrifty()
    own.cost = di.verifier.CostCurve(rows=(1, 6), cost=(1.0, 50.0))
    dear = eng.with_(verifier=own)
    assert dear.generate(LONG[:9], **HOW)[0].token_ids == text
    assert sum(dear.stats.drafted.values()) == 0 and asked[-1].cost == (1.0, 50.0)


def test_signatures_spell_their_keywords():
    import inspect

    assert {"verifier", "page_size"} <= set(inspect.signature(Engine.with_).parameters)
    assert {"device", "dtype", "kernels"} <= set(inspect.signature(Engine.tiny).parameters)
    assert {"temperature", "seed"} <= set(inspect.signature(Engine.generate).parameters)


def test_tables_say_what_they_were_made_with(eng):
    for table in (
        eng.generate(LONG[:5], max_tokens=2, seed=9).table(),
        eng.memory,
        eng.kernels,
        eng.score([LONG[:9]]).table(),
    ):
        assert table.provenance["weights"] == eng.fingerprint and "slots" in table.provenance
    assert "seed=9" in str(
        eng.generate(LONG[:5], max_tokens=2, seed=9).table().provenance["sampling"]
    )
