"""Speculation changes how many steps a text takes, and nothing else: Fixed(0..5) gives the text and
the log-probabilities of `off`, whatever is accepted; under rule 'rejection', the target's law."""

import functools

import pytest
import torch

from deepinfer.engine.engine import Engine
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.slots.protocols import RowParams
from deepinfer.slots.sampler.distribution import distribution
from deepinfer.slots.verifier import Fixed
from support.slot_laws import chi_square_fits
from support.small import DRAFTS, WINDOW, small_engine, stream

TOKENS = 20
PROMPTS = [stream(3, 11), stream(WINDOW + 1, 12), stream(40, 13, period=5), stream(WINDOW - 2, 14)]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=TOKENS, top_logprobs=3),
    SamplingParams(temperature=0.7, top_p=0.8, max_tokens=TOKENS, seed=3, top_logprobs=3),
    SamplingParams(temperature=1.0, max_tokens=TOKENS, seed=2**64 - 1, top_logprobs=3),
    SamplingParams(
        temperature=1.0, top_k=20, max_tokens=TOKENS, seed=7, ignore_eos=True, top_logprobs=3
    ),
]


@functools.cache
def tiny() -> Engine:
    return Engine.tiny(dtype="float64", device="cpu", max_model_len=128, max_num_seqs=4)


@functools.cache
def plain(model: str):
    eng = tiny().with_() if model == "tiny" else small_engine()
    return [eng.generate([p], [q])[0] for p, q in zip(PROMPTS, PARAMS)]


def same(got, want) -> None:
    assert got.error is None and got.token_ids == want.token_ids
    assert (got.text, got.finish_reason) == (want.text, want.finish_reason)
    assert len(got.logprobs) == len(got.token_ids) == len(got.steps) == len(got.top_logprobs)
    assert got.logprobs == pytest.approx(want.logprobs, abs=1e-9) and max(got.logprobs) <= 0
    for a, b in zip(got.top_logprobs, want.top_logprobs):
        assert list(a) == list(b) and list(a.values()) == pytest.approx(list(b.values()), abs=1e-9)


@pytest.mark.parametrize("n", range(DRAFTS + 1))
def test_fixed_gives_the_text_of_off_in_a_batch(n):
    """Greedy, T 0.7 with top_p, T 1, top_k: side by side, against each alone without drafts."""
    eng = tiny().with_(verifier=Fixed(n))
    for got, want in zip(eng.generate(PROMPTS, PARAMS), plain("tiny")):
        same(got, want)
    assert sorted(eng.stats.drafted) == list(range(n))
    assert n == 0 or 0 < eng.stats.acceptance < 1


@pytest.mark.parametrize("n", [1, DRAFTS])
@pytest.mark.parametrize("i", range(len(PROMPTS)))
def test_fixed_gives_the_text_of_off_alone(n, i):
    same(tiny().with_(verifier=Fixed(n)).generate([PROMPTS[i]], [PARAMS[i]])[0], plain("tiny")[i])


# ------------------------------------------------------------------------- forced acceptance


def forcing(texts: dict[int, list[int]], right):
    """An edit of the drafter's logits: request r drafts its known next tokens, as long as
    right(request, position) holds, and others where it does not."""

    def edit(x, at):
        x = torch.zeros_like(x)
        for row, (request, position) in enumerate(zip(at.request.tolist(), at.position.tolist())):
            known, place = texts[request], position + 1
            token = known[place] if place < len(known) else 9
            x[row, token if right(request, place) else (token + 1) % x.shape[1]] = 1e6
        return x

    return edit


@pytest.mark.parametrize("n", range(1, DRAFTS + 1))
def test_any_accept_count_leaves_the_text_alone(n):
    """Drafts forced right and wrong, by another pattern in each request of the batch."""
    want = plain("small")
    texts = {i: [*p, *c.token_ids] for i, (p, c) in enumerate(zip(PROMPTS, want))}
    patterns = [lambda p: True, lambda p: p % 2 == 0, lambda p: p % 7 > 0, lambda p: p % 5 > 1]
    eng = small_engine(verifier=Fixed(n))
    with eng.trace("mtp.base", edit=forcing(texts, lambda r, p: patterns[r](p))):
        got = eng.generate(PROMPTS, PARAMS)
    for a, b in zip(got, want):
        same(a, b)
    for depth in range(n):
        assert 0 < eng.stats.accepted[depth] <= eng.stats.drafted[depth]
    always = got[0].steps  # all drafts right: each step emits n + 1 tokens
    assert [s.source for s in always[1 : n + 2]] == ["draft"] * n + ["target"]
    assert [s.row for s in always[1 : n + 2]] == list(range(n + 1))


def test_each_accept_count_happens_as_forced():
    """Step k of a request accepts exactly k mod 6 drafts."""
    eng, greedy = (
        small_engine(verifier=Fixed(DRAFTS)),
        SamplingParams(temperature=0.0, max_tokens=30, top_logprobs=3),
    )
    want = small_engine().generate([PROMPTS[0]], greedy)[0]
    text = [*PROMPTS[0], *want.token_ids]
    wrong, at, accepted = set(), len(PROMPTS[0]) + 1, []
    while at + len(accepted) % (DRAFTS + 1) < len(text) - 1:
        k = len(accepted) % (DRAFTS + 1)
        accepted.append(k)
        wrong.add(at + k)
        at += k + 1
    with eng.trace("mtp.base", edit=forcing({0: text}, lambda r, p: p not in wrong)):
        got = eng.generate([PROMPTS[0]], greedy)[0]
    same(got, want)
    counts = {}
    for s in got.steps[1:]:
        counts[s.step] = counts.get(s.step, 0) + (s.source == "draft")
    assert len(accepted) > DRAFTS and list(counts.values())[: len(accepted)] == accepted


def test_a_drafter_that_returns_nan_costs_nothing_but_speed():
    for rule in ("match", "rejection"):
        eng = small_engine(verifier=Fixed(3, rule=rule))
        with eng.trace("mtp.base", edit=lambda x, at: torch.full_like(x, torch.nan)):
            got = eng.generate(PROMPTS[:1], PARAMS[:1])
        same(got[0], plain("small")[0])
        assert eng.stats.acceptance in (None, 0.0)


@pytest.mark.parametrize("stop_at", range(7))
def test_an_end_token_inside_a_draft_ends_the_text_there(stop_at):
    """The end token inside a step whose drafts were all right: nothing after it is kept."""
    want, eos = plain("small")[0], small_engine().config.eos_token_id
    text = [*PROMPTS[0], *want.token_ids]
    place = len(PROMPTS[0]) + stop_at
    text[place] = eos

    def edit(x, at):
        if at.name == "mtp.base":
            return forcing({0: text, 1: text}, lambda r, p: True)(x, at)
        x[at.position == place - 1] = (
            torch.nn.functional.one_hot(torch.tensor(eos), x.shape[1]).double() * 1e6
        )
        return x

    eng = small_engine(verifier=Fixed(DRAFTS))
    with eng.trace("mtp.base", "logits", edit=edit):
        got, on = eng.generate(
            [PROMPTS[0]] * 2,
            [PARAMS[0], SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)],
        )
    assert got.finish_reason == "stop" and got.token_ids == (*want.token_ids[:stop_at], eos)
    assert on.finish_reason == "length" and len(on.token_ids) == 9 and on.token_ids[stop_at] == eos
    assert eng.runtime.pages.free == eng.runtime.pages.size


# ------------------------------------------------------------------------------ rule 'rejection'

SMALL_VOCAB = 8
SAMPLES = 1500


@pytest.mark.parametrize(
    "setting",
    [dict(temperature=1.0), dict(temperature=0.6, top_p=0.9, top_k=5)],
    ids=["T1", "filtered"],
)
def test_rejection_emits_the_law_of_the_target(setting):
    """Tokens 1..3 of many seeded requests against the law computed from teacher-forced logits."""
    eng = small_engine(
        "one layer",
        vocab=SMALL_VOCAB,
        max_num_seqs=125,
        max_model_len=32,
        verifier=Fixed(3, rule="rejection"),
    )
    prompt = [3, 4, 5]
    many = [
        SamplingParams(max_tokens=4, ignore_eos=True, seed=s, **setting) for s in range(SAMPLES)
    ]
    out = eng.generate([prompt] * SAMPLES, many).raise_for_errors()
    drawn = torch.tensor([c.token_ids for c in out])
    first = law_after(eng, prompt, setting)
    assert chi_square_fits(torch.bincount(drawn[:, 0], minlength=SMALL_VOCAB), first)
    pairs = torch.stack(
        [first[a] * law_after(eng, [*prompt, a], setting) for a in range(SMALL_VOCAB)]
    )
    assert chi_square_fits(
        torch.bincount(drawn[:, 0] * SMALL_VOCAB + drawn[:, 1], minlength=SMALL_VOCAB**2),
        pairs.flatten(),
    )
    third = torch.stack(
        [
            pairs[a, b] * law_after(eng, [*prompt, a, b], setting)
            for a in range(SMALL_VOCAB)
            for b in range(SMALL_VOCAB)
        ]
    ).view(SMALL_VOCAB, SMALL_VOCAB, SMALL_VOCAB)
    later = torch.bincount(drawn[:, 1] * SMALL_VOCAB + drawn[:, 2], minlength=SMALL_VOCAB**2)
    assert chi_square_fits(later, third.sum(0).flatten())
    assert 0.1 < eng.stats.acceptance < 1
    assert not chi_square_fits(
        later, torch.full((SMALL_VOCAB**2,), SMALL_VOCAB**-2.0)
    )  # the test can fail


def law_after(eng, ids: list[int], setting) -> torch.Tensor:
    p = SamplingParams(**setting)
    row = RowParams(
        *(torch.tensor([float(x)], dtype=torch.float64) for x in (p.temperature, p.top_p)),
        torch.tensor([p.top_k]),
    )
    return distribution(eng.logits(ids)[-1:], row).probs[0]


# --------------------------------------------------------------------------- the drafter's context


@pytest.mark.parametrize("rows", [None, 1, 3, 7, WINDOW])
@pytest.mark.parametrize("length", [1, 5, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW + 3])
def test_the_drafter_sees_a_full_window_after_every_prefill(rows, length):
    """One chunk, chunks of 3, one by one: it sees min(length, W) rows, and drafts the same."""
    eng, whole = (
        small_engine(verifier=Fixed(DRAFTS), max_num_batched_tokens=r) for r in (rows, None)
    )
    for store in eng.runtime.cache.stores().values():
        store[1:] = torch.nan
    ids, drafts = stream(length, 21), []
    for e in (eng, whole):
        number = e.add(ids, temperature=0.0, max_tokens=4)
        while not e.requests[number].output:
            e.step()
        drafts.append(e.requests[number].draft)
    assert drafts[0].tokens == drafts[1].tokens and len(drafts[0].tokens) == DRAFTS
    assert drafts[0].confidence == pytest.approx(drafts[1].confidence, abs=1e-9)
    cache, request = eng.runtime.cache, eng.requests[number]
    (layer,) = eng.config.draft_layers
    held = cache.windows[layer].stored[
        request.state_id * cache.ring : (request.state_id + 1) * cache.ring
    ]
    seen = [p % cache.ring for p in range(max(length - WINDOW, 0), length)]
    assert (
        len(seen) == min(length, WINDOW) and held[seen].isfinite().all() and held[seen].any(1).all()
    )
    if length < cache.ring:
        assert held.isfinite().all(1).sum() == length


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_drafts_are_made_in_every_dtype(dtype):
    eng = small_engine(dtype=dtype, verifier=Fixed(2))
    eng.generate(PROMPTS[:2], max_tokens=6, ignore_eos=True)
    assert eng.stats.drafted[0] > 0 and eng.stats.drafted[1] > 0
