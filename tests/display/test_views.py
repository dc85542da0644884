"""What a person sees of configs, plans, names, reports and texts: complete, short and deterministic."""

import dataclasses
import re

import pytest

import deepinfer as di
from deepinfer.display import html, names
from deepinfer.slots.protocols import Prompt


@pytest.fixture(scope="module")
def eng():
    return di.Engine.tiny(dtype="float64", max_model_len=256).with_(verifier="fixed")


def longest(text: str) -> int:
    return max(map(len, text.splitlines()))


def test_a_model_config_shows_every_field_and_marks_what_differs_from_the_release(eng):
    text, page = repr(eng.config), eng.config._repr_html_()
    differs = eng.config.diff(di.ModelConfig.v41_flash())
    for f in dataclasses.fields(eng.config):
        if f.name == "extra":
            continue
        found = re.search(rf"(?<!\w){f.name}=(?:\(.*\)|[^ *\n]+)(\*?)(?= \w+=|$)", text, re.M)
        assert found and (found[1] == "*") == (f.name in differs), f.name
        assert f">{f.name}</span>" in page
    assert longest(text) < 140 and "36 fields differ" in text
    assert "0 differ" in di.ModelConfig.v41_flash()._repr_html_()
    assert "no field differs" in repr(di.ModelConfig.v41_flash())


def test_an_engine_config_prints_the_call_that_makes_it():
    for config in (di.EngineConfig(), di.EngineConfig.production(), di.EngineConfig(seed=3)):
        assert eval(repr(config), {"EngineConfig": di.EngineConfig}) == config
    assert repr(di.EngineConfig()) == "EngineConfig()"
    page = di.EngineConfig.production()._repr_html_()
    assert "10 of 18 settings differ" in page and "max_context" in page


def test_a_plan_names_the_rows_of_every_layer(eng):
    plan = di.replay.Bounded(keep=40).plan(Prompt(200), eng.config)
    text, page = repr(plan), plan._repr_html_()
    assert "approximate" in text and "layers 0-4" in text and "rows 160..end" in text
    assert "layers 5-9" in page and "160..end" in page and plan.why in text
    hit = eng.slots["replay"].plan(Prompt(200, 96, 96), eng.config)
    assert (
        "block KV below 96 is read" in repr(hit)
        and "read from the prefix cache" in hit._repr_html_()
    )


def test_names_are_a_list_shown_as_a_tree_that_loses_none(eng):
    found = eng.trace_names()
    assert found == list(found) and isinstance(found, list)
    shown = [
        f"{layer}.{part}" if layer else part
        for parts, layers in names._alike(found)
        for layer in layers
        for part in parts
    ]
    assert sorted(shown) == sorted(found)
    assert {names._split(n)[1] for n in found} <= set(names.SHAPES)
    page = found._repr_html_()
    assert page.count("<details") < len(found) / 8 and "t m d" in page
    assert len(repr(found).splitlines()) < 15


def test_the_shapes_of_names_are_those_of_a_trace(eng):
    with eng.trace(*eng.trace_names()) as t:
        eng.generate([[5, 6, 7, 8] * 6], max_tokens=3, seed=1)
    for name in t.names:
        shape = names.SHAPES[names._split(name)[1]][0]
        assert len(shape.split()) == t[name].dim(), (name, shape, t[name].shape)


def test_reports_and_texts_have_pages():
    report = di.check(di.verifier.Fixed(1))
    assert (
        report._repr_html_().count("<tr") == len(report.results) + 1
        and "holds" in report._repr_html_()
    )
    text = di.data.heldout()[0]
    assert text.path in text._repr_html_() and "<script" not in text._repr_html_()


def test_tokens_that_are_blank_or_maths_can_be_read(eng):
    page = di.Table([dict(text="\n"), dict(text="\t"), dict(text="$x$")])._repr_html_()
    assert "\u21b5" in page and "\u2192" in page and html.NO_MATHS in page
    (c,) = out = eng.generate(["a $b$\n c"], max_tokens=3, seed=0)
    assert c.prompt == "a $b$\n c" and repr(c.prompt) in repr(c)
    assert "prompt" in c._repr_html_() and html.NO_MATHS in c._repr_html_()
    assert out.text == [c.text] and list(out.to_pandas()["text"]) == out.text


def test_a_comparison_shows_the_other_engine_s_own_text(eng):
    base = eng.with_(verifier="off")
    dense = base.with_(attention=di.attention.CSA2(topk=1))
    page = di.compare(base, dense, [[7, 8, 9] * 20], continuation=12)._repr_html_()
    assert "own text" in page


def test_lists_of_request_outputs_are_short(eng):
    llm = di.LLM(eng, max_model_len=128, decode_sequence=False)
    out = llm.generate(["hello"], di.LLM.SamplingParams(max_tokens=20, temperature=0))
    assert len(repr(out)) < 800 and "1 lists of RequestOutput" in repr(out)
    assert len(out._repr_html_()) < 20_000
