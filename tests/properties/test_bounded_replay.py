"""Bounded and Halo in an engine: what runs, what it changes, and what a hit leaves alone.

TM is a model with a window of 8 and backtracking of 6, whose figures the tests of faults are told in.
"""

from __future__ import annotations

import functools

import pytest
import torch
from deepinfer.engine.batch import Work
from deepinfer.slots.protocols import Prompt
from deepinfer.slots.replay import Bounded, Exact, Halo
from deepinfer.slots.verifier import Fixed

from engine.pool import check, check_empty
from properties.serial import TOLERANCE, Place, block, forward, state_rows, stored
from properties.small import DRAFTS, WINDOW, poison, small_engine, stream

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


# ------------------------------------------------------------------------- whatever the chunks (B16)


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
    """A recompute keeps the cut of the prompt: it drops none of the output's rows, and no others."""
    prompts, how = [TOKENS[:40], TOKENS[5:14], TOKENS[9:39]], dict(max_tokens=14, temperature=0.0)
    policy = Bounded(14, sides="both")
    whole = tm(policy).generate(prompts, **how)
    exact = tm("exact").generate(prompts, **how)
    assert whole[0].logprobs != pytest.approx(exact[0].logprobs, abs=1e-9)
    for more in (dict(max_num_batched_tokens=7), dict(num_pages=17, page_size=4, max_model_len=64)):
        for drafts in (0, DRAFTS):
            eng = tm(policy).with_(verifier=Fixed(drafts) if drafts else "off", **more)
            poison(eng.runtime.cache)
            for got, want in zip(eng.generate(prompts, **how).raise_for_errors(), whole):
                assert got.token_ids == want.token_ids
                assert got.logprobs == pytest.approx(want.logprobs, abs=1e-9)
            assert eng.stats.preemptions > 0 or "num_pages" not in more
            check_empty(eng)


# ------------------------------------------------------------------ behind a hit (B13, B14, B17)


def cached(policy, drafts: int = 0, page: int = 4, **settings):
    """An engine with a prefix cache that keeps pages and, unless told, no state KV."""
    how = dict(prefix_cache=True, page_size=page, num_snapshots=0, max_model_len=128)
    return tm("exact").with_(
        replay=policy, verifier=Fixed(drafts) if drafts else "off", **{**how, **settings}
    )


def greedy(eng, prompt, most: int = 12):
    """(completion, prefill rows it took)."""
    before = eng.stats.prefill_rows
    (out,) = eng.generate(prompt, max_tokens=most, temperature=0.0).raise_for_errors()
    check_empty(eng)
    return out, eng.stats.prefill_rows - before


BOTH = Bounded(14, sides="both")
ENCODER = Bounded(sides="encoder")


@pytest.mark.parametrize("policy", [BOTH, ENCODER], ids=repr)
@pytest.mark.parametrize("hit", [4, 8, 12, 16, 20])
def test_a_hit_is_replayed_from_one_window_below_it_or_not_adopted(policy, hit):
    n, eng = hit + 14, cached(policy)
    first, rows = greedy(eng, TOKENS[:n], 1)
    assert rows == n and first.cached_tokens == 0
    again, rows = greedy(eng, TOKENS[:n], 1)
    start = hit - 8 if hit > 8 else 0
    assert (again.cached_tokens, rows) == (start, n - start)
    plan = policy.plan(Prompt(n, hit), eng.config)
    assert (plan.start, plan.write_from, min(plan.floor)) == (start, hit if start else 0, start)


@pytest.mark.parametrize("drafts", [0, DRAFTS])
@pytest.mark.parametrize("policy", [BOTH, ENCODER, Bounded(14), Halo(), Exact()], ids=repr)
def test_a_hit_reads_no_stale_window(policy, drafts):
    """B13: the same prompt again, also after another used its slot or left garbage in it."""
    for n in (21, 45):
        eng = cached(policy, drafts, max_num_seqs=1)
        cold, _ = greedy(eng, TOKENS[:n])
        one, _ = greedy(eng, TOKENS[:n])
        greedy(eng, TOKENS[7:40])
        two, _ = greedy(eng, TOKENS[:n])
        for garbage in (torch.nan, 3.0):
            for state in range(1, 3):
                for rows in state_rows(eng.runtime, state):
                    rows.fill_(garbage)
            three, rows = greedy(eng, TOKENS[:n])
            assert three.token_ids == one.token_ids == two.token_ids
            assert three.logprobs == pytest.approx(one.logprobs, abs=1e-9)
        if policy.exact:
            assert one.token_ids == cold.token_ids
            assert one.logprobs == pytest.approx(cold.logprobs, abs=1e-9)
        elif n == 45 and policy.replays:
            assert one.cached_tokens == 20 and one.logprobs != pytest.approx(cold.logprobs, abs=1e-9)
            assert "approximate" in repr(eng)
        assert len(one.token_ids) == 12


@pytest.mark.parametrize("policy", [BOTH, ENCODER, Halo()], ids=repr)
def test_a_replay_leaves_the_block_kv_of_the_hit_as_it_was(policy):
    """B14: not a byte of it, and none of it is computed from an empty window."""
    eng = cached(policy, packed_cache=True)
    greedy(eng, TOKENS[:45], 1)
    prefix = eng.runtime.reuse.prefix
    pages = [*prefix.lookup(prefix.keys(TOKENS[:28]), 28, exact=False).pages]
    assert len(pages) == 7

    def kv():
        cache, out = eng.runtime.cache, []
        for side in (cache.entries, cache.index_keys):
            for layer, records in side.items():
                per = cache.entries_per_page(cache.specs[layer].ratio)
                at = torch.tensor([p * per + j for p in pages for j in range(per)])
                out.append(records.gather(at, torch.float64))
        return out

    before = kv()
    _, rows = greedy(eng, TOKENS[:42], 3)
    assert rows < 42 or policy.exact
    assert before and all(torch.equal(a, b) for a, b in zip(kv(), before))
    assert any(x.any() for x in before)


@pytest.mark.parametrize("policy", [BOTH, Bounded(14, "mask", "both"), ENCODER, Halo()], ids=repr)
def test_a_replay_sees_nothing_of_a_window_that_is_not_there(policy):
    """Whatever lies in the rings below s: the rows behind it read the same."""
    eng, n, hit = tm(policy, verifier=Fixed(DRAFTS)), 60, 32
    rt = eng.runtime
    place, other = Place.take(rt, n + DRAFTS), Place.take(rt, n + DRAFTS)
    plan = rt.replay_plan(Prompt(n, hit))
    run(rt, Place(place.pages, other.state), None, 0, hit)
    results = []
    for garbage, chunks in ((0.0, ()), (torch.nan, ()), (3.0, (1, 8, 5))):
        for rows in state_rows(rt, place.state):
            rows.fill_(garbage)
        results.append(run(rt, place, plan, plan.start, n, chunks))
    for logits in results[1:]:
        close(logits[-14:], results[0][-14:])
    assert results[0][-14:].isfinite().all()


def run(rt, place, plan, start: int, stop: int, chunks=()) -> torch.Tensor:
    """Logits of the rows start..stop-1 that there are."""
    out, at = [], start
    for size in [*chunks, stop - start - sum(chunks)]:
        ids, before = TOKENS[at : at + size], TOKENS[max(at - 3, 0) : at]
        out.append(forward(rt, [Work(ids, at, before, place.pages, place.state, plan)], decode=False))
        at += size
    return torch.cat(out)


@pytest.mark.parametrize("hit", [17, 33, 45, 47, 60])
@pytest.mark.parametrize("layout", ["2 and 1", "4 and 2 and 1", "all 2", "all 1"])
def test_halo_rebuilds_what_is_read_also_where_a_hit_is_inside_a_group(layout, hit):
    """Logits, block KV, windows and drafts behind a hit without state KV are those of a cold run.
    The first layer's n-gram memory looks back at ids below the first row that runs."""
    n = 130
    eng = small_engine(layout, replay="halo", verifier=Fixed(DRAFTS))
    rt, ids = eng.runtime, stream(n + 1, 5)

    def go(place, plan, start):
        work = Work(ids[start:n], start, ids[max(start - 3, 0) : start], place.pages, place.state, plan)
        logits = forward(rt, [work], decode=False)[-1]
        return logits, stored(rt, place, 0, n), block(rt, place, n, ids[n])

    cold = Place.take(rt, n + DRAFTS)
    want, rows, drafts = go(cold, None, 0)
    # Another request's pages: the hit's block KV, and garbage where this one has to write.
    warm = Place.take(rt, n + DRAFTS)
    poison_pages(rt, warm.pages)
    forward(rt, [Work(ids[:hit], 0, [], warm.pages, warm.state)], decode=False)
    for x in state_rows(rt, warm.state):
        x.fill_(torch.nan)
    plan = rt.replay_plan(Prompt(n, hit))
    got, mine, proposed = go(warm, plan, plan.start)
    assert plan.exact and plan.write_from == hit and sum(plan.rows_run(n)) < n * len(plan.floor)
    close(got, want)
    close(proposed, drafts)
    for name, values in rows.items():
        if name.startswith(("entry", "index", "window")):
            for number, row in values.items():
                if not name.startswith("window") or number >= n - KEEP:
                    close(mine[name][number], row, msg=lambda m: f"{name} {number}: {m}")


def poison_pages(rt, pages) -> None:
    cache = rt.cache
    for side in (cache.entries, cache.index_keys):
        for layer, records in side.items():
            per = cache.entries_per_page(cache.specs[layer].ratio)
            for page in pages:
                records.stored[page * per : (page + 1) * per] = torch.nan


def test_engram_looks_back_at_the_real_ids_below_a_replay():
    """Another id in front of s changes the first row replayed, through the n-gram memory alone."""
    eng = small_engine(replay=Bounded(sides="encoder"), prefix_cache=True, page_size=16)
    eng = eng.with_(num_snapshots=0, max_model_len=160)
    seen = {}
    for change in (0, 1):
        ids = IDS[:100]
        ids[47] += change  # s = 64 - 16 = 48
        eng.generate(ids, max_tokens=1)
        with eng.trace("layers.0.engram.value") as t:
            out = eng.generate(ids, max_tokens=1, temperature=0.0)[0]
        assert out.cached_tokens == 48
        seen[change] = t.at("layers.0.engram.value", 48).flatten()
        cold = small_engine()
        with cold.trace("layers.0.engram.value") as t:
            cold.logits(ids)
        close(seen[change], t.at("layers.0.engram.value", 48).flatten())
    assert (seen[0] - seen[1]).abs().max() > 1e-6


@pytest.mark.parametrize("policy", [BOTH, ENCODER, Bounded(14), Halo(), Exact()], ids=repr)
def test_hits_and_greedy_text_are_the_same_with_a_drafter(policy):
    """B17: a replay rebuilds the drafter's context, and no draft changes a text."""
    found, texts, accepted = {}, {}, {}
    for drafts in (0, DRAFTS):
        eng = cached(policy, drafts)
        runs = [greedy(eng, TOKENS[:38], 24)[0] for _ in range(3)]
        found[drafts] = [c.cached_tokens for c in runs]
        texts[drafts] = [c.token_ids for c in runs]
        accepted[drafts] = [len(c.token_ids) / len({s.step for s in c.steps}) for c in runs]
    assert found[0] == found[DRAFTS] and texts[0] == texts[DRAFTS]
    if policy in (BOTH, ENCODER):
        assert found[0] == [0, 16, 16]
    assert accepted[0] == [1, 1, 1] and accepted[DRAFTS][1] == accepted[DRAFTS][2]


@pytest.mark.parametrize("policy", [BOTH, Bounded(14), Bounded(14, "mask"), ENCODER], ids=repr)
def test_the_drafters_context_is_whole_behind_a_cut_or_a_replay(policy):
    """Its last window of rows is there, from kept rows: no ring slot of another is read."""
    rt = tm(policy, verifier=Fixed(DRAFTS)).runtime
    n, hit = 45, 28
    place = Place.take(rt, n + DRAFTS)
    run(rt, place, None, 0, n)
    plan = rt.replay_plan(Prompt(n, hit if getattr(policy, "replays", False) else 0))
    blocks = []
    for garbage in (torch.nan, 3.0):
        for rows in state_rows(rt, place.state):
            rows.fill_(garbage)
        run(rt, place, plan, plan.start, n)
        blocks.append(block(rt, place, n, TOKENS[n]))
        lowest = n - 8
        mine = stored(rt, place, lowest, n)[f"window.{rt.config.num_layers}"]
        assert len(mine) == 8
        assert all((row != garbage).any() and row.isfinite().all() for row in mine.values())
    close(blocks[0], blocks[1])
    place.give(rt)


# ------------------------------------------------------------------------------- what is promised


def test_what_a_bounded_prompt_leaves_is_marked():
    """Pages and snapshots of a cut or a replay are not exact; those of an uncut prompt are, until
    it takes over some that are not."""
    eng = cached(BOTH, num_snapshots=16)
    prefix = eng.runtime.reuse.prefix
    greedy(eng, TOKENS[:45], 20)
    assert not any(h.exact for h in prefix.pages._held.values())
    assert eng.runtime.reuse.snapshots._held  # of decoded rows, whose windows the cut has left
    assert not any(s.exact for s in eng.runtime.reuse.snapshots._held.values())
    assert prefix.lookup(prefix.keys(TOKENS[:24]), 24).length == 0
    assert prefix.lookup(prefix.keys(TOKENS[:24]), 24, exact=False).length == 24
    mine = cached(ENCODER)
    store = mine.runtime.reuse.prefix
    greedy(mine, TOKENS[:24], 1)  # cold: exact pages of an approximate engine
    assert store.lookup(store.keys(TOKENS[:24]), 24).length == 24
    greedy(mine, TOKENS[:45], 1)  # behind a hit of 24, replayed
    assert store.lookup(store.keys(TOKENS[:44]), 44).length == 24
    assert store.lookup(store.keys(TOKENS[:44]), 44, exact=False).length == 44


@pytest.mark.parametrize("mode", ["compact", "mask"])
def test_log_probabilities_of_rows_below_the_cut_are_refused_by_name(mode):
    eng = tm(Bounded(14, mode))
    words = rf"prompt_logprobs: the replay policy Bounded\(keep=14, mode='{mode}'\).*below 26.*'exact'"
    with pytest.raises(ValueError, match=words):
        eng.generate(TOKENS[:40], prompt_logprobs=True, max_tokens=2)
    out = eng.generate([TOKENS[:40], TOKENS[:14]], prompt_logprobs=True, max_tokens=2)
    assert "prompt_logprobs" in str(out[0].error) and len(out[1].prompt_logprobs) == 14
    check(eng)
    whole = tm(ENCODER).generate(TOKENS[:40], prompt_logprobs=True, max_tokens=2)[0]
    want = tm("exact").generate(TOKENS[:40], prompt_logprobs=True, max_tokens=2)[0]
    assert whole.prompt_logprobs[1:] == pytest.approx(want.prompt_logprobs[1:], abs=1e-12)
