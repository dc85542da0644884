"""The serving benchmark: its bare loop computes the engine's tokens, its sums are right, and what it
measures is what it says. No time is asserted."""

import json

import pytest

from deepinfer.engine.engine import Engine
from deepinfer.engine.stats.records import StepRecord
from deepinfer.engine.stats.timeline import Timeline
from deepinfer.tables.table import Table
from experiments.serving import bench, first_token, gap, rate, setup
from experiments.serving.bare import BareLoop


@pytest.fixture(scope="module")
def tiny():
    return Engine.tiny(dtype="float64", max_num_seqs=4, max_model_len=512)


# ----------------------------------------------------------------------------------- the bare loop


def test_bare_loop_gives_the_engines_tokens(tiny):
    """Prompts of other lengths, below and above the n-gram's look-back and the window, over pages."""
    steps, prompts = 20, [[0, 7], [0], [0, *range(20, 60)]]
    eng = tiny.with_()
    out = eng.generate(
        prompts, [eng_params(i, steps + 1) for i in range(len(prompts))]
    ).raise_for_errors()
    bare = tiny.with_()
    loop = BareLoop(bare, prompts, steps, temperature=0.8, seeds=range(len(prompts)))
    for _ in range(steps):
        loop.step()
    assert loop.tokens == [[*c.token_ids] for c in out]
    loop.close()
    rt = bare.runtime
    assert rt.pages.free == rt.pages.size and rt.states.free == rt.states.size


def eng_params(seed, tokens):
    from deepinfer.engine.sampling_params import SamplingParams

    return SamplingParams(temperature=0.8, max_tokens=tokens, ignore_eos=True, seed=seed)


def test_bare_loop_refuses_drafts(tiny):
    from deepinfer.slots import verifier

    with pytest.raises(ValueError, match="a row a sequence"):
        BareLoop(tiny.with_(verifier=verifier.Fixed(2)), [[0]], 2, temperature=1.0, seeds=[0])


def test_prompts_are_each_their_own_and_begin_with_bos(tiny):
    made = setup.prompts(tiny, 5, 30)
    assert {len(p) for p in made} == {30} and len({tuple(p) for p in made}) == 5
    assert {p[0] for p in made} == {tiny.config.bos_token_id}
    assert setup.prompts(tiny, 1, 30, skip=29)[0] == made[1]
    with pytest.raises(ValueError, match="left"):
        setup.prompts(tiny, 10**6, 30)


# ----------------------------------------------------------------------------------------- its sums


def test_speed_is_of_medians_and_shares_are_of_rounds():
    host = [dict(schedule=0.1, launch=0.2, wait=9.0, **{"post-process": 0.1})] * 3
    found = rate.Rounds(
        4, bare=[1.0, 2.0, 4.0], engine=[2.0, 2.5, 4.0], overlapped=[5.0] * 3, host=host
    )
    row = found.speed()
    assert (row["bare tokens/s"], row["engine tokens/s"]) == (2.0, 1.6)
    assert row["overlapped tokens/s"] == 0.8
    # rounds: 1 - 1/2, 1 - 2/2.5, 1 - 4/4
    assert (row["engine share %"], row["least %"], row["most %"]) == pytest.approx((20, 0, 50))
    assert row["host phases %"] == pytest.approx(16)  # 0.4 of the median 2.5, wait left out
    assert found.phases() == pytest.approx(
        {"batch": 4, "schedule ms": 100, "launch ms": 200, "wait ms": 9000, "post-process ms": 100}
    )


def record(number, host, device, unfinished=1):
    r = StepRecord(number, "decode", unfinished=unfinished)
    r.host, r.device = host, [("decode", *device)]
    return r


def test_a_lane_begins_and_ends_with_the_device():
    """Two overlapped steps: while the first was scheduled, a step that is in no record ran."""
    t = Timeline(
        [
            record(1, [("schedule", 0, 10), ("post-process", 42, 50)], (20, 40)),
            record(2, [("schedule", 30, 35), ("wait", 50, 61), ("post-process", 61, 70)], (41, 61)),
        ]
    )
    lane = gap.Lane.of(t)
    assert (lane.busy, lane.idle, lane.steps) == (40, {"outside": 1}, 2)
    assert lane.share == 1 / 41 and t.idle_share > 0.2
    with pytest.raises(ValueError, match="without a step"):
        gap.Lane.of(Timeline([]))


def test_a_pause_without_work_is_no_idle_time():
    t = Timeline(
        [
            record(1, [("schedule", 0, 1)], (1, 10), unfinished=0),
            record(2, [("schedule", 100, 101)], (101, 110)),
        ]
    )
    assert gap.Lane.of(t).idle == {"schedule": 1}


def test_idle_of_a_case():
    lanes = [gap.Lane(90, {"launch": 10.0}, 5), gap.Lane(60, {"launch": 10.0, "wait": 30.0}, 5)]
    row = gap.row("steady decode", True, 4, lanes, [0.001, 0.002, 0.009], 5.0)
    assert (row["idle %"], row["least %"], row["most %"]) == pytest.approx((25, 10, 40))
    assert row["idle ms a step"] == pytest.approx(5000) and row["computing ms"] == 2
    assert row["at 20 ms, %"] == pytest.approx(50)  # 5 s beside steps of 5 s
    assert (row["most of it during"], row["engine"]) == ("wait", "overlapped")


def test_ratios_of_first_tokens_are_of_rounds():
    row = first_token.Times(
        64, 32, [2.0, 3.0, 4.0], [2.0, 1.0, 4.0], [4.0, 4.0, 4.0], [9.0] * 3
    ).row()
    assert (row["of same depth"], row["of same depth, most"]) == (1, 3)
    assert (row["of alone"], row["of alone, least"]) == (0.75, 0.5)
    assert (row["with hit ms"], row["whole prompt cold ms"]) == (3000, 9000)


def test_targets_judge_the_worst_row():
    found = {
        "speed": Table(
            [{"batch": 4, "engine share %": 50.0}, {"batch": 16, "engine share %": 10.0}]
        ),
        "idle gap": Table(
            [
                {"load": load, "engine": engine, "at 20 ms, %": idle}
                for load, engine, idle in [
                    ("steady decode", "synchronous", 9.0),
                    ("steady decode", "overlapped", 2.0),
                    ("steady decode", "overlapped", 3.1),
                    ("requests come and go", "overlapped", 1.0),
                ]
            ]
        ),
        "first token": Table(
            [{"of same depth": 1.1, "of alone": 1.3}, {"of same depth": 1.0, "of alone": 1.0}]
        ),
    }
    judged = bench.targets(found)
    assert judged["measured"] == [10.0, 3.1, 1.0, 1.1, 1.3]
    assert judged["reached"] == [True, False, True, True, False]
    assert len(bench.targets({})) == 0


# ---------------------------------------------------------------------------------- what is measured


def test_first_token_behind_a_hit_computes_the_rest_only(tiny):
    """And the chunk at the same depth, and the prompt alone, are as many rows."""
    seen = {}
    first, tail = setup.prompts(tiny, 1, 64)[0], [9] * 40
    warm = tiny.with_(prefix_cache=True, num_snapshots=8)
    for other in (5, 6):  # from the second on there is a snapshot where they part
        first_token.to_first(warm, [*first, other, *tail])
    for name, eng, ids, skip in (
        ("hit", warm, [*first, *tail], 0),
        ("chunk", tiny.with_(max_num_batched_tokens=64), [*first, *tail], 1),
        ("alone", tiny.with_(), tail, 0),
    ):
        eng.stats.reset()
        assert first_token.to_first(eng, ids, skip) > 0
        seen[name] = [r["prefill_rows"] for r in eng.stats.by_step(times=False)]
        assert not eng.requests
    assert seen == {"hit": [40], "chunk": [64, 40], "alone": [40]}


def test_first_token_needs_its_hit(tiny):
    with pytest.raises(ValueError, match="one chunk"):
        first_token.measure(tiny, 32, 64, 1)
    with pytest.raises(RuntimeError, match="16 were found"):  # fewer rows than a hit leaves over
        first_token.measure(tiny, 32, 8, 1)


TABLES = {
    "speed": ["speed", "host phases"],
    "gap": ["idle gap"],
    "first-token": ["first token"],
}


@pytest.mark.parametrize(
    "only", [["speed"], pytest.param([*TABLES], marks=pytest.mark.slow)], ids=["speed", "all"]
)
def test_command_prints_and_writes_its_tables(only, tmp_path, capsys):
    out = tmp_path / "bench.json"
    asked = ["--quick", "--model", "tiny", "--batches", "2", "--dtype", "float64"]
    assert bench.main([*asked, "--only", *only, "--out", str(out)]) == 0
    shown, tables = capsys.readouterr().out, bench.read(out)
    assert list(tables) == [*(table for name in only for table in TABLES[name]), "targets"]
    assert all(name in shown for name in tables) and tables["speed"]["batch"] == [2]
    if "gap" in only:
        assert len(tables["idle gap"]) == 4
        assert tables["idle gap"].where(engine="overlapped")["load"] == list(gap.LOADS)
    facts = json.loads(out.read_text())["facts"]
    known = {"commit", "threads", "processor", "cores", "load", "weights", "dtype", "clock"}
    assert known <= set(facts) and facts["quick"]
    assert tables["speed"].provenance["dtype"] == "float64"
    other = tmp_path / "other.json"
    other.write_text("{}")
    with pytest.raises(ValueError, match="no file of this benchmark"):
        bench.read(other)


def test_calls_take_turns():
    said = []
    clock = iter(range(100))
    calls = (lambda: said.append("a"), lambda: said.append(next(clock)))  # the second takes longer
    took = setup.in_turn(calls, 2, lambda: float(next(clock)))
    assert [s for s in said if s == "a"] == ["a", "a"] and said[0] == "a" != said[1]
    assert took == [[1, 1], [2, 2]]
