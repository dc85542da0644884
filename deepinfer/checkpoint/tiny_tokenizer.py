"""The tokenizer of the tiny model: 1024 entries, byte-level BPE, the same on every machine.

| ids       | entries                                                             |
|-----------|---------------------------------------------------------------------|
| 0, 1, 2   | begin of sequence, end of sequence, padding                         |
| 3..258    | the 256 bytes                                                       |
| 259..999  | merges, in the order in which training on `tiny_text.txt` made them |
| 1000      | the drafter's noise (the released model names its noise id "System") |
| 1001      | the image placeholder                                               |
| 1002..    | chat turns and reserved places                                      |

The merges are shipped (`tiny_merges.txt`); `train` remakes them from the text.
"""

from __future__ import annotations

from collections import Counter
from importlib import resources
from typing import Any

__all__ = ["IMAGE_ID", "NOISE_ID", "tiny_tokenizer", "train"]

VOCAB = 1024
NOISE_ID = 1000
IMAGE_ID = 1001
_FIRST = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>")
_NAMED = ("<｜System｜>", "<｜deepseek_image｜>", "<｜User｜>", "<｜Assistant｜>")
_NAMED += ("<think>", "</think>")


def tiny_tokenizer() -> Any:
    """A `tokenizers.Tokenizer` made from the shipped merges."""
    from tokenizers import AddedToken, Tokenizer, decoders, models

    lines = (line.split(" ") for line in _data("tiny_merges.txt").splitlines())
    merges = [(left, right) for left, right in lines]
    entries = [*_FIRST, *_alphabet(), *(left + right for left, right in merges)]
    vocab = {entry: token for token, entry in enumerate(entries)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = _pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    places = (f"<｜place▁holder▁{n}｜>" for n in range(VOCAB - len(entries) - len(_NAMED)))
    special = [*_FIRST, *_NAMED, *places]
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in special])
    return tokenizer


def train(text: str | None = None, size: int = NOISE_ID) -> list[tuple[str, str]]:
    """The merges that fill a vocabulary of `size` entries: always the most frequent pair of
    neighbours, among equals the first in string order. text: the shipped one.

    ValueError when the text has too few pairs.
    """
    text = _data("tiny_text.txt") if text is None else text
    counts = Counter(word for word, _ in _pre_tokenizer().pre_tokenize_str(text))
    words = [(list(word), count) for word, count in sorted(counts.items())]
    merges: list[tuple[str, str]] = []
    while len(_FIRST) + 256 + len(merges) < size:
        pairs: Counter[tuple[str, str]] = Counter()
        for parts, count in words:
            for pair in zip(parts, parts[1:]):
                pairs[pair] += count
        if not pairs:
            raise ValueError(f"the text gives {len(merges)} merges, not enough for {size} entries")
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        for parts, _ in words:
            _merge(parts, best)
    return merges


def _merge(parts: list[str], pair: tuple[str, str]) -> None:
    """Join every occurrence of a pair in a word, from left to right."""
    place = 0
    while place + 1 < len(parts):
        if (parts[place], parts[place + 1]) == pair:
            parts[place : place + 2] = ["".join(pair)]
        place += 1


def _alphabet() -> list[str]:
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


def _pre_tokenizer():
    from tokenizers.pre_tokenizers import ByteLevel

    return ByteLevel(add_prefix_space=False)


def _data(name: str) -> str:
    return resources.files("deepinfer.checkpoint").joinpath(name).read_text(encoding="utf-8")
