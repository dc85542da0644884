"""check itself: what it runs, what it says, and that every registered variant passes."""

import time

import pytest
import torch

import deepinfer as di
from deepinfer.slots.conformance import ConformanceError, check
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

    case = {r.law: r.case for r in check(Raises()).failures}
    assert case["any number of rows is legal, also none; shapes are [t, v] and [t]"] == (
        "rows 2, vocabulary 3: raised RuntimeError: two rows"
    )
