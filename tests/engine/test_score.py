"""Engine.score: bits per byte of what follows the prompt."""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import deepinfer as di
from deepinfer.checkpoint.tiny_tokenizer import tiny_tokenizer
from deepinfer.engine.text import byte_count


@pytest.fixture(scope="module")
def engine() -> di.Engine:
    return di.Engine.tiny(dtype="float64", max_model_len=128, max_num_seqs=2)


TEXTS = ["The walk of a token", "na\u00efve \U0001f642 caf\u00e9"]


def test_scores_are_those_of_the_logits(engine):
    scores = engine.score(TEXTS)
    for text, score in zip(TEXTS, scores):
        ids = engine.encode(text)
        laws = engine.logits(ids, prompt=1).log_softmax(-1)
        expected = [float(laws[i, token]) for i, token in enumerate(ids[1:])]
        assert score.token_ids == tuple(ids) and score.first == 1
        assert score.logprobs == pytest.approx(expected, abs=1e-9)
        assert score.nbytes == len(text.encode())
        nats = -sum(expected)
        assert score.perplexity == pytest.approx(math.exp(nats / len(expected)))
        assert score.bits_per_byte == pytest.approx(nats / math.log(2) / len(text.encode()))
    nats, size = sum(s.nats for s in scores), sum(s.nbytes for s in scores)
    assert scores.bits_per_byte == pytest.approx(nats / math.log(2) / size)
    tokens = sum(len(s.logprobs) for s in scores)
    assert scores.perplexity == pytest.approx(math.exp(nats / tokens))


def test_only_what_follows_the_prompt_is_scored(engine):
    """The scored parts of all splits add up, bytes too, also where a split cuts a character."""
    (whole,) = engine.score(TEXTS[1])
    for prompt in range(2, len(whole.token_ids)):
        (rest,) = engine.score(TEXTS[1], prompt=prompt)
        assert rest.logprobs == pytest.approx(whole.logprobs[prompt - 1 :], abs=1e-9)
        head = byte_count(engine.tokenizer, list(whole.token_ids[1:prompt]))
        assert head + rest.nbytes == whole.nbytes


def test_the_prompt_is_what_the_replay_policy_sees(engine):
    """Rows behind the prompt are decode rows: a policy costs what it costs in generation."""
    seen = []

    class Watched(di.replay.Exact):
        def plan(self, prompt, config):
            seen.append(prompt.length)
            return super().plan(prompt, config)

    engine.with_(replay=Watched()).score(engine.encode("The walk of a token"), prompt=4)
    assert seen == [4]


def test_refusals(engine):
    with pytest.raises(ValueError, match="text 1 has 2 tokens and prompt=2: nothing follows"):
        engine.score(["The walk of a token", [0, 5]], prompt=2)
    with pytest.raises(ValueError, match="text 0 has 1 tokens and prompt=1"):
        engine.score("")
    with pytest.raises(ValueError, match="prompt=0"):
        engine.score("The walk", prompt=0)
    nan = lambda x, at: torch.where((at.position == 2)[:, None], torch.nan, x)  # noqa: E731
    with engine.trace("logits", edit=nan):
        with pytest.raises(ValueError, match=r"position 2: the replay policy Exact\(\)"):
            engine.score("The walk of a token")
        engine.score("The walk of a token", prompt=4)  # the row is not scored


def test_special_tokens_spell_nothing(engine):
    eos = engine.config.eos_token_id
    ids = engine.encode("ab") + [eos]
    (score,) = engine.score([ids])
    assert len(score.logprobs) == len(ids) - 1 and score.nbytes == 2


def test_the_table_says_it_over_all_texts(engine):
    scores = engine.score(TEXTS)
    table = scores.table()
    assert table["bytes"] == [len(t.encode()) for t in TEXTS] and len(scores) == 2
    assert table["bits_per_byte"] == [s.bits_per_byte for s in scores]
    assert f"2 texts: perplexity {di.fmt(scores.perplexity)}" in repr(scores)
    assert "bits per byte" in scores._repr_html_()


@given(st.text(max_size=30), st.data())
def test_bytes_add_up(text, data):
    tokenizer = TOKENIZER
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    cut = data.draw(st.integers(0, len(ids)))
    whole = byte_count(tokenizer, ids)
    assert byte_count(tokenizer, ids[:cut]) + byte_count(tokenizer, ids[cut:]) == whole
    if not any(i in ADDED for i in ids):
        assert whole == len(text.encode())


TOKENIZER = tiny_tokenizer()
ADDED = TOKENIZER.get_added_tokens_decoder()


def test_other_tokenizers_are_asked_for_the_text():
    other = SimpleNamespace(
        decoder=None, decode=lambda ids, skip_special_tokens: "\u00e9" * len(ids)
    )
    assert byte_count(other, [1, 2]) == 4 and byte_count(None, [1]) == 0
