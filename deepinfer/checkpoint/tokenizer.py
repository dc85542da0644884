"""A checkpoint's tokenizer as engines use it: a copy that neither cuts nor pads.

A tokenizer.json may hold settings of the run that wrote it. Truncation would drop what a prompt
says and padding would add to it, so both are switched off. A normaliser or a post-processor that
the released tokenizer does not have changes the ids of a text: it stays, and is named.
"""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepinfer.checkpoint.header import CheckpointError
from deepinfer.config.io import read_json
from deepinfer.config.wording import printable

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = [
    "additions",
    "copy_of",
    "digest",
    "engine_copy",
    "is_panic",
    "read_tokenizer",
]

_RELEASED = {"normalizer": (), "post_processor": ("ByteLevel",)}  # beside None and an empty list


def read_tokenizer(file: Path) -> Tokenizer:
    """The tokenizer of a tokenizer.json. CheckpointError for a file that holds none."""
    from tokenizers import Tokenizer

    try:
        read_json(file)
        return Tokenizer.from_file(str(file))
    except BaseException as error:  # bare Exception, or a panic, for what it can't parse
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise CheckpointError(f"{file}: {error}") from None


def is_panic(error: BaseException) -> bool:
    """Whether the tokenizers library gave up: its PanicException is no Exception."""
    return type(error).__name__ == "PanicException"


def copy_of(tokenizer: Any) -> Tokenizer:
    """Another tokenizer that gives the same ids."""
    from tokenizers import Tokenizer

    return Tokenizer.from_str(tokenizer.to_str())


def engine_copy(tokenizer: Any, source: str) -> Tokenizer:
    """A copy without truncation and padding. A warning in the log names what was switched off."""
    mine = copy_of(tokenizer)
    found = {"truncation": mine.truncation, "padding": mine.padding}
    mine.no_truncation()
    mine.no_padding()
    if stored := [f"{name} {value}" for name, value in found.items() if value]:
        logging.getLogger("deepinfer").warning(
            "%s: the tokenizer has %s, which would change prompts; switched off",
            printable(source),
            " and ".join(stored),
        )
    return mine


def additions(tokenizer: Any) -> list[str]:
    """What changes the ids of a text and the released tokenizer does not have, e.g. 'normalizer
    Lowercase'. Tokens that a post-processor puts around a text are never added by an engine."""
    content = json.loads(tokenizer.to_str())
    return [
        f"{part} {kind}"
        for part, usual in _RELEASED.items()
        for kind in _kinds(content.get(part))
        if kind not in usual
    ]


def _kinds(part: Any) -> list[str]:
    if part is None:
        return []
    inner = part.get("normalizers") or part.get("processors") or []
    if part["type"] == "Sequence":
        return [kind for each in inner for kind in _kinds(each)]
    return [part["type"]]


def digest(content: dict[str, Any] | None) -> str:
    """8 hex digits of a tokenizer.json's content, without truncation and padding, which engines
    switch off; 'none' for None."""
    if content is None:
        return "none"
    content = {k: v for k, v in content.items() if k not in ("truncation", "padding")}
    text = json.dumps(content, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]
