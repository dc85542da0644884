"""What a completion shows: where each token came from, escaped, with what is hidden said."""

import re

import pytest

from deepinfer import session
from deepinfer.display import html, progress
from deepinfer.display.numbers import counted
from deepinfer.engine.completion import Completion, Completions, TokenStep


def completion(n=3, error=None, drafts=(1,), piece="<b>") -> Completion:
    steps = tuple(
        TokenStep(step=i, row=0, source="draft" if i in drafts else "target") for i in range(n)
    )
    return Completion(
        index=0,
        prompt_token_ids=(5, 6),
        token_ids=tuple(range(n)),
        text=piece * n,
        finish_reason="error" if error else "length",
        logprobs=(-0.5,) * n,
        steps=steps,
        error=error,
        pieces=(piece,) * n,
    )


def test_completion_says_where_tokens_came_from():
    c = completion()
    assert repr(c) == (
        "Completion 0: 2 prompt tokens, 3 tokens, 1 of them from drafts, 3 steps, "
        "mean logprob -0.5, finished: length\n'<b><b><b>'"
    )
    shown = c._repr_html_()
    assert "<b><b>" not in shown and shown.count("&lt;b&gt;") == 3
    assert len(re.findall("step 1 row 0, draft", shown)) == 1 and "accepted draft" in shown
    assert "accepted draft" not in completion(drafts=())._repr_html_()


def test_one_is_singular():
    one = Completions([completion(1, drafts=(0,))])
    for shown in (repr(one), one._repr_html_()):
        assert "1 completion" in shown and "1 completions" not in shown
    assert "2 prompt tokens, 1 token, 1 of them from drafts, 1 step, mean" in repr(one[0])
    assert "2 completions" in repr(Completions([completion()] * 2))
    assert "1 more character in" in repr(completion(601, piece="a"))
    assert counted(1, "entry", "entries") == "1 entry"
    assert counted(0, "entry", "entries") == "0 entries" and counted(2, "text") == "2 texts"


def test_errors_are_seen():
    c = completion(0, error=ValueError("id 97 is out of range"))
    for shown in (repr(c), c._repr_html_(), repr(Completions([c])), Completions([c])._repr_html_()):
        assert "id 97 is out of range" in shown


def test_long_lists_and_texts_are_cut_and_say_so():
    many = Completions([completion()] * 23)
    assert "3 of 23 items hidden" in repr(many) and "3 of 23 items hidden" in many._repr_html_()
    long = completion(450, piece="ab")
    assert "300 more characters" in repr(long) and "50 more tokens" in long._repr_html_()


def test_engine_says_what_it_is():
    import deepinfer as di

    eng = di.Engine.tiny(seed=0, max_num_seqs=3)
    text, shown = repr(eng), eng._repr_html_()
    assert text.startswith("Engine of tiny(seed=0): exact\n") and "max_num_seqs=3" in text
    for layer in range(eng.config.num_layers):
        assert f'title="layer {layer}' in shown
    for name, value in eng.slots.items():
        assert re.search(rf"^  {name} +{re.escape(repr(value))}$", text, re.M)
    assert "approximate" not in text + shown
    changed = eng.with_(attention=di.attention.CSA2(topk=2))
    for approximate in (repr(changed), changed._repr_html_()):
        assert "approximate" in approximate and "attention" in approximate
    changed.close()
    assert "closed" in repr(changed)


def test_engine_s_text_names_no_folder(tmp_path):
    import deepinfer as di
    from deepinfer.checkpoint.tiny import write_tiny

    write_tiny(tmp_path / "small", seed=1)
    eng = di.Engine.from_pretrained(str(tmp_path / "small"))
    for shown in (repr(eng), eng._repr_html_()):
        assert "Engine of small" in shown and str(tmp_path) not in shown


def test_bar_is_cut_to_its_frame():
    assert "width:100.0%" in html.bar(3.0) and "width:0.0%" in html.bar(float("nan"))


def test_bars_show_only_where_someone_watches(monkeypatch, capsys):
    monkeypatch.setenv("DI_DISPLAY", "test")
    with progress.bar(10, "tokens", show=True) as bar:
        bar.update(3)
    monkeypatch.delenv("DI_DISPLAY")
    assert not progress.watched()  # pytest's stderr is no terminal
    with progress.bar(10, "tokens") as bar:
        bar.update(3)
    assert capsys.readouterr() == ("", "")
    with progress.bar(10, "tokens", show=True) as bar:
        bar.update(3)
    assert "0/10" in capsys.readouterr().err


def test_notebook_is_a_setting_that_can_be_taken_back(capsys):
    import torch

    threads, seen = torch.get_num_threads(), torch.get_default_dtype()
    state = torch.get_rng_state()
    assert session.default_dtype() is None and session.default_seed() is None
    try:
        assert session.notebook(seed=3) is None
        assert (session.default_dtype(), session.default_seed()) == ("float64", 3)
        assert capsys.readouterr().out == "CPU engines: float64, threads 1, seed 3\n"
        assert torch.get_num_threads() == 1 and torch.get_default_dtype() == seen
        assert torch.equal(torch.get_rng_state(), state)
        with pytest.raises(ValueError, match="dtype='float16'"):
            session.notebook(dtype="float16")
        with pytest.raises(TypeError, match="seed"):
            session.notebook(seed=None)
        assert session.default_dtype() == "float64"
    finally:
        session._settings = session._Settings()
        torch.set_num_threads(threads)
    assert session.default_dtype() is None
