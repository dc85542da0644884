"""What a request reports: seeds, log-probabilities of output and prompt, and when it stops."""

import pytest
import torch

from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.slots.sampler import Philox
from deepinfer.slots.verifier import Fixed
from support.pool import check_empty
from support.small import small_engine, stream

VOCAB = 97
SEEDS = [1111, 2222, 3333, 4444]
PROMPT = stream(9, 4, high=90)


def engine(**changes):
    return small_engine(
        "one layer", vocab=VOCAB, **{"max_model_len": 64, "max_num_seqs": 8, **changes}
    )


def texts(out) -> list[tuple[int, ...]]:
    return [c.token_ids for c in out.raise_for_errors()]


# ------------------------------------------------------------------------------------------ seeds


@pytest.mark.parametrize("drafts", [0, 2])
def test_seeds_in_a_batch_are_those_alone(drafts):
    """Shuffled, and beside requests without a seed."""
    eng = engine(verifier=Fixed(drafts))
    alone = {s: eng.generate(PROMPT, seed=s, max_tokens=16)[0].token_ids for s in SEEDS}
    assert len(set(alone.values())) == 4
    for order in (SEEDS, SEEDS[::-1], [3333, 1111, 4444, 2222], [2222] * 3):
        each = [SamplingParams(seed=s, max_tokens=16) for s in order]
        assert texts(eng.generate([PROMPT] * len(order), each)) == [alone[s] for s in order]
        beside = [p for q in each for p in (q, SamplingParams(max_tokens=16))]
        assert texts(eng.generate([PROMPT] * len(beside), beside))[::2] == [alone[s] for s in order]


def test_unseeded_requests_follow_the_seed_of_the_engine():
    """Same engine seed, same texts, request by request; another seed, others; no repeat."""
    runs = [texts(engine(seed=s).generate([PROMPT] * 6, max_tokens=16)) for s in (0, 0, 1)]
    assert runs[0] == runs[1] and len(set(runs[0] + runs[2])) == 12
    one_by_one = engine(seed=0)
    assert [texts(one_by_one.generate(PROMPT, max_tokens=16))[0] for _ in range(6)] == runs[0]
    seeded_between = [SamplingParams(max_tokens=16, seed=5 if i == 2 else None) for i in range(6)]
    got = texts(engine(seed=0).generate([PROMPT] * 6, seeded_between))
    assert [t for i, t in enumerate(got) if i != 2] == [t for i, t in enumerate(runs[0]) if i != 2]


def test_a_seed_gives_its_text_whatever_came_before():
    eng = engine()
    want = texts(eng.generate(PROMPT, seed=9, max_tokens=12))
    eng.generate([PROMPT, [5]], max_tokens=5)
    assert texts(eng.generate(PROMPT, seed=9, max_tokens=12)) == want
    assert texts(eng.generate(PROMPT, seed=9, max_tokens=7)) == [want[0][:7]]
    assert texts(engine(max_num_batched_tokens=2).generate(PROMPT, seed=9, max_tokens=12)) == want


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1])
def test_every_seed_of_64_bits_counts(seed):
    eng = engine()
    near = {
        s % 2**64: texts(eng.generate(PROMPT, seed=s % 2**64, max_tokens=16))[0]
        for s in (seed, seed ^ 1, seed ^ 2**40)
    }
    assert len(set(near.values())) == len(near) == 3


# ----------------------------------------------------------------------------- log-probabilities


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize(
    "setting",
    [dict(temperature=0.0), dict(temperature=0.7, top_p=0.8, seed=1)],
    ids=["greedy", "T0.7"],
)
def test_log_probabilities_are_those_of_the_logits(setting, drafts):
    """At temperature 1 without filters, of the token, of the most likely ones, of the prompt."""
    eng = engine(verifier=Fixed(drafts))
    (c,) = eng.generate(
        PROMPT, max_tokens=12, top_logprobs=5, prompt_logprobs=True, ignore_eos=True, **setting
    )
    want = eng.logits([*PROMPT, *c.token_ids]).log_softmax(-1)
    n = len(PROMPT)
    assert len(c.token_ids) == len(c.logprobs) == len(c.top_logprobs) == len(c.steps) == 12
    for i, (token, lp, top) in enumerate(zip(c.token_ids, c.logprobs, c.top_logprobs)):
        row = want[n - 1 + i]
        assert lp == pytest.approx(float(row[token]), abs=1e-9) and lp <= 0
        values, ids = row.topk(5)
        assert list(top) == ids.tolist() and list(top.values()) == pytest.approx(
            values.tolist(), abs=1e-9
        )
        assert sum(torch.tensor(list(top.values())).exp()) <= 1 + 1e-9
    assert c.prompt_logprobs[0] is None and len(c.prompt_logprobs) == n
    assert list(c.prompt_logprobs[1:]) == pytest.approx(
        [float(want[p - 1, PROMPT[p]]) for p in range(1, n)], abs=1e-9
    )


@pytest.mark.parametrize("rows", [None, 1, 4, 8])
def test_prompt_log_probabilities_in_any_chunks(rows):
    """Beside a request that wants none; the first entry is None, twice the same array."""
    eng = engine(max_num_batched_tokens=rows)
    each = [
        SamplingParams(prompt_logprobs=w, max_tokens=3, temperature=0.0)
        for w in (False, True, True)
    ]
    out = eng.generate([PROMPT, PROMPT, PROMPT[:1]], each).raise_for_errors()
    want = eng.logits(PROMPT).log_softmax(-1)
    assert out[0].prompt_logprobs == () and out[2].prompt_logprobs == (None,)
    assert list(out[1].prompt_logprobs[1:]) == pytest.approx(
        [float(want[p - 1, PROMPT[p]]) for p in range(1, len(PROMPT))], abs=1e-9
    )
    assert out[0].token_ids == out[1].token_ids


@pytest.mark.parametrize("n", [1, 96, 97])
def test_top_log_probabilities_up_to_the_vocabulary(n):
    (c,) = engine().generate(PROMPT, max_tokens=2, top_logprobs=n)
    assert [len(top) for top in c.top_logprobs] == [n, n]
    values = list(c.top_logprobs[0].values())
    assert values == sorted(values, reverse=True)
    if n == VOCAB:
        assert sum(torch.tensor(values).exp()).item() == pytest.approx(1, abs=1e-6)
    assert engine().generate(PROMPT, max_tokens=2)[0].top_logprobs == ()


def test_ties_go_to_the_lower_id():
    eng = engine()
    with eng.trace("logits", edit=lambda x, at: torch.zeros_like(x)):
        (c,) = eng.generate(PROMPT, temperature=0.0, max_tokens=3, top_logprobs=4)
        assert c.token_ids == (0, 0, 0) and [list(t) for t in c.top_logprobs] == [[0, 1, 2, 3]] * 3
        assert texts(eng.generate(PROMPT, top_k=1, seed=3, max_tokens=3)) == [(0, 0, 0)]


# --------------------------------------------------------------------------------------- stopping


class Scripted(Philox):
    """Draws given tokens by output position."""

    def __init__(self, script):
        self.script = script

    def draw(self, dist, keys):
        tokens = torch.tensor([self.script[p] for p in keys.position.tolist()], dtype=torch.long)
        return type(super().draw(dist, keys))(
            tokens, dist.logprobs.gather(-1, tokens[:, None])[:, 0]
        )


@pytest.mark.parametrize("drafts", [0, 1, 5])
@pytest.mark.parametrize("at", [0, 1, 3, 6])
def test_the_end_token_stops_unless_ignored(at, drafts):
    eos = engine().config.eos_token_id
    script = {i: 10 + i for i in range(30)} | {at: eos}
    eng = engine(sampler=Scripted(script), verifier=Fixed(drafts))
    each = [SamplingParams(max_tokens=9, ignore_eos=i) for i in (False, True, False)]
    stopped, on, same = eng.generate([PROMPT, PROMPT, PROMPT[:2]], each).raise_for_errors()
    want = [script[i] for i in range(9)]
    assert stopped.finish_reason == "stop" and list(stopped.token_ids) == want[: at + 1]
    assert on.finish_reason == "length" and list(on.token_ids) == want
    assert same.token_ids == stopped.token_ids and len(stopped.logprobs) == at + 1
    assert eng.stats.tokens == 2 * (at + 1) + 9
    assert eng.stats.finished == {"stop": 2, "length": 1}
    check_empty(eng)


def test_an_end_token_as_the_last_token_is_a_stop():
    eos = engine().config.eos_token_id
    eng = engine(sampler=Scripted({0: 10, 1: eos}))
    assert eng.generate(PROMPT, max_tokens=2)[0].finish_reason == "stop"
    assert eng.generate(PROMPT, max_tokens=1)[0].finish_reason == "length"


@pytest.mark.parametrize("drafts", [0, 5])
def test_the_last_position_is_reached_and_never_passed(drafts):
    """Texts up to max_model_len are those of a roomy engine, log-probabilities too."""
    eng, roomy = engine(max_model_len=24, verifier=Fixed(drafts)), engine()
    for n in (1, 16, 22, 23):
        (c,) = eng.generate(stream(n, 6, high=90), seed=2, ignore_eos=True)
        (want,) = roomy.generate(stream(n, 6, high=90), seed=2, ignore_eos=True, max_tokens=24 - n)
        assert c.token_ids == want.token_ids and len(c.token_ids) == 24 - n
        assert c.logprobs == pytest.approx(want.logprobs, abs=1e-9) and c.finish_reason == "length"


def test_what_a_completion_says_adds_up():
    eng = small_engine("one layer", verifier=Fixed(2))
    (c,) = eng.generate("The walk of a token", max_tokens=12, seed=1, ignore_eos=True)
    assert c.text == eng.decode(c.token_ids)
    assert eng.encode("The walk of a token") == list(c.prompt_token_ids)
    rows = c.table().rows
    assert [r["id"] for r in rows] == list(c.token_ids) and [r["position"] for r in rows] == list(
        range(12)
    )
    assert c.accepted_drafts == sum(s.source == "draft" for s in c.steps)
    assert [s.step for s in c.steps] == sorted(s.step for s in c.steps)
