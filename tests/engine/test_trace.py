"""Trace: names, coordinates, edits. In float64: there shapes of the same work give one number."""

import pytest
import torch

import deepinfer as di

LAYER = "layers.3.attn.out"


@pytest.fixture(scope="module")
def engine() -> di.Engine:
    """A tiny engine in float64, where the order of a sum does not show."""
    return di.Engine.tiny(dtype="float64", max_model_len=256, max_num_seqs=4)


@pytest.fixture(scope="module")
def drafting(engine) -> di.Engine:
    return engine.with_(verifier="fixed")


@pytest.fixture(scope="module")
def long_text() -> str:
    """More compressed entries than the candidate blocks hold."""
    return "The walk of a token through the layers of the model, again and again, " * 5


def walk(engine, run) -> list[str]:
    """Names in the order in which a run first shows them."""
    seen: dict[str, None] = {}
    with engine.trace(edit=lambda x, at: seen.setdefault(at.name)):
        run()
    return list(seen)


@pytest.mark.parametrize("kind", ["plain", "drafting"])
def test_names_listed_are_names_seen(kind, engine, drafting, long_text):
    eng = engine if kind == "plain" else drafting
    assert walk(eng, lambda: eng.generate(long_text, max_tokens=2)) == eng.trace_names()
    assert any(n.startswith("mtp.") for n in eng.trace_names()) == (kind == "drafting")
    with eng.trace("*.attn.out", "logits") as t:
        eng.logits(long_text)
    assert t.names == [
        n for n in eng.trace_names() if n.startswith("layers") and n.endswith("attn.out")
    ] + ["logits"]
    assert [*t] == t.names and len(t) == len(t.names) and "logits" in t and "final" not in t


def test_a_value_that_was_not_computed_says_so(engine):
    with engine.trace("*.candidates", LAYER) as t:
        engine.logits("short")
    assert t.names == [LAYER]
    with pytest.raises(KeyError, match="candidates was not computed while"):
        t["layers.5.attn.candidates"]


def test_unknown_names_get_the_nearest(engine, drafting):
    with pytest.raises(KeyError, match="'layers.3.atn.out'.*layers.3.attn.out"):
        engine.trace("layers.3.atn.out")
    with pytest.raises(KeyError, match="'mtp.0.in'.*with a verifier that drafts"):
        engine.trace("mtp.0.in")
    drafting.trace("mtp.0.in")
    with engine.trace(LAYER) as t:
        engine.logits("short")
    with pytest.raises(KeyError, match="'layers.3.attn.ou'.*this trace chose layers.3.attn.out"):
        t["layers.3.attn.ou"]


# --------------------------------------------------------------------------------- coordinates


def test_coordinates_of_prefill_and_decode(engine):
    long, short = engine.encode("The walk of a token"), engine.encode("ab")
    with engine.trace(LAYER, "logits") as t:
        a = engine.add(long, max_tokens=3, temperature=0.0)
        b = engine.add(short, max_tokens=2, temperature=0.0)
        while engine.unfinished:
            engine.step()
    x, n, m = t[LAYER], len(long), len(short)
    assert x.request.tolist() == [a] * n + [b] * m + [a, b] + [a]
    assert x.position.tolist() == [*range(n), *range(m), n, m, n + 1]
    first = x.step[0].item()
    assert x.step.tolist() == [first] * (n + m) + [first + 1] * 2 + [first + 2]
    assert x.accepted.all() and x.shape == (n + m + 3, engine.config.hidden_size)
    assert t["logits"].position.tolist() == [n - 1, m - 1, n, m, n + 1]
    assert type(x[0]) is torch.Tensor  # coordinates belong to all rows or to none


def test_coordinates_of_a_chunked_prefill(engine):
    with engine.with_(max_num_batched_tokens=4, max_num_seqs=1) as chunked:
        ids = chunked.encode("The walk of a token begins")
        with chunked.trace(LAYER) as t:
            out = chunked.generate(ids, max_tokens=1, temperature=0.0)
    with engine.trace(LAYER) as whole:
        assert engine.generate(ids, max_tokens=1, temperature=0.0)[0].token_ids == out[0].token_ids
    assert t[LAYER].position.tolist() == list(range(len(ids)))
    assert t[LAYER].step.tolist() == [p // 4 for p in range(len(ids))]
    torch.testing.assert_close(t[LAYER] + 0, whole[LAYER] + 0, rtol=1e-9, atol=1e-9)


def test_rows_of_rejected_drafts_are_not_accepted(drafting):
    ids = drafting.encode("The walk of a token")
    with drafting.trace(LAYER, "mtp.0.attn.out", "mtp.base", "features") as t:
        request = drafting.add(ids, max_tokens=14, temperature=0.0)
        while drafting.unfinished:
            done = drafting.step()
    (out,) = done
    x, n = t[LAYER], drafting.config.max_draft
    steps = sorted({s.step for s in out.steps})
    assert 0 < out.accepted_drafts and not x.accepted.all()  # both kinds of rows are here
    for step in steps[1:]:
        row = [s.row for s in out.steps if s.step == step]
        at = x.step == step
        assert row == list(range(len(row)))
        assert x.accepted[at].tolist() == [i < len(row) for i in range(1 + n)]
        start = len(ids) + sum(s.step < step for s in out.steps) - 1
        assert x.position[at].tolist() == list(range(start, start + 1 + n))
    # every position but the last token's stands exactly once
    stand = x.position[x.accepted].tolist()
    assert stand == list(range(len(ids) + len(out.token_ids) - 1))
    assert torch.equal(t["features"].position, x.position)
    block = t["mtp.base"]
    assert not block.accepted.any() and (block.request == request).all()
    assert block.position[:n].tolist() == list(range(len(ids), len(ids) + n))


@pytest.mark.parametrize("name", [LAYER, "layers.9.ffn.in", "final", "logits"])
def test_at_is_what_one_pass_computes(name, engine, drafting):
    """Verified, batched and decoded rows are the rows of a single teacher-forced pass."""
    ids = [drafting.encode("The walk of a token"), drafting.encode("A cache remembers")]
    with drafting.trace(name) as t:
        requests = [drafting.add(i, max_tokens=12, temperature=0.0) for i in ids]
        while drafting.unfinished:
            drafting.step()
    assert not t[name].accepted.all()
    for prompt, request in zip(ids, requests):
        x = t[name]
        mine = x.accepted & (x.request == request)
        count = int(mine.sum())
        tokens = engine.generate(prompt, max_tokens=12, temperature=0.0)[0].token_ids
        whole = [*prompt, *tokens]
        with engine.trace(name) as once:
            engine.logits(whole)
        assert (once[name].request == -1).all()
        for position in x.position[mine].tolist():
            got = t.at(name, position, request)
            torch.testing.assert_close(got, once.at(name, position), rtol=1e-9, atol=1e-9)
        assert count >= len(tokens)  # the anchor rows at least
    with pytest.raises(KeyError, match=f"of requests .*{requests[0]}, {requests[1]}.*request="):
        t.at(name, max(map(len, ids)))
    with pytest.raises(KeyError, match="no accepted row at position 999"):
        t.at(name, 999)


def test_keep_chooses_rows(engine):
    with engine.trace(LAYER, keep=lambda at: at.position % 2 == 1) as t, engine.trace(LAYER) as u:
        engine.generate("The walk of a token", max_tokens=3)
    assert t[LAYER].position.tolist() == [p for p in u[LAYER].position.tolist() if p % 2]
    assert torch.equal(t[LAYER] + 0, (u[LAYER] + 0)[u[LAYER].position % 2 == 1])
    assert t[LAYER].accepted.all()
    with pytest.raises(ValueError, match=r"keep gave shape \(2,\) for the \d+ rows of layers.3"):
        with engine.trace(LAYER, keep=lambda at: [True, False]):
            engine.logits("The walk of a token")


def test_rows_of_different_width_are_filled(engine):
    """Picked entries grow with the context; -1 means none, as everywhere."""
    with engine.trace("layers.5.attn.selected") as t:
        engine.generate("The walk", max_tokens=4)
    x = t["layers.5.attn.selected"]
    assert x.shape[1] == max(x.position.tolist()) + 1  # ratio 1: as many entries as positions
    for row, position in zip(x.tolist(), x.position.tolist()):
        assert row == [*range(position + 1), *[-1] * (x.shape[1] - position - 1)]


def test_table_says_what_was_seen(engine):
    with engine.trace("layers.2.attn.entries", LAYER) as t:
        engine.generate("The walk", max_tokens=3)
    assert t.table()["name"] == ["layers.2.attn.entries", LAYER]
    assert t.table()["steps"] == [3, 3] and t.table()["shape"][1] == str(engine.config.hidden_size)
    assert "2 of 2 chosen names seen" in repr(t) and LAYER in t._repr_html_()
    assert repr(t[LAYER]).startswith(f"{LAYER} [") and "positions 0.." in repr(t[LAYER])


# -------------------------------------------------------------------------------------- editing


def nudge(x, at):
    return x + 0.5


def test_an_edit_of_every_kind_of_name_takes_effect(engine, long_text):
    """An edit that is taken and ignored would be worse than none. One layer of each kind."""
    c = engine.config
    kinds = {c.role(layer): layer for layer in reversed(range(c.num_layers))}
    layers = {c.engram_layer_ids[0], c.candidate_source_layer_id, *kinds.values()} - {c.num_layers}
    names = [n for n in engine.trace_names() if n[:2] != "la" or int(n.split(".")[1]) in layers]
    assert {"full", "reuse", "reindex", "window"} <= set(kinds) and len(names) > 50

    def other(x, at):
        return x * 1.5 + 0.1 if x.is_floating_point() else torch.where(x > 0, x - 1, x)

    for some, ids in (
        (False, engine.encode("The walk of a token")),
        (True, engine.encode(long_text)),
    ):
        base = engine.logits(ids)
        for name in names:
            if name.endswith(("candidates", "index_keys")) == some:  # what only many entries need
                with engine.trace(name, edit=other):
                    assert not torch.equal(engine.logits(ids), base), name
        assert torch.equal(engine.logits(ids), base)


def test_an_edit_of_the_drafter_changes_drafts_alone(drafting):
    def drafts(edit) -> tuple:
        seen = []
        with drafting.trace(
            "layers.0.in", keep=lambda at: seen.append(at.position.tolist()) or at.position >= 0
        ):
            with drafting.trace("mtp.base", edit=edit):
                out = drafting.generate("The walk of a token", max_tokens=10, temperature=0.0)
        return out[0].token_ids, out[0].accepted_drafts

    plain, silenced = drafts(lambda x, at: None), drafts(lambda x, at: -x)
    assert plain[0] == silenced[0] and plain[1] > silenced[1]


def test_an_edit_is_gone_on_exit_and_after_an_error(engine):
    base = engine.logits("The walk of a token")

    def fault(x, at):
        raise ZeroDivisionError("in the edit")

    with engine.trace(LAYER, edit=nudge):
        assert not torch.equal(engine.logits("The walk of a token"), base)
    with pytest.raises(ZeroDivisionError):
        with engine.trace(LAYER, edit=fault):
            engine.generate("The walk of a token", max_tokens=4)
    assert engine.unfinished == 0
    assert torch.equal(engine.logits("The walk of a token"), base)


def test_rows_of_a_failed_step_do_not_stand(engine):
    fail = [True]

    def once(x, at):
        if fail[0]:
            raise ZeroDivisionError

    with engine.trace("layers.2.attn.out") as t:
        with engine.trace("layers.5.attn.out", edit=once):
            with pytest.raises(ZeroDivisionError):
                engine.generate("ab", max_tokens=2)
            with pytest.raises(ZeroDivisionError):
                engine.logits("ab")
            fail[0] = False
            engine.generate("ab", max_tokens=2)
    x = t["layers.2.attn.out"]
    n = len(engine.encode("ab"))
    assert x.accepted.tolist() == [False] * (2 * n) + [True] * (n + 1)
    assert len(set(x.step.tolist())) == 4


def test_nested_edits_run_innermost_last(engine):
    order = []

    def say(word):
        return lambda x, at: order.append(word) or x + 1

    with engine.trace(LAYER, edit=say("outer")) as outer:
        with engine.trace(LAYER, edit=say("inner")) as inner:
            engine.logits("ab")
        assert order == ["outer", "inner"]
        torch.testing.assert_close(inner[LAYER] + 0, outer[LAYER] + 1)
        engine.logits("ab")
    assert order == ["outer", "inner", "outer"]


def test_an_edit_in_place_has_to_be_returned(engine):
    """The edit gets a copy; to change it and return nothing is a slip that is caught."""

    def first_row(x, at):
        x[at.position == 0] = 0

    with pytest.raises(
        ValueError, match="layers.3.attn.out changed its copy in place and returned None"
    ):
        with engine.trace(LAYER, edit=first_row):
            engine.logits("ab")
    with engine.trace(LAYER, edit=lambda x, at: first_row(x, at) or x) as t:
        engine.logits("ab")
    assert (t[LAYER][0] == 0).all() and t[LAYER][1].all()


@pytest.mark.parametrize(
    "edit, error, words",
    [
        (
            lambda x, at: x[:, :3],
            ValueError,
            r"edit of layers.3.attn.out returned shape \(\d+, 3\) for \(\d+, \d+\)",
        ),
        (lambda x, at: x.tolist(), TypeError, "edit of layers.3.attn.out returned list"),
    ],
)
def test_an_edit_of_another_shape_is_refused(edit, error, words, engine):
    with pytest.raises(error, match=words):
        with engine.trace(LAYER, edit=edit):
            engine.generate("The walk of a token", max_tokens=2)


def test_an_edit_changes_its_request_alone(engine):
    prompts = ["The walk of a token", "A cache remembers"]
    with engine.trace("logits") as base:
        plain = [engine.add(p, max_tokens=4, temperature=0.0) for p in prompts]
        while engine.unfinished:
            engine.step()
    target = []

    def one(x, at):
        return torch.where((at.request == target[0])[:, None], -x, x)

    with engine.trace(LAYER, edit=one), engine.trace("logits") as t:
        changed = [engine.add(p, max_tokens=4, temperature=0.0) for p in prompts]
        target.append(changed[1])
        while engine.unfinished:
            engine.step()
    before, after = base["logits"], t["logits"]
    for i, same in enumerate([True, False]):
        a, b = (before + 0)[before.request == plain[i]], (after + 0)[after.request == changed[i]]
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-9) == same


def test_an_edit_reaches_later_steps_through_a_packed_cache(engine):
    """Keys edited in the prompt are what decode rows read, stored as numbers or as bytes."""
    ids = engine.encode("The walk of a token")

    def scaled(x, at):  # a power of two: representable wherever x is
        return torch.where((at.position < 3)[:, None], 2 * x, x)

    def last(**settings):
        with engine.with_(**settings) as eng, eng.trace("layers.0.attn.window_keys", edit=scaled):
            return eng.logits(ids, prompt=len(ids) - 1)[-1]

    floats, packed = last(packed_cache=False), last(packed_cache=True)
    torch.testing.assert_close(packed, floats, rtol=1e-9, atol=1e-9)
    assert not torch.allclose(floats, engine.logits(ids)[-1])


def test_zeros_in_what_a_mechanism_gives_take_it_away(engine):
    """Without Engram's value the streams pass by as they came."""
    layer = f"layers.{engine.config.engram_layer_ids[0]}"
    with engine.trace(f"{layer}.in", f"{layer}.engram.streams") as t:
        engine.logits(list(range(5, 25)))
        with engine.trace(f"{layer}.engram.value", edit=lambda x, at: x * 0):
            engine.logits(list(range(5, 25)))
    came, left = (
        t[f"{layer}.{name}"].as_subclass(torch.Tensor) for name in ("in", "engram.streams")
    )
    assert torch.equal(came, left[20:].repeat(2, 1, 1)) and not torch.equal(came, left)
