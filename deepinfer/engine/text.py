"""Prompts in, text out: what counts as a prompt, and text that grows token by token."""

from __future__ import annotations

from typing import Any


def is_ids(x: Any) -> bool:
    """True for a flat sequence of integers (a list, a tuple, an array or a 1-d tensor)."""
    if isinstance(x, str) or not hasattr(x, "__iter__"):
        return False
    x = x.tolist() if hasattr(x, "tolist") else list(x)
    return bool(x) and all(not isinstance(i, (str, list, tuple)) and not hasattr(i, "__iter__") for i in x)


def prompt_list(prompts: Any) -> tuple[list[Any], bool]:
    """(prompts, was it a single one). A flat list of numbers is one prompt of token ids."""
    if isinstance(prompts, str) or is_ids(prompts):
        return [prompts], True
    if isinstance(prompts, dict) or not hasattr(prompts, "__iter__"):
        raise ValueError(
            f"prompts={prompts!r}: want a string, a list of token ids, or a list of those, got {type(prompts).__name__}"
        )
    return list(prompts), False


def encode_prompt(engine, prompt: Any) -> list[int]:
    """Token ids of one prompt, range-checked. ValueError says what was found."""
    if isinstance(prompt, str):
        ids = engine.encode(prompt)
    else:
        if not hasattr(prompt, "__iter__") or isinstance(prompt, dict):
            raise ValueError(f"a prompt is a string or a list of token ids, got {type(prompt).__name__} {prompt!r}")
        ids = prompt.tolist() if hasattr(prompt, "tolist") else list(prompt)
    if not ids:
        raise ValueError("the prompt is empty: give at least one token id (text always has the bos)")
    vocab = engine.config.vocab_size
    for i, token in enumerate(ids):
        if isinstance(token, bool) or not hasattr(token, "__index__"):
            raise ValueError(f"prompt[{i}] is {token!r} ({type(token).__name__}): token ids are integers")
        if not 0 <= token < vocab:
            raise ValueError(f"prompt[{i}] is {int(token)}: token ids of this model are 0..{vocab - 1}")
    return [int(t) for t in ids]


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
        return "" if self._tokenizer is None else self._tokenizer.decode(ids, skip_special_tokens=True)
