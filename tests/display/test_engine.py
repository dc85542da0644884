"""What an engine shows: everything that makes its numbers, nothing that changes between runs."""

import re

import pytest

import deepinfer as di
from deepinfer.display.engine import changes, slot_text
from deepinfer.display.layers import layers_html, layers_text


@pytest.fixture(scope="module")
def engine() -> di.Engine:
    return di.Engine.tiny(dtype="float32", max_model_len=128, max_num_seqs=2)


def shown(eng) -> list[str]:
    return [repr(eng), eng._repr_html_()]


def test_every_part_is_named(engine):
    c = engine.config
    for text in shown(engine):
        assert "tiny(seed=0)" in text and engine.fingerprint in text and "exact" in text
        assert f"{c.num_layers} layers" in text and f"vocabulary {c.vocab_size}" in text
        assert "max_model_len=128, max_num_seqs=2" in text and "page_size" not in text
        assert "cpu, float32, fidelity 1" in text and "approximate" not in text
        for name, slot in engine.slots.items():
            assert name in text and type(slot).__name__ in text
    parameters = sum(p.numel() for p in engine.model.parameters())
    assert f"{di.fmt(parameters / 1e6)} M parameters" in repr(engine)


def test_what_is_approximate_says_so(engine):
    eng = engine.with_(attention="dense")
    assert repr(eng).startswith("Engine of tiny(seed=0): approximate: attention (Dense)\n")
    assert "approximate: attention (Dense)" in eng._repr_html_()

    class Halved(di.attention.CSA2):
        """Overrides the selection and claims nothing, so nothing is promised."""

        def select(self, layer, index, kv, plan, carried):
            return super().select(layer, index, kv, plan, carried)

    for text in shown(engine.with_(attention=Halved())):
        assert "approximate: attention (Halved)" in text


def test_shown_engines_hold_no_time_and_no_address(engine):
    class Nameless(di.replay.Exact):
        __repr__ = object.__repr__

        def __init__(self, keep=3):
            self.keep, self._secret, self.table = keep, 5, object()

    eng = engine.with_(replay=Nameless(), verifier="fixed", num_pages=40)
    eng.generate("The walk of a token", max_tokens=6)
    eng.score("The walk")
    other = engine.with_(replay=Nameless(), verifier="fixed", num_pages=40)
    other.generate("The walk of a token", max_tokens=6)
    other.score("The walk")
    for text, again in zip(shown(eng), shown(other)):
        assert text == again
        assert "Nameless(keep=3)" in text
        assert not re.search(r"0x[0-9a-f]{4}|\bsecond|\d ?ms\b|tokens/s|/(root|home|tmp)/", text)


def test_slots_of_a_cell_are_shown_by_their_settings():
    class Mine:
        def __init__(self, name):
            self.name, self.n, self._hidden = name, 2, 7

    assert slot_text(Mine("<script>")) == "Mine(name='<script>', n=2)"
    assert slot_text(di.verifier.Fixed(3)) == repr(di.verifier.Fixed(3))


def test_text_of_a_user_is_escaped(engine):
    class Odd(di.replay.Exact):
        def __repr__(self):
            return "<script>alert('slot')</script>"

    eng = engine.with_(replay=Odd())
    out = eng.generate(["<script>alert(1)</script>", "<b>"], max_tokens=3)
    for item in out:
        object.__setattr__(item, "pieces", ("<script>", "&amp;", '"'))
    pieces = [
        eng._repr_html_(),
        out._repr_html_(),
        out[0]._repr_html_(),
        out.table()._repr_html_(),
        out[0].table()._repr_html_(),
        eng.score("<script>alert(1)</script>")._repr_html_(),
        di.compare(eng, engine, ["<script>alert(1)</script>"], continuation=2)._repr_html_(),
    ]
    assert "&lt;script&gt;" in pieces[0] and "&lt;script&gt;" in pieces[1]
    for page in pieces:
        assert "<script" not in page and "<b>&" not in page


def test_memory_and_what_ran(engine):
    eng = engine.with_(verifier="fixed")
    assert "cache not made yet" in repr(eng) and " ran " not in repr(eng)
    eng.generate("The walk of a token", max_tokens=6)
    s = eng.stats
    drafts = sum(s.drafted.values())
    said = f"{s.steps} steps (1 prefill, {s.steps - 1} decode), 6 tokens, "
    for text in shown(eng):
        assert said + f"{sum(s.accepted.values())} of {drafts} verified drafts accepted" in text
    page = eng._repr_html_()
    for row in [*eng.memory, *eng.kernels]:
        assert row.get("component", row.get("op")) in page
    ops = {row["op"] for row in eng.kernels}
    counted = re.search(r"kernels that ran: ([^<]*)<", page).group(1)
    assert sum(int(n) for n in re.findall(r"\d+", counted)) >= len(ops)
    eng.close()
    for text in shown(eng):
        assert "closed" in text


def test_changes_are_what_differs(engine):
    assert changes(engine, engine.with_()) == ""
    eng = engine.with_(attention="dense", fidelity=0, kernels={"linear": "reference"})
    said = changes(engine, eng)
    assert "attention=Dense" in said and "fidelity=0" in said and "'linear': 'reference'" in said
    assert "experts" not in said and "device" not in said
    other = di.Engine.tiny(seed=1, dtype="float64", max_model_len=128, max_num_seqs=2)
    said = changes(engine, other)
    assert f"weights=tiny(seed=1) ({other.fingerprint})" in said and "dtype=float64" in said


# ---------------------------------------------------------------------------------------- layers


@pytest.mark.parametrize("release", [True, False])
def test_layers_show_roles_and_sources(engine, release):
    c = di.ModelConfig.v41_flash() if release else engine.config
    page = layers_html(c)
    for layer, role in enumerate(c.roles):
        assert f'title="layer {layer}\n{role}: ' in page
    for source in c.kv_source_layers:
        reads = sum(c.kv_source(layer) == source for layer in range(c.num_layers))
        assert re.search(rf'colspan="{reads}"[^>]*><div [^>]*>{source}</div>', page)
    assert page.count("adds the n-gram memory") == len(c.engram_layer_ids)
    assert page.count("feed the drafter") == len(c.dspark_target_layer_ids)
    assert page.count("publishes the candidate blocks") == 1
    letters = (
        layers_text(c).replace("encoder ", "").replace(", decoder ", "").replace(", drafter ", "")
    )
    assert len(letters) == len(c.roles)
    assert [letters.count(x) for x in "Fx"] == [c.roles.count("full"), c.roles.count("reindex")]


def test_a_model_without_parts_shows_none_of_them():
    c = di.ModelConfig.v41_flash()
    plain = c.replace(
        compress_ratios=(0,) * c.num_layers,
        kv_source_layer_ids=(),
        index_source_layer_ids=(),
        candidate_source_layer_id=None,
        engram_layer_ids=(),
        engram_num_embeddings=(),
        num_nextn_predict_layers=0,
        dspark_target_layer_ids=(),
    )
    page = layers_html(plain)
    assert "drafter" not in page and "n-gram" not in page and "KV of" not in page
    assert layers_text(plain) == "encoder " + "w" * c.num_layers
