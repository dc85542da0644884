"""The plans of Bounded and Halo: their arithmetic, their words, and what is refused."""

import dataclasses
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

import deepinfer as di
from deepinfer.config import ModelConfig
from deepinfer.conformance import check
from deepinfer.conformance.small import engine_info
from deepinfer.slots.protocols import Prompt
from deepinfer.slots.registry import start
from deepinfer.slots.replay import Bounded, Exact, Halo
from support.small import LAYOUTS, small_config, small_engine

RELEASE = ModelConfig.v41_flash()
SMALL = small_config()  # window 16, backtracking 6, decoder layers 2 to 4
TM = small_config(sliding_window=8)
POLICIES = [
    Bounded(),
    Bounded(mode="mask"),
    Bounded(whole_window=True),
    Bounded(sides="both"),
    Bounded(mode="mask", sides="both", whole_window=True),
    Bounded(sides="encoder"),
    Halo(),
]


def plan(policy, length, hit=0, state_at=0, config=RELEASE):
    prompt = Prompt(length, hit, state_at)
    made = policy.plan(prompt, config)
    return made.validate(prompt, config.num_layers, config.kv_source_layers)


# ------------------------------------------------------------------------------------- keep


def test_keep_is_a_window_and_twice_the_backtracking():
    nano = dataclasses.replace(SMALL, sliding_window=64)
    for config, keep in ((RELEASE, 140), (nano, 76), (TM, 20)):
        own = start(Bounded(), engine_info(config))
        assert (own.keep, repr(own)) == (keep, f"Bounded(keep={keep}, mode='compact')")
        assert plan(Bounded(), 4000, config=config).rows_from[-1] == 4000 - keep
        assert plan(own, 4000, config=config) == plan(Bounded(), 4000, config=config)


def test_too_small_a_keep_is_refused_when_an_engine_is_built_with_it():
    eng = small_engine(window=8, vocab=97)
    words = r"keep=13.*keep >= 14, its window \(8\) and backtracking \(6\)"
    with pytest.raises(ValueError, match=words):
        eng.with_(replay=Bounded(13))
    assert "approximate: replay" in repr(eng.with_(replay=Bounded(14)))
    with pytest.raises(ValueError, match="keep=133.*>= 134"):
        start(Bounded(133), engine_info(RELEASE))
    for sides in ("decoder", "both"):
        assert start(Bounded(134, sides=sides), engine_info(RELEASE)).keep == 134


def test_the_exact_length_is_a_window_and_one_row_less_for_each_layer_before():
    assert Bounded().exact_keep(RELEASE) == 128 + 19 * 127 == 2541
    assert Bounded(whole_window=True).exact_keep(RELEASE) == 128 + 18 * 127 == 2414
    assert Bounded(layer=38).exact_keep(RELEASE) == 128 + 127
    assert Bounded(sides="encoder").exact_keep(RELEASE) is None


@pytest.mark.parametrize(
    ("given", "words"),
    [(dict(keep=0), "keep=0"), (dict(keep=True), "keep=True"), (dict(keep=76.0), "keep=76.0")]
    + [(dict(mode="Compact"), "compact, mask"), (dict(sides="left"), "decoder, encoder, both")]
    + [(dict(layer=-1), "layer=-1"), (dict(whole_window=1), "whole_window=1")],
)
def test_a_setting_that_is_none_is_refused_by_name(given, words):
    with pytest.raises(ValueError, match=words):
        Bounded(**given)


def test_a_cut_before_a_kv_source_is_refused_and_a_layout_without_a_cut_is_told():
    for layer in (1, 5):
        with pytest.raises(ValueError, match=rf"layer={layer}.*layers 2 to 4"):
            start(Bounded(layer=layer), engine_info(SMALL))
    assert start(Bounded(layer=4), engine_info(SMALL)).cut_layer(SMALL) == 4
    no_decoder, above = small_config("all 2"), small_config()
    object.__setattr__(above, "kv_source_layer_ids", (1, 2, 4))
    for config, words in ((no_decoder, "no decoder layer"), (above, "KV source 4 lies above")):
        with pytest.warns(UserWarning, match=f"nothing will be dropped, since .*{words}"):
            own = start(Bounded(), engine_info(config))
        made = plan(own, 90, config=config)
        assert made.exact and not any(made.rows_from) and words in made.why
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        start(Bounded(), engine_info(SMALL)), start(Bounded(sides="encoder"), engine_info(above))


# ------------------------------------------------------------------------------------- plans


def test_the_decoder_side_of_the_release():
    made = plan(Bounded(), 4000)
    assert made.rows_from == (0,) * 20 + (3860,) * 20 == made.floor == made.kv_from
    assert made.rows_in(4000) == (4000,) * 21 + (140,) * 19
    assert made.rows_run(4000) == (4000,) * 20 + (140,) * 20
    whole = plan(Bounded(whole_window=True), 4000)
    assert whole.rows_from == made.rows_from and whole.floor == (0,) * 21 + (3860,) * 19
    mask = plan(Bounded(mode="mask"), 4000)
    assert mask.floor == made.floor and not any(mask.rows_from + mask.kv_from)
    assert plan(Bounded(layer=30), 4000).rows_run(4000) == (4000,) * 30 + (140,) * 10
    assert not made.exact and made.why == (
        "from 0: nothing is available; from layer 20 on only the last 140 rows run, those from 3860"
    )
    short = plan(Bounded(), 140)
    assert short.exact and short.rows_run(140) == (140,) * 40 and "within keep (140)" in short.why
    assert not plan(Bounded(), 141).exact


@pytest.mark.parametrize("hit", [4, 8, 12, 16])
def test_a_hit_is_replayed_from_one_window_below_it(hit):
    for policy in (Bounded(sides="both"), Bounded(sides="encoder")):
        made = plan(policy, 40, hit, config=TM)
        begin = hit - 8 if hit > 8 else 0
        assert (made.start, made.write_from) == (begin, hit if begin else 0)
        assert made.floor[0] == made.kv_from[0] == begin and ("replayed" in made.why) == bool(begin)
        assert ("no longer than the window (8)" in made.why) != bool(begin)
        there = plan(policy, 40, hit, state_at=hit, config=TM)  # no replay where state KV is
        assert (there.start, there.write_from, there.floor[0]) == (hit, hit, 0)
        assert there.exact == (policy.sides == "encoder")
    assert plan(Bounded(), 40, hit, config=TM).start == 0


def test_state_kv_inside_the_last_window_is_nearer_than_a_replay():
    policy = Bounded(sides="encoder")
    near, far = plan(policy, 60, 32, 28, config=TM), plan(policy, 60, 32, 20, config=TM)
    assert (near.start, near.write_from, near.floor[0], near.exact) == (28, 32, 0, True)
    assert (far.start, far.write_from, far.floor[0], far.exact) == (24, 32, 24, False)


def test_the_cut_is_that_of_the_prompt_behind_a_hit_too():
    policy = Bounded(14, sides="both")
    for hit in (0, 16, 24, 36):
        made = plan(policy, 40, hit, config=TM)
        assert made.rows_from == (0, 0, 26, 26, 26)
        begin = max(hit - 8, 0)
        assert made.floor == (begin, begin) + (max(26, begin),) * 3
        assert made.rows_run(40)[-1] == min(14, 40 - begin)


def test_the_halo_of_the_release():
    made = plan(Halo(), 4000)
    end = 4000 - 134
    assert made.floor[39] == end and made.floor[38] == end - 127
    assert made.floor[21:] == tuple(end - 127 * (39 - i) for i in range(21, 40))
    assert made.floor[:21] == (0,) * 21  # layer 20 owns block KV: every row enters it
    assert made.rows_from[:39] == made.floor[1:] and made.rows_from[39] == end
    assert 4000 - (made.floor[21] - 127) == 2541 + 6  # the exact length, and the backtracking
    assert made.rows_in(4000)[20] == 4000 and made.exact
    # Behind a hit the layers below also run from ids that are known.
    warm = plan(Halo(), 40_000, 32_768)
    assert warm.write_from == 32_768 and warm.start == 32_768 - 127 * 20 == warm.floor[0]
    assert warm.floor[20] == 32_768 and warm.rows_in(40_000)[20] == 40_000 - 32_768
    there = plan(Halo(), 40_000, 32_768, 32_768)
    assert there.start == 32_768 and there.floor[:21] == (*(0,) * 20, 32_768)
    # A cut prompt leaves the windows of the encoder: they are enough, the decoder runs what it needs.
    half = Halo().plan(Prompt(40_000, 32_768, states=((32_768, 20), (128, 40))), RELEASE)
    assert half == dataclasses.replace(there, why=half.why)
    lacking = Halo().plan(Prompt(40_000, 32_768, states=((32_768, 19),)), RELEASE)
    assert lacking.start == warm.start and lacking.floor == warm.floor
    assert plan(Halo(), 4000, 128).write_from == 0 and not any(plan(Halo(), 130).rows_from)


@pytest.mark.parametrize("hit", [33, 34, 35, 36])
def test_a_group_that_the_hit_does_not_close_is_run_whole(hit):
    config = small_config("4 and 2 and 1")
    for policy in (Bounded(sides="encoder"), Halo()):
        made = plan(policy, 120, hit, config=config)
        for source in config.kv_source_layers:
            ratio = config.ratio(source)
            enter = max(made.start, made.rows_from[source - 1] if source else 0)
            assert enter <= hit // ratio * ratio and made.write_from == hit


prompts = st.integers(1, 400).flatmap(
    lambda n: st.tuples(
        st.just(n), st.integers(0, n - 1), st.sampled_from(("none", "some", "all")), st.booleans()
    )
)


@given(st.sampled_from(POLICIES), st.sampled_from(sorted(LAYOUTS)), prompts)
def test_every_plan_keeps_the_laws(policy, layout, prompt):
    length, hit, state, everything = prompt
    config = small_config(layout)
    at = {"none": 0, "some": hit * 2 // 3, "all": hit}[state]
    asked = Prompt(length, hit, at, everything)
    try:
        made = policy.plan(asked, config)
    except ValueError as error:
        assert everything and "prompt_logprobs" in str(error) and repr(policy) in str(error)
        return
    made.validate(asked, config.num_layers, config.kv_source_layers)
    assert made.why and made == policy.plan(asked, config)
    assert not policy.exact or made.exact
    if everything:
        assert made.start == made.write_from == max(made.rows_from) == max(made.floor) == 0
    rows = sum(made.rows_run(length))
    assert rows <= sum(Exact().plan(Prompt(length), config).rows_run(length))
    assert all(a >= b for a, b in zip(made.rows_in(length), made.rows_run(length)))


@pytest.mark.parametrize("policy", [POLICIES[0], POLICIES[4], POLICIES[-1]], ids=repr)
def test_the_conformance_suite_holds(policy):
    check(policy).raise_for_failures()


def test_names_and_what_is_shown():
    assert repr(di.replay.Bounded(76)) == "Bounded(keep=76, mode='compact')"
    shown = "Bounded(keep=76, mode='mask', sides='both', layer=8, whole_window=True)"
    assert repr(Bounded(76, "mask", "both", 8, True)) == shown
    assert repr(Bounded(sides="encoder")) == "Bounded(sides='encoder')" and repr(Halo()) == "Halo()"
    eng = small_engine(replay="bounded")
    assert not eng.exact and "approximate: replay" in repr(eng)
    assert small_engine(replay=di.replay.Halo).exact
    assert "approximate" not in repr(small_engine(replay="halo"))


def test_a_policy_that_promises_more_than_its_plan_is_refused():
    class Liar(Bounded):
        exact = True

    eng = di.Engine.tiny(dtype="float64", replay=Liar())
    with pytest.raises(ValueError, match="promises to be exact and made a plan that is not"):
        eng.generate([5] * 60, max_tokens=1)
    assert len(eng.generate([[5] * 20], max_tokens=2, ignore_eos=True)[0].token_ids) == 2  # not cut


def test_rows_of_an_exact_plan_that_are_not_exact_are_no_numbers():
    """Halo runs them for the windows behind them; their own logits come from windows that are cut."""
    eng = di.Engine.tiny(dtype="float64")
    ids, prompt = [5 + 7 * i % 900 for i in range(180)], 160
    want = eng.logits(ids)
    for chunks in (None, [100, 60, 20], [150, 30], [170, 10]):
        got = eng.with_(replay="halo").logits(ids, prompt=prompt, chunks=chunks)
        assert got[: prompt - 1].isnan().all()
        assert (got[prompt - 1 :] - want[prompt - 1 :]).abs().max() < 1e-10


def test_a_plan_that_was_not_made_is_named():
    class Nothing(Exact):
        def plan(self, prompt, config): ...

    assert "plan returned None: want a ReplayPlan" in repr(check(Nothing()))


def test_an_engine_shows_what_it_runs():
    """Its own copy: with keep in tokens, and whatever becomes of the object that it was given."""
    mine = Bounded(30)
    given, own = di.Engine.tiny(replay=mine), di.Engine.tiny(replay=Bounded())
    mine.keep = 99
    assert "Bounded(keep=30" in repr(given) and given.slots["replay"].keep == 30
    assert "Bounded(keep=28" in repr(own)
    assert own.with_(fidelity=0).slots["replay"].keep == 28


class Few(Bounded):
    """Bounded with a keep that it would refuse."""

    exact = False

    def start(self, info):
        return self


def test_a_policy_that_leaves_less_than_a_window_is_told_once():
    config = small_config()
    needs = config.ring_length
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for policy in (Bounded(), Bounded(needs), Few(needs), Halo(), Bounded(sides="encoder")):
            eng = small_engine(replay=policy)
            eng.generate([list(range(3, 3 + n)) for n in (2, needs - 1, 60)], max_tokens=1)
    eng = small_engine(replay=Few(needs - 1))
    with pytest.warns(
        UserWarning, match=rf"leaves {needs - 1} rows .* of 60; .* up to {needs} .*check"
    ):
        eng.generate(list(range(3, 63)), max_tokens=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        eng.generate(list(range(3, 63)), max_tokens=1)
