"""The nano model's data: `python -m experiments.nano.data` makes all of it (about two minutes).

    experiments/nano/work/tokenizer.json    learnt on the trained files only
    experiments/nano/work/corpus.npz        their tokens and the dev part's
    deepinfer/data/                         held-out, dev and prose as text (`di.data`)

For each of library, renamed, tests, dev the corpus has `NAME_ids` uint16 (documents one after
another, each [bos] + tokens + [eos]) and `NAME_offsets` int64 [documents + 1]. renamed: the
library's documents COPIES times, each time with other names in them (see `renamed`). Held-out is
not in the corpus: it is measured once, from `di.data`. The same Python gives the same files, byte
for byte.
"""

from __future__ import annotations

import argparse
import hashlib
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from deepinfer.data import xz_bits_per_byte
from experiments.nano import WORK
from experiments.nano.data import ship
from experiments.nano.data.prose import prose
from experiments.nano.data.renamed import pool_of, renamed
from experiments.nano.data.split import Source, Split, sources, split, standard_library
from experiments.nano.data.vocabulary import train_tokenizer

__all__ = ["COPIES", "encode", "make", "renamed_copies", "vocabulary_texts"]

BOS, EOS = 0, 1
LIBRARY_WEIGHT = 4  # a library file counts so often for the merges, a test file once
TABLES = "encodings"  # 1.4 MB of character tables: not worth a merge
# A file of at least so many tokens with fewer bytes a token than this is a table of numbers or
# names. A quarter of the library's tokens are, and they teach nothing about code.
TABLE_TOKENS, TABLE_BYTES = 2_000, 2.4
TRAINED = ("library", "renamed", "tests")
COPIES = 3  # of each library file, with other names in it
NAMES_SEED = 41  # of those names


def make(work: Path = WORK, replace: bool = False) -> list[str]:
    """Write all files; returns the summary, line by line.

    replace: overwrite shipped texts that differ. Without it they are an error, since the figures
    that are published for them would no longer hold.
    """
    folder = standard_library()
    files = sources(folder)
    parts, second = split(files), prose(folder, files)
    shipped = {"heldout": parts.heldout, "dev": parts.dev, "prose": second}
    licence = (folder / "LICENSE.txt").read_text(encoding="utf-8")
    ship.write(shipped, platform.python_version(), licence, replace=replace)
    tokenizer = train_tokenizer(vocabulary_texts(parts))
    work.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(work / "tokenizer.json"))
    library, tests = (without_tables(tokenizer, x) for x in (parts.library, parts.tests))
    texts = {"library": library, "renamed": renamed_copies(library), "tests": tests, **shipped}
    tokens = {}
    arrays: dict[str, np.ndarray] = {}
    for name, files in texts.items():
        ids, offsets = encode(tokenizer, [file.text for file in files])
        tokens[name] = (files, ids.size)
        if name in (*TRAINED, "dev"):
            arrays |= {f"{name}_ids": ids, f"{name}_offsets": offsets}
    np.savez_compressed(work / "corpus.npz", **arrays)
    return [*_found(parts), "", *_table(tokens), "", *_digests(work)]


def vocabulary_texts(parts: Split) -> list[str]:
    """What the merges are learnt from: trained files alone, library text before all."""
    library = [file.text for file in parts.library if file.module != TABLES]
    return library * LIBRARY_WEIGHT + [file.text for file in parts.tests]


def without_tables(tokenizer: Any, files: Sequence[Source]) -> list[Source]:
    """The files that are not tables (see TABLE_BYTES)."""
    kept = []
    for file in files:
        tokens = len(tokenizer.encode(file.text).ids)
        if tokens < TABLE_TOKENS or file.size / tokens >= TABLE_BYTES:
            kept.append(file)
    return kept


def renamed_copies(library: Sequence[Source], copies: int = COPIES) -> list[Source]:
    """All files of copy 1, then of copy 2, ... The new names are those of the given files: no file
    that judges gives one."""
    pool = pool_of(file.text for file in library)
    return [
        Source(file.path, renamed(file.text, pool, np.random.default_rng((NAMES_SEED, copy, i))))
        for copy in range(copies)
        for i, file in enumerate(library)
    ]


def encode(tokenizer: Any, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """(ids uint16 of all documents, each with bos and eos; offsets int64 [documents + 1])."""
    documents = [[BOS, *tokenizer.encode(text).ids, EOS] for text in texts]
    offsets = np.cumsum([0, *map(len, documents)], dtype=np.int64)
    return np.array([token for ids in documents for token in ids], dtype=np.uint16), offsets


def _found(parts: Split) -> Iterable[str]:
    """What the split did, in words."""
    for name in ("heldout", "dev"):
        modules = list(dict.fromkeys(file.module for file in getattr(parts, name)))
        yield f"{name}: {len(modules)} modules: {' '.join(modules)}"
    yield "modules that share text, kept together: " + "; ".join(map("+".join, parts.units))
    own = [path for path, why in parts.dropped.items() if why.startswith("tests ")]
    yield f"not trained on, tests of a held-out or dev module: {len(own)} files"
    for path, why in parts.dropped.items():
        if why.startswith("near "):
            yield f"not trained on: {path}: {why}"
    yield (
        f"trained files that are tables are left out: {TABLE_TOKENS:,} tokens or more at less than "
        f"{TABLE_BYTES} bytes a token"
    )
    copies = sum(why.startswith("copy ") for why in parts.dropped.values())
    yield f"not trained on, exact copies: {copies} files"
    yield "text that trained files still share with held-out or dev ones, the largest:"
    yield from (f"  {pair}" for pair in [p for p in parts.left if p.runs >= 20][:10])


def _table(parts: dict[str, tuple[Sequence[Source], int]]) -> Iterable[str]:
    yield "part      files modules       bytes     tokens  B/token xz bits/B"
    for name, (files, tokens) in parts.items():
        size = sum(file.size for file in files)
        xz = ""
        if name not in TRAINED:
            xz = f"{xz_bits_per_byte([file.text for file in files]):9.4f}"
        modules = len({ship.unit_of(file) for file in files})
        per_token = size / (tokens - 2 * len(files))
        line = f"{name:8} {len(files):6} {modules:7} {size:11,} {tokens:10,} {per_token:8.4f} {xz}"
        yield line.rstrip()
    yield "tokens count bos and eos of every document; bytes per token does not"


def _digests(work: Path) -> Iterable[str]:
    yield "sha256 of the files written:"
    for name in ("tokenizer.json", "corpus.npz"):
        written = (work / name).read_bytes()
        yield f"  {hashlib.sha256(written).hexdigest()}  {name}  {len(written):,} bytes"


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.nano.data", description="Make the nano model's data."
    )
    parser.add_argument("--replace", action="store_true", help="overwrite other shipped texts")
    replace = parser.parse_args(arguments).replace
    try:
        print("\n".join(make(replace=replace)))
    except (RuntimeError, FileExistsError) as error:
        raise SystemExit(f"error: {error}") from error
