"""The experiment on replay: what its parts measure is what they say, and its files read back."""

import pytest
import torch

import deepinfer as di
from deepinfer.engine.engine import Engine
from deepinfer.measure.replay.error import replay_error
from deepinfer.measure.replay.passes import Passage
from deepinfer.measure.replay.seconds import replay_seconds
from deepinfer.slots import attention
from deepinfer.slots.protocols import Prompt
from deepinfer.slots.replay import Bounded, Exact, Halo
from deepinfer.tables.table import Table
from experiments.replay_error import accelerator, compare, readme_tables, run
from experiments.replay_error.baselines import NoReplay, PageGivenUp, Short
from experiments.replay_error.config import TINY, depths, keep_policies
from experiments.replay_error.cost import where_it_goes
from experiments.replay_error.files import Part, read, read_all
from experiments.replay_error.floors import floors
from experiments.replay_error.passages import Passages, last, passages
from experiments.replay_error.stairs import Stairs
from experiments.replay_error.tables import pairs
from experiments.replay_error.turns import Turns, chained, fresh, turn_engine, turn_error


@pytest.fixture(scope="module")
def eng():
    with Engine.tiny(dtype="float64") as own:
        yield own


# ---------------------------------------------------------------------------------------- policies


def test_baselines_begin_where_they_say(eng):
    c = eng.config
    asked = Prompt(64, 32)
    none, given = (
        p.plan(asked, c).validate(asked, c.num_layers) for p in (NoReplay(), PageGivenUp(16))
    )
    assert (none.start, none.write_from, set(none.floor)) == (32, 32, {32})
    assert (given.start, given.write_from, set(given.floor)) == (16, 16, {16})
    assert not none.exact and NoReplay().plan(Prompt(64), c).exact


def test_no_window_leaves_the_last_row(eng):
    """And an engine takes it, which refuses a Bounded of the same keep."""
    plan = Short(keep=1).plan(Prompt(64), eng.config)
    assert plan.floor[-1] == plan.rows_from[-1] == 63
    eng.with_(replay=Short(keep=1)).close()
    with pytest.raises(ValueError, match="needs keep"):
        eng.with_(replay=Bounded(keep=1))


def test_policies_by_depth_reach_the_exact_length_and_none_is_refused(eng):
    c = eng.config
    found = depths(c, (0.2, 1.0), (0.5, 1.0))
    n = c.num_layers - c.first_decoder_layer
    assert {int(name[1:].split()[0]) for name in found} == set(range(1, n + 1))
    for name, policy in found.items():
        policy.start(type("Info", (), dict(config=c))())
        assert f" keep {policy.keep}" in name
    assert found[f"n{n} keep {Bounded().exact_keep(c)}"].layer == c.first_decoder_layer
    assert f"n{n} keep {Bounded().rows_kept(c)}" in found


def test_stairs_run_as_many_rows_as_a_box_and_keep_the_laws(eng):
    c, at = eng.config, 60
    least = c.ring_length
    for keep in range(least, 40):
        stairs, box = (p.plan(Prompt(at), c) for p in (Stairs(keep), Bounded(keep=keep)))
        assert sum(stairs.rows_run(at)) == sum(box.rows_run(at)), keep
        assert stairs.rows_run(at)[-1] == least and stairs.rows_run(at) == tuple(
            sorted(stairs.rows_run(at), reverse=True)
        )
    assert (
        Stairs(least).plan(Prompt(at), c).rows_from
        == Bounded(keep=least).plan(Prompt(at), c).rows_from
    )
    with pytest.raises(ValueError, match=f"want a keep of {least}"):
        Stairs(least - 1).plan(Prompt(at), c)
    assert di.check(Stairs(160))  # it runs on the release's shape too


def test_steep_stairs_are_exact(eng):
    """With a step of window - 1 they are the cone of the exact rebuild; less, and they are not."""
    c = eng.config
    n, w = c.num_layers - c.first_decoder_layer, c.sliding_window
    keep = c.ring_length + (n - 1) * (w - 1) // 2
    texts = passages(eng, "heldout", 140, 1)
    r = replay_error(
        eng, texts.ids, {"cone": Stairs(keep), "less": Stairs(keep - w)}, 128, 12, drafter=False
    )
    assert r.estimate("cone", "kl", "max").value < 1e-12 < r.estimate("less", "kl", "max").value


# -------------------------------------------------------------------------------------------- texts


def test_passages_do_not_overlap_and_take_each_module_first(eng):
    found = passages(eng, "heldout", 60, 40)
    assert {len(x) for x in found.ids} == {60} and {x[0] for x in found.ids} == {
        eng.config.bos_token_id
    }
    assert len({tuple(x) for x in found.ids}) == 40 and len(set(found.modules)) == 28
    assert len(set(found.modules[:28])) == 28
    short = last(found, 20, eng)
    assert all(a[1:] == b[-19:] for a, b in zip(short.ids, found.ids))
    with pytest.raises(ValueError, match="there are"):
        passages(eng, "prose", 3000, 99)


def test_floors_are_laws_of_the_engines_themselves(eng):
    """Zero between an engine and itself in other chunks, in float64; the halved index is another law."""
    texts = passages(eng, "heldout", 76, 2)
    r = floors(eng, texts, 64, 12, ("chunks", "top-k halved"))
    assert r.estimate("chunks", "kl", "max").value < 1e-12 < r.estimate("top-k halved", "kl").value
    half = eng.with_(attention=attention.CSA2(topk=eng.config.index_topk // 2))
    p, q = (e.logits(texts.ids[0][:-1], 64)[63:].double().log_softmax(-1) for e in (eng, half))
    want = (p.exp() * (p - q)).sum(-1).mean()
    assert r.passages[1]["kl"] == pytest.approx(float(want), rel=1e-9)


def test_policies_beside_floors_are_those_of_replay_error(eng):
    texts = passages(eng, "heldout", 76, 2)
    policies = {"a": Bounded(), "b": Halo()}
    mine = floors(eng, texts, 64, 12, ("chunks",), policies)
    its = replay_error(eng, texts.ids, policies, 64, 12, groups=texts.modules, drafter=False)
    for k in ("keep", "depth", "kl", "kl_max", "perplexity_ratio"):
        assert mine.summary()[k][:2] == its.summary()[k], k
    assert mine.policies == ("a", "b", "chunks")


def test_window_keys_of_floors_are_compared_where_a_replay_leaves_some(eng):
    """Same bins and rows as the default's, and nothing between an engine and itself."""
    c, texts = eng.config, passages(eng, "heldout", 76, 1)
    r = floors(eng, texts, 64, 12, ("chunks", "top-k halved"))
    its = replay_error(eng, texts.ids, {"a": Bounded()}, 64, 12, drafter=False)
    same = ("layer", "lowest", "distance", "until", "rows", "norm2")
    assert [[x[k] for k in same] for x in r.windows] == [[x[k] for k in same] for x in its.windows]
    assert {x["policy"] for x in r.windows} == {"top-k halved"}
    by = {x["layer"]: x["rel_l2"] for x in r.by_layer()}
    assert by[c.num_layers - 1] > 0


def test_pairs_are_over_the_same_texts():
    rows = [
        dict(text=i, group=str(i // 2), policy=p, kl=k * (i + 1))
        for p, k in (("a", 1.0), ("b", 3.0))
        for i in range(16)
    ]
    (pair,) = pairs(rows, [("a", "b")])
    assert pair["ratio"] == pair["ratio_low"] == pair["ratio_high"] == 3
    assert pair["difference"] == pytest.approx(17)
    assert pair["difference_low"] < 17 < pair["difference_high"]
    with pytest.raises(ValueError, match="other texts"):
        pairs(rows[:-1], [("a", "b")])


# -------------------------------------------------------------------------------------------- turns

TURNS = Turns.of(first=40, turns=3, step=24, reply=12)


def exact_turns(rt, ids):
    whole = Passage(rt, ids[: TURNS.tokens - 1], TURNS.prompts[0], set()).exact.logits
    return [whole[p - TURNS.prompts[0] :][: TURNS.reply] for p in TURNS.prompts]


@pytest.fixture(scope="module")
def ids(eng):
    return passages(eng, "heldout", TURNS.tokens, 1).ids[0]


@torch.no_grad()
def test_turns_of_exact_policies_are_exact(eng, ids):
    """Halo behind pages of its own turns, and pages go back."""
    with turn_engine(eng, TURNS) as own:
        rt, free = own.runtime, own.runtime.pages.free
        assert [TURNS.hit(k, rt) for k in range(3)] == [0, 32, 64]
        for policy in (Exact(), Halo()):
            for want, got in zip(
                exact_turns(rt, ids), chained(rt, ids, TURNS, policy), strict=True
            ):
                assert torch.allclose(want, got, atol=1e-9)
        assert rt.pages.free == free


@torch.no_grad()
def test_chained_turns_read_what_the_turns_before_left(eng, ids):
    """The first two turns have exact pages in both; the third one reads pages that the second has replayed."""
    policy = Bounded(sides="both")
    with turn_engine(eng, TURNS) as own:
        some = [list(f(own.runtime, ids, TURNS, policy)) for f in (chained, fresh)]
        exact = exact_turns(own.runtime, ids)
    apart = [float((a - b).abs().max()) for a, b in zip(*some)]
    assert max(apart[:2]) < 1e-9 < apart[2]
    assert all(float((a - b).abs().max()) > 1e-6 for a, b in zip(some[0], exact))


def test_floors_of_turns_are_those_of_each_prompt(eng, ids):
    texts, policies = Passages([ids], ["m"]), {"exact": (Exact(), True)}
    r = turn_error(eng, texts, TURNS, policies, ("chunks", "fidelity 0"))
    by = {row["policy"]: row["kl"] for row in r.passages}
    assert len(by) == 9 and by["chunks turn 2"] < 1e-12
    for k, prompt in enumerate(TURNS.prompts):
        alone = floors(
            eng,
            Passages([ids[: prompt + TURNS.reply]], ["m"]),
            prompt,
            TURNS.reply,
            ("fidelity 0",),
        )
        assert alone.passages[0]["kl"] == pytest.approx(by[f"fidelity 0 turn {k}"], rel=1e-6)


@torch.no_grad()
def test_chained_turns_are_those_of_an_engine(eng, ids):
    """An engine without snapshots talks for three turns. Fed its own replies, the chain has its laws."""
    policy, said, logprobs = Bounded(sides="both"), list(ids[: TURNS.prompts[0]]), []
    with eng.with_(replay=policy, prefix_cache=True, num_snapshots=0) as serving:
        for k, prompt in enumerate(TURNS.prompts):
            said += ids[len(said) : prompt]
            how = dict(temperature=0.0, max_tokens=TURNS.reply, ignore_eos=True, progress=False)
            (reply,) = serving.generate([said], **how)
            assert serving.runtime.prefix_cache.report().hits == k
            said += reply.token_ids
            logprobs.append(reply.logprobs)
    with turn_engine(eng, TURNS) as own:
        for k, law in enumerate(chained(own.runtime, said, TURNS, policy)):
            at = TURNS.prompts[k]
            want = law.log_softmax(-1)[range(TURNS.reply), said[at : at + TURNS.reply]]
            assert logprobs[k] == pytest.approx(want.tolist(), abs=1e-9), k


# --------------------------------------------------------------------------------------------- cost


def test_seconds_by_op_are_of_every_op(eng):
    text = passages(eng, "heldout", 65, 1).ids[0]
    t = where_it_goes(eng, text, {"compact": Bounded()}, [64], 1)
    both = {(r["side"], r["op"]) for r in t if r["seconds"] > 0}
    assert {op for _, op in both} >= {
        "attention",
        "experts",
        "index masks",
        "projections and streams",
        "other",
    }
    flops = {p: sum(r["flops"] for r in t.where(policy=p)) for p in ("exact", "compact")}
    r = replay_error(eng, [text], {"compact": Bounded()}, 64, 1, drafter=False)
    assert flops == {row["policy"]: row["flops"] for row in r.plans}


def test_seconds_are_of_the_clock_that_is_given(eng):
    text, ticks = passages(eng, "heldout", 65, 1).ids[0], iter(range(100))
    t = replay_seconds(eng, [text], {"compact": Bounded()}, [64], 2, lambda: float(next(ticks)))
    assert t["seconds"] == [1.0, 1.0] == t["fastest"]


# ------------------------------------------------------------------------------------------ command


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("results")
    assert run.main(["--model", "tiny", "--out", str(out), "--only", "law"]) == 0
    return out


def test_parts_read_back_and_are_not_measured_again(folder, capsys):
    parts = read_all(folder)
    assert list(parts) == ["law"]
    facts = parts["law"].facts
    assert {"commit", "threads", "processor", "weights", "dtype", "torch", "sizes"} <= set(facts)
    before = (folder / "law.json").read_bytes()
    parts["law"].write(folder)
    assert (folder / "law.json").read_bytes() == before
    assert run.main(["--model", "tiny", "--out", str(folder), "--only", "law"]) == 0
    assert "there already" in capsys.readouterr().out


def test_a_second_run_is_equal_to_the_digit(folder, tmp_path, capsys):
    assert run.main(["--model", "tiny", "--out", str(tmp_path), "--only", "law"]) == 0
    assert compare.main([str(folder), str(tmp_path)]) == 0
    assert "to the digit" in capsys.readouterr().out
    part = read(tmp_path / "law.json")
    rows = part.tables["summary"].rows
    rows[0]["kl"] += 1e-12
    Part("law", part.facts, part.tables | {"summary": Table(rows)}).write(tmp_path)
    assert compare.main([str(folder), str(tmp_path)]) == 1


def test_each_part_has_an_engine_of_its_own(tmp_path, monkeypatch):
    """So that no part depends on what the ones before have left in a cache."""
    seen = []

    def measure(own, sizes, say):
        seen.append((own, own.logits([1, 2, 3]).shape))
        return {"summary": Table([dict(policy="a", kl=0.0)])}

    monkeypatch.setattr(run, "PARTS", {"law": measure, "prose": measure})
    assert run.main(["--model", "tiny", "--out", str(tmp_path)]) == 0
    assert len({id(own) for own, _ in seen}) == 2 and set(read_all(tmp_path)) == {"law", "prose"}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_part_and_every_figure_of_it(tmp_path):
    import matplotlib

    matplotlib.use("Agg")
    from experiments.replay_error import cost_figures as costs
    from experiments.replay_error import figures

    assert run.main(["--model", "tiny", "--out", str(tmp_path)]) == 0
    parts = read_all(tmp_path)
    assert set(parts) == set(run.PARTS)
    for draw in (
        figures.keep,
        figures.depth,
        figures.windows,
        figures.lengths,
        figures.turns,
        figures.sides,
        figures.domains,
        costs.drafts,
        costs.divergence,
        costs.error_and_cost,
        costs.seconds,
        costs.where,
    ):
        assert draw(parts), draw.__name__
    for name, block in readme_tables.BLOCKS.items():
        assert block(parts), name


def test_seconds_on_an_accelerator_are_a_command_of_their_own(tmp_path, capsys, monkeypatch):
    shape = ["--device", "cpu", "--lengths", "24", "80", "--repeats", "1", "--out", str(tmp_path)]
    monkeypatch.setattr(accelerator, "DTYPES", ("float32",))  # bfloat16 is slow on a CPU
    assert accelerator.main(shape) == 0
    rows = read_all(tmp_path)["accelerator"].tables["seconds"].rows
    found = {(r["length"], r["dtype"], r["policy"]) for r in rows}
    assert len(rows) == len(found) == 2 * len(accelerator.DTYPES) * (1 + len(accelerator.POLICIES))
    assert all(r["seconds"] >= r["fastest"] > 0 for r in rows)
    cut = {r["length"]: r["predicted_rows"] for r in rows if r["policy"] == "compact"}
    assert cut[24] == 1 < cut[80]
    assert "| 80 | float32 | `compact` |" in readme_tables.accelerator(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        accelerator.main(["--out", str(tmp_path)])
    assert "no accelerator here" in capsys.readouterr().err


def test_compare_names_the_means_outside(tmp_path):
    def table(kl):
        return Table(
            [
                dict(policy="a", kl=kl, kl_low=1.0, kl_high=2.0),
                dict(policy="b", kl=1.5, kl_low=None, kl_high=None),
            ]
        )

    assert compare.outside(table(1.5), table(1.9)) == (1, [])
    count, (words,) = compare.outside(table(1.5), table(2.5))
    assert count == 1 and words == "a: 2.5, not in [1, 2]"


def test_compare_says_what_it_does_not_compare(tmp_path, capsys):
    table = {"summary": Table([dict(policy="a", kl=1.0)])}
    facts = dict(sizes=dict(passages=64), weights="w")
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        Part("keep", facts, table).write(folder)
    assert compare.main([str(first), str(second)]) == 0
    Part("sides", facts, table).write(first)
    assert compare.main([str(first), str(second)]) == 1
    assert f"sides: only in {first}" in capsys.readouterr().out
    Part("sides", facts | dict(sizes=dict(passages=9)), table).write(second)
    assert compare.main([str(first), str(second)]) == 1
    assert "sides: of other sizes, not compared: passages 64 and 9" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        compare.main([str(first), str(tmp_path / "none")])
    assert "no results in" in capsys.readouterr().err


def test_files_of_others_are_refused(tmp_path):
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(ValueError, match="no part"):
        read_all(tmp_path)
    with pytest.raises(ValueError, match="no results"):
        read_all(tmp_path / "none")


def test_sizes_cover_the_policies(eng):
    assert TINY.prompt > Bounded().exact_keep(eng.config)
    assert "halo" in keep_policies(eng.config, TINY)
