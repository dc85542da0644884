"""Prompts in, text out: what counts as a prompt, and text that grows token by token."""

from __future__ import annotations

import reprlib
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


def encode_prompt(engine, prompt: Any) -> list[int]:
    """Token ids of one prompt, range-checked. ValueError says what was found."""
    if isinstance(prompt, str):
        ids = engine.encode(prompt)
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
    return [int(t) for t in ids]


def byte_count(tokenizer: Any, ids: list[int]) -> int:
    """UTF-8 bytes that ids spell, also where they start or stop inside a character; special tokens
    spell none. 0 without a tokenizer.

    A byte-level tokenizer writes one character for each byte. Any other is asked for the text.
    """
    if tokenizer is None or not ids:
        return 0
    if type(tokenizer.decoder).__name__ != "ByteLevel":
        return len(tokenizer.decode(ids, skip_special_tokens=True).encode())
    added = tokenizer.get_added_tokens_decoder()
    total = 0
    for i in ids:
        if i not in added:
            total += len(tokenizer.id_to_token(i) or "")
        elif not added[i].special:
            total += len(added[i].content.encode())
    return total


class Detokenizer:
    """Text of a growing list of ids. `push` returns the text a token completes: '' inside a character
    of several bytes. Without a tokenizer everything is ''."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._stream = None

    def push(self, token: int) -> str:
        if self._tokenizer is None:
            return ""
        if self._stream is None:
            from tokenizers.decoders import DecodeStream

            self._stream = DecodeStream(skip_special_tokens=True)
        return self._stream.step(self._tokenizer, token) or ""

    def all(self, ids: list[int]) -> str:
        return (
            "" if self._tokenizer is None else self._tokenizer.decode(ids, skip_special_tokens=True)
        )


def token_bytes(tokenizer: Any, vocab: int) -> list[bytes]:
    """The bytes each token id spells, for grammars; b"" for ids the tokenizer does not have.

    Byte-level vocabularies write a byte as a printable character (GPT-2's table); special tokens
    spell their own text.
    """
    if tokenizer is None:
        return [b""] * vocab
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in plain]
    table = {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(rest)}
    special = set(tokenizer.get_added_tokens_decoder())
    out = []
    for token in range(vocab):
        text = tokenizer.id_to_token(token) or ""
        if token not in special and all(ch in table for ch in text):
            out.append(bytes(table[ch] for ch in text))
        else:
            out.append(text.encode())
    return out
