"""Bounded.fit: the smallest keep, chosen on some groups and checked on others, by brute force."""

import copy
import dataclasses
import math
import pickle

import pytest
import torch

import deepinfer as di
from deepinfer.measure.bootstrap import Estimate, quantile
from deepinfer.measure.replay import fit as fitting
from deepinfer.measure.replay.calibration import tried
from deepinfer.measure.replay.texts import Texts
from deepinfer.slots.replay import Bounded
from deepinfer.tables.table import Table
from support.small import DRAFTS, small_config, small_engine, stream

WINDOW = 8
LEAST = WINDOW + DRAFTS + 1
EXACT = WINDOW + 2 * (WINDOW - 1)  # three decoder layers
PROMPT, MORE = EXACT + WINDOW, 4
GROUPS = "abcdefghijklmnopq"  # 9 choose, 8 check
TEXTS = [[x % 90 for x in stream(PROMPT + MORE, s)] for s in range(len(GROUPS))]
KEEPS = [LEAST, 16, 19, EXACT]
HOW = dict(prompt=PROMPT, continuation=MORE, groups=GROUPS, candidates=KEEPS)


@pytest.fixture(scope="module")
def eng():
    return small_engine(window=WINDOW, vocab=97)


@pytest.fixture(scope="module")
def whole(eng):
    """Every candidate on every text."""
    policies = {k: Bounded(k) for k in KEEPS}
    how = dict(prompt=PROMPT, continuation=MORE, groups=GROUPS, drafter=False)
    return di.measure.replay_error(eng, TEXTS, policies, **how)


def kls(report, keep, groups, metric="kl") -> list[torch.Tensor]:
    rows = [r for r in report.tokens.where(policy=str(keep)) if r["group"] in groups]
    return [
        torch.tensor([r[metric] for r in rows if r["group"] == g], dtype=torch.float64)
        for g in sorted(groups)
    ]


def ends(report, q, metric="kl") -> dict[int, float]:
    """The upper end of the quantile's interval by keep, on every other group."""
    return {k: quantile(kls(report, k, GROUPS[::2], metric), q).high for k in KEEPS}


@pytest.fixture(scope="module")
def fitted(eng, whole):
    tolerance = 1.0001 * ends(whole, 0.5)[16]
    return Bounded.fit(eng, TEXTS, tolerance, 0.5, **HOW)


# ------------------------------------------------------------------------------------- the choice


@pytest.mark.parametrize("metric", ["kl", "dlogprob"])
@pytest.mark.parametrize("q", [0.5, 0.9])
def test_the_smallest_keep_that_meets_it_as_all_larger_ones_do(whole, fitted, q, metric):
    high, report = ends(whole, q, metric), fitted.calibration.report
    chosen = []
    for tolerance in sorted(high[k] * x for k in KEEPS[:3] for x in (0.999, 1.001)):
        meets = [k for k in KEEPS if all(high[j] <= tolerance for j in KEEPS if j >= k)]
        names = {f"keep {k}": k for k in KEEPS}
        table = tried(report, names, metric, q, tolerance)
        assert fitting.smallest(table) == min(meets)
        assert table["high"] == pytest.approx([high[k] for k in KEEPS], abs=1e-12)
        assert table["meets"] == [high[k] <= tolerance for k in KEEPS]
        chosen.append(min(meets))
    assert len(set(chosen)) >= 3


def test_metric_and_quantile_are_those_asked(eng, whole):
    tolerance = 1.0001 * ends(whole, 0.9, "dlogprob")[19]
    how = dict(HOW, metric="dlogprob", candidates=[19, EXACT])
    got = Bounded.fit(eng, TEXTS, tolerance, 0.9, **how)
    c, x = got.calibration, torch.cat(kls(whole, got.keep, GROUPS[1::2], "dlogprob"))
    want = [ends(whole, 0.9, "dlogprob")[k] for k in (19, EXACT)]
    assert c.candidates["high"] == pytest.approx(want, abs=1e-12)
    assert got.keep == 19 and (c.metric, c.quantile) == ("dlogprob", 0.9)
    assert c.held.value == pytest.approx(float((x <= tolerance).double().mean()), abs=0)


def test_the_least_keep_where_it_is_enough_and_the_exact_one_where_nothing_else_is(eng):
    assert Bounded.fit(eng, TEXTS, 1e3, 0.9, **dict(HOW, candidates=[LEAST])).keep == LEAST
    assert Bounded.fit(eng, TEXTS, 1e-12, 0.9, **dict(HOW, candidates=[19, EXACT])).keep == EXACT


def test_a_smaller_keep_that_meets_it_by_chance_is_not_taken():
    def table(*meets):
        return Table([dict(keep=k, meets=m) for k, m in zip((20, 30, 40), meets, strict=True)])

    assert fitting.smallest(table(True, True, True)) == 20
    assert fitting.smallest(table(True, False, True)) == 40
    assert fitting.smallest(table(False, True, True)) == 30
    assert fitting.smallest(table(True, True, False)) is None


def test_default_candidates_go_from_the_least_keep_to_the_exact_length():
    config, make = small_config(sliding_window=WINDOW), lambda keep: Bounded(keep)
    keeps = fitting.keeps_of(make, config, 1000, None, "fit")
    assert keeps[0] == LEAST and keeps[-1] == EXACT
    assert LEAST + DRAFTS + 1 in keeps  # the default of Bounded
    assert keeps == sorted(set(keeps)) and len(keeps) <= 13
    assert fitting.keeps_of(make, config, LEAST + WINDOW + 3, None, "fit")[-1] == LEAST + 3
    one = fitting.keeps_of(lambda k: Bounded(k, layer=4), config, 1000, None, "fit")
    assert one == [LEAST]  # one layer's window is cut: the least keep is exact
    wide = fitting.keeps_of(make, dataclasses.replace(config, sliding_window=64), 1000, None, "fit")
    assert (wide[0], wide[-1], len(wide)) == (70, 64 + 2 * 63, 13) and 76 in wide
    assert wide[3] - wide[0] < wide[-1] - wide[-3]


# -------------------------------------------------------------------------------------- the check


def test_no_group_and_no_text_is_on_both_sides(fitted):
    first, second = fitted.calibration.groups
    assert "".join(first) == GROUPS[::2] and "".join(second) == GROUPS[1::2]
    report, check = fitted.calibration.report, fitted.calibration.check
    assert not {r["ids"] for r in report.passages} & {r["ids"] for r in check.passages}
    assert check.policies == ("keep 16",) and report.policies == tuple(f"keep {k}" for k in KEEPS)


def test_the_share_that_held_is_that_of_the_other_groups_tokens(fitted, whole):
    c = fitted.calibration
    assert fitted.keep == c.keep == 16
    groups = kls(whole, 16, GROUPS[1::2])
    held = [int((x <= c.tolerance).sum()) for x in groups]
    assert c.held.value == pytest.approx(sum(held) / sum(map(len, groups)), abs=0)
    assert c.by_group()["held"] == held and c.by_group()["tokens"] == [MORE] * 8
    assert 0 < c.held.low < c.held.value < 1 and c.held.value < c.held.high
    assert c.holds == (c.held.value >= 0.5)


def test_texts_that_check_have_no_say_and_order_does_not_matter(eng, fitted):
    c = fitted.calibration
    odd, how = range(1, len(GROUPS), 2), dict(HOW, candidates=[16, EXACT])
    others = [TEXTS[i][::-1] if i in odd else t for i, t in enumerate(TEXTS)]
    other = Bounded.fit(eng, others, c.tolerance, 0.5, **how)
    mine = [row for row in c.candidates if row["keep"] in (16, EXACT)]
    assert other.keep == 16 and other.calibration.candidates.rows == mine
    assert other.calibration.by_group().rows != c.by_group().rows
    turned = dict(HOW, groups=GROUPS[::-1], candidates=[EXACT, 16, 16])
    again = Bounded.fit(eng, iter(TEXTS[::-1]), c.tolerance, 0.5, **turned)
    assert again.keep == 16 and again.calibration.candidates.rows == mine
    assert again.calibration.by_group().rows == c.by_group().rows


def test_texts_know_their_module():
    eng = di.Engine.tiny(dtype="float64")
    texts = di.data.heldout(characters=300, count=4)
    found = Texts.of(eng, [*texts, "x" * 200, [5] * 60], 20, 5, None, "fit")
    assert found.groups == (*(t.module for t in texts), "4", "5")
    assert Texts.of(eng, texts, 20, 5, "aabb", "fit").groups == tuple("aabb")


# ------------------------------------------------------------------------------- a plain Bounded


def test_it_is_a_plain_bounded(eng, fitted):
    assert type(fitted) is Bounded and fitted == Bounded(keep=16)
    assert hash(fitted) == hash(Bounded(16))
    assert fitted != Bounded(17) and fitted != Bounded(16, mode="mask") and fitted != 25
    assert repr(fitted) == repr(Bounded(16)) == "Bounded(keep=16, mode='compact')"
    assert di.check(fitted).raise_for_failures()
    other, plain = eng.with_(replay=fitted), eng.with_(replay=Bounded(16))
    assert torch.equal(*(e.logits(TEXTS[0][:PROMPT])[-1] for e in (other, plain)))
    assert repr(other) == repr(plain) and other._repr_html_() == plain._repr_html_()
    assert other.slots["replay"].calibration is fitted.calibration
    assert "checked" not in repr(other) and "approximate: replay" in repr(other)


def test_a_subclass_may_have_settings_of_its_own():
    class Mine(Bounded):
        pass

    assert Mine(16) != Mine(16) and Mine(16) != Bounded(16) and Bounded(16) != Mine(16)
    one = Mine(16)
    assert one == one and one in {one}


def test_a_calibration_is_no_setting_and_is_of_one_keep(fitted):
    assert Bounded().calibration is None and str(Bounded(16)) == repr(Bounded(16))
    assert Bounded()._repr_html_() is None
    assert copy.copy(fitted).calibration is fitted.calibration
    assert dataclasses.replace(fitted, keep=19).calibration is None
    again = pickle.loads(pickle.dumps(fitted))
    assert again == fitted and str(again) == str(fitted)


def test_settings_are_those_asked(eng):
    tm = dict(mode="mask", layer=3, whole_window=True)
    got = Bounded.fit(eng, TEXTS, 1e3, 0.9, **dict(HOW, candidates=[LEAST]), **tm)
    assert got == Bounded(LEAST, **tm) and "mode='mask', layer=3" in str(got)


def test_both_sides_are_measured_behind_a_hit(eng):
    hit = 2 * WINDOW
    how = dict(HOW, candidates=[LEAST], sides="both", hit=hit)
    got = Bounded.fit(eng, TEXTS, 1e3, 0.9, **how)
    (both,) = got.calibration.report.plans.where(policy=f"keep {LEAST}")
    assert both["start"] == hit - WINDOW and f"{hit} of it found" in str(got)


# ------------------------------------------------------------------------------------ what it shows


class Printer:
    def __init__(self, depth):
        self.stack, self.said = [0] * depth, ""

    def text(self, said):
        self.said += said


def test_what_it_shows(fitted):
    c, text, page = fitted.calibration, str(fitted), fitted._repr_html_()
    assert text == repr(c) and text.startswith(repr(fitted) + "\n")
    tokens = sum(c.by_group()["tokens"])
    held = f"held for {sum(c.by_group()['held'])} of {tokens} tokens, {100 * c.held.value:.2f} %"
    for part in (held, "50 % of tokens", "on 9 groups", "on 8 other groups", "rows x layers"):
        assert part in text and part in page
    assert "as asked" in text if c.holds else "less than asked" in text
    chosen = [line for line in text.splitlines() if "yes, chosen" in line]
    assert len(chosen) == 1 and chosen[0].split()[0] == "16"
    lines = [line.split() for line in text.splitlines()]
    assert [line[0] for line in lines if line[0].isdigit()] == [str(k) for k in KEEPS[::-1]]
    assert "<b>16</b>" in page and "<b>19</b>" not in page
    assert all(len(line) <= 120 for line in text.splitlines())
    for depth, said in ((1, text), (2, repr(fitted))):
        printer = Printer(depth)
        fitted._repr_pretty_(printer, False)
        assert printer.said == said


def test_a_check_that_fails_says_so(fitted):
    within = Estimate(0.45, 0.4, 0.55)
    for held, words in ((Estimate(0.3, 0.2, 0.4), "less than asked;"), (within, "within the int")):
        c = dataclasses.replace(fitted.calibration, held=held)
        assert not c.holds and words in repr(c) and "less than asked" in c._repr_html_()


# -------------------------------------------------------------------------------------- refusals


def test_no_keep_that_is_good_enough_is_named_with_the_best(eng, whole):
    high = ends(whole, 0.9)
    words = rf"kl <= 1e-09 for 90 % of the tokens: the best is keep 19.*ends at {high[19]:.3g}"
    with pytest.raises(ValueError, match=rf"Bounded\.fit: no keep of 2.*{words}.*up to {EXACT}"):
        Bounded.fit(eng, TEXTS, 1e-9, 0.9, **dict(HOW, candidates=[16, 19]))


def test_it_says_what_to_do_instead(eng):
    def said(rows, **settings):
        table = Table([dict(zip(("keep", "error", "high", "meets"), r, strict=True)) for r in rows])
        return fitting.too_much(table, 0.1, 0.9, "kl", lambda k: Bounded(k, **settings), eng)

    assert "prompt >= 30 shows it" in said([(19, 0.2, 0.3, False)])
    assert "is rounding" in said([(EXACT, 0.2, 0.3, False)])
    assert "encoder side errs" in said([(EXACT, 0.2, 0.3, False)], sides="both")
    chance = said([(16, 0.05, 0.06, True), (19, 0.2, 0.3, False)])
    assert "best is keep 16" in chance and "keep 19 ends at 0.3, so it is chance" in chance


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(tolerance=0.0), r"tolerance=0\.0: want nats, more than 0"),
        (dict(tolerance=True), "tolerance=True"),
        (dict(tolerance=math.nan), "tolerance=nan"),
        (dict(quantile=1.0), r"quantile=1\.0: want a share"),
        (dict(quantile=99), "quantile=99: want a share"),
        (dict(quantile=0.999), r"have 36 tokens.* needs at least 999"),
        (dict(metric="agreement"), "metric='agreement': 'kl' or 'dlogprob'"),
        (dict(groups="aabbccddeeffgghhi"), "9 groups of texts: want at least 16"),
        (dict(groups="abc"), "3 groups for 17 texts"),
        (dict(texts=[*TEXTS[:16], TEXTS[1]]), "text 16 of group 'q' and text 1 of group 'b'"),
        (dict(candidates=[]), "no candidates"),
        (dict(candidates="30"), "candidates='30'"),
        (dict(candidates=[19.0]), "candidates: 19.0"),
        (dict(candidates=[EXACT + 1]), rf"at least keep \+ window = {EXACT + 1 + WINDOW} tokens"),
        (dict(candidates=[LEAST - 1]), rf"keep={LEAST - 1}.*needs keep >= {LEAST}"),
        (dict(candidates=None, prompt=20), rf"prompt=20.*want prompt >= {LEAST + WINDOW}"),
        (dict(prompt=PROMPT + 1), "take 35: give a longer text"),
        (dict(sides="encoder"), "sides='encoder' cuts nothing"),
        (dict(sides="both"), r"sides='both' and hit=0.*say how many"),
        (dict(hit=24), r"sides='decoder' and hit=24"),
        (dict(sides="both", hit=WINDOW), "is not replayed"),
        (dict(mode="Mask"), "compact, mask"),
        (dict(layer=1), r"layers 2 to 4"),
    ],
)
def test_refusals(eng, changes, words):
    given = dict(HOW, texts=TEXTS, tolerance=0.1, quantile=0.9) | changes
    with pytest.raises(ValueError, match=words):
        Bounded.fit(eng, **given)


def test_what_is_no_engine_and_a_model_without_a_cut_are_refused():
    with pytest.raises(TypeError, match="Bounded.fit: want an Engine"):
        Bounded.fit("nano", TEXTS, 0.1, 0.9, **HOW)
    with pytest.raises(ValueError, match="no layer to cut at"):
        Bounded.fit(small_engine("all 2"), TEXTS, 0.1, 0.9, **HOW)
