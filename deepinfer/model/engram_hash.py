"""How the n-gram memory names its rows: token compression, multipliers, primes and offsets.

Nothing here is stored in a checkpoint. It follows from the tokenizer and five numbers of the
config, and is checked against the stored table sizes before a table is used (V4.1 technical report,
Engram; the constants reproduce the released tables' row counts). Ids are tokens, rows are rows of
one layer's table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from deepinfer.config import ModelConfig

__all__ = [
    "HashConstants",
    "check_ids",
    "check_map",
    "check_rows",
    "hash_constants",
    "hash_multipliers",
    "hash_primes",
    "table_rows",
    "token_map",
]

_LONE_SPACE = "\ue000"  # private-use character: keeps a lone space from being stripped
_REPLACEMENT = "\ufffd"  # what a decoder shows for bytes that are not text by themselves
_BASES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)
_SEED = 10007  # of the released multiplier generator, times the layer id


def token_map(tokenizer: Any) -> torch.Tensor:
    """Class of every token id, "v" int64: spellings that differ in case, accents or spaces share
    one.

    `tokenizer` is a `tokenizers.Tokenizer`. A token's key is its decoded text normalised (NFKC,
    NFD, no accents, lower case, spaces collapsed and stripped; a lone space stays), its text when
    that leaves nothing, or its raw spelling when its bytes are not text. Classes are numbered in
    the order in which their keys first appear.
    """
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    texts = tokenizer.decode_batch([[token] for token in range(size)], skip_special_tokens=False)
    simplify = _normaliser()
    classes: dict[str, int] = {}
    found = np.empty(size, dtype=np.int64)
    for token, text in enumerate(texts):
        if _REPLACEMENT in text:
            key = tokenizer.id_to_token(token)
        else:
            key = simplify(text) or text
        found[token] = classes.setdefault(key, len(classes))
    return torch.from_numpy(found)


def _normaliser():
    from tokenizers import Regex, normalizers

    steps = [
        normalizers.NFKC(),
        normalizers.NFD(),
        normalizers.StripAccents(),
        normalizers.Lowercase(),
        normalizers.Replace(Regex("[ \t\r\n]+"), " "),
        normalizers.Replace(Regex("^ $"), _LONE_SPACE),
        normalizers.Strip(),
        normalizers.Replace(_LONE_SPACE, " "),
    ]
    return normalizers.Sequence(steps).normalize_str


def hash_multipliers(layer: int, compressed_vocab_size: int, max_ngram: int) -> list[int]:
    """Odd multipliers, one per n-gram place, small enough that id * multiplier fits in int64.

    >>> hash_multipliers(1, 99092, 4)[0]
    76632096046245
    """
    bound = max(1, (2**63 - 1) // compressed_vocab_size // 2)
    drawn = np.random.default_rng(_SEED * layer).integers(0, bound, size=max_ngram, dtype=np.int64)
    return [int(value) * 2 + 1 for value in drawn]


def hash_primes(config: ModelConfig) -> dict[int, list[list[int]]]:
    """{layer: primes by n-gram size and head}: consecutive primes from engram_vocab_size up, never
    reused, handed out by layer, then n-gram size, then head."""
    candidate = config.engram_vocab_size - 1
    found: dict[int, list[list[int]]] = {}
    for layer in config.engram_layer_ids:
        found[layer] = []
        for _ in range(config.engram_max_ngram_size - 1):
            heads = []
            for _ in range(config.engram_n_heads):
                candidate = _next_prime(candidate)
                heads.append(candidate)
            found[layer].append(heads)
    return found


def _next_prime(number: int) -> int:
    number += 1
    while not _is_prime(number):
        number += 1
    return number


def _is_prime(number: int) -> bool:
    """The test of Miller and Rabin, which is exact with these bases for numbers below 3e24."""
    if number < 41 * 41:
        return number > 1 and all(number % p for p in range(2, int(number**0.5) + 1))
    if any(number % p == 0 for p in _BASES):
        return False
    twos = (number - 1 & 1 - number).bit_length() - 1
    odd = number - 1 >> twos
    for base in _BASES:
        power = pow(base, odd, number)
        if power in (1, number - 1):
            continue
        for _ in range(twos - 1):
            power = power * power % number
            if power == number - 1:
                break
        else:
            return False
    return True


def table_rows(config: ModelConfig) -> dict[int, int]:
    """{layer: rows its table must have}, the sum of its primes."""
    return {layer: sum(map(sum, primes)) for layer, primes in hash_primes(config).items()}


@dataclass(frozen=True, eq=False)
class HashConstants:
    """The arguments of the op `engram_hash` for one layer, as int64 arrays: multipliers "n", primes
    "n-1 h", offsets "(n-1)*h"."""

    multipliers: np.ndarray
    primes: np.ndarray
    offsets: np.ndarray


def hash_constants(config: ModelConfig, layer: int) -> HashConstants:
    """The constants of one Engram layer. Offsets put its parts, one per prime, one after
    another."""
    primes = np.array(hash_primes(config)[layer], dtype=np.int64)
    size, ngram = config.engram_compressed_vocab_size, config.engram_max_ngram_size
    multipliers = np.array(hash_multipliers(layer, size, ngram), dtype=np.int64)
    return HashConstants(multipliers, primes, primes.cumsum() - primes.flatten())


def check_ids(ids: torch.Tensor, token_map: torch.Tensor) -> None:
    """ValueError for ids outside the tokenizer: a negative id would index the map from its end.
    Reads a value back from the device, so it belongs to the host side of a request."""
    size = token_map.shape[0]
    wrong = (ids < 0) | (ids >= size)
    if bool(wrong.any()):
        found = int(ids[wrong].flatten()[0])
        raise ValueError(f"token id {found}: the tokenizer has ids 0..{size - 1}")


def check_map(config: ModelConfig, classes: torch.Tensor) -> None:
    """ValueError unless a token map "v" has engram_compressed_vocab_size classes, numbered without
    gaps, and covers the vocabulary."""
    count = int(classes.max()) + 1 if classes.numel() else 0
    if count != config.engram_compressed_vocab_size or int(classes.min()) < 0:
        raise ValueError(
            f"the tokenizer compresses to {count} classes of spelling, and the config's "
            f"engram_compressed_vocab_size is {config.engram_compressed_vocab_size}: this is not "
            "the tokenizer that the n-gram tables were made with; use the tokenizer.json that came "
            "with the checkpoint"
        )
    if classes.shape[0] < config.vocab_size:
        raise ValueError(
            f"the tokenizer has {classes.shape[0]} tokens and the model vocab_size "
            f"{config.vocab_size}: the ids behind the tokenizer's have no class of spelling"
        )


def check_rows(config: ModelConfig) -> None:
    """ValueError unless engram_num_embeddings are the sums of the primes of their layers."""
    expected = tuple(table_rows(config).values())
    if config.engram_num_embeddings != expected:
        raise ValueError(
            f"text_config.engram_num_embeddings: found {list(config.engram_num_embeddings)}; the "
            f"primes from engram_vocab_size {config.engram_vocab_size} up give {list(expected)} "
            f"rows for layers {list(config.engram_layer_ids)}; the hash would read other n-grams' "
            "rows, so one of these keys is wrong"
        )
