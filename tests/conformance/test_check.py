"""check itself: what it runs, what it says, and that every registered variant passes."""

import re
import time

import pytest
import torch

import deepinfer as di
from deepinfer.conformance import ConformanceError, check
from deepinfer.slots.attention import CSA2
from deepinfer.slots.protocols import Selected
from deepinfer.slots.registry import REGISTRIES
from deepinfer.slots.sampler import Philox

VARIANTS = [(slot, name) for slot, r in REGISTRIES.items() for name in r.names()]


@pytest.mark.parametrize("slot, name", VARIANTS, ids=[f"{s}-{n}" for s, n in VARIANTS])
def test_every_registered_variant_holds_its_laws(slot, name):
    began, threads = time.process_time(), torch.get_num_threads()
    torch.set_num_threads(1)
    report = check(name, slot=slot)
    torch.set_num_threads(threads)
    report.raise_for_failures()
    assert report.slot == slot and len(report.results) > 5
    assert time.process_time() - began < 20  # five seconds on a quiet machine


class NoDraw(Philox):
    draw = None


class Shy(Philox):
    """Draws from another law."""

    def draw(self, dist, keys):
        out = super().draw(dist, keys)
        return type(out)((out.tokens + 1) % dist.probs.shape[1], out.logprobs)


def test_the_report():
    good, bad = di.check(Philox()), di.check(Shy)
    assert good and not bad and good.raise_for_failures() is good
    assert repr(good).startswith(
        "Philox() as sampler: all 14 laws hold\n  ok      its methods fit the protocol"
    )
    with pytest.raises(ConformanceError, match="draws follow the law"):
        bad.raise_for_failures()
    assert {r.status for r in bad.results} == {
        "ok",
        "FAILED",
        "not run",
    }  # Shy does not claim exact
    rows = bad.table().to_pandas() if hasattr(bad.table(), "to_pandas") else None
    assert (
        rows is not None
        and list(rows.columns) == ["law", "status", "case"]
        and len(rows) == len(bad.results)
    )


def test_what_does_not_fit_runs_no_law():
    report = check(NoDraw(), slot="sampler")
    assert [r.status for r in report.results] == ["FAILED"] + ["not run"] * (
        len(report.results) - 1
    )
    assert "method 'draw' is missing" in report.results[0].case


def test_the_object_itself_is_never_used():
    class Counts(Philox):
        def __init__(self):
            self.exact, self.calls = True, []

        def draw(self, dist, keys):
            self.calls.append(1)
            return super().draw(dist, keys)

    obj = Counts()
    assert check(obj) and obj.calls == []


def test_names_and_slots():
    with pytest.raises(ValueError, match="pass slot="):
        check("philox")
    with pytest.raises(ValueError, match="did you mean 'sampler'"):
        check(Philox(), slot="sample")
    with pytest.raises(TypeError, match="no method of any slot"):
        check(object())


def test_an_exception_is_the_case_that_broke_the_law():
    class Raises(Philox):
        def draw(self, dist, keys):
            if len(keys.seed) == 2:
                raise RuntimeError("two rows")
            return super().draw(dist, keys)

    report = check(Raises())
    case = {r.law: r.case for r in report.failures}
    told = case.pop("any number of rows is legal, also none; shapes are [t, v] and [t]")
    line = Raises.draw.__code__.co_firstlineno + 2
    assert told == (
        f"rows 2, vocabulary 3: raised RuntimeError: two rows (test_check.py line {line}, in draw)"
    )
    assert not case and [r.case for r in report.results].count("same error") > 2


def test_a_mistake_is_told_once_with_its_line():
    class Unknown(CSA2):
        def select(self, layer, index, kv, plan, carried):
            return super().select(layer, index, kv, plan, carred)

    class Shape(CSA2):
        def select(self, layer, index, kv, plan, carried):
            return Selected(torch.cat((plan.queries.positions[:, None], index.query), 1))

    class Kind(CSA2):
        def select(self, layer, index, kv, plan, carried):
            return plan.visible[layer.ratio]

    class Whole(CSA2):
        def attend(self, layer, q, kv, selected, plan):
            return super().attend(layer, q, kv, plan.visible, plan)

    for cls, words in (
        (Unknown, r"raised NameError: .*carred.* \(test_check.py line {}, in select\)"),
        (Shape, r"raised RuntimeError: .* \(test_check.py line {}, in select\)"),
        (Kind, r"raised TypeError: select gives a Tensor, it should give a Selected$"),
        (Whole, r"raised AttributeError: 'dict' .* \(test_check.py line {}, in attend\)"),
    ):
        report = di.check(cls())
        method = cls.attend if cls is Whole else cls.select
        line = method.__code__.co_firstlineno + 1
        raised = [r for r in report.failures if "raised" in r.case]
        assert len(raised) == 1 and re.search(words.format(line), raised[0].case), report
        assert "/" not in raised[0].case
        same = [r for r in report.results if r.case == "same error"]
        assert len(same) > 5 and {r.status for r in same} == {"not run"}
        assert not report and len(report.failures) == 1


def test_two_mistakes_are_told_as_two():
    class Two(Philox):
        def distribution(self, logits, params, mask=None):
            if mask is not None:
                raise KeyError("mask")
            return super().distribution(logits, params, mask)

        def draw(self, dist, keys):
            raise RuntimeError("draw")

    cases = [r.case for r in check(Two()).failures]
    assert len(cases) == 2 and "KeyError" in "".join(cases) and "in draw" in "".join(cases)


def test_only_runs_the_laws_with_these_words():
    report = check(CSA2(), only="later keys")
    assert report and [r.law for r in report.results][1:] == ["changing later keys changes nothing"]
    assert "all 2 laws hold" in repr(report)
    with pytest.raises(ValueError, match=r"'padding rows change nothing(?s:.*)- a row picks"):
        check(CSA2(), only="pading")
    with pytest.raises(ValueError, match="no law of attention has these words"):
        check(CSA2(), only="futre")
    with pytest.raises(TypeError, match="words of a law"):
        check(CSA2(), only=3)


def test_one_law_is_singular():
    fits = check(CSA2(), only="methods fit")
    assert repr(fits).startswith("CSA2() as attention: 1 law holds\n") and fits
    assert "1 of 1 law broken" in repr(check(NoDraw(), slot="sampler"))
