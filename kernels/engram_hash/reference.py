"""Rows of the n-gram table, in plain torch."""

from __future__ import annotations

import torch


def engram_hash(
    compressed: torch.Tensor,
    multipliers: torch.Tensor,
    primes: torch.Tensor,
    offsets: torch.Tensor,
) -> torch.Tensor:
    """Table rows of the n-grams that end at each row, for 2-grams up to n-grams and every head.

    compressed "t n" int64: column s is the compressed id of the token s before the row's own (dead
    or missing ones already replaced by the pad id); multipliers "n", primes "n-1 h",
    offsets "(n-1)*h", all int64 -> "t (n-1)*h" int64, ordered by n-gram size, then head.
    The hash of an n-gram is the XOR of id * multiplier; its row is hash mod prime + offset.
    """
    terms = compressed * multipliers
    hashed, columns = terms[:, 0], []
    for n in range(1, terms.shape[1]):
        hashed = hashed ^ terms[:, n]
        columns.append(hashed.unsqueeze(1) % primes[n - 1])
    return torch.cat(columns, dim=1) + offsets
