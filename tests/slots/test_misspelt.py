"""Methods that override nothing though they should, and the slot that an object means."""

import pytest

import deepinfer as di
from deepinfer.slots.attention import CSA2
from deepinfer.slots.experts import Local
from deepinfer.slots.registry import PROTOCOLS, resolve, slot_of
from deepinfer.slots.sampler import Philox
from deepinfer.slots.signatures import mismatches
from deepinfer.slots.verifier import BaseVerifier

TYPOS = [
    (CSA2, "attention", "select", "selct selekt selcet slect Select selectt"),
    (CSA2, "attention", "attend", "atend attned attendd"),
    (CSA2, "attention", "kv_spec", "kvspec kv_sepc kvSpec"),
    (CSA2, "attention", "plan", "paln plann"),
    (CSA2, "attention", "start", "strat"),
    (BaseVerifier, "verifier", "allocate", "alocate allocte alloctae"),
    (BaseVerifier, "verifier", "accept", "acept accpet"),
    (Local, "experts", "route", "rotue rute"),
    (Philox, "sampler", "distribution", "distrubution distributon"),
]
HELPERS = [
    (
        CSA2,
        "attention",
        "selected_blocks plan_rows score selected selection reselect plain stats "
        "planner attention extend state scores select_block window topk plot specs",
    ),
    (BaseVerifier, "verifier", "accepted acceptance allocator locate budgets observe reject"),
    (Local, "experts", "router routes routing routed dispatch combine format reroute"),
    (Philox, "sampler", "raw redraw drawn drop drew distribute distributions noise"),
]


def with_method(base, name, **others):
    return type("Mine", (base,), {"__module__": "mine", name: lambda self: None, **others})


@pytest.mark.parametrize("base, slot, meant, names", TYPOS)
def test_a_misspelt_method_is_told(base, slot, meant, names):
    for name in names.split():
        words = f"method '{name}' is not part of {slot}; did you mean '{meant}'?"
        mine = with_method(base, name)()
        assert mismatches(mine, PROTOCOLS[slot]) == [words]
        with pytest.raises(TypeError) as e:
            resolve(slot, mine)
        assert words in str(e.value)
    report = di.check(mine)
    assert not report and words in report.results[0].case


@pytest.mark.parametrize("base, slot, names", HELPERS)
def test_a_helper_is_no_mistake(base, slot, names):
    for name in names.split():
        assert mismatches(with_method(base, name)(), PROTOCOLS[slot]) == [], name
    _ = resolve(slot, with_method(base, "_selct"))


def test_a_near_name_beside_the_method_itself_is_a_helper():
    both = with_method(CSA2, "selct", select=CSA2.select)
    assert mismatches(both(), PROTOCOLS["attention"]) == []
    above = type("Above", (with_method(CSA2, "selct"),), {"select": CSA2.select})
    assert mismatches(above(), PROTOCOLS["attention"]) == []
    below = type(
        "Below",
        (with_method(CSA2, "select_one", select=CSA2.select),),
        {
            "__module__": "mine",
            "selct": CSA2.select,
        },
    )
    assert "did you mean 'select'" in mismatches(below(), PROTOCOLS["attention"])[0]


def test_the_slot_has_the_most_methods_present():
    class Near:
        def kv_spec(self, config, layer): ...

        def plan(self, batch, keys, queries, floor, cache): ...

        def attend(self, layer, q, kv, selected, plan): ...

        def selct(self, layer, index, kv, plan, carried): ...

    class Plans:
        exact = True

        def plan(self, prompt, config): ...

    assert slot_of(Near()) == slot_of(Near) == "attention" and slot_of(Plans()) == "replay"
    report = di.check(Near())
    assert report.slot == "attention" and "'select' is missing (it has 'selct')" in repr(report)
