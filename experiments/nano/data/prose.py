"""The second domain, which the nano model never sees in training: English about Python.

The topics of the interactive help (`pydoc_data/topics.py`: the language reference as plain text)
and Python's licence. Topics are sorted by the SHA-1 of their name and taken until the next would
make it more than 200 kB. One is passed over if it shares a tenth of its eight-word runs with a
topic already taken (many repeat a section of another) or with a library file (`debugger` is the
help text of `pdb.py`).
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Sequence
from pathlib import Path

from experiments.nano.data.overlap import shared_text
from experiments.nano.data.split import NEAR, PROSE, Source

__all__ = ["prose"]

BYTES = 200_000
SMALLEST = 2_000  # bytes of a topic; shorter ones are mostly a single grammar rule


def prose(folder: Path, files: Sequence[Source]) -> list[Source]:
    """The licence and the chosen topics of a standard library, in the order of the choice.

    files: its `.py` files (`split.sources(folder)`), of whose text there shall be nothing.
    """
    licence = Source("LICENSE.txt", (folder / "LICENSE.txt").read_text(encoding="utf-8"))
    chosen = [licence]
    for topic in _fresh(_topics(folder), files):
        if sum(source.size for source in chosen) + topic.size > BYTES:
            break
        if not _near([topic], chosen):
            chosen.append(topic)
    return chosen


def _topics(folder: Path) -> list[Source]:
    """Every topic of some length, by the SHA-1 of its name. The file is parsed and not run."""
    path = f"{PROSE}/topics.py"
    tree = ast.parse((folder / path).read_text(encoding="utf-8"))
    value = next(node.value for node in tree.body if isinstance(node, ast.Assign))
    named = sorted(ast.literal_eval(value).items(), key=lambda item: _sha1(item[0]))
    topics = [Source(f"{path}#{name}", text) for name, text in named]
    return [topic for topic in topics if topic.size >= SMALLEST]


def _fresh(topics: Sequence[Source], files: Sequence[Source]) -> list[Source]:
    """The topics that no library file has the text of."""
    known = _near(topics, [file for file in files if file.module != PROSE])
    return [topic for topic in topics if topic.path not in known]


def _near(topics: Sequence[Source], others: Sequence[Source]) -> set[str]:
    """The paths of the topics that are near copies of one of the others."""
    marked = [(file.path, "others", file.text) for file in others]
    pairs = shared_text([*marked, *((topic.path, "topics", topic.text) for topic in topics)])
    found = {path for pair in pairs if pair.share >= NEAR for path in (pair.a, pair.b)}
    return found & {topic.path for topic in topics}


def _sha1(name: str) -> str:
    return hashlib.sha1(name.encode()).hexdigest()
