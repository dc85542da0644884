"""replay_error: the engine's own numbers, shared work, zeros where nothing changes, refusals."""

import dataclasses
import math

import pytest
import torch
from properties.test_replay_plans import KEEP, Last, Twice

import deepinfer as di
from deepinfer.measure.distributions import dist_error
from deepinfer.measure.replay.cost import prefill_cost
from deepinfer.measure.replay.drafts import accepted_lengths
from deepinfer.measure.replay.error import measuring_engine, plan_of
from deepinfer.measure.replay.passes import Passage, behind_hit, first_layer, prefix_pages
from deepinfer.measure.replay.windows import edges
from deepinfer.slots.replay import Bounded, Halo
from support.small import DRAFTS, WINDOW, small_engine, stream

PROMPT, MORE = 72, 10
TEXTS = [stream(PROMPT + MORE, s) for s in range(3)]
EXACT = WINDOW + 2 * (WINDOW - 1)  # three decoder layers
POLICIES = {
    "keep": Last(keep=KEEP),
    "mask": Last(keep=KEEP, mode="mask"),
    "whole window": Last(keep=KEEP, whole_window=True),
    "a later layer": Last(keep=KEEP, layer=3),
    "the last layer": Last(keep=KEEP, layer=4, whole_window=True),
    "one window": Last(keep=WINDOW),
    "one row": Last(keep=1),
    "no cut": Last(keep=PROMPT),
    "twice": Twice(),
    "halo": Halo(),
}


@pytest.fixture(scope="module")
def eng():
    return small_engine()


@pytest.fixture(scope="module")
def report(eng):
    return di.measure.replay_error(eng, TEXTS, POLICIES, PROMPT, MORE)


# ------------------------------------------------------------------------- the engine's own numbers


@pytest.mark.parametrize("layout", ["2 and 1", "all 1", "all 2", "4 and 2 and 1", "windows only"])
def test_shared_passes_have_the_numbers_of_an_engine_with_that_policy(layout):
    eng, ids = small_engine(layout), TEXTS[0]
    first = max(eng.config.kv_source_layers, default=0)
    policies = {
        f"{mode} {keep} {layer}": Last(keep=keep, mode=mode, layer=layer)
        for mode in ("compact", "mask")
        for keep in (1, KEEP, 40)
        for layer in {first, 4}
    }
    plans = {n: plan_of(eng.with_(replay=p), n, PROMPT, 0) for n, p in policies.items()}
    with measuring_engine(eng, PROMPT + MORE, 0) as own, torch.no_grad():
        layers = {first_layer(p) for p in plans.values()}
        passage = Passage(own.runtime, ids[:-1], PROMPT, layers)
        want = eng.logits(ids[:-1], prompt=PROMPT)[PROMPT - 1 :]
        torch.testing.assert_close(passage.exact.logits, want, rtol=0, atol=1e-10)
        for name, plan in plans.items():
            other = eng.with_(replay=policies[name], verifier="fixed")
            want = other.logits(ids[:-1], prompt=PROMPT)[PROMPT - 1 :]
            got = passage.by(plan).logits
            torch.testing.assert_close(got, want, rtol=0, atol=1e-10, msg=lambda m: f"{name}: {m}")


def test_passage_rows_are_those_logits_metered(eng, report):
    for name in ("keep", "mask", "whole window", "a later layer", "halo"):
        other = eng.with_(replay=POLICIES[name])
        for i, ids in enumerate(TEXTS[:2]):
            p, q = (e.logits(ids, prompt=PROMPT)[PROMPT - 1 : -1] for e in (eng, other))
            want = dist_error(p, q, ids[PROMPT:])
            row = report.passages.where(policy=name, text=i)[0]
            assert row["kl"] == pytest.approx(float(want.kl.mean()), abs=1e-10)
            assert row["nats_q"] == pytest.approx(float(want.nats_q.sum()), abs=1e-9)
            kls = report.tokens.where(policy=name, text=i)["kl"]
            assert kls == pytest.approx(want.kl.tolist(), abs=1e-10)


def test_mask_and_compact_measure_the_same(report):
    a, b = (report.passages.where(policy=n) for n in ("keep", "mask"))
    for name in ("kl", "dlogprob", "nats_q", "length", "window_rel_l2"):
        assert a[name] == pytest.approx(b[name], abs=1e-10)


# ------------------------------------------------------------------------------ zero where it is


def test_a_policy_that_drops_nothing_is_exactly_the_reference(report):
    row = report.summary().where(policy="no cut")[0]
    assert row["kl_max"] == row["dlogprob_max"] == row["window_rel_l2"] == row["length_change"] == 0
    assert row["agreement"] == row["perplexity_ratio"] == 1


def test_halo_is_exact_and_cheaper(report):
    row = report.summary().where(policy="halo")[0]
    assert max(row["kl_max"], row["dlogprob_max"], row["window_rel_l2"]) < 1e-12
    assert abs(row["length_change"]) < 1e-12 and row["rows_share"] < 1


def test_the_exact_length_is_exact_and_one_row_less_is_not(eng):
    """Every row of the continuation looks back by a window in each of the three cut layers."""
    ids = [stream(PROMPT + MORE, s, period=7) for s in range(2)] + TEXTS[:1]
    keeps = {k: Last(keep=k) for k in (EXACT - 1, EXACT)}
    report = di.measure.replay_error(eng, ids, keeps, PROMPT, MORE, drafter=False)
    worst = {k: max(report.tokens.where(policy=str(k))["dlogprob"]) for k in keeps}
    assert worst[EXACT] < 1e-12 < 1e-9 < worst[EXACT - 1]


def test_errors_fall_with_keep(eng):
    keeps = {k: Last(keep=k) for k in (2, 8, KEEP, 34, EXACT)}
    report = di.measure.replay_error(eng, TEXTS, keeps, PROMPT, MORE, drafter=False)
    kls = [row["kl"] for row in report.summary()]
    assert kls == sorted(kls, reverse=True) and kls[0] > 100 * kls[-2] > 0
    for layer in (3, 4):
        near = [r["rel_l2"] for r in report.by_layer().where(layer=layer)]
        assert near[0] > near[2]


# ------------------------------------------------------------------------------------ window keys


def test_window_errors_are_those_of_the_keys_an_engine_computes(eng, report):
    with eng.trace("layers.*.attn.window_keys") as a:
        eng.logits(TEXTS[1][:-1], prompt=PROMPT)
    other = eng.with_(replay=POLICIES["keep"])
    with other.trace("layers.*.attn.window_keys") as b:
        other.logits(TEXTS[1][:-1], prompt=PROMPT)
    lo = PROMPT - KEEP
    for layer in (2, 3, 4):
        x, y = (t[f"layers.{layer}.attn.window_keys"] for t in (a, b))
        gone = x.as_subclass(torch.Tensor)[lo:] - y.as_subclass(torch.Tensor)[y.position >= lo]
        rows = report.windows.where(policy="keep", text=1, layer=layer)
        ends = edges(WINDOW, PROMPT + MORE - 1 - lo)
        assert rows["distance"] == ends[:-1] and rows["until"] == ends[1:]
        for row in rows:
            part = slice(row["distance"], row["until"])
            want = float(gone[part].square().sum())
            assert row["error2"] == pytest.approx(want, abs=1e-12) and row["rows"] == len(
                gone[part]
            )
            norm2 = float(x.as_subclass(torch.Tensor)[lo:][part].square().sum())
            assert row["norm2"] == pytest.approx(norm2)
            assert row["rel_l2"] == pytest.approx(math.sqrt(want / norm2), abs=1e-12)
    assert not any(report.windows.where(policy="keep", layer=2)["error2"])  # its input is exact
    assert all(report.windows.where(policy="keep", layer=4, distance=0)["error2"])


def test_where_rows_end_all_their_keys_are_kept_and_metered(eng, report):
    """A layer whose window stays whole drops rows behind its keys; every later row sees them."""
    fed, lo = PROMPT + MORE - 1, PROMPT - KEEP
    with eng.trace("layers.2.attn.window_keys", "layers.3.attn.window_keys") as t:
        eng.logits(TEXTS[0][:-1], prompt=PROMPT)
    for layer, low in ((2, 0), (3, lo), (4, lo)):
        rows = report.windows.where(policy="whole window", text=0, layer=layer)
        assert set(rows["lowest"]) == {low} and rows["until"][-1] == sum(rows["rows"]) == fed - low
        if layer < 4:
            keys = t[f"layers.{layer}.attn.window_keys"].as_subclass(torch.Tensor)[low:]
            assert math.fsum(rows["norm2"]) == pytest.approx(float(keys.square().sum()))
    assert not any(report.windows.where(policy="whole window", layer=2)["error2"])
    shape = report.plans.where(policy="whole window")[0]
    assert (shape["keep"], shape["cut_layer"]) == (KEEP, 2)
    # a whole window has no cut: its keys have no distance from one
    far = report.by_distance().where(policy="whole window")
    assert far["until"][-1] == fed - lo and sum(far["rows"]) == len(TEXTS) * 2 * (fed - lo)
    near = far.where(distance=0)[0]
    cells = [c for c in report.windows.where(policy="whole window", distance=0) if c["layer"] > 2]
    want = sum(c["error2"] for c in cells) / sum(c["norm2"] for c in cells)
    assert near["rel_l2"] == pytest.approx(math.sqrt(want))
    assert len(report.by_distance().where(policy="no cut"))


def test_distance_bins():
    assert edges(16, 40) == [0, 4, 8, 12, 16, 24, 32, 40]
    assert edges(16, 300) == [0, 4, 8, 12, 16, 24, 32, 48, 64, 128, 256, 300]
    assert edges(2, 3) == [0, 1, 2, 3] and edges(16, 1) == [0, 1]


# ---------------------------------------------------------------------------------------- drafter


@pytest.mark.parametrize("name", ["keep", "one row"])
def test_accepted_lengths_are_those_of_the_drafts_an_engine_would_make(eng, report, name):
    """Block by block through an engine's cache: prefill by the plan, decode, the drafter's states."""
    from deepinfer.engine.step.batch import Work, build
    from support.serial import Place

    ids, plan = TEXTS[0][:-1], plan_of(eng.with_(replay=POLICIES[name]), name, PROMPT, 0)
    rt = eng.with_(verifier="fixed", replay=POLICIES[name]).runtime
    place, want = Place.take(rt, len(ids) + DRAFTS), []
    logits = eng.with_(replay=POLICIES[name]).logits(ids, prompt=PROMPT)
    with torch.no_grad():
        rt.model(
            rt.context(
                build([Work(ids[:PROMPT], 0, [], place.pages, place.state, plan)], rt.config)
            )
        )
        for at in range(PROMPT, len(ids)):
            work = Work(ids[at : at + 1], at, ids[at - 3 : at], place.pages, place.state, plan)
            ctx = rt.context(build([work], rt.config, decode=True))
            if at <= len(ids) - DRAFTS:
                here = torch.tensor([at])
                h, base = rt.model.drafter.states(torch.tensor(ids[at : at + 1]), here, DRAFTS, ctx)
                fed = torch.tensor(ids[at : at + DRAFTS])
                draft, _ = rt.model.drafter.slot_logits(h[0], base[0], fed, ctx)
                both = logits[at : at + DRAFTS].softmax(-1), draft.double().softmax(-1)
                want.append(float(1 + torch.minimum(*both).sum(-1).cumprod(0).sum()))
            rt.model(ctx)
    with measuring_engine(eng, len(ids), 0) as own, torch.no_grad():
        passage = Passage(own.runtime, ids, PROMPT, {2})
        got = accepted_lengths(own.runtime, passage.by(plan), ids, PROMPT, 1)
        exact = accepted_lengths(own.runtime, passage.exact, ids, PROMPT, 1)
    assert got.tolist() == pytest.approx(want, abs=1e-10)
    assert (got - exact).abs().max() > 1e-6
    row = report.passages.where(policy=name, text=0)[0]  # a block every 4 tokens
    assert row["length"] == pytest.approx(float(got[::4].mean()), abs=1e-10)
    assert row["length_exact"] == pytest.approx(float(exact[::4].mean()), abs=1e-10)


def test_lengths_in_the_report(eng, report):
    row = report.passages.where(policy="keep", text=0)[0]
    assert row["blocks"] == 2 and 1 <= row["length"] <= 1 + DRAFTS  # starts 72, 76 of 81 fed ids
    change = report.estimate("keep", "length_change").value
    rows = report.passages.where(policy="keep").rows
    assert change == pytest.approx(
        sum(r["length"] - r["length_exact"] for r in rows) / 3, abs=1e-12
    )
    short = di.measure.replay_error(eng, TEXTS[0], {"a": Last(keep=KEEP)}, PROMPT, DRAFTS)
    assert short.passages[0]["blocks"] == 0 and short.passages[0]["length"] is None
    assert short.summary()[0]["length_change"] is None


# ------------------------------------------------------------------------------------ costs, work


@pytest.mark.parametrize("name", POLICIES)
def test_rows_and_layers_are_what_the_layers_of_an_engine_see(eng, name):
    other = eng.with_(replay=POLICIES[name])
    plan = plan_of(other, name, PROMPT, 0)
    cost = prefill_cost(plan, PROMPT, eng.config)
    seen = {}
    for chunks in ([PROMPT], [30, 30, PROMPT - 60]):
        with other.trace("layers.*.attn.in", "layers.*.ffn.in") as t:
            other.logits(TEXTS[0][:PROMPT], chunks=chunks)
        for i in range(eng.config.num_layers):
            seen[i] = [len(t[f"layers.{i}.{site}.in"]) for site in ("attn", "ffn")]
            assert seen[i] == [cost.entering[i], cost.going[i]]
    assert cost.rows_x_layers == sum(b for _, b in seen.values())


def test_the_encoder_half_is_run_once(report):
    """Rows x layers that ran: five layers for exact, from its cut layer on for every policy."""
    n, fed = len(TEXTS), PROMPT + MORE - 1
    ran = {row["policy"]: row["ran"] for row in report.plans}
    assert ran["exact"] == n * 5 * fed
    assert ran["keep"] == n * 3 * (KEEP + MORE - 1)
    assert ran["mask"] == n * 3 * fed
    assert ran["a later layer"] == n * 2 * (KEEP + MORE - 1)
    assert ran["the last layer"] == n * (KEEP + MORE - 1)
    assert ran["no cut"] == 0
    alone = {row["policy"]: row["alone"] for row in report.plans}
    assert alone["keep"] == n * (2 * fed + 3 * (KEEP + MORE - 1))
    assert sum(ran.values()) < 0.5 * sum(alone.values())


def test_flops_by_hand():
    """One layer of each kind, counted pair by pair."""
    eng = small_engine()
    c, plan = eng.config, plan_of(small_engine(replay=Last(keep=KEEP)), "keep", PROMPT, 0)
    got = prefill_cost(plan, PROMPT, c).flops
    lo, d, e, h = PROMPT - KEEP, c.hidden_size, c.head_dim, c.num_attention_heads
    seen = {i: [0, 0] for i in range(5)}
    for i, r in enumerate(c.compress_ratios[:5]):
        for p in range(lo if i >= 2 else 0, PROMPT):
            keys = range(max(p - WINDOW + 1, lo if i >= 2 else 0), p + 1)
            entries = sum(1 for j in range(PROMPT) if r and (j + 1) * r - 1 <= p)
            seen[i][0] += len(keys) + min(entries, c.index_topk)
            seen[i][1] += entries if i in (1, 2) else min(entries, 16) if i == 3 else 0
    assert got["attention"] == 2 * 2 * h * e * sum(a for a, _ in seen.values())
    rows = 2 * PROMPT + 3 * KEEP
    assert got["query"] == 2 * rows * c.q_lora_rank * (d + h * e)
    index_rows = PROMPT + 2 * KEEP
    want = index_rows * c.index_n_heads * (c.q_lora_rank * c.index_head_dim + d)
    want += sum(b for _, b in seen.values()) * c.index_n_heads * c.index_head_dim
    assert got["index"] == 2 * want
    entering = 3 * PROMPT + 2 * KEEP
    own = PROMPT * d * e * 2 + PROMPT // 2 * e * c.index_head_dim  # ratio 2
    own += PROMPT * d * e + PROMPT * e * c.index_head_dim  # ratio 1
    assert got["keys"] == 2 * (entering * d * e + own)
    assert got["experts"] == 2 * rows * d * (3 * c.moe_intermediate_size * 3 + c.n_routed_experts)
    assert got["head"] == 2 * d * c.vocab_size


def test_cut_shapes(report):
    by = {row["policy"]: row for row in report.plans}
    assert [by[n]["keep"] for n in ("keep", "mask", "whole window", "no cut")] == [KEEP] * 3 + [
        PROMPT
    ]
    assert [by[n]["cut_layers"] for n in ("keep", "whole window", "a later layer", "no cut")] == [
        3,
        2,
        2,
        0,
    ]
    assert by["keep"]["depth"] == pytest.approx((KEEP - WINDOW) / (2 * (WINDOW - 1)))
    assert by["the last layer"]["depth"] is None and by["no cut"]["cut_layer"] is None


# ----------------------------------------------------------------------------------- encoder side


def test_behind_a_hit_as_an_engine_with_a_prefix_cache():
    """A prefix is served, then the prompt with a hit and no snapshot: the measured pass's numbers."""
    policy = Last(keep=KEEP, sides="both")
    eng = small_engine()
    hit = 48
    serving = eng.with_(replay=policy, prefix_cache=True, num_snapshots=0, page_size=WINDOW)
    greedy = dict(temperature=0.0, ignore_eos=True)
    serving.generate(TEXTS[0][:hit], max_tokens=1, **greedy)
    (done,) = serving.generate(TEXTS[0][:PROMPT], max_tokens=MORE, **greedy)
    assert serving.runtime.prefix_cache.report().hit_tokens == hit - WINDOW
    ids = [*TEXTS[0][:PROMPT], *done.token_ids]
    plan = plan_of(eng.with_(replay=policy), "both", PROMPT, hit)
    assert plan.start == hit - WINDOW and plan.write_from == hit
    with measuring_engine(eng, len(ids) + 64, hit) as own, torch.no_grad():
        rt = own.runtime
        free = rt.pages.available, rt.states.free
        with prefix_pages(rt, ids[:hit]) as pages:
            got = [behind_hit(rt, ids[:-1], PROMPT, plan, pages) for _ in range(2)]
        assert (rt.pages.available, rt.states.free) == free
        less = plan_of(eng.with_(replay=policy), "both", PROMPT, 32)
        with prefix_pages(rt, ids[:hit]) as pages:  # a plan that adopts fewer writes none of them
            behind_hit(rt, ids[:-1], PROMPT, less, pages)
            again = behind_hit(rt, ids[:-1], PROMPT, plan, pages)
        torch.testing.assert_close(got[0].logits, again.logits, rtol=0, atol=1e-12)
    law = got[0].logits.log_softmax(-1)
    assert law.argmax(-1).tolist() == list(done.token_ids)
    assert law.amax(-1).tolist() == pytest.approx(list(done.logprobs), abs=1e-10)
    torch.testing.assert_close(got[0].logits, got[1].logits, rtol=0, atol=0)
    report = di.measure.replay_error(
        eng, [ids], {"both": policy, "decoder": Last(keep=KEEP)}, PROMPT, MORE, hit=hit
    )
    p = eng.logits(ids, prompt=PROMPT)[PROMPT - 1 : -1]
    want = dist_error(p, got[0].logits, ids[PROMPT:]).kl
    kl = {row["policy"]: row["kl"] for row in report.summary()}
    assert kl["both"] == pytest.approx(float(want.mean()), abs=1e-10)
    assert kl["both"] != kl["decoder"] > 0
    starts = {row["policy"]: row["start"] for row in report.plans}
    assert starts["both"] == hit - WINDOW and starts["decoder"] == 0
    assert {r["layer"] for r in report.windows.where(policy="both")} == set(range(5))


@pytest.mark.parametrize("prompt, hit", [(160, 128), (PROMPT, 48)])
def test_an_exact_rebuild_behind_a_hit_changes_nothing(eng, prompt, hit):
    """Also where it reaches back to the first token and reads block KV of the hit all the same."""
    policies = {"halo": Halo(), "encoder": Last(sides="encoder")}
    report = di.measure.replay_error(eng, stream(prompt + 10, 4), policies, prompt, 10, hit=hit)
    plans = {row["policy"]: row for row in report.plans}
    assert plans["halo"]["start"] < hit - WINDOW == plans["encoder"]["start"]
    assert (plans["halo"]["start"] > 0) == (prompt == 160)
    halo, encoder = report.summary()
    assert max(halo["kl_max"], halo["dlogprob_max"], halo["window_rel_l2"]) < 1e-12
    assert abs(halo["length_change"]) < 1e-12 < encoder["kl"]
    assert plans["encoder"]["ran"] == 5 * (prompt + 9 - (hit - WINDOW))


# ------------------------------------------------------------------------ other engines, free text


def test_floors_are_metered_alike(eng):
    ids = TEXTS[0]
    others = {
        "same": eng.with_(),
        "dense": eng.with_(attention="dense"),
        "chunks": lambda ids, prompt: eng.logits(ids, prompt, chunks=[40, 40, len(ids) - 80]),
        "keep": eng.with_(replay=POLICIES["keep"]),
    }
    floors = di.measure.logits_error(eng, others, ids, PROMPT, MORE)
    kl = {row["policy"]: row["kl"] for row in floors.summary()}
    assert max(kl["same"], kl["chunks"]) < 1e-12 and kl["dense"] > 1e-8
    report = di.measure.replay_error(eng, ids, {"keep": POLICIES["keep"]}, PROMPT, MORE)
    assert kl["keep"] == pytest.approx(report.estimate("keep", "kl").value, abs=1e-10)
    assert "attention" in floors.facts["policies"]["dense"]
    assert "KL(first" in repr(floors) and "FLOPs" not in repr(floors)
    assert floors.summary()["rows_x_layers"] == [None] * 4


def test_divergence_of_free_text(eng):
    policies = {"no cut": Last(keep=PROMPT), "short": Last(keep=4)}
    table = di.measure.replay_divergence(eng, TEXTS, policies, PROMPT, 10, groups="aab", seed=7)
    assert len(table) == 2 * 2 * 3 and table["group"][:3] == ["a", "a", "b"]
    assert set(table.where(policy="no cut")["diverged"]) == {None}
    other = eng.with_(replay=policies["short"])
    for row in table.where(policy="short"):
        how = dict(max_tokens=10, temperature=1.0 if row["way"] == "seeded" else 0.0)
        prompt = TEXTS[row["text"]][:PROMPT]
        both = [e.generate(prompt, seed=7 + row["text"], **how)[0].token_ids for e in (eng, other)]
        a, b = (list(x) for x in both)
        want = next((k for k, (x, y) in enumerate(zip([*a, -1], [*b, -1])) if x != y), None)
        assert row["diverged"] == want and row["tokens"] == len(a)
    assert (
        len(set(table.where(policy="short", way="seeded")["diverged"])) > 1
    )  # else a seed is lost


def test_seconds_only_where_asked(eng, report):
    table = di.measure.replay_seconds(eng, TEXTS[0], {"keep": Last(keep=KEEP)}, [40, 72], repeats=1)
    assert table["length"] == [40, 40, 72, 72] and all(x > 0 for x in table["seconds"])
    rows = table.where(policy="keep", length=72)[0]
    plan = plan_of(eng.with_(replay=Last(keep=KEEP)), "keep", 72, 0)
    assert rows["rows_x_layers"] == prefill_cost(plan, 72, eng.config).rows_x_layers
    for t in (report.passages, report.tokens, report.windows, report.plans, report.summary()):
        assert not [c for c in t.columns if "second" in c or "time" in c]


# ------------------------------------------------------------------------------ the engine is left


def test_engine_policy_does_not_matter_and_the_engine_is_left_alone(eng, report):
    other = small_engine(replay=Last(keep=3), verifier="fixed", prefix_cache=True)
    again = di.measure.replay_error(other, TEXTS[:1], POLICIES, PROMPT, MORE)
    for name in ("passages", "tokens", "windows"):
        assert getattr(again, name).rows == getattr(report, name).where(text=0).rows
    assert other._runtime is None and other.slots["replay"].keep == 3


def test_policies_are_keeps_objects_classes_or_names(eng):
    """Alone or in a list; what has no name of its own is named by its repr."""
    keeps = [KEEP, "halo", Bounded(keep=40), Halo]
    report = di.measure.replay_error(eng, TEXTS[:2], keeps, PROMPT, MORE, drafter=False)
    want = (f"keep {KEEP}", "halo", "Bounded(keep=40, mode='compact')", "Halo")
    assert report.policies == want
    for alone in ("halo", Halo(), Halo):
        one = di.measure.replay_error(eng, TEXTS[:2], alone, PROMPT, MORE, drafter=False)
        assert max(one.tokens["kl"]) < 1e-12 and len(one.policies) == 1
    with pytest.raises(TypeError, match="replay_error: want an Engine, found str 'nano'"):
        di.measure.replay_error("nano", TEXTS, KEEP, PROMPT, MORE)


def test_keeps_are_bounded_policies(eng):
    report = di.measure.replay_error(eng, TEXTS[:1], [KEEP, 40], PROMPT, MORE)
    assert report.policies == (f"keep {KEEP}", "keep 40")
    assert report.facts["policies"][f"keep {KEEP}"] == repr(Bounded(keep=KEEP))
    one = di.measure.replay_error(eng, TEXTS[0], KEEP, PROMPT, MORE)
    assert one.tokens.rows == report.tokens.where(policy=f"keep {KEEP}").rows


@pytest.mark.parametrize(
    "changes, error, words",
    [
        (dict(keeps=[KEEP - 1]), ValueError, f"keep={KEEP - 1}.*needs keep >= {KEEP}"),
        (dict(keeps=[]), ValueError, "no keeps"),
        (dict(keeps=[40, 40]), ValueError, "given twice"),
        (dict(keeps={"exact": Last(keep=40)}), ValueError, "'exact' means the reference"),
        (dict(prompt=PROMPT + MORE), ValueError, f"text 0 has {PROMPT + MORE} tokens.*take"),
        (dict(prompt=0), ValueError, "prompt=0"),
        (dict(continuation=True), ValueError, "continuation=True"),
        (dict(apart=0), ValueError, "apart=0"),
        (dict(texts=[]), ValueError, "no texts"),
        (dict(texts=[TEXTS[0], [5, 10**9]]), ValueError, "text 1"),
        (dict(groups=["a"]), ValueError, "1 groups for 3 texts"),
        (dict(hit=20), ValueError, r"hit=20.*page size \(16\)"),
        (dict(hit=80), ValueError, "hit=80.*below prompt"),
        (dict(hit="16"), ValueError, "replay_error: hit='16'"),
        (dict(hit=16.0), ValueError, r"replay_error: hit=16\.0"),
        (dict(hit=None), ValueError, "replay_error: hit=None"),
        (dict(hit=-16), ValueError, "replay_error: hit=-16"),
        (dict(apart="4"), ValueError, "replay_error: apart='4'"),
        (dict(keeps={22: Last(keep=22), "22": Last(keep=40)}), ValueError, "'22' is given twice"),
        (dict(keeps=None), ValueError, "replay_error: keeps=None"),
        (dict(keeps=1.5), ValueError, r"replay_error: keeps=1\.5"),
        (dict(keeps="exact"), ValueError, "'exact' means the reference"),
        (dict(keeps=["exact", 40]), ValueError, "'exact' means the reference"),
        (
            dict(keeps=[40, object]),
            ValueError,
            "replay_error: keeps=<class 'object'>: want a number",
        ),
        (dict(keeps=True), ValueError, "keeps=True: want a number"),
        (dict(keeps="halloo"), ValueError, "halloo"),
        (dict(keeps={"bad": "no such policy"}), ValueError, "no such policy"),
    ],
)
def test_refusals(eng, changes, error, words):
    given = (
        dict(texts=TEXTS, keeps={"a": Last(keep=KEEP)}, prompt=PROMPT, continuation=MORE) | changes
    )
    with pytest.raises(error, match=words):
        di.measure.replay_error(eng, **given)


def test_each_measurement_signs_its_own_errors(eng):
    """By the name that was called, and by the names of its own arguments."""
    keeps, m = {"a": Last(keep=KEEP)}, di.measure
    for bad, words in [
        ({}, "no keeps"),
        ({1: keeps["a"], "1": keeps["a"]}, "'1' is given twice"),
        ({"exact": keeps["a"]}, "'exact' means the reference"),
        (None, "keeps=None"),
    ]:
        with pytest.raises(ValueError, match=f"^replay_divergence: .*{words}"):
            m.replay_divergence(eng, TEXTS, bad, PROMPT, 2)
        with pytest.raises(ValueError, match=f"^replay_seconds: .*{words}"):
            m.replay_seconds(eng, TEXTS[0], bad, [40])
    for most in (0, -1, 2.0, "2", True):
        with pytest.raises(ValueError, match=f"^replay_divergence: max_tokens={most!r}"):
            m.replay_divergence(eng, TEXTS, keeps, PROMPT, most)
    with pytest.raises(ValueError, match="^replay_seconds: policy 'b'"):
        m.replay_seconds(eng, TEXTS[0], {"b": Broken(keep=KEEP, layer=2)}, [40], repeats=1)
    nan = {"f": lambda ids, prompt: torch.full((len(ids), eng.config.vocab_size), torch.nan)}
    with pytest.raises(ArithmeticError, match="^logits_error: policy 'f', text 0"):
        m.logits_error(eng, nan, TEXTS, PROMPT, MORE)


@pytest.mark.parametrize(
    "changes, words",
    [
        *((dict(lengths=[40, n]), f"length={n!r}: a number of tokens") for n in (-5, 0, True)),
        *((dict(lengths=[n, 40]), f"length={n!r}: a number of tokens") for n in (1.5, "40", None)),
        *((dict(repeats=n), f"repeats={n!r}: a number of runs") for n in (1.5, 0, -1, True, "5")),
        *((dict(lengths=n), f"lengths={n!r}: want a list") for n in (40, None, "40")),
        (dict(lengths=[]), "no lengths"),
        (dict(text=TEXTS), "3 texts: one is timed"),
    ],
)
def test_refusals_of_seconds(eng, changes, words):
    given = dict(text=TEXTS[0], keeps={"a": Last(keep=KEEP)}, lengths=[40]) | changes
    with pytest.raises(ValueError, match=f"^replay_seconds: {words}"):
        di.measure.replay_seconds(eng, **given)


@dataclasses.dataclass(eq=False)
class Broken(Last):
    def plan(self, prompt, config):
        plan = super().plan(prompt, config)
        return dataclasses.replace(plan, floor=(0, 0, 999, 999, 999)) if self.layer else None


def test_bad_plans_and_bad_numbers_are_named(eng):
    with pytest.raises(ValueError, match="policy 'b': ReplayPlan breaks a law"):
        di.measure.replay_error(eng, TEXTS, {"b": Broken(keep=KEEP, layer=2)}, PROMPT, MORE)
    with pytest.raises(TypeError, match="policy 'b' planned None"):
        di.measure.replay_error(eng, TEXTS, {"b": Broken(keep=KEEP)}, PROMPT, MORE)
    one = {"short": lambda ids, prompt: torch.full((len(ids), eng.config.vocab_size), torch.nan)}
    with pytest.raises(ArithmeticError, match=f"'short', text 0, position {PROMPT - 1}"):
        di.measure.logits_error(eng, one, TEXTS, PROMPT, MORE)


def test_a_report_says_where_nothing_was_cut():
    """A prompt within keep, an encoder side without a hit: no error, for want of anything to err."""
    nano = di.Engine.nano()
    texts = [nano.encode(text) for text in di.data.heldout(count=2)]
    policies = {"cut": Bounded(), "short": Bounded(keep=100), "idle": Bounded(sides="encoder")}
    report = di.measure.replay_error(
        nano, texts, policies, prompt=90, continuation=4, drafter=False
    )
    words = "Nothing is cut or replayed at a prompt of 90 tokens without a hit by short, idle"
    assert words in repr(report) and words in report._repr_html_()
    alone = di.measure.replay_error(nano, texts, [76], prompt=90, continuation=4, drafter=False)
    assert "Nothing is cut" not in repr(alone)
    for draw in (report.plot_layers, report.plot_distance, report.plot_cost):
        with pytest.raises(KeyError, match="no policy 'cot' was measured: cut, short, idle were"):
            draw(policies=["cot"])
