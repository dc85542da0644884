"""The tokenizer of the nano model: byte-level BPE for Python source, 4,096 entries.

| ids      | entries                                                                        |
|----------|--------------------------------------------------------------------------------|
| 0, 1, 2  | begin of sequence, end of sequence, padding                                    |
| 3, 4     | the drafter's noise (the released model names it "System"), image placeholder  |
| 5..260   | the 256 bytes                                                                  |
| 261..    | merges                                                                         |

Text is cut into pieces before it is merged: a word with at most one sign or space before it
(" name", ".name", "_name"), up to three digits, a run of signs with the spaces around it, or line
ends with the indentation that follows. So one token can say how deep the next line is.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

__all__ = ["SPECIAL", "VOCAB", "train_tokenizer"]

VOCAB = 4096
SPECIAL = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>")
SPECIAL += ("<｜System｜>", "<｜deepseek_image｜>")
_PIECES = "|".join(
    [
        r"(?:[ \t]*\r?\n)+[ \t]*",  # line ends, blank lines, the indentation that follows
        r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",  # a word, with the sign or space before it
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+ ?",  # signs: " = ", "):", ", "
        r"\s+",
    ]
)


def train_tokenizer(texts: Iterable[str]) -> Any:
    """A `tokenizers.Tokenizer` with VOCAB entries; merges are learnt from `texts`, in any order.

    ValueError when the texts have too few pairs.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[AddedToken(name, normalized=False) for name in SPECIAL],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != VOCAB:
        raise ValueError(f"the texts give {tokenizer.get_vocab_size()} entries, not {VOCAB}")
    return tokenizer
