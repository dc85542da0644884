"""Prompts in, text out: what counts as a prompt, and text that grows token by token."""

from __future__ import annotations

import codecs
import reprlib
from collections.abc import Sequence
from typing import Any

LONG = 20_000  # characters, some 10 ms of tokenising


def plain(x: Any) -> Any:
    """Arrays and tensors as Python numbers and lists of them; anything else as it is."""
    return x.tolist() if hasattr(x, "tolist") else x


def items_of(x: Any, want: str) -> list[Any]:
    """The items of a list, array, tensor or iterator, read once. ValueError for what has no items
    or no order, and for bytes, whose items would pass for token ids."""
    x = plain(x)
    if isinstance(x, (str, bytes, bytearray, dict, set, frozenset)) or not hasattr(x, "__iter__"):
        raise ValueError(f"{want}, got {type(x).__name__} {reprlib.repr(x)}")
    return [plain(i) for i in x]


def prompt_list(prompts: Any) -> tuple[list[Any], bool]:
    """(prompts, was it a single one). A flat sequence of numbers, or an empty array of one axis, is
    one prompt of token ids; an empty list is no prompts."""
    if isinstance(prompts, str):
        return [prompts], True
    items = items_of(prompts, "prompts are a string, a list of token ids, or a list of those")
    # an empty array is one empty prompt where its only axis would count tokens
    if not items and hasattr(prompts, "tolist") and getattr(prompts, "ndim", 1) == 1:
        return [items], True
    flat = bool(items) and not any(isinstance(i, str) or hasattr(i, "__iter__") for i in items)
    return ([items], True) if flat else (items, False)


def check_unicode(text: str) -> None:
    """ValueError for a lone surrogate, which a Python string can hold and UTF-8 can't spell."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the text is not valid Unicode: index {error.start} is the lone surrogate "
            f"{text[error.start]!r}; decode it from bytes with errors='replace', or remove it"
        ) from None


def token_ids(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text as it stands, without special tokens around it. Of a long text they are
    asked as a batch of one: the tokenizer then lets other threads run, and counts no offsets."""
    if len(text) < LONG:
        return tokenizer.encode(text, add_special_tokens=False).ids
    return tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids


def encode_prompt(
    engine: Any, prompt: Any, special: bool = False, *, text_only: bool = False
) -> list[int]:
    """Token ids of one prompt, range-checked; special: see `Engine.encode`. ValueError says what was
    found. text_only: the image token is refused, because rows of images are not routed as such yet
    (their bias changes nothing); a teacher-forced pass may hold it, since a model can emit it."""
    if isinstance(prompt, str):
        ids = engine.encode(prompt, special=special)
    else:
        ids = items_of(prompt, "a prompt is a string or a list of token ids")
    if not ids:
        raise ValueError(
            "the prompt is empty: give at least one token id (text always has the bos)"
        )
    vocab = engine.config.vocab_size
    for i, token in enumerate(ids):
        if isinstance(token, bool) or not hasattr(token, "__index__"):
            found = f"{reprlib.repr(token)} ({type(token).__name__})"
            raise ValueError(f"prompt[{i}] is {found}: token ids are integers")
        if not 0 <= token < vocab:
            raise ValueError(
                f"prompt[{i}] is {int(token)}: token ids of this model are 0..{vocab - 1}"
            )
        if text_only and token == engine.config.image_token_id:
            raise ValueError(
                f"prompt[{i}] is {int(token)}, the image token: this engine has no images yet; "
                "leave it out"
            )
    return [int(t) for t in ids]


def is_byte_level(tokenizer: Any) -> bool:
    """Whether it writes one character for each byte."""
    return type(tokenizer.decoder).__name__ == "ByteLevel"


def byte_count(tokenizer: Any, ids: list[int]) -> int:
    """UTF-8 bytes that ids spell, also if they start or stop inside a character; special tokens
    spell none. 0 without a tokenizer. A tokenizer that is not byte-level is asked for the text."""
    if tokenizer is None or not ids:
        return 0
    if not is_byte_level(tokenizer):
        return len(tokenizer.decode(ids, skip_special_tokens=True).encode())
    spell = Spelling(tokenizer)
    return sum(len(spell(i)) for i in ids)


def silent(tokenizer: Any, ids: list[int]) -> list[int]:
    """Places in ids of the tokens that spell no byte: special ones, and ids without a token."""
    if tokenizer is None:
        return []
    spell = Spelling(tokenizer)
    return [at for at, i in enumerate(ids) if not spell(i)]


PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
# GPT-2's table: the printable character that stands for a byte in a byte-level vocabulary
BYTE_OF = {chr(b): b for b in PRINTABLE} | {
    chr(256 + i): b for i, b in enumerate(sorted({*range(256)} - {*PRINTABLE}))
}


class Spelling:
    """spell(id): the bytes that a token spells, b"" for special tokens and ids without a token.

    Byte-level vocabularies write a byte as a printable character; added tokens spell their own
    text. special=True: special tokens spell theirs too, as a grammar sees them."""

    def __init__(self, tokenizer: Any, special: bool = False) -> None:
        self._tokenizer, self._special = tokenizer, special
        self._added = tokenizer.get_added_tokens_decoder()

    def __call__(self, token: int) -> bytes:
        if (added := self._added.get(token)) is not None:
            return added.content.encode() if self._special or not added.special else b""
        text = self._tokenizer.id_to_token(token) or ""
        if all(ch in BYTE_OF for ch in text):
            return bytes(BYTE_OF[ch] for ch in text)
        return text.encode()


class Detokenizer:
    """Text of a growing list of ids, the continuation of a prompt.

    `push` returns the text that a token completes: '' inside a character of several bytes. `end`
    returns what is left of a character that broke off, once no token follows; together they are
    the whole text, for any ids. If the prompt breaks off inside a character and the ids complete
    it, it is theirs; if they do not, what the prompt had of it is left out. Without a tokenizer
    everything is ''.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._spell = Spelling(tokenizer) if tokenizer and is_byte_level(tokenizer) else None
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._ids: list[int] = []  # of a tokenizer that is not byte-level
        self._said, self._stream = "", None
        self._open = b"" if self._spell is None else unfinished(self._spell, prompt)

    def push(self, token: int) -> str:
        if self._tokenizer is None:
            return ""
        if self._spell is None:
            return self._push_stream(token)
        data = self._spell(token)
        if data and self._open:
            if goes_on(self._open, data):
                data = self._open + data
            self._open = b""
        return self._decoder.decode(data)

    def end(self) -> str:
        if self._spell is not None:
            return self._decoder.decode(b"", True)
        if self._tokenizer is None:
            return ""
        return self._tokenizer.decode(self._ids, skip_special_tokens=True)[len(self._said) :]

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The text of each of ids, together their whole text: the last one has the end."""
        found = [self.push(i) for i in ids]
        if found:
            found[-1] += self.end()
        return found

    def _push_stream(self, token: int) -> str:
        if self._stream is None:
            from tokenizers.decoders import DecodeStream

            self._stream = DecodeStream(skip_special_tokens=True)
        self._ids.append(token)
        piece = self._stream.step(self._tokenizer, token) or ""
        self._said += piece
        return piece


def unfinished(spell: Spelling, prompt: Sequence[int]) -> bytes:
    """The bytes of a character that a prompt breaks off, 0 to 3."""
    tail = b""
    for token in reversed(prompt):
        if not (data := spell(token)):
            break
        tail = data + tail
        if len(tail) > 3:
            break
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(tail)
    return decoder.getstate()[0]


def goes_on(start: bytes, data: bytes) -> bool:
    """Whether the first byte of data can follow the start of a character."""
    try:
        codecs.getincrementaldecoder("utf-8")("strict").decode(start + data[:1])
    except UnicodeDecodeError:
        return False
    return True


def token_bytes(tokenizer: Any, vocab: int) -> list[bytes]:
    """The bytes each token id spells, for grammars; b"" for ids the tokenizer does not have. Special
    tokens spell their own text."""
    if tokenizer is None:
        return [b""] * vocab
    spell = Spelling(tokenizer, special=True)
    return [spell(token) for token in range(vocab)]
