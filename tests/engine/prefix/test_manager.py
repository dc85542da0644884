"""PrefixCacheManager from its parts, and what one admission asks of the index and the policy."""

from __future__ import annotations

import pytest
import torch

import deepinfer as di
from deepinfer.cache.addressing import page_end
from deepinfer.cache.kv_cache import CacheSize, KVCache
from deepinfer.cache.pages import PageManager, Pool
from deepinfer.cache.prefix_index import PrefixIndex
from deepinfer.checkpoint.tiny import tiny_config
from deepinfer.engine.prefix.admission import Admission
from deepinfer.engine.prefix.manager import PrefixCacheManager
from deepinfer.engine.replay import ReplayPlanner, first_cut
from deepinfer.engine.request import Request
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.engine.scheduling.resources import Resources
from deepinfer.engine.sizing import Limits
from deepinfer.engine.stats.stats import Stats
from deepinfer.slots.attention import CSA2
from deepinfer.slots.protocols import EngineInfo, Prompt

PAGE = 8
TOKENS = [17 + 7 * i % 900 for i in range(120)]
CONFIG = tiny_config()
LIMITS = Limits(
    model_len=128, seqs=4, rows=128, page_size=PAGE, pages=64, lookahead=CONFIG.max_draft
)


class Now:
    """A device that runs what is posted at once."""

    def post(self, work):
        work()


def manager(replay=None, budget=1 << 24) -> PrefixCacheManager:
    """A prefix cache over a small KV cache: no engine, no model."""
    attention = CSA2().start(EngineInfo(CONFIG, torch.device("cpu"), torch.float32, 4))
    specs = [attention.kv_spec(CONFIG, i) for i in range(len(CONFIG.compress_ratios))]
    size = CacheSize(num_pages=64, num_states=5, page_size=PAGE, backtracking=CONFIG.backtracking)
    cache = KVCache(CONFIG, specs, size, dtype=torch.float32, device=torch.device("cpu"))
    return PrefixCacheManager(
        config=CONFIG,
        limits=LIMITS,
        pages=PageManager(64),
        cache=cache,
        replay=ReplayPlanner(replay or di.replay.Exact(), CONFIG),
        device=Now(),
        snapshot_budget=budget,
    )


def resources(prefix: PrefixCacheManager) -> Resources:
    return Resources(
        prefix.page_manager,
        Pool("state ids", 5),
        Stats(),
        page_size=PAGE,
        max_num_seqs=4,
        max_rows=128,
        prefix_cache=prefix,
    )


def request(id: int, prompt: list[int]) -> Request:
    return Request(id, prompt, SamplingParams(max_tokens=8), seed=id)


def leave(prefix: PrefixCacheManager, held: Resources, id: int, prompt: list[int]) -> Request:
    """A request that is admitted, computes its prompt page by page, registers it and finishes."""
    r = request(id, prompt)
    assert held.admit(r)
    for computed in range(PAGE, len(prompt) + 1, PAGE):
        r.num_computed = computed
        prefix.register(r, computed, {})
    held.finish(r, "stop")
    return r


# --------------------------------------------------------------------------------- from its parts


def test_what_one_request_leaves_the_next_one_finds():
    prefix = manager()
    held = resources(prefix)
    first = leave(prefix, held, 0, TOKENS[:96])
    assert first.prefix.registered == 12 and prefix.report().pages == 12
    again = request(1, [*TOKENS[:96], 5, 6])
    found = prefix.match(again)
    limit = page_end(98 - CONFIG.ring_length, PAGE)
    assert found.found == limit and 0 < found.plan.start <= limit and found.layers
    assert (
        held.admit(again) and again.num_computed == found.plan.start == again.prefix.cached_tokens
    )
    assert again.pages[: len(found.pages)] == list(found.pages)
    report = prefix.report()
    assert (report.hits, report.hit_tokens) == (1, found.plan.start)


def test_an_admission_brings_the_window_rows_of_its_snapshot():
    prefix = manager()
    held = resources(prefix)
    leave(prefix, held, 0, TOKENS[:96])
    for ring in prefix.cache.windows:
        ring.stored.normal_()
    second = request(1, TOKENS[:96])
    at = prefix.match(second).plan.start
    snapshot = prefix.snapshots.get(prefix.keys(second, at)[-1])
    assert held.admit(second)
    low = at - snapshot.windows[0].shape[0]
    places = [second.state_id * prefix.cache.ring + p % prefix.cache.ring for p in range(low, at)]
    for layer, rows in enumerate(snapshot.windows):
        assert torch.equal(prefix.cache.windows[layer].stored[places], rows)


def test_no_more_than_the_ring_length_is_left_uncovered():
    prefix = manager()
    held = resources(prefix)
    leave(prefix, held, 0, TOKENS[:96])
    for n in range(CONFIG.ring_length, 97):
        found = prefix.match(request(n, TOKENS[:n]))
        assert found.found == page_end(n - CONFIG.ring_length, PAGE)


def test_a_request_that_failed_leaves_nothing():
    prefix = manager()
    held = resources(prefix)
    r = request(0, TOKENS[:96])
    assert held.admit(r)
    r.num_computed = 96
    prefix.register(r, 96, {})
    r.finish("error", ArithmeticError("not finite"))
    prefix.register(r, 96, {})
    held.finish(r)
    assert (prefix.report().pages, prefix.report().snapshots) == (0, 0)
    assert prefix.match(request(1, TOKENS[:96])).found == 0


def test_a_cleared_cache_is_not_served_from_and_nothing_older_registers():
    prefix = manager()
    held = resources(prefix)
    running = request(0, TOKENS[:96])
    assert held.admit(running)
    prefix.clear()
    running.num_computed = 96
    prefix.register(running, 96, {})
    assert prefix.report().pages == 0
    held.finish(running, "stop")
    assert prefix.match(request(1, TOKENS[:96])).found == 0 and held.pages.used == 0


def test_the_first_cut_of_a_plan():
    exact = di.replay.Exact().plan(Prompt(100), CONFIG)
    assert first_cut(exact) == (0, CONFIG.num_layers)
    bounded = di.replay.Bounded(keep=30)
    cut, uncut = first_cut(bounded.plan(Prompt(100), CONFIG))
    assert (cut, uncut) == (70, CONFIG.first_decoder_layer)


# ------------------------------------------------------------------------------- asked only once


class Counted:
    """Lookups and plans, and the requests that `match` was asked for."""

    def __init__(self, monkeypatch, policy):
        self.lookups = self.plans = 0
        lookup, plan = PrefixIndex.lookup, policy.plan

        def counted_lookup(index, *args, **kw):
            self.lookups += 1
            return lookup(index, *args, **kw)

        def counted_plan(own, *args, **kw):
            self.plans += 1
            return plan(own, *args, **kw)

        monkeypatch.setattr(PrefixIndex, "lookup", counted_lookup)
        monkeypatch.setattr(policy, "plan", counted_plan)

    def reset(self):
        self.lookups = self.plans = 0


@pytest.fixture(scope="module")
def eng():
    with di.Engine.tiny(dtype="float64", device="cpu") as made:
        yield made


HOW = dict(prefix_cache=True, page_size=PAGE, max_num_seqs=2, max_model_len=128)


@pytest.mark.parametrize("policy", [di.replay.Exact, di.replay.Bounded, di.replay.Halo])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_request_costs_one_lookup_and_two_plans(eng, monkeypatch, policy, overlap):
    e = eng.with_(**HOW, overlap=overlap, replay=policy())
    e.generate(TOKENS[:80], max_tokens=2)
    count = Counted(monkeypatch, policy)
    (c,) = e.generate([[*TOKENS[:80], 5]], max_tokens=2)
    assert count.lookups == 1 and 1 <= count.plans <= 2
    if policy is di.replay.Exact:
        assert c.cached_tokens > 0 and count.plans == 2
    e.close()


@pytest.mark.parametrize("scheduler", ["fcfs", "decode_order", "mixed"])
def test_many_requests_cost_as_many_lookups_and_twice_as_many_plans(eng, monkeypatch, scheduler):
    """Also if they wait for a state id: one that does not fit is matched once in a step."""
    e = eng.with_(**HOW, scheduler=scheduler)
    e.generate(TOKENS[:80], max_tokens=2)
    count, waits = Counted(monkeypatch, di.replay.Exact), 5
    for i in range(waits):
        e.add([*TOKENS[:80], i], max_tokens=3)
    assert count.plans == waits and not count.lookups
    while e.unfinished:
        before, running = count.lookups, len(e.runtime.scheduler.running)
        e.step()
        begun = len(e.runtime.scheduler.running) - running
        assert count.lookups - before <= max(begun, 0) + 1
    assert count.plans <= 2 * waits + count.lookups - waits
    e.close()


def test_an_answer_is_kept_until_the_cache_or_the_request_changes(monkeypatch):
    prefix = manager()
    held = resources(prefix)
    leave(prefix, held, 0, TOKENS[:96])
    count = Counted(monkeypatch, di.replay.Exact)
    waits = request(1, TOKENS[:96])
    first = prefix.match(waits)
    assert isinstance(first, Admission) and count.lookups == 1
    assert held.can_admit(waits) == "ok" and held.start_at(waits) == first.plan.start
    assert prefix.match(waits) is first and (count.lookups, count.plans) == (1, 1)
    prefix.pages.evict(prefix.keys(waits, PAGE)[0])  # the first page goes: nothing is left of a hit
    assert prefix.match(waits).found == 0 and count.lookups == 2
    assert held.admit(waits) and waits.num_computed == 0 and count.lookups == 2
    held.finish(waits)
    leave(prefix, held, 2, TOKENS[:96])
    other = request(3, TOKENS[:96])
    found = prefix.match(other)
    prefix.snapshots.clear()
    assert prefix.match(other).plan.start == 0 < found.plan.start
    other.output.extend(range(20))
    before = count.lookups
    prefix.match(other)
    assert count.lookups == before + 1


def test_pages_that_were_reclaimed_meanwhile_are_not_adopted():
    """Between `can_admit` and `admit` of one request another one takes the pages of its hit."""
    prefix = manager()
    held = resources(prefix)
    leave(prefix, held, 0, TOKENS[:96])
    waits, greedy = request(1, TOKENS[:96]), request(2, [3] * 40)
    assert held.can_admit(waits) == "ok" and held.start_at(waits) > 0
    taken = held.pages.take(held.pages.free)  # so that the next one has to reclaim
    assert held.admit(greedy) and prefix.pages.reclaimed
    held.pages.give(taken)
    assert held.admit(waits)
    assert len(set(waits.pages)) == len(waits.pages)
