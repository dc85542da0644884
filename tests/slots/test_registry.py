"""Names, classes and instances; signatures in words; promises; starting."""

import inspect
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from deepinfer.slots import protocols, registry
from deepinfer.slots.grammar import NoGrammar
from deepinfer.slots.protocols import SLOTS
from deepinfer.slots.registry import Registry, promises, resolve, slot_of, start
from deepinfer.slots.replay import Exact
from deepinfer.slots.sampler import Greedy, Philox
from deepinfer.slots.signatures import mismatches, protocol_methods
from deepinfer.slots.verifier import BaseVerifier, Fixed, Off

OWN = ("sampler", "verifier", "grammar", "replay")


@pytest.mark.parametrize("slot", OWN)
def test_every_name_makes_an_object_that_fits(slot):
    for name in registry.registry(slot).names():
        obj = resolve(slot, name)
        assert type(obj) is registry.registry(slot).get(name)
        assert resolve(slot, type(obj)).__class__ is type(obj) and resolve(slot, obj) is obj
        assert mismatches(obj, registry.PROTOCOLS[slot]) == [] and slot_of(obj) == slot


@pytest.mark.parametrize(
    "value, error, words",
    [
        ("fixd", ValueError, "did you mean 'fixed'.*the names are fixed, off"),
        ("fixed:3", ValueError, r"takes no settings; pass an instance, di.verifier.Fixed\(3\)"),
        ("fixed(3)", ValueError, r"di.verifier.Fixed\(3\)"),
        (None, TypeError, "want a name .*'fixed', 'off'"),
        ({"name": "fixed"}, TypeError, "want a name"),
        (3, TypeError, "want a name"),
        (Philox(), TypeError, r"'accept' is missing: Verifier.accept\(self, draft: Draft, target"),
        (Philox, TypeError, "Philox is no verifier variant"),
    ],
)
def test_what_does_not_fit_says_so(value, error, words):
    with pytest.raises(error, match=words):
        resolve("verifier", value)


def test_unknown_slot():
    with pytest.raises(ValueError, match="did you mean 'verifier'"):
        resolve("verifer", "off")


def test_a_class_that_needs_settings():
    class Deep(Fixed):
        def __init__(self, n):
            super().__init__(n)

    with pytest.raises(
        TypeError, match=r"Deep cannot be made without arguments.*pass an instance, Deep\(n\)"
    ):
        resolve("verifier", Deep)
    assert resolve("verifier", Deep(2)).max_draft == 2


def test_registering():
    own = Registry("sampler", protocols.Sampler)

    @own.register("mine")
    class Mine(Philox):
        pass

    assert own.get("mine") is Mine and isinstance(own.resolve("mine"), Mine)
    with pytest.raises(ValueError, match="already has 'mine'.*register .*Other under another name"):

        @own.register("mine")
        class Other(Philox):
            pass

    for bad in ("", "a b", 3, "a:1"):
        with pytest.raises(ValueError, match="name must be"):
            own.register(bad)


def test_a_cell_run_again_replaces_its_own():
    own = Registry("sampler", protocols.Sampler)

    def cell(module, qualname="Mine"):
        return own.register("mine")(
            type("Mine", (Philox,), {"__module__": module, "__qualname__": qualname})
        )

    cell("__main__")
    second = cell("__main__")
    assert own.get("mine") is second
    for module, qualname in [("__main__", "Other"), ("elsewhere", "Mine")]:
        with pytest.raises(ValueError, match="already has"):
            cell(module, qualname)


def test_signatures_in_words():
    class Bad:
        def distribution(self, logits, mask=None, params=None): ...

        def draw(self, dist): ...

    said = mismatches(Bad(), protocols.Sampler)
    assert "parameter 2 is named 'mask', it should be 'params'" in said[0]
    assert any("draw: parameter 2, 'keys', is missing" in s for s in said)
    assert (
        "the protocol's line is Sampler.draw(self, dist: Dist, keys: RowKeys) -> Sampled"
        in said[-1]
    )

    class Near(Philox):
        draw = None

        def drew(self, dist, keys): ...

    assert "method 'draw' is missing (it has 'drew')" in mismatches(Near(), protocols.Sampler)[0]

    class More(Philox):
        def draw(self, dist, keys, noise): ...

    assert "parameter 'noise' is one too many" in mismatches(More(), protocols.Sampler)[0]

    class Strict(Philox):
        def distribution(self, logits, params, mask): ...

    assert "'mask' needs a default, None" in mismatches(Strict(), protocols.Sampler)[0]

    class Loose(Philox):
        def draw(self, *args): ...

        def distribution(self, logits, params, mask=None, extra=1): ...

    assert mismatches(Loose(), protocols.Sampler) == []

    class Old(Philox):
        version = 0

    assert (
        "written for version 0 of Sampler, this is version 1"
        in mismatches(Old(), protocols.Sampler)[0]
    )

    class Deep(Off):
        max_draft = True

    assert "attribute 'max_draft' must be an integer" in mismatches(Deep(), protocols.Verifier)[0]


@pytest.mark.parametrize("slot", SLOTS)
def test_protocols_state_their_methods(slot):
    protocol = registry.PROTOCOLS[slot]
    assert protocol_methods(protocol)
    for name in protocol_methods(protocol):
        assert list(inspect.signature(getattr(protocol, name)).parameters)[0] == "self"


def test_slot_of_asks_when_nothing_fits():
    with pytest.raises(TypeError, match="no method of any slot"):
        slot_of(object())


def test_promises_end_where_a_deciding_method_is_overridden():
    class Renamed(Philox):
        note = "nothing that decides is overridden"

    class Changed(Philox):
        def draw(self, dist, keys): ...

    class Restated(Changed):
        exact = True

    class Again(Restated):
        def draw(self, dist, keys): ...

    assert promises(Philox()) == promises(Renamed()) == registry.Promises(True, True, True)
    assert promises(Changed()) == registry.Promises(False, False, False)
    assert promises(Restated()) == registry.Promises(True, False, False)
    assert not promises(Again()).exact and not promises(Greedy()).exact

    class Scheduling(BaseVerifier):
        def allocate(self, fresh, budget): ...

    assert promises(Scheduling()).exact and promises(Exact()).exact and promises(NoGrammar()).exact

    @dataclass(frozen=True, slots=True)
    class Setting:
        exact: bool = True

        def plan(self, prompt, config): ...

    assert (
        promises(Setting(), "replay").exact and not promises(Setting(exact=False), "replay").exact
    )
    obj = Philox()
    obj.exact = False
    assert not promises(obj).exact


def test_engines_never_share_an_object():
    obj = Philox()
    obj.learned = [1]
    own = start(obj, None)
    own.learned.append(2)
    assert own is not obj and obj.learned == [1]

    class Returns:
        def __init__(self, what):
            self.what = what

        def start(self, info):
            return self if self.what == "self" else self.what

    shared = Returns("self")
    assert start(shared, None) is not shared
    with pytest.raises(TypeError, match="start\\(info\\) returned None"):
        start(Returns(None), None)
    info = SimpleNamespace(config=SimpleNamespace(max_draft=5))
    fixed = Fixed(2)
    assert start(fixed, info) is not fixed


@pytest.mark.parametrize("slot", SLOTS)
def test_a_subclass_is_never_shown_as_its_base(slot):
    for name in registry.registry(slot).names():
        base = registry.registry(slot).get(name)
        assert repr(type("Half", (base,), {})()).startswith("Half("), name

    class Half(Fixed):
        def __init__(self, n, share=1):
            super().__init__(n, rule="rejection")
            self.share = share

    assert repr(Half(5, 2)) == "Half(5, share=2, rule='rejection')"
    assert repr(Fixed()) == "Fixed(None)" and repr(Fixed(2)) == "Fixed(2)"


def test_an_inherited_repr_that_names_the_base_is_refused():
    class Named(Philox):
        def __repr__(self):
            return "Named()"

    class Other(Named):
        pass

    assert repr(resolve("sampler", Named())) == "Named()"
    with pytest.raises(
        TypeError, match=r"Other is no sampler variant:\n.*shows itself as Named\(\)"
    ):
        resolve("sampler", Other)


def test_a_wrong_class_is_refused_where_it_is_registered():
    """With the words that `resolve` has, and without making an object."""

    class Bad(Philox):
        def __init__(self, needed): ...

        def draw(self, dist): ...

    own = Registry("sampler", protocols.Sampler)
    with pytest.raises(
        TypeError, match="(?s)Bad is no sampler variant:.*'keys', is missing"
    ) as said:
        own.register("bad")(Bad)
    with pytest.raises(TypeError) as later:
        resolve("sampler", Bad(1))
    assert str(said.value) == str(later.value) and "bad" not in own._variants
    with pytest.raises(TypeError, match="'accept' is missing"):
        Registry("verifier", protocols.Verifier).register("none")(type("None_", (), {}))

    class Late(BaseVerifier):  # max_draft comes from the constructor
        max_draft = None

        def __init__(self):
            self.max_draft = 3

        @staticmethod
        def accept(draft, target): ...

        @classmethod
        def allocate(cls, fresh, budget): ...

    registered = Registry("verifier", protocols.Verifier).register("late")(Late)
    assert registered is Late and mismatches(Late, protocols.Verifier) == []
