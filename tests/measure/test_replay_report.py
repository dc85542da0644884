"""ReplayReport: intervals from its own tables, exports, and what it shows."""

import json
import math
import re

import pytest
import torch
from properties.test_replay_plans import KEEP, Last

import deepinfer as di
from deepinfer.display.replay import family
from deepinfer.measure import bootstrap
from deepinfer.measure.replay.divergence import first_difference
from deepinfer.measure.replay.report import FORMAT, METERS, ReplayReport
from support.small import small_engine, stream

PROMPT, MORE = 60, 9
MODULES = "aabcdefghi"
POLICIES = {
    "keep 22": Last(keep=KEEP),
    "keep 40": Last(keep=40),
    "open": Last(keep=KEEP, whole_window=True),
    "all": Last(keep=PROMPT),
}


@pytest.fixture(scope="module")
def report() -> ReplayReport:
    texts = [stream(PROMPT + MORE, s) for s in range(len(MODULES))]
    return di.measure.replay_error(small_engine(), texts, POLICIES, PROMPT, MORE, groups=MODULES)


@pytest.fixture(scope="module")
def floors() -> ReplayReport:
    eng = small_engine()
    others = {"dense": eng.with_(attention="dense")}
    return di.measure.logits_error(eng, others, stream(PROMPT + MORE, 1), PROMPT, MORE)


# ---------------------------------------------------------------------------------------- numbers


def test_intervals_are_over_groups_not_texts(report):
    e = report.estimate("keep 22", "kl")
    by_group = {}
    for row in report.tokens.where(policy="keep 22"):
        by_group.setdefault(row["group"], []).append(row["kl"])
    assert {g: len(v) for g, v in by_group.items()} == {"a": 18, **dict.fromkeys("bcdefghi", 9)}
    pairs = [torch.tensor(by_group[g]) for g in sorted(by_group)]
    want = bootstrap.ratio([(v, torch.ones_like(v, dtype=torch.bool)) for v in pairs])
    assert (e.value, e.low, e.high) == pytest.approx((want.value, want.low, want.high), rel=1e-6)
    assert e.low < e.value < e.high
    assert report.estimate("keep 22", "kl", "max").value == max(map(max, by_group.values()))


def test_perplexity_ratio_is_that_of_all_tokens(report):
    rows = report.tokens.where(policy="keep 22")
    want = math.exp((math.fsum(rows["nats_q"]) - math.fsum(rows["nats_p"])) / len(rows))
    e = report.estimate("keep 22", "perplexity_ratio")
    assert e.value == pytest.approx(want, rel=1e-12) and e.low < e.value < e.high
    passages = report.passages.where(policy="keep 22")
    ratio = math.exp(math.fsum(b - a for a, b in zip(passages["nats_p"], passages["nats_q"])) / 90)
    assert ratio == pytest.approx(want, rel=1e-12)


def test_summary_holds_every_estimate(report):
    for row in report.summary():
        for meter, of in [("kl", "p99"), ("dlogprob", "median"), ("agreement", "mean")]:
            e = report.estimate(row["policy"], meter, of)
            column = meter if of == "mean" else f"{meter}_{of}"
            assert (row[column], row[f"{column}_low"], row[f"{column}_high"]) == (
                e.value,
                e.low,
                e.high,
            )
        assert row["kl_median"] <= row["kl_p99"] <= row["kl_max"]
        assert row["kl_p99_low"] <= row["kl_p99"] <= row["kl_p99_high"]


def test_few_groups_have_no_interval(report):
    rows = report.tokens.where(lambda r: r["group"] in "abc")
    few = ReplayReport(report.passages, rows, report.windows, report.plans)
    e = few.estimate("keep 22", "kl")
    assert e.value > 0 and e.low is e.high is None


def test_windows_pool_squares_and_not_ratios(report):
    row = report.by_layer().where(policy="keep 22", layer=4)[0]
    cells = report.windows.where(policy="keep 22", layer=4).rows
    want = sum(c["error2"] for c in cells) / sum(c["norm2"] for c in cells)
    assert row["rel_l2"] == pytest.approx(math.sqrt(want)) and row["rows"] == 10 * (KEEP + MORE - 1)
    assert row["rel_l2_low"] < row["rel_l2"] < row["rel_l2_high"]
    near = report.by_distance().where(policy="keep 22", distance=0)[0]
    cells = report.windows.where(policy="keep 22", distance=0).rows
    want = sum(c["error2"] for c in cells) / sum(c["norm2"] for c in cells)
    assert near["until"] == 4 and near["rel_l2"] == pytest.approx(math.sqrt(want))


def test_unknown_names_are_refused(report):
    with pytest.raises(KeyError, match="no policy 'x' was measured: keep 22, keep 40"):
        report.estimate("x", "kl")
    with pytest.raises(KeyError, match="no meter 'klx': kl, agreement"):
        report.estimate("keep 22", "klx")
    with pytest.raises(KeyError, match="of='p50'"):
        report.estimate("keep 22", "kl", "p50")
    with pytest.raises(ValueError, match="x='rows': keep, windows"):
        report.plot_error(x="rows")


def test_a_quantile_is_given_or_refused_and_never_a_mean(report, floors):
    """Every meter with every `of`: what it does not have is refused, also where it is drawn."""
    meters = (*METERS, "window_rel_l2")
    for one, name in ((report, "keep 22"), (floors, "dense")):
        for meter in meters:
            for of in ("median", "p99", "max", "p50", "", None):
                if meter in ("kl", "dlogprob") and of in ("median", "p99", "max"):
                    assert one.estimate(name, meter, of).value != one.estimate(name, meter).value
                    continue
                known = of in ("median", "p99", "max")
                words = f"of={of!r}: {meter} has 'mean' only" if known else f"of={of!r}: 'mean', "
                for ask in (
                    lambda: one.estimate(name, meter, of),
                    lambda: one.plot_error(meter, of=of),
                ):
                    with pytest.raises(KeyError, match=re.escape(words)):
                        ask()
        with pytest.raises(KeyError, match="no meter 'klx'"):
            one.plot_error("klx")
    for meter in ("length_change", "window_rel_l2"):  # engines' drafts and keys are not compared
        assert floors.estimate("dense", meter).value is None


def test_first_difference():
    assert first_difference([1, 2, 3], [1, 2, 3]) is None and first_difference([], []) is None
    assert first_difference([1, 2, 3], [1, 4, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2 == first_difference([1, 2, 3], [1, 2])


# ---------------------------------------------------------------------------------------- exports


def test_json_comes_back_equal(report, floors, tmp_path):
    for one in (report, floors):
        path = tmp_path / "report.json"
        text = one.to_json(path)
        for source in (text, path, str(path)):
            back = ReplayReport.from_json(source)
            for name in ("passages", "tokens", "windows", "plans"):
                assert getattr(back, name) == getattr(one, name)
            assert back.summary() == one.summary() and repr(back) == repr(one)
    with pytest.raises(ValueError, match="not a replay report"):
        ReplayReport.from_json(report.tokens.to_json())


def test_other_json_is_no_report(report, tmp_path):
    """As a text and as a file: always a ValueError, never what the parser stumbled over."""
    whole = json.loads(report.to_json())
    bad = [
        {"format": FORMAT},
        [],
        [1],
        {},
        {"format": "deepinfer.Table/1"},
        whole | dict(tokens=None),
        whole | dict(plans=[]),
        whole | dict(windows={}),
        whole | dict(passages={"format": "deepinfer.Table/1"}),
        whole | dict(tokens=whole["tokens"] | dict(rows=[1])),
        {k: x for k, x in whole.items() if k != "plans"},
    ]
    path = tmp_path / "[draft] report.json"
    for x in bad:
        path.write_text(json.dumps(x), "utf-8")
        for source in (json.dumps(x), path):
            with pytest.raises(ValueError, match="^not a replay report: "):
                ReplayReport.from_json(source)
    path.write_text("null", "utf-8")
    with pytest.raises(ValueError, match="not a replay report"):
        ReplayReport.from_json(path)
    report.to_json(path)  # a path may begin with a bracket
    monkey = pytest.MonkeyPatch()
    with monkey.context() as m:
        m.chdir(tmp_path)
        assert ReplayReport.from_json(path.name).tokens == report.tokens
    with pytest.raises(FileNotFoundError):
        ReplayReport.from_json("[no such].json")


def test_provenance_says_what_was_measured(report):
    facts = report.facts
    assert facts["weights"] == small_engine().fingerprint and facts["dtype"] == "float64"
    assert facts["prompt"] == PROMPT and facts["continuation"] == MORE and facts["hit"] == 0
    assert facts["texts"] == 10 and facts["groups"] == 9 and len(facts["ids"]) == 16
    assert facts["policies"]["keep 40"] == repr(POLICIES["keep 40"])
    assert report.tokens.provenance == report.windows.provenance == report.plans.provenance == facts


# ---------------------------------------------------------------------------------------- showing


def test_what_is_shown_holds_no_time_and_does_not_change(report):
    for text in (repr(report), report._repr_html_()):
        assert "second" not in text and not re.search(r"\d ?m?s\b", text)
        assert "keep 22" in text and "10 texts of 9 groups" in text and "95 % over groups" in text
    assert max(map(len, repr(report).splitlines())) <= 160
    assert len(report._repr_html_()) < 12_000


def test_plots_take_and_return_axes(report, floors):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    ax = report.plot_error(floors=floors)
    assert ax.get_yscale() == "log" and ax.get_xlabel().startswith("keep")
    labels = [t.get_text() for t in ax.get_legend().get_texts()]
    assert labels[0] == "dense" and len(labels) == 3  # two families of policies
    _, mine = plt.subplots()
    assert report.plot_error("agreement", x="windows", ax=mine) is mine
    assert mine.get_yscale() == "linear"
    assert report.plot_error("dlogprob", x="depth", of="max").get_ylabel().endswith("max")
    ax = report.plot_error(x="rows_share", by=lambda name: "k" if "keep" in name else "other")
    points = {c.get_label(): len(c.lines[0].get_xdata()) for c in ax.containers}
    keeps = sum("keep" in name for name in report.policies)
    assert points == {"k": keeps, "other": len(report.policies) - keeps}
    _, mine = plt.subplots()
    assert report.plot_layers(mine) is mine
    drawn = {line.get_label(): line for line in mine.get_lines()}
    assert set(drawn) == {"keep 22", "keep 40", "open"}  # nothing is cut in the other
    assert list(drawn["keep 22"].get_xdata()) == [3, 4]  # the cut layer's own keys are exact
    want = [r["rel_l2"] for r in report.by_layer().where(policy="keep 22") if r["rel_l2"]]
    assert list(drawn["keep 22"].get_ydata()) == want
    ax = report.plot_distance(policies=["keep 22"])
    assert len(ax.get_lines()) == 1 and ax.get_lines()[0].get_xdata()[0] == 1.5
    ax = report.plot_cost(policies=["keep 22"])
    widths = [sum(bar[i].get_width() for bar in ax.containers) for i in (0, 1)]
    plans = {row["policy"]: row for row in report.plans}
    assert widths == pytest.approx([1, plans["keep 22"]["flops_share"]])
    plt.close("all")


def test_noise_and_zero_look_alike_so_that_tables_do_not_differ_between_machines():
    from deepinfer.display.replay import number

    assert [number(x) for x in (0.0, 1e-17, -1e-12)] == ["<1e-9"] * 3
    assert [number(x) for x in (0, None, 2e-9)] == ["0", "", "2e-09"]


def test_a_family_is_a_policy_without_its_keep(report):
    names = [family(report, name) for name in report.policies]
    assert names[0] == names[1] == names[3] and "keep" not in names[0]
    assert names[2] != names[0] and "whole_window=True" in names[2]
    assert family(report, "someone else's") == "someone else's"


def test_names_of_the_namespace():
    import ast
    from pathlib import Path

    stub = Path(di.measure.__file__).with_suffix(".pyi").read_text("utf-8")
    names = {a.name for n in ast.parse(stub).body if isinstance(n, ast.ImportFrom) for a in n.names}
    assert names == set(di.measure.__all__) <= set(dir(di.measure))
    assert all(callable(getattr(di.measure, name)) for name in names)
    with pytest.raises(AttributeError, match="replay_errors"):
        di.measure.replay_errors


# ---------------------------------------------------------------------------------------- joining


def test_reports_of_parts_join_to_that_of_all(report):
    eng, texts = small_engine(), [stream(PROMPT + MORE, s) for s in range(len(MODULES))]

    def measured(part: slice, policies) -> ReplayReport:
        named = {n: POLICIES[n] for n in policies}
        groups = MODULES[part]
        return di.measure.replay_error(eng, texts[part], named, PROMPT, MORE, groups=groups)

    parts = [measured(slice(0, 4), POLICIES), measured(slice(4, 10), POLICIES)]
    whole = ReplayReport.joined(parts)
    for name in ("passages", "tokens", "windows", "plans"):
        assert getattr(whole, name).rows == getattr(report, name).rows
    assert whole.summary().rows == report.summary().rows
    assert whole.facts["texts"] == 10 and whole.facts["groups"] == 9
    two = [measured(slice(0, 2), ["keep 22"]), measured(slice(0, 2), ["open", "all"])]
    both = ReplayReport.joined(two)
    assert both.policies == ("keep 22", "open", "all") == tuple(both.facts["policies"])
    assert both.plans["policy"] == ["exact", "keep 22", "open", "all"]
    assert both.facts["texts"] == 2 and sorted(both.passages["text"]) == [0, 0, 0, 1, 1, 1]
    assert ReplayReport.joined([report]).to_json() == report.to_json()
    for bad, words in [
        ([], "no reports"),
        ([two[0], two[0]], "keep 22 were measured twice"),
        ([parts[0], parts[1], parts[0]], "the same texts twice"),
        ([two[0], parts[1]], "neither the same texts nor the same policies"),
    ]:
        with pytest.raises(ValueError, match=words):
            ReplayReport.joined(bad)
    short = di.measure.replay_error(eng, texts[:1], {"all": Last(keep=PROMPT)}, PROMPT - 1, MORE)
    with pytest.raises(ValueError, match="differ in prompt"):
        ReplayReport.joined([short, two[1]])


def test_texts_without_groups_stay_groups_of_their_own_when_joined():
    """Their labels go on counting: parts have the numbers and intervals of the whole."""
    eng, texts = small_engine(), [stream(PROMPT + MORE, s) for s in range(9)]

    def measured(part, **more) -> ReplayReport:
        return di.measure.replay_error(
            eng,
            part,
            {n: POLICIES[n] for n in ("keep 22", "open")},
            PROMPT,
            MORE,
            drafter=False,
            **more,
        )

    whole, parts = measured(texts), [measured(texts[:4]), measured(texts[4:])]
    both = ReplayReport.joined(parts)
    for name in ("passages", "tokens", "windows", "plans"):
        assert getattr(both, name).rows == getattr(whole, name).rows
    assert both.summary().rows == whole.summary().rows
    assert both.facts["groups"] == 9 and both.estimate("keep 22", "kl").low is not None
    thrice = ReplayReport.joined([ReplayReport.joined(parts[:1]), parts[1]])
    assert thrice.tokens.rows == whole.tokens.rows
    older = [  # a file of before it was a fact whether groups were given
        ReplayReport.of(
            r.passages.rows,
            r.tokens.rows,
            r.windows.rows,
            r.plans.rows,
            {k: x for k, x in r.facts.items() if k != "grouped"},
        )
        for r in parts
    ]
    assert ReplayReport.joined(older).tokens.rows == whole.tokens.rows
    # given names stay, also where they are numbers
    named = [measured(texts[:4], groups=range(4)), measured(texts[4:], groups=range(5))]
    merged = ReplayReport.joined(named)
    assert merged.facts["groups"] == 5 and set(merged.tokens["group"]) == set("01234")
    with pytest.raises(ValueError, match="groups were given in some"):
        ReplayReport.joined([parts[0], named[1]])
    other = di.measure.replay_error(
        eng, texts[:4], {"all": POLICIES["all"]}, PROMPT, MORE, groups="aabb", drafter=False
    )
    with pytest.raises(ValueError, match="in different groups"):
        ReplayReport.joined([parts[0], other])


def test_a_text_that_is_there_twice_is_refused():
    eng, texts = small_engine(), [stream(PROMPT + MORE, s) for s in range(3)]

    def measured(part, names=("keep 22", "open"), **more) -> ReplayReport:
        return di.measure.replay_error(
            eng, part, {n: POLICIES[n] for n in names}, PROMPT, MORE, drafter=False, **more
        )

    for more in ({}, dict(groups="x" * 2)):
        first = measured(texts[:2], **more)
        more = {k: v[:1] for k, v in more.items()}
        apart = [measured([texts[2]], **more), measured([texts[1]], **more)]
        words = "text 1 of report 0 is text 0 of report 2"
        with pytest.raises(ValueError, match=f"joined: the same text twice: {words}"):
            ReplayReport.joined([first, *apart])
        with pytest.raises(ValueError, match="the same text twice"):
            ReplayReport.joined([ReplayReport.joined([first, apart[0]]), apart[1]])
        assert len(ReplayReport.joined([first, apart[0]]).passages) == 2 * 3
    with pytest.raises(ValueError, match="the same text twice"):
        ReplayReport.joined([measured(texts), measured(texts[::-1])])
    # policies in another order are the same ones, each with its own cost
    a, b = measured(texts[:1]), measured(texts[1:2], ("open", "keep 22"))
    plans = {row["policy"]: row for row in ReplayReport.joined([a, b]).plans}
    for name in ("exact", "keep 22", "open"):
        ran = [r.plans.where(policy=name)[0]["ran"] for r in (a, b)]
        assert plans[name]["ran"] == sum(ran) and plans[name]["policy"] == name
