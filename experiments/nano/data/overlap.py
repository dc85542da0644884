"""Text that files of different modules share, counted in runs of eight words.

A run that many modules have is a licence header or the like and is not counted.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations

import numpy as np

__all__ = ["Shared", "shared_text"]

WORDS = 8
COMMON = 5  # a run in more modules than this is common property
_WORD = re.compile(r"\w+")
_MULTIPLIERS = np.random.default_rng(8).integers(0, 2**63, WORDS, dtype=np.uint64) * 2 + 1


@dataclass(frozen=True)
class Shared:
    """Two files (paths) of different modules, the runs that both have, and their share of the
    runs of the file with fewer."""

    a: str
    b: str
    runs: int
    share: float

    def __str__(self) -> str:
        return f"{self.share:5.1%} ({self.runs} runs) {self.a} ~ {self.b}"


def shared_text(files: Iterable[tuple[str, str, str]]) -> list[Shared]:
    """Every pair of files of different modules with a run in common, the largest share first.

    files: (path, module, text). Quadratic only in the files that have a run in common.
    """
    paths, modules, texts = zip(*files)
    numbers = {name: number for number, name in enumerate(dict.fromkeys(modules))}
    module = np.array([numbers[name] for name in modules])
    runs, owner, sizes = _of_several(_runs(texts), module)
    pairs: Counter[tuple[int, int]] = Counter()
    for group in np.split(owner, np.flatnonzero(np.diff(runs)) + 1):
        pairs.update((a, b) for a, b in combinations(group.tolist(), 2) if module[a] != module[b])
    found = [
        Shared(paths[a], paths[b], count, count / int(min(sizes[a], sizes[b])))
        for (a, b), count in pairs.items()
    ]
    return sorted(found, key=lambda pair: (-pair.share, pair.a, pair.b))


def _runs(texts: Iterable[str]) -> list[np.ndarray]:
    """Each text's different runs as 64-bit hashes, which depend on the texts alone."""
    numbers: dict[str, int] = {}
    found = []
    for text in texts:
        words = [numbers.setdefault(word, len(numbers)) for word in _WORD.findall(text)]
        ids = np.array(words, dtype=np.uint64)
        if ids.size < WORDS:
            found.append(np.empty(0, dtype=np.uint64))
            continue
        windows = np.lib.stride_tricks.sliding_window_view(ids + np.uint64(1), WORDS)
        found.append(np.unique((windows * _MULTIPLIERS).sum(axis=1, dtype=np.uint64)))
    return found


def _of_several(runs: list[np.ndarray], module: np.ndarray) -> tuple[np.ndarray, ...]:
    """(run, file) of every run that 2 to COMMON modules have, sorted; and by file, how many runs
    it has that no more than COMMON modules have."""
    owner = np.repeat(np.arange(len(runs)), [found.size for found in runs])
    flat = np.concatenate(runs)
    order = np.lexsort((owner, module[owner], flat))
    flat, owner = flat[order], owner[order]
    first = np.r_[True, flat[1:] != flat[:-1]]  # of a run
    other = first | np.r_[True, np.diff(module[owner]) != 0]  # one more module that has it
    group = first.cumsum() - 1
    count = np.bincount(group, weights=other)[group]
    sizes = np.bincount(owner[count <= COMMON], minlength=len(runs))
    several = (count > 1) & (count <= COMMON)
    return flat[several], owner[several], sizes
