"""The second domain, which the nano model never sees in training: English about Python.

The topics of the interactive help (`pydoc_data/topics.py`: the language reference as plain text)
and Python's licence. Topics are sorted by the SHA-1 of their name and taken until there are
200 kB; one that shares a tenth of its eight-word runs with one already taken is passed over, for
many topics repeat a section of another.
"""

from __future__ import annotations

import ast
import hashlib
from pathlib import Path

from experiments.nano.overlap import shared_text
from experiments.nano.split import NEAR, PROSE, Source

__all__ = ["prose"]

BYTES = 200_000
SMALLEST = 2_000  # bytes of a topic; shorter ones are mostly a single grammar rule


def prose(folder: Path) -> list[Source]:
    """The licence and the chosen topics of a standard library, in the order of the choice."""
    licence = Source("LICENSE.txt", (folder / "LICENSE.txt").read_text(encoding="utf-8"))
    chosen = [licence]
    for topic in _topics(folder):
        if sum(source.size for source in chosen) + topic.size > BYTES:
            break
        if not _repeats(topic, chosen):
            chosen.append(topic)
    return chosen


def _topics(folder: Path) -> list[Source]:
    """Every topic of some length, by the SHA-1 of its name. The file is parsed and not run."""
    path = f"{PROSE}/topics.py"
    tree = ast.parse((folder / path).read_text(encoding="utf-8"))
    value = next(node.value for node in tree.body if isinstance(node, ast.Assign))
    topics = [Source(f"{path}#{name}", text) for name, text in ast.literal_eval(value).items()]
    long = [topic for topic in topics if topic.size >= SMALLEST]
    return sorted(long, key=lambda topic: _sha1(topic.path.split("#")[1]))


def _repeats(topic: Source, chosen: list[Source]) -> bool:
    pairs = shared_text([(source.path, source.path, source.text) for source in [*chosen, topic]])
    return any(topic.path in (pair.a, pair.b) and pair.share >= NEAR for pair in pairs)


def _sha1(name: str) -> str:
    return hashlib.sha1(name.encode()).hexdigest()
