"""A grammar slot constrains what is emitted, drafts included; its faults cost its own request."""

from __future__ import annotations

import pytest

import deepinfer as di
from deepinfer.engine.engine import Engine

PROMPT = [0, 5, 9, 301, 44]


class Cycle:
    """Only the given tokens, in order and again; done after `stop` of them (None = never)."""

    def __init__(self, tokens, stop=None):
        self.tokens, self.stop, self.taken = list(tokens), stop, 0

    @property
    def done(self):
        return self.stop is not None and self.taken >= self.stop

    def allowed(self):
        return [self.tokens[self.taken % len(self.tokens)]] if self.tokens else []

    def accept(self, token):
        if token not in self.allowed():
            return False
        self.taken += 1
        return True

    def rollback(self, n):
        self.taken -= n

    def fork(self):
        raise NotImplementedError


class Cycles:
    """A grammar slot: spec is (tokens, stop) or 'broken'."""

    version = 1
    exact = True

    def compile(self, spec, vocab):
        assert len(vocab) == 1024 and vocab[35] == b"A"

        class Compiled:
            def start(self):
                if spec == "broken":
                    state = Cycle([3])
                    state.allowed = lambda: 1 / 0
                    return state
                return Cycle(*spec)

        return Compiled()


@pytest.fixture(scope="module")
def eng() -> Engine:
    return Engine.tiny(dtype="float64", grammar=Cycles())


@pytest.mark.parametrize("drafts", [0, 3, 5])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_legal_tokens_are_emitted(eng, drafts, temperature):
    e = eng.with_(verifier=di.verifier.Fixed(drafts))
    free, bound = e.generate(
        [PROMPT, PROMPT],
        [
            di.SamplingParams(max_tokens=9, temperature=temperature, seed=4),
            di.SamplingParams(max_tokens=9, temperature=temperature, seed=4, grammar=([7, 8, 11],)),
        ],
    )
    assert bound.token_ids == (7, 8, 11) * 3
    assert (
        free.token_ids
        == eng.generate(PROMPT, max_tokens=9, temperature=temperature, seed=4)[0].token_ids
    )
    assert all(lp == 0.0 for lp in bound.logprobs)  # one legal token has the whole law


@pytest.mark.parametrize("drafts", [0, 5])
def test_a_finished_grammar_stops_the_request(eng, drafts):
    e = eng.with_(verifier=di.verifier.Fixed(drafts))
    out = e.generate(PROMPT, max_tokens=10, ignore_eos=True, grammar=([7, 8], 2))[0]
    assert out.token_ids == (7, 8) and out.finish_reason == "stop"


def test_nothing_legal_and_broken_grammars_cost_their_own_request(eng):
    how = [dict(), dict(grammar=([],)), dict(grammar="broken")]
    out = eng.generate([PROMPT] * 3, [di.SamplingParams(max_tokens=3, seed=1, **h) for h in how])
    assert [c.finish_reason for c in out] == ["length", "error", "error"]
    assert "allow no token" in str(out[1].error) and isinstance(out[2].error, ZeroDivisionError)
    assert out[1].token_ids == out[2].token_ids == ()


def test_an_engine_without_grammars_refuses_one():
    out = Engine.tiny().generate(
        [PROMPT, PROMPT],
        [di.SamplingParams(max_tokens=2), di.SamplingParams(max_tokens=2, grammar="x")],
    )
    assert out[0].error is None and "grammar slot is 'none'" in str(out[1].error)
