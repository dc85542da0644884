"""Behind a prefix hit: what a policy adopts of it, runs again, leaves alone and marks.

TM is a model with a window of 8 and backtracking of 6: the figures of these laws are told in it.
"""

from __future__ import annotations

import dataclasses
import random
import warnings

import pytest
import torch
from properties.test_bounded_replay import IDS, KEEP, TOKENS, close, tm

import deepinfer as di
from deepinfer.engine.step.batch import Work
from deepinfer.slots.protocols import Prompt
from deepinfer.slots.replay import Bounded, Exact, Halo
from deepinfer.slots.verifier import Fixed
from support.pool import check_empty
from support.serial import Place, block, forward, state_rows, stored
from support.small import DRAFTS, small_engine, stream

torch.set_num_threads(1)
SLOW = pytest.mark.slow


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


@pytest.mark.parametrize("drafts", [pytest.param(0, marks=SLOW), DRAFTS])
@pytest.mark.parametrize(
    "policy, n",
    [
        *((policy, 45) for policy in (BOTH, ENCODER, Halo(), Exact())),
        (BOTH, 21),
        *(pytest.param(p, 21, marks=SLOW) for p in (ENCODER, Halo(), Exact())),
        *(pytest.param(Bounded(14), n, marks=SLOW) for n in (21, 45)),
    ],
    ids=repr,
)
def test_a_hit_reads_no_stale_window(policy, n, drafts):
    """B13: the same prompt again, also after another used its slot or left garbage in it."""
    snapshots = 16 if isinstance(policy, Exact) else 0  # without them it adopts nothing
    eng = cached(policy, drafts, max_num_seqs=1, num_snapshots=snapshots)
    cold, _ = greedy(eng, TOKENS[:n], 6)
    one, _ = greedy(eng, TOKENS[:n], 6)
    greedy(eng, TOKENS[7:27], 2)
    two, _ = greedy(eng, TOKENS[:n], 6)
    for state in range(1, 3):
        for rows in state_rows(eng.runtime, state):
            rows.fill_(3.0)
    three, _ = greedy(eng, TOKENS[:n], 6)
    assert len(one.token_ids) == 6 and three.token_ids == one.token_ids == two.token_ids
    for other in (two, three):
        assert other.logprobs == pytest.approx(one.logprobs, abs=1e-9)
    if policy.exact:
        assert one.cached_tokens > 0 or not snapshots
        assert one.token_ids == cold.token_ids
        assert one.logprobs == pytest.approx(cold.logprobs, abs=1e-9)
    elif n == 45 and policy.replays:
        assert one.cached_tokens == 20 and one.logprobs != pytest.approx(cold.logprobs, abs=1e-9)
        assert "approximate" in repr(eng)


@pytest.mark.parametrize("policy", [BOTH, ENCODER, Halo()], ids=repr)
def test_a_replay_leaves_the_block_kv_of_the_hit_as_it_was(policy):
    """B14: not a byte of it, and none of it is computed from an empty window."""
    eng = cached(policy, packed_cache=True)
    greedy(eng, TOKENS[:45], 1)
    prefix = eng.runtime.prefix_cache.index
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
        work = Work(ids, at, before, place.pages, place.state, plan)
        out.append(forward(rt, [work], decode=False))
        at += size
    return torch.cat(out)


@pytest.mark.parametrize("hit", [17, 45, 47, 60])
@pytest.mark.parametrize("layout", ["2 and 1", "4 and 2 and 1", "all 2"])
def test_halo_rebuilds_what_is_read_also_where_a_hit_is_inside_a_group(layout, hit):
    """Logits, block KV, windows and drafts behind a hit without state KV are those of a cold run.
    The first layer's n-gram memory looks back at ids below the first row that runs."""
    n = 130
    eng = small_engine(layout, replay="halo", verifier=Fixed(DRAFTS))
    rt, ids = eng.runtime, stream(n + 1, 5)

    def go(place, plan, start):
        before = ids[max(start - 3, 0) : start]
        work = Work(ids[start:n], start, before, place.pages, place.state, plan)
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


@pytest.mark.parametrize(
    "policy",
    [BOTH, ENCODER, Halo(), *(pytest.param(p, marks=SLOW) for p in (Bounded(14), Exact()))],
    ids=repr,
)
def test_hits_and_greedy_text_are_the_same_with_a_drafter(policy):
    """B17: a replay rebuilds the drafter's context, and no draft changes a text."""
    found, texts, accepted = {}, {}, {}
    for drafts in (0, DRAFTS):
        eng = cached(policy, drafts)
        runs = [greedy(eng, TOKENS[:38], 12)[0] for _ in range(3)]
        found[drafts] = [c.cached_tokens for c in runs]
        texts[drafts] = [c.token_ids for c in runs]
        accepted[drafts] = [len(c.token_ids) / len({s.step for s in c.steps}) for c in runs]
    assert found[0] == found[DRAFTS] and texts[0] == texts[DRAFTS]
    if policy in (BOTH, ENCODER):
        assert found[0] == [0, 16, 16]
    first, second, third = accepted[DRAFTS]
    assert accepted[0] == [1, 1, 1] and second == third and 0.8 < second / first < 1.25


@pytest.mark.slow
@pytest.mark.parametrize("policy", [Bounded(), Bounded(sides="both"), Halo()], ids=repr)
def test_a_trained_drafter_is_as_good_behind_a_cut_or_a_replay(policy):
    """Accepted length of greedy text on nano, cold and behind a hit, beside that of `exact`."""
    base = di.Engine.nano(verifier=Fixed(), prefix_cache=True, num_snapshots=0, max_model_len=1024)
    prompts = [base.encode(text)[:700] for text in di.data.heldout()[:3]]

    def length(eng):
        out = eng.generate(prompts, max_tokens=48, temperature=0.0, ignore_eos=True)
        return sum(len(c.token_ids) for c in out) / sum(len({s.step for s in c.steps}) for c in out)

    eng, want = base.with_(replay=policy), length(base.with_(prefix_cache=False))
    assert length(eng) > 0.75 * want > 1 and length(eng) > 0.75 * want
    assert eng.cache.hits == (3 if getattr(policy, "replays", True) else 0)


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
    prefix = eng.runtime.prefix_cache.index
    greedy(eng, TOKENS[:45], 20)
    assert not any(h.exact for h in prefix.pages._held.values())
    assert (
        eng.runtime.prefix_cache.snapshots._held
    )  # of decoded rows, whose windows the cut has left
    assert not any(s.exact for s in eng.runtime.prefix_cache.snapshots._held.values())
    assert prefix.lookup(prefix.keys(TOKENS[:24]), 24).length == 0
    assert prefix.lookup(prefix.keys(TOKENS[:24]), 24, exact=False).length == 24
    mine = cached(ENCODER)
    store = mine.runtime.prefix_cache.index
    greedy(mine, TOKENS[:24], 1)  # cold: exact pages of an approximate engine
    assert store.lookup(store.keys(TOKENS[:24]), 24).length == 24
    greedy(mine, TOKENS[:45], 1)  # behind a hit of 24, replayed
    assert store.lookup(store.keys(TOKENS[:44]), 44).length == 24
    assert store.lookup(store.keys(TOKENS[:44]), 44, exact=False).length == 44


def test_what_begins_at_an_inexact_snapshot_is_marked_too():
    """Its own plan drops nothing and replays nothing: the windows it took over are another's."""
    eng = cached(ENCODER, num_snapshots=16)
    prefix_cache = eng.runtime.prefix_cache
    greedy(eng, TOKENS[:30], 1)
    for key in [*prefix_cache.snapshots._held]:
        prefix_cache.snapshots.evict(key)
    second, _ = greedy(eng, TOKENS[:45], 1)  # replayed behind a hit of 28
    third, _ = greedy(eng, TOKENS[:60], 1)
    assert second.cached_tokens == 20 and third.cached_tokens in (40, 44)
    marks = [prefix_cache.pages.get(key).exact for key in prefix_cache.index.keys(TOKENS[:60])]
    assert marks == [True] * 7 + [False] * 8
    assert any(s.exact is False and s.position > 44 for s in prefix_cache.snapshots._held.values())
    assert not any(s.exact and s.position > 28 for s in prefix_cache.snapshots._held.values())


def test_a_recompute_behind_a_hit_keeps_the_cut_of_the_prompt():
    eng = cached(BOTH)
    number = eng.add(TOKENS[:40], max_tokens=16, ignore_eos=True)
    request = eng.requests[number]
    while len(request.output) < 12:
        eng.step()
    eng.runtime.scheduler.preempt(request)
    while request.status != "running":
        eng.step()
    assert request.plan.rows_from[-1] == 26 and request.plan.write_from == 36
    assert request.plan.floor == (28, 28, 28, 28, 28)  # the last page in which the prompt has a row
    while eng.unfinished:
        (out,) = eng.step() or (None,)
    assert len(out.token_ids) == 16
    check_empty(eng)


def test_an_exact_run_takes_the_place_of_what_a_replay_has_left():
    """Pages and snapshots: else all that begins there would be inexact for ever."""
    eng = cached(ENCODER, num_snapshots=30)
    prefix_cache = eng.runtime.prefix_cache
    greedy(eng, TOKENS[:30], 1)
    for key in [*prefix_cache.snapshots._held]:
        prefix_cache.snapshots.evict(key)
    greedy(eng, TOKENS[:60], 1)  # replayed behind a hit of 28
    keys = prefix_cache.index.keys(TOKENS[:60])
    before = {k: prefix_cache.snapshots.get(k).exact for k in keys if prefix_cache.snapshots.get(k)}
    assert list(before.values()).count(False) > 1 and not prefix_cache.pages.get(keys[-1]).exact
    eng.generate(TOKENS[:60], max_tokens=1, prompt_logprobs=True)  # runs every row
    assert all(prefix_cache.pages.get(k).exact for k in keys)
    assert all(prefix_cache.snapshots.get(k).exact for k in before)
    again, _ = greedy(eng, TOKENS[:60], 4)
    assert again.cached_tokens > 28 and all(prefix_cache.pages.get(k).exact for k in keys)
    want, _ = greedy(cached(Exact(), prefix_cache=False, num_snapshots=None), TOKENS[:60], 4)
    assert again.token_ids == want.token_ids


def test_a_recompute_begins_at_a_snapshot_at_the_very_end_of_the_prompt():
    eng = cached(Exact(), num_snapshots=30)
    number = eng.add(TOKENS[:40], max_tokens=24, temperature=0.0, ignore_eos=True)
    request, prefix_cache = eng.requests[number], eng.runtime.prefix_cache
    while len(request.output) < 20:
        eng.step()
    keys = prefix_cache.index.keys(request.token_slice(0, request.num_tokens))
    for page, key in enumerate(keys):
        if page != 9:  # the one that ends at 40
            prefix_cache.snapshots.evict(key)
    assert prefix_cache.snapshots.get(keys[9]) is not None
    eng.runtime.scheduler.preempt(request)
    while request.status != "running":
        eng.step()
    assert request.plan.start == 40
    while eng.unfinished:
        (out,) = eng.step() or (None,)
    want = cached(Exact(), prefix_cache=False, num_snapshots=None).generate(
        TOKENS[:40], max_tokens=24, temperature=0.0, ignore_eos=True
    )
    assert out.token_ids == want[0].token_ids


class FromZero(Bounded):
    """Cuts, and begins behind nothing that it has not computed itself."""

    def plan(self, prompt, config):
        return super().plan(Prompt(prompt.length), config)


def test_who_cuts_prompts_and_adopts_no_hit_is_told():
    with pytest.warns(
        UserWarning, match="its first 2 layers only.*no long prompt will begin behind"
    ):
        cached(FromZero(KEEP)).runtime
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for policy in (Bounded(KEEP), Bounded(KEEP, "mask"), BOTH, ENCODER, Exact(), Halo()):
            cached(policy).runtime


# --------------------------------------------------------- behind a cut: the layers before it

CUTS = [
    Bounded(KEEP),
    Bounded(KEEP, "mask"),
    Bounded(20),
    Bounded(KEEP, layer=3),
    Bounded(KEEP, whole_window=True),
    Bounded(30, whole_window=True, layer=3),
]


@pytest.mark.parametrize("policy", CUTS, ids=repr)
@pytest.mark.parametrize("drafts", [0, DRAFTS])
def test_a_prompt_that_is_cut_begins_behind_the_layers_before_the_cut(policy, drafts):
    """Their windows are exact and stored; the rows of the others run from the cut on, hit or not."""
    eng = cached(policy, drafts, num_snapshots=32)
    cold = cached(policy, drafts, prefix_cache=False, num_snapshots=None)
    n = 60
    cut = n - policy.keep
    want, _ = greedy(cold, TOKENS[:n])
    first, rows = greedy(eng, TOKENS[:n])
    assert rows == n and first.token_ids == want.token_ids
    held = eng.runtime.prefix_cache.snapshots._held.values()
    layers = policy.cut_layer(eng.config) + policy.whole_window
    assert {s.layers for s in held if s.position < n} == {layers}
    assert {s.layers for s in held if s.position >= n} == {eng.config.num_layers}
    again, rows = greedy(eng, TOKENS[:n])
    assert again.cached_tokens == cut // 4 * 4 == n - rows  # the last page end below the cut
    assert again.token_ids == want.token_ids
    assert again.logprobs == pytest.approx(want.logprobs, abs=1e-9)
    turn = [*TOKENS[:n], *first.token_ids, *TOKENS[:9]]  # another length: another cut
    want, _ = greedy(cold, turn)
    again, rows = greedy(eng, turn)
    assert again.cached_tokens == len(turn) - rows > 0.6 * (len(turn) - policy.keep)
    assert again.token_ids == want.token_ids
    assert again.logprobs == pytest.approx(want.logprobs, abs=1e-9)


@pytest.mark.parametrize("drafts", [0, pytest.param(DRAFTS, marks=SLOW)])
@pytest.mark.parametrize(
    "policy", [CUTS[0], *(pytest.param(p, marks=SLOW) for p in CUTS[1:]), Halo()], ids=repr
)
@pytest.mark.parametrize("overlap", [False, True], ids=["synchronous", "overlapped"])
def test_behind_a_cut_no_hit_and_no_recompute_changes_a_number(policy, drafts, overlap):
    """Prompts with common beginnings, turns, forks and requests that be preempted, in a small cache:
    each text is the one of an engine that caches nothing and has room for all."""
    how = dict(num_pages=34, max_num_batched_tokens=24, overlap=overlap)
    eng = cached(policy, drafts, num_snapshots=10, **how)
    cold = cached(policy, drafts, prefix_cache=False, num_snapshots=None)
    chance, todo, asked, done = random.Random(11), 14, {}, {}
    while todo or eng.unfinished:
        if todo and chance.random() < 0.4:
            todo -= 1
            if done and chance.random() < 0.4:  # a next turn
                old = chance.choice(list(done))
                prompt = [*asked[old], *done[old].token_ids, *chance.sample(TOKENS, 9)]
            else:
                shared = TOKENS[: chance.choice((10, 26, 40, 52))]
                prompt = [*shared, *chance.sample(TOKENS, chance.randint(0, 9))]
            if len(prompt) < 96:
                number = eng.add(prompt, max_tokens=16, temperature=0.0, ignore_eos=True)
                asked[number] = prompt
        for c in eng.step():
            done[c.index] = c
        running = [r for r in eng.runtime.scheduler.running if r.output]
        if running and not overlap and chance.random() < 0.08:
            eng.runtime.scheduler.preempt(chance.choice(running))
        elif running and chance.random() < 0.04:
            parent = chance.choice(running).id
            asked[eng.fork(parent)] = asked[parent]
    check_empty(eng)
    for number, prompt in asked.items():
        (want,) = cold.generate(prompt, max_tokens=16, temperature=0.0, ignore_eos=True)
        assert done[number].token_ids == want.token_ids
        assert done[number].logprobs == pytest.approx(want.logprobs, abs=1e-8)
    assert eng.cache.hits > 5 and (overlap or eng.stats.preemptions > 0)


@pytest.mark.parametrize("whose", ["own", "another's"])
def test_windows_that_another_cut_has_left_are_not_begun_at(whose):
    """A request that was preempted goes on behind its prompt where its own windows are kept. Those of a
    longer prompt with the same ids are of another cut: not its numbers."""
    eng = cached(Bounded(KEEP), num_snapshots=40)
    cold = cached(Bounded(KEEP), prefix_cache=False, num_snapshots=None)
    how = dict(max_tokens=50, temperature=0.0, ignore_eos=True)
    (want,) = cold.generate(TOKENS[:30], **how)
    number = eng.add(TOKENS[:30], **how)
    request = eng.requests[number]
    while len(request.output) < 40:
        eng.step()
    store = eng.runtime.prefix_cache.snapshots
    for key, old in [*store._held.items()]:
        if old.position > 30:
            assert old.layers == eng.config.num_layers and old.floor == 30 - KEEP
            rows = [w + 1.0 for w in old.windows]  # such as nobody has computed
            floor = old.floor if whose == "own" else old.floor + 4
            store.put(key, dataclasses.replace(old, windows=tuple(rows), floor=floor))
    eng.runtime.scheduler.preempt(request)
    while eng.unfinished:
        (out,) = eng.step() or (None,)
    same = out.logprobs == pytest.approx(want.logprobs, abs=1e-9)
    assert same == (whose != "own") and (request.plan.start > 30) == (whose == "own")


@pytest.mark.parametrize(
    "layout, policy, prompts",
    [
        ("all 1", Bounded(30), (34, 30)),  # the second is not cut, and every layer of the first is
        ("all 1", Bounded(30, "mask"), (60, 30)),
        ("windows only", Bounded(30, layer=0), (34, 30)),
        ("all 2", Bounded(22, layer=3), (60, 60)),  # cut where another model's decoder begins
        ("windows only", Bounded(22, layer=2), (60, 60)),
    ],
    ids=str,
)
def test_wherever_a_model_is_cut_a_hit_changes_no_number(layout, policy, prompts):
    base = small_engine(layout, vocab=97, replay=policy, max_model_len=128)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # cut at layer 0 nothing is left: it says so
        eng = base.with_(prefix_cache=True, page_size=4, num_snapshots=40)
        for n in prompts:
            out, _ = greedy(eng, TOKENS[:n], 6)
    want, _ = greedy(base, TOKENS[: prompts[-1]], 6)
    assert out.token_ids == want.token_ids
    assert out.logprobs == pytest.approx(want.logprobs, abs=1e-9)
    assert bool(out.cached_tokens) == (policy.cut_layer(eng.config) > 0)


@pytest.mark.parametrize("n", [60, 61, 62, 63, 64])
@pytest.mark.parametrize("policy", [Bounded(KEEP), Bounded(30), Halo()], ids=repr)
def test_what_lies_above_a_cut_is_no_lost_hit(policy, n):
    eng = cached(policy, num_snapshots=40)
    greedy(eng, TOKENS[:n], 4)
    out, _ = greedy(eng, TOKENS[:n], 4)
    assert out.cached_tokens > 0 and eng.cache.lost_tokens == 0


@pytest.mark.parametrize(
    "policy", [Exact(), Bounded(KEEP), Bounded(60), Bounded(80), Halo()], ids=repr
)
def test_a_prompt_that_comes_again_behind_a_long_answer_begins_where_it_can(policy):
    """With the default number of snapshots; the longer keeps do not cut this prompt."""
    eng = cached(policy, num_snapshots=None, max_num_seqs=1)
    greedy(eng, TOKENS[:50], 70)
    out, _ = greedy(eng, TOKENS[:50], 4)
    floors = [f for f in policy.plan(Prompt(50), eng.config).floor if f]
    at = min(floors) if floors else 50 - 14  # its window and backtracking
    assert out.cached_tokens == at // 4 * 4 > 0


def test_a_recompute_leaves_windows_of_its_own_cut():
    """Its rows behind the prompt are prefill rows now: what they leave names the prompt's cut, and
    the next recompute begins there."""
    eng = cached(Bounded(KEEP), num_snapshots=40)
    number = eng.add(TOKENS[:30], max_tokens=60, temperature=0.0, ignore_eos=True)
    request, store = eng.requests[number], eng.runtime.prefix_cache.snapshots
    while len(request.output) < 40:
        eng.step()
    for key in [*store._held]:
        store.evict(key)
    starts = []
    for _ in range(2):
        eng.runtime.scheduler.preempt(request)
        while request.status != "running" or request.optimistic_computed < request.num_tokens - 1:
            eng.step()
        starts.append(request.plan.start)
        behind = [s for s in store._held.values() if s.position >= 30]
        assert behind and {s.floor for s in behind} == {30 - KEEP}
    assert starts[0] < 30 < starts[1]
    eng.abort(number)


def test_a_snapshot_of_all_layers_takes_the_place_of_one_of_the_first():
    """A long prompt leaves the first layers at page ends that a short one reaches as its output."""
    cold = cached(Bounded(KEEP), prefix_cache=False, num_snapshots=None)
    how = dict(max_tokens=50, temperature=0.0, ignore_eos=True)
    (want,) = cold.generate(TOKENS[:30], **how)
    eng = cached(Bounded(KEEP), num_snapshots=40)
    greedy(eng, [*TOKENS[:30], *want.token_ids[:40]], 1)
    store, layers = eng.runtime.prefix_cache.snapshots, eng.config.num_layers
    keys = eng.runtime.prefix_cache.index.keys([*TOKENS[:30], *want.token_ids[:40]])
    before = {i for i, k in enumerate(keys) if k in store and store.peek(k).layers < layers}
    number = eng.add(TOKENS[:30], **how)
    request = eng.requests[number]
    while len(request.output) < 44:
        eng.step()
    tail = {i for i in before if 4 * (i + 1) in request.prefix.tail}
    assert tail and all(store.peek(keys[i]).layers == layers for i in tail)
    eng.abort(number)
