"""What help() shows of a method with many keywords: types as words, real defaults, short lines."""

import dataclasses
import inspect
import pydoc
from types import SimpleNamespace

import pytest

import deepinfer as di
from deepinfer.engine.background.background import Background
from deepinfer.engine.engine import Engine

METHODS = [
    *(getattr(Engine, n) for n in ("nano", "tiny", "from_pretrained", "with_", "generate", "add")),
    *(getattr(Engine, n) for n in ("stream", "astream", "fork")),
    Background.add,
    Background.fork,
]
CHANGE = ("with_", "fork")  # what is not given stays as it is


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.__qualname__)
def test_help_is_readable(method):
    said = pydoc.render_doc(method, renderer=pydoc.plaintext).split("\n\n")[1]
    head = said[: said.index("->")]
    assert not [w for w in ("ForwardRef", "Ellipsis", "'int", "'str", "<", "Unpack") if w in head]
    assert max(map(len, head.split("\n"))) <= 95 and head.count(" *,") == 1
    assert method.__doc__.split("\n")[0] in said


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.__qualname__)
def test_the_defaults_are_those_that_hold(method):
    real = {f.name: f.default for f in dataclasses.fields(di.EngineConfig)}
    if "temperature" in inspect.signature(method).parameters:
        real |= {f.name: f.default for f in dataclasses.fields(di.SamplingParams)}
    shown = {p.name: p for p in inspect.signature(method).parameters.values() if p.name in real}
    if method is Engine.tiny:
        assert shown.pop("seed").default == 0  # of the weights
    assert len(shown) >= 8
    for name, p in shown.items():
        if method.__name__ in CHANGE:
            new = method.__name__ == "fork" and name == "seed"
            assert str(p).endswith("= new" if new else "= unchanged")
        else:
            assert p.default == real[name] and type(p.default) is type(real[name])


def test_the_slots_defaults_are_those_of_an_engine():
    shown = inspect.signature(Engine.tiny).parameters
    named = {name: shown[name].default for name in ("attention", "verifier", "sampler", "grammar")}
    assert repr(Engine.tiny(**named)) == repr(Engine.tiny())


def test_a_bound_method_s_signature_is_wrapped_too_and_a_short_one_is_one_line():
    from deepinfer.engine.keywords import Wrapped

    eng = SimpleNamespace()
    bound = inspect.signature(Engine.add.__get__(eng))
    assert isinstance(bound, Wrapped) and "self" not in bound.parameters and "\n" in str(bound)
    assert str(bound.replace(parameters=[])) == "() -> int"
