"""README.md from the stored results: its tables, and its findings in words.

python -m experiments.replay_error.findings            # writes them into README.md
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from experiments.replay_error import accelerator
from experiments.replay_error import readme_tables as t
from experiments.replay_error.files import read_all
from experiments.replay_error.readme_tables import Parts
from experiments.replay_error.words import found

HERE = Path(__file__).resolve().parent

BLOCKS: dict[str, Callable[[Parts], str]] = {
    "facts": t.facts,
    "found": found,
    "keep": t.keep,
    "differences": t.differences,
    "depth": t.depth,
    "law": t.law,
    "lengths": t.lengths,
    "lengths_pairs": t.lengths_pairs,
    "turns": t.turns,
    "turns_pairs": t.turns_pairs,
    "sides": t.sides,
    "prose": t.prose,
    "drafts": t.drafts,
    "divergence": t.divergence,
    "seconds": t.seconds,
    "where": t.where,
    "accelerator": lambda _: accelerator.block(),
}


def filled(text: str, parts: Parts) -> str:
    """A README with every block made anew. ValueError for a name that is none."""

    def one(match: re.Match) -> str:
        name = match[1]
        if name not in BLOCKS:
            raise ValueError(f"README: no block {name!r}: {', '.join(BLOCKS)}")
        return f"<!-- begin {name} -->\n{BLOCKS[name](parts)}\n<!-- end {name} -->"

    return re.sub(r"<!-- begin (\w+) -->.*?<!-- end \1 -->", one, text, flags=re.S)


def main(arguments: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(
        prog="python -m experiments.replay_error.findings", description=__doc__
    )
    p.parse_args(arguments)
    readme, parts = HERE / "README.md", read_all(HERE / "results")
    readme.write_text(filled(readme.read_text("utf-8"), parts), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
