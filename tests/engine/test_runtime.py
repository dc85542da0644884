"""Runtime: made when an engine first runs, its own parts, freed when it is closed."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest

import deepinfer as di
from deepinfer.engine.replay import ReplayPlanner
from deepinfer.slots.protocols import Prompt


@pytest.fixture(scope="module")
def eng():
    with di.Engine.tiny(dtype="float64", device="cpu") as made:
        yield made


def test_two_engines_over_the_same_weights_share_nothing_else(eng):
    a, b = eng.with_(prefix_cache=True, max_model_len=64), eng.with_(max_model_len=64)
    assert a._runtime is None  # nothing is taken before it runs
    one, two = a.runtime, b.runtime
    assert one.model is two.model and a.runtime is one
    for name in ("cache", "pages", "states", "stats", "resources", "scheduler", "device"):
        assert getattr(one, name) is not getattr(two, name)
    assert all(one.slots[n] is not two.slots[n] for n in ("attention", "verifier", "replay"))
    assert one.prefix_cache is one.resources.prefix_cache and two.prefix_cache is None
    a.close()
    with pytest.raises(RuntimeError, match="this engine is closed"):
        _ = a.runtime
    b.close()


def test_the_prefix_cache_has_the_parts_of_its_engine(eng):
    e = eng.with_(prefix_cache=True, max_model_len=64, page_size=8)
    rt = e.runtime
    prefix = rt.prefix_cache
    assert prefix.cache is rt.cache and prefix.page_manager is rt.pages
    assert prefix.replay is rt.planner and prefix.device is rt.device
    assert prefix.snapshot_policy.reserve == rt.config.ring_length
    assert rt.cache.ring == rt.config.sliding_window + rt.limits.backtracking
    e.close()


def test_a_plan_is_checked_before_it_is_followed(eng):
    config = eng.config

    class Wrong(di.replay.Exact):
        made = None

        def plan(self, prompt, config):
            return self.made(super().plan(prompt, config))

    def planner(made, exact=True):
        policy = Wrong()
        policy.made, policy.exact = made, exact
        return ReplayPlanner(policy, config)

    with pytest.raises(TypeError, match="want a ReplayPlan"):
        planner(lambda p: None).plan(Prompt(40))
    with pytest.raises(ValueError, match="promises to be exact"):
        planner(lambda p: replace(p, exact=False, why="a test")).plan(Prompt(40))
    with pytest.raises(ValueError, match=r"Prompt\(length=40.*"):
        planner(lambda p: replace(p, start=41)).plan(Prompt(40))


def test_a_plan_that_leaves_too_few_rows_warns_once(eng):
    config = eng.config

    class Short(di.replay.Exact):
        exact = False

        def plan(self, prompt, config):
            cut = max(prompt.length - 5, 0)
            floors = tuple(0 if i < 5 else cut for i in range(config.num_layers))
            made = super().plan(prompt, config)
            return replace(made, rows_from=floors, kv_from=floors, floor=floors, exact=False)

    planner = ReplayPlanner(Short(), config)
    words = f"leaves 5 rows at the end of a prompt of 60; decoding looks back up to {config.ring_length}"
    with pytest.warns(UserWarning, match=words):
        planner.plan(Prompt(60))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        planner.plan(Prompt(61))
