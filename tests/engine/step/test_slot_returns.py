"""What a slot returns is looked at where it enters: None, another type, ids that are none, NaN."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import deepinfer as di
from deepinfer.slots.protocols import Accepted
from support.small import small_engine, stream

PROMPTS = [stream(n, 30 + n, high=90) for n in (19, 9)]
RUN = dict(max_tokens=4, ignore_eos=True, temperature=0.0)


@pytest.fixture(scope="module")
def eng():
    return small_engine("two layers", vocab=97, max_model_len=64, page_size=8)


def variant(base, method, returns):
    """A subclass whose method gives returns(what it gave)."""

    def changed(self, *args, **kwargs):
        return returns(getattr(base, method)(self, *args, **kwargs))

    return type("Wrong", (base,), {method: changed})


def ids(value):
    return lambda record: dataclasses.replace(record, ids=value(record.ids))


CSA2, Local, Fixed, Philox = (
    di.attention.CSA2,
    di.experts.Local,
    di.verifier.Fixed,
    di.sampler.Philox,
)
NONE = {
    ("attention", CSA2, "kv_spec"): "want a KVSpec",
    ("attention", CSA2, "plan"): "want a AttnPlan",
    ("attention", CSA2, "select"): "want a Selected",
    ("attention", CSA2, "attend"): "want a tensor",
    ("experts", Local, "route"): "want a Routing",
    ("experts", Local, "forward"): "want a tensor",
    ("verifier", Fixed, "budget"): "want rows, an integer",
    ("verifier", Fixed, "allocate"): "want a tensor",
    ("verifier", Fixed, "accept"): "want a Accepted",
    ("replay", di.replay.Exact, "plan"): "want a ReplayPlan",
    ("sampler", Philox, "distribution"): "want a Dist",
    ("sampler", Philox, "draw"): "want a Sampled",
}


@pytest.mark.parametrize("value", [None, 3.5, "x"], ids=repr)
@pytest.mark.parametrize("slot, base, method", NONE)
def test_another_type_is_named_with_slot_and_method(eng, slot, base, method, value):
    wrong = variant(base, method, lambda _: value)
    with pytest.raises(TypeError) as raised:
        eng.with_(**{slot: wrong()}).generate(PROMPTS[0], **RUN)
    said = str(raised.value)
    assert said.startswith(f"{slot} Wrong") and f".{method} returned" in said
    assert NONE[slot, base, method] in said and "AttributeError" not in said


WRONG_IDS = {
    "select high": ("attention", CSA2, "select", ids(lambda x: x.clamp(min=500)), "entries that"),
    "select future": ("attention", CSA2, "select", ids(lambda x: x + 1), "entries that end at or"),
    "select low": ("attention", CSA2, "select", ids(lambda x: x - 7), "or -1 for none"),
    "select shape": ("attention", CSA2, "select", ids(lambda x: x[0]), r"want \[\d+, any\]"),
    "select dtype": ("attention", CSA2, "select", ids(lambda x: x.double()), "want an integer"),
    "route high": ("experts", Local, "route", ids(lambda x: x + 8), "want experts, here below 8"),
    "route low": ("experts", Local, "route", ids(lambda x: x - 9), "want experts, here below 8"),
    "route none": ("experts", Local, "route", ids(lambda x: None), "want a tensor"),
}


@pytest.mark.parametrize("case", WRONG_IDS)
def test_ids_that_are_none_are_named_and_the_engine_stays_usable(eng, case):
    slot, base, method, returns, words = WRONG_IDS[case]
    armed = [True]
    wrong = variant(base, method, lambda r: returns(r) if armed else r)
    e = eng.with_(**{slot: wrong()})
    with pytest.raises((ValueError, TypeError), match=f"{slot} Wrong.{method} .*{words}"):
        e.generate(PROMPTS, **RUN)
    armed.clear()
    assert not e.requests and [c.error for c in e.generate(PROMPTS, **RUN)] == [None, None]


@pytest.mark.parametrize("token", [97, -1])
def test_a_drafter_s_draw_that_is_no_token_is_no_bare_index_error(eng, token):
    class Wrong(Philox):
        def draw(self, dist, keys):
            drawn = super().draw(dist, keys)
            return dataclasses.replace(drawn, tokens=torch.full_like(drawn.tokens, token))

    for c in eng.with_(sampler=Wrong()).generate(PROMPTS, **RUN):
        assert f"emitted token {token}" in str(c.error)


def test_a_log_probability_that_is_nan_ends_its_own_request(eng):
    """The row calls itself finite; the other request goes on."""

    class Wrong(Philox):
        def distribution(self, logits, params, mask=None):
            dist = super().distribution(logits, params, mask)
            bad = (params.top_k == 3)[:, None]
            return dataclasses.replace(dist, logprobs=dist.logprobs.masked_fill(bad, torch.nan))

    e = eng.with_(sampler=Wrong())
    each = [di.SamplingParams(**RUN, top_k=3), di.SamplingParams(**RUN)]
    bad, good = e.generate(PROMPTS, each)
    assert "Wrong() gave token" in str(bad.error) and "log-probability nan" in str(bad.error)
    assert good.error is None and good.token_ids == eng.generate(PROMPTS[1], **RUN)[0].token_ids


def test_counts_that_are_impossible_end_the_requests(eng):
    class Wrong(Fixed):
        def accept(self, draft, target):
            accepted = super().accept(draft, target)
            return Accepted(accepted.tokens, accepted.count * 0)

    for c in eng.with_(verifier=Wrong(2)).generate(PROMPTS, **RUN):
        assert "Wrong(2) accepted 0 tokens" in str(c.error)


# ----------------------------------------------------------------------------------------- grammars


class State:
    done = False

    def allowed(self):
        return None

    def accept(self, token):
        return True

    def rollback(self, n):
        pass

    def fork(self):
        return self


@pytest.mark.parametrize(
    "method, value, words",
    [
        ("accept", None, "State.accept returned NoneType None: want True or False"),
        ("accept", 1, "State.accept returned int 1: want True or False"),
        ("allowed", "abc", "allowed.. returned str 'abc': want None, a bool mask"),
        ("allowed", [0.5], "allowed.. returned torch.float32: token ids are integers"),
        ("allowed", [200], "allowed.. names ids outside 0..96"),
        ("compile", None, "compile returned NoneType None: want an object whose start"),
        ("start", None, "start.. returned NoneType, which has no allowed, accept, rollback, done"),
    ],
)
def test_a_grammar_costs_its_own_request(eng, method, value, words):
    class Compiled:
        def start(self):
            state = State()
            if method in ("accept", "allowed"):
                setattr(state, method, lambda *_: value)
            return value if method == "start" else state

    class Mine:
        def compile(self, spec, vocab):
            return value if method == "compile" else Compiled()

    e = eng.with_(grammar=Mine())
    each = [di.SamplingParams(**RUN, grammar="g"), di.SamplingParams(**RUN)]
    bad, good = e.generate(PROMPTS, each)
    assert isinstance(bad.error, (TypeError, ValueError)) and good.error is None
    with pytest.raises(type(bad.error), match=words):
        raise bad.error
