"""Bounded and Halo in an engine: which rows run, and what that changes.

TM is a model with a window of 8 and backtracking of 6: the figures of these laws are told in it.
"""

from __future__ import annotations

import functools

import pytest
import torch

from deepinfer.slots.protocols import Prompt
from deepinfer.slots.replay import Bounded, Exact, Halo
from deepinfer.slots.verifier import Fixed
from support.pool import check, check_empty
from support.serial import TOLERANCE
from support.small import DRAFTS, WINDOW, poison, small_engine, stream

torch.set_num_threads(1)
IDS = stream(150, 5)
KEEP = WINDOW + DRAFTS + 1  # the least keep an engine takes
CUTS = {
    "deepinfer": {},
    "its window whole": dict(whole_window=True),
    "one layer later": dict(layer=3),
    "one layer later, its window whole": dict(layer=3, whole_window=True),
}


def engine(policy="exact", **settings):
    return small_engine(replay=policy, **settings)


def close(got, want, **how):
    torch.testing.assert_close(got, want, **{**TOLERANCE, **how})


@functools.cache
def exact_logits(n: int) -> torch.Tensor:
    """Without the cache's roundings, in which small differences vanish."""
    return engine(fidelity=0).logits(IDS[:n])


# ----------------------------------------------------------------------------------- what runs


@pytest.mark.parametrize("chunks", [None, [7, 20, 21], [47, 1]])
@pytest.mark.parametrize(
    "policy",
    [*(Bounded(**c) for c in CUTS.values()), Bounded(mode="mask"), Halo(), Exact()],
    ids=repr,
)
def test_the_layers_see_the_rows_of_the_formula(policy, chunks):
    n, eng = 48, engine(policy)
    plan = eng.runtime.replay_plan(Prompt(n))
    with eng.trace("layers.*.attn.in") as entering, eng.trace("layers.*.ffn.in") as running:
        eng.logits(IDS[:n], chunks=chunks)
    layers = range(eng.config.num_layers)
    assert tuple(len(entering[f"layers.{i}.attn.in"]) for i in layers) == plan.rows_in(n)
    rows = tuple(len(running[f"layers.{i}.ffn.in"]) for i in layers)
    assert rows == plan.rows_run(n)
    if isinstance(policy, Bounded) and policy.mode == "compact":
        kept = eng.config.num_layers - (policy.layer or 2)
        assert sum(rows) == n * (len(layers) - kept) + 28 * kept  # 28 = 16 + 2 * 6
    elif not isinstance(policy, Halo):
        assert set(rows) == {n}
    else:
        assert rows == (48, 48, 37, 22, 22)  # 22 = 16 + 6 are read later, and 15 more seen by those


def test_rows_below_the_cut_of_a_mask_see_compressed_entries_only():
    """Their window keys may be anything from the cut layer on; entries still reach them."""
    n, cut = 48, 48 - KEEP
    eng = engine(Bounded(KEEP, "mask"))
    want = eng.logits(IDS[:n])

    def below(rows, at):
        rows[:cut] = 3.0
        return rows

    for layer, whole in ((2, False), (3, False), (4, False), (1, True)):
        with eng.trace(f"layers.{layer}.attn.window_keys", edit=below):
            same = torch.allclose(eng.logits(IDS[:n]), want, rtol=1e-9, atol=1e-9)
        assert same is not whole
    with eng.trace("layers.2.attn.entries", edit=below):
        assert (eng.logits(IDS[:n])[1:cut] - want[1:cut]).abs().amax(-1).min() > 1e-6
    whole = engine(Bounded(KEEP, "mask", whole_window=True))
    want = whole.logits(IDS[:n])
    with whole.trace("layers.2.attn.window_keys", edit=below):
        assert (whole.logits(IDS[:n])[1:cut] - want[1:cut]).abs().amax(-1).min() > 1e-6


@pytest.mark.parametrize("cut", CUTS)
def test_at_the_exact_length_nothing_changes_and_below_it_something_does(cut):
    n, want = 96, exact_logits(96)[-1]
    config = engine().config
    most = Bounded(**CUTS[cut]).exact_keep(config)
    layers = config.num_layers - (CUTS[cut].get("layer") or 2) - ("whole" in cut)
    assert most == 16 + 15 * (layers - 1)

    def last(keep):
        class Any(Bounded):  # engines refuse fewer than KEEP
            def start(self, info):
                return Any(self.keep, self.mode, layer=self.layer, whole_window=self.whole_window)

        return engine(Any(keep, **CUTS[cut]), fidelity=0).logits(IDS[:n])[-1]

    close(last(most), want, rtol=0, atol=2e-14)
    assert (last(most - 1) - want).abs().max() > 1e-11
    close(last(n), want, rtol=0, atol=0)


def test_halo_is_exact_with_drafts_and_for_the_windows_that_are_read_later():
    n = 70
    got, want = engine("halo", verifier=Fixed(DRAFTS)), engine(verifier=Fixed(DRAFTS))
    close(got.logits(IDS[:n])[-1], want.logits(IDS[:n])[-1])
    a = got.generate([IDS[:n], IDS[:9]], max_tokens=12, temperature=0.0)
    b = want.generate([IDS[:n], IDS[:9]], max_tokens=12, temperature=0.0)
    for x, y in zip(a, b):
        assert x.token_ids == y.token_ids and x.logprobs == pytest.approx(y.logprobs, abs=1e-9)
        assert [(s.row, s.source) for s in x.steps] == [(s.row, s.source) for s in y.steps]
    assert got.exact and got.stats.prefill_rows == want.stats.prefill_rows


# ------------------------------------------------------------------------ whatever the chunks (B16)


@functools.cache
def tm(policy, **settings):
    """The model of the faults: window 8, backtracking 6."""
    return small_engine(window=8, vocab=97, replay=policy, **settings)


TOKENS = stream(60, 3, high=90)


@pytest.mark.parametrize("mode", ["compact", "mask"])
@pytest.mark.parametrize("chunks", [[6, 6, 6, 2], [1] * 20, [19, 1], [5, 1, 14]])
def test_the_cut_is_absolute_whatever_the_chunks(chunks, mode):
    eng = tm(Bounded(14, mode))
    want = eng.logits(TOKENS[:20])
    close(eng.logits(TOKENS[:20], chunks=chunks), want, equal_nan=True, rtol=0, atol=1e-12)
    assert (want[-1] - tm("exact").logits(TOKENS[:20])[-1]).abs().max() > 1e-6


def test_a_prompt_within_keep_is_exact():
    for n in (1, 13, 14):
        close(tm(Bounded(14)).logits(TOKENS[:n]), tm("exact").logits(TOKENS[:n]), rtol=0, atol=0)
    a, b = tm(Bounded(14)).logits(TOKENS[:40])[-1], tm("exact").logits(TOKENS[:40])[-1]
    assert 1e-6 < (a - b).abs().max() < 2.0  # an approximation of it, and not something else


def test_text_does_not_depend_on_chunks_or_company_or_giving_way():
    """A recompute keeps the cut of the prompt: it drops no rows of the output, and no others."""
    prompts, how = [TOKENS[:40], TOKENS[5:14], TOKENS[9:39]], dict(max_tokens=10, temperature=0.0)
    policy = Bounded(14, sides="both")
    whole = tm(policy).generate(prompts, **how)
    exact = tm("exact").generate(prompts, **how)
    assert whole[0].logprobs != pytest.approx(exact[0].logprobs, abs=1e-9)
    few_pages = dict(num_pages=17, page_size=4, max_model_len=64)
    for more in (dict(max_num_batched_tokens=7), dict(few_pages, overlap=True)):
        for drafts in (0, DRAFTS):
            eng = tm(policy).with_(verifier=Fixed(drafts) if drafts else "off", **more)
            poison(eng.runtime.cache)
            for got, want in zip(eng.generate(prompts, **how).raise_for_errors(), whole):
                assert got.token_ids == want.token_ids
                assert got.logprobs == pytest.approx(want.logprobs, abs=1e-9)
            assert eng.stats.preemptions > 0 or "num_pages" not in more
            check_empty(eng)


# ------------------------------------------------------------------------------- what is promised


@pytest.mark.parametrize("mode", ["compact", "mask"])
def test_log_probabilities_of_rows_below_the_cut_are_refused_by_name(mode):
    eng = tm(Bounded(14, mode))
    words = rf"prompt_logprobs: .* policy Bounded\(keep=14, mode='{mode}'\).*below 26.*'exact'"
    with pytest.raises(ValueError, match=words):
        eng.generate(TOKENS[:40], prompt_logprobs=True, max_tokens=2)
    out = eng.generate([TOKENS[:40], TOKENS[:14]], prompt_logprobs=True, max_tokens=2)
    assert "prompt_logprobs" in str(out[0].error) and len(out[1].prompt_logprobs) == 14
    check(eng)
    how = dict(prompt_logprobs=True, max_tokens=2)
    whole = tm(Bounded(sides="encoder")).generate(TOKENS[:40], **how)[0]
    want = tm("exact").generate(TOKENS[:40], **how)[0]
    assert whole.prompt_logprobs[1:] == pytest.approx(want.prompt_logprobs[1:], abs=1e-12)
