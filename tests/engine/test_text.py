"""Text of tokens: pieces add up, also if a prompt or an output breaks off inside a character."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import deepinfer as di
from deepinfer.checkpoint.tiny_tokenizer import tiny_tokenizer
from deepinfer.engine.text import Detokenizer
from deepinfer.slots.protocols import Sampled

TOKENIZER = tiny_tokenizer()
SIZE = TOKENIZER.get_vocab_size()
# whatever its number, the id of each byte: sequences of them break off inside characters often
BYTES = [i for i in range(SIZE) if len(TOKENIZER.id_to_token(i) or "") == 1]
IDS = st.lists(st.one_of(st.sampled_from(BYTES), st.integers(0, SIZE - 1)), max_size=12)


def of_text(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def of_bytes(data: bytes) -> list[int]:
    """One id a byte."""
    return [next(i for i in BYTES if Detokenizer(TOKENIZER)._spell(i) == bytes([b])) for b in data]


@given(IDS)
def test_pieces_are_the_text(ids):
    pieces = Detokenizer(TOKENIZER).pieces(ids)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == TOKENIZER.decode(ids, skip_special_tokens=True)


@given(st.text(max_size=6), st.data())
def test_a_cut_anywhere_loses_no_character(text, data):
    """Prompt and output together are the text: one of both has the character that is cut."""
    ids = of_bytes(text.encode())
    cut = data.draw(st.integers(0, len(ids)))
    ours = "".join(Detokenizer(TOKENIZER, ids[:cut]).pieces(ids[cut:]))
    assert text.endswith(ours) and "\ufffd" not in ours.replace("\ufffd" * text.count("\ufffd"), "")
    before = text[: len(text) - len(ours)].encode()
    assert len(before) <= cut < len(before) + 4 or not ours


@pytest.mark.parametrize(
    "prompt, output, text",
    [
        (b"\xf0\x9f", b"\x99\x82!", "\U0001f642!"),  # completed: the output's
        (b"\xf0\x9f", b"a", "a"),  # broken off in the prompt: nothing of it is the output's
        (b"\xf0\x9f", b"\x99", "\ufffd"),  # broken off in both: one replacement
        (b"ok", b" \xf0\x9f", " \ufffd"),
        (b"\xc3", b"", ""),
        (b"", b"\x99\x82", "\ufffd\ufffd"),  # two strays
    ],
)
def test_what_breaks_off(prompt, output, text):
    found = Detokenizer(TOKENIZER, of_bytes(prompt)).pieces(of_bytes(output))
    assert "".join(found) == text


class Scripted(di.sampler.Philox):
    """Emits the ids it is given, by output position."""

    def __init__(self, ids):
        self.ids = ids

    def draw(self, dist, keys):
        out = super().draw(dist, keys)
        tokens = out.tokens.new_tensor([self.ids[p] for p in keys.position.tolist()])
        return Sampled(tokens, out.logprobs)


def test_stream_handle_and_pieces_have_the_tail():
    ids = of_bytes(b"ok \xf0\x9f")
    eng = di.Engine.tiny(sampler=Scripted(ids), max_model_len=64, max_num_seqs=2)
    how = dict(max_tokens=len(ids), ignore_eos=True)
    (c,) = eng.generate("a", **how)
    assert c.token_ids == tuple(ids) and c.text == "ok \ufffd" == "".join(c.pieces)
    assert "".join(token.text for token in eng.stream("a", **how)) == c.text
    with eng.background() as bg:
        running = bg.add("a", **how)
        assert "".join(token.text for token in running) == c.text
    assert running.text == c.text


# -------------------------------------------------------------------------------- special tokens


@pytest.fixture(scope="module")
def engine() -> di.Engine:
    return di.Engine.tiny(dtype="float64", max_model_len=128, max_num_seqs=2)


def test_special_tokens_in_text_are_text_unless_asked(engine):
    bos, added = engine.config.bos_token_id, TOKENIZER.get_added_tokens_decoder()
    for token in list(added)[:8]:
        text = f"a{added[token].content}b"
        safe = engine.encode(text)
        assert token not in safe[1:] and safe[0] == bos and engine.decode(safe) == text
        assert token in engine.encode(text, special=True)
    name = added[bos].content
    assert engine.encode(name + "a", special=True) == [bos, *of_text("a")]
    assert engine.encode(name + "a", special=True, bos=False) == [bos, *of_text("a")]
    assert engine.encode("a", special=True) == engine.encode("a")
    assert engine.encode(name + "a").count(bos) == 1


def test_every_way_in_has_the_switch(engine):
    text = "a<\uff5cUser\uff5c>b"
    for special in (False, True):
        ids, how = engine.encode(text, special=special), dict(max_tokens=1, special=special)
        assert engine.generate(text, **how)[0].prompt_token_ids == tuple(ids)
        number = engine.add(text, **how)
        assert engine.requests[number].prompt == ids
        engine.abort(number)
        assert engine.score(text, special=special)[0].token_ids == tuple(ids)
        stream = engine.stream(text, **how)
        assert [r.prompt for r in engine.requests.values()] == [ids]
        stream.close()
        with engine.background() as bg:
            assert bg.add(text, **how).result().prompt_token_ids == tuple(ids)
