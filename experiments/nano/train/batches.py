"""Batches of whole sequences from the tokenised corpus."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True)
class Split:
    """Documents one after another, each [bos] + tokens + [eos].

    ids: uint16; offsets: [documents + 1].
    """

    ids: np.ndarray
    offsets: np.ndarray

    @property
    def documents(self) -> int:
        return len(self.offsets) - 1

    def document(self, i: int) -> np.ndarray:
        return self.ids[self.offsets[i] : self.offsets[i + 1]]


def corpus(path: str | Path) -> dict[str, Split]:
    """{'library', 'renamed', 'tests', 'dev'} of the corpus.npz of `experiments.nano.data`."""
    with np.load(path) as stored:
        names = sorted({key.split("_")[0] for key in stored.files})
        return {n: Split(stored[f"{n}_ids"], stored[f"{n}_offsets"]) for n in names}


class Stream:
    """Endless rows of a split: its documents in a new order each epoch, cut into rows of equal
    length from a random place on. Epochs are drawn from the seed, not from a clock."""

    def __init__(self, split: Split, seed: int) -> None:
        self.split, self.epoch = split, 0
        self._rng = np.random.default_rng(seed)
        self._ids, self._at = split.ids[:0], 0

    def rows(self, n: int, length: int) -> np.ndarray:
        """[n, length] int64."""
        out = []
        for _ in range(n):
            while len(self._ids) - self._at < length:
                self._next_epoch(length)
            out.append(self._ids[self._at : self._at + length])
            self._at += length
        return np.stack(out).astype(np.int64) if out else np.zeros((0, length), np.int64)

    def _next_epoch(self, length: int) -> None:
        order = self._rng.permutation(self.split.documents)
        left = self._ids[self._at :]
        self._ids = np.concatenate([left, *(self.split.document(i) for i in order)])
        if not self.epoch:
            self._at = int(self._rng.integers(min(length, max(len(self._ids) - length, 1))))
        else:
            self._at = 0
        self.epoch += 1


def trained_streams(data: dict[str, Split], renamed: float, seed: int) -> dict[str, Stream]:
    """What training text is drawn from; renamed library text only where it has a share."""
    names = ("library", "tests", "renamed") if renamed else ("library", "tests")
    return {name: Stream(data[name], seed + i) for i, name in enumerate(names)}


def trained_shares(library: float, renamed: float) -> list[float]:
    """Their shares of the rows: library text, and of that the renamed part."""
    shares = [library * (1 - renamed), 1 - library, library * renamed]
    return shares if renamed else shares[:2]


def mixed(
    streams: list[Stream], shares: list[float], rows: int, length: int, step: int = 0
) -> np.ndarray:
    """[rows, length] of all streams, whose shares add up to 1.

    A stream's rows of a step are its share rounded up or down, and its share on average over the
    steps: a share too small for a row each step gets one every few steps.
    """
    return np.concatenate([s.rows(n, length) for s, n in zip(streams, counts(shares, rows, step))])


def counts(shares: list[float], rows: int, step: int) -> list[int]:
    """How many of the rows each share gets at a step.

    [0, rows] is cut into the shares. A ruler with a mark at every 1 lies along it, and a share gets
    the marks in its part. Each step moves the ruler by the golden ratio, which spreads evenly.
    """
    ends = np.cumsum(shares) * rows
    ends[-1] = rows  # whatever the sum of the shares was rounded to
    return np.diff(np.floor(ends + (0.5 + step * GOLDEN) % 1), prepend=0).astype(int).tolist()


def pieces(split: Split, length: int) -> np.ndarray:
    """[n, length] rows that cover the split's documents, one after another, without the rest."""
    n = len(split.ids) // length
    return split.ids[: n * length].reshape(n, length).astype(np.int64)
