"""Python text with other names in it: `renamed(text, pool, rng)`.

Library text is read many times in training, and a model that knows a file's names by heart has no
need to read them. In a renamed copy some names are others, the same ones in the whole file, so what
a name is can only be learnt from what stands before it.

What knows a name by its meaning keeps it: keywords, built-ins and the methods of their types,
__dunder__ names, self and cls, imported modules.
"""

from __future__ import annotations

import builtins
import io
import keyword
import re
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

__all__ = ["Pool", "pool_of", "renamed", "shape"]

# {shape: (names, sorted; how often each is drawn, relative to the others)}
Pool = dict[tuple[str, str], tuple[list[str], np.ndarray]]

SHARE = (0.3, 0.9)  # of a document's names that are renamed
POWER = 0.5  # a name is drawn as often as its count to this power

_TYPES = (str, bytes, bytearray, int, float, list, tuple, dict, set, range, BaseException)
_TYPES += (io.TextIOWrapper, io.BufferedRandom, io.BytesIO, io.StringIO, property, memoryview)
KEPT = {"self", "cls", *keyword.kwlist, *keyword.softkwlist, *dir(builtins)}
KEPT |= {name for kind in _TYPES for name in dir(kind)}

_WORD = re.compile(r"(?<!\w)[A-Za-z_]\w*")
# What can be no English word: with _ or a digit inside, or capitals after or before small letters.
_CODE = re.compile(r"[A-Za-z].*[_\d]|_.*[A-Za-z]|[a-z][A-Z]|[A-Z]{2}[a-z]{2}")
_IN_STRING = re.compile(  # escapes are taken first: the n of \n belongs to no name
    r"\\N\{[^}]*\}|\\x\w\w|\\u\w{4}|\\U\w{8}|\\.|\w+", re.DOTALL
)
_IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+\.*([\w.]+)[ \t]+import\b|import[ \t]+([\w., \t]+))", re.MULTILINE
)
_FUTURE = re.compile(r"^from __future__ import (.*)", re.MULTILINE)


def renamed(text: str, pool: Pool, rng: np.random.Generator) -> str:
    """`text` with a share (see SHARE) of its names replaced, each by one of `pool` of its shape.

    A new name stands for one old name, and is no word of the text. In comments and strings only
    what cannot be English (`_CODE`) is replaced, so that prose stays prose; in the fields of an
    f-string everything is. Text that is not Python 3 comes back as it is.
    """
    pieces = _pieces(text)
    if pieces is None:
        return text
    words = set(_WORD.findall(text))
    kept = KEPT | _modules(text)
    names = sorted({name for name in _names(pieces) if name not in kept})
    count = round(rng.uniform(*SHARE) * len(names))
    chosen = [names[i] for i in sorted(rng.permutation(len(names))[:count])]
    new = _new_names(chosen, pool, words | kept, rng)
    return "".join(_replaced(piece, new) for piece in pieces)


def pool_of(texts: Iterable[str]) -> Pool:
    """The names of texts, by shape; without modules, which no variable is called after."""
    counts: Counter[str] = Counter()
    modules: set[str] = set()
    for text in texts:
        counts.update(_names(_pieces(text) or []))
        modules |= _modules(text)
    by_shape: dict[tuple[str, str], list[str]] = {}
    for name in sorted(counts.keys() - modules):
        by_shape.setdefault(shape(name), []).append(name)
    return {
        kind: (names, np.array([counts[name] for name in names]) ** POWER)
        for kind, names in by_shape.items()
    }


def shape(name: str) -> tuple[str, str]:
    """(underscores in front, kind of the rest).

    >>> shape("_read_line"), shape("HTTPServer"), shape("MAX_SIZE"), shape("x")
    (('_', 'snake_case'), ('', 'CamelCase'), ('', 'UPPER_CASE'), ('', 'x'))
    """
    rest = name.lstrip("_")
    front = name[: len(name) - len(rest)]
    if len(rest) == 1:
        return front, "X" if rest.isupper() else "x"
    if rest == rest.upper():
        return front, "UPPER_CASE" if "_" in rest else "UPPER"
    if rest == rest.lower():
        return front, "snake_case" if "_" in rest else "word"
    return front, "CamelCase" if rest[0].isupper() else "camelCase"


# ------------------------------------------------------------------------------ what may be renamed


def _names(pieces: list[Piece]) -> Iterator[str]:
    """The names in code that may be others, as often as they stand there."""
    for kind, name in pieces:
        if kind == NAME and name not in KEPT and name.strip("_") and name.isascii():
            if not (name.startswith("__") and name.endswith("__")):
                yield name


def _modules(text: str) -> set[str]:
    """Names of imported modules, and what comes from __future__."""
    found = set()
    for source, several in _IMPORT.findall(text):
        for path in [source, *several.split(",")]:
            found.update(path.split(" as ")[0].strip().split("."))
    for listed in _FUTURE.findall(text):
        found.update(_WORD.findall(listed))
    return found


def _new_names(
    chosen: list[str], pool: Pool, taken: set[str], rng: np.random.Generator
) -> dict[str, str]:
    """{old name: new name}; without those for which the pool has no name left."""
    new = {}
    for kind in sorted({shape(name) for name in chosen}):
        old = [name for name in chosen if shape(name) == kind]
        names, weights = pool.get(kind, ([], np.zeros(0)))
        # Draws without replacement: whose clock, faster for larger weights, rings first.
        order = np.argsort(rng.exponential(size=len(names)) / weights)
        free = (names[i] for i in order if names[i] not in taken)
        new.update(zip(old, free))
    return new


# --------------------------------------------------------------------------------- where names are

NAME, PROSE, REST = range(3)
Piece = tuple[int, str]  # (NAME, PROSE: text of a comment or string, or REST; the text)

_FIELD = re.compile(
    r"""(?P<string>(?:(?<!\w)[rbfuRBFU]{1,2})?(?:'''.*?'''|\"\"\".*?\"\"\"|'[^']*'|"[^"]*"))"""
    r"|(?P<name>(?<!\w)[A-Za-z_]\w*)|!=|![rsa]|.",
    re.DOTALL,
)


def _pieces(text: str) -> list[Piece] | None:
    """A Python 3 text in pieces, which joined are the text; None where it is none."""
    begin = [0]
    for line in text.split("\n"):
        begin.append(begin[-1] + len(line) + 1)
    pieces, done = [], 0
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.ERRORTOKEN and token.string.strip():
                return None
            if token.type not in (tokenize.NAME, tokenize.COMMENT, tokenize.STRING):
                continue
            start = begin[token.start[0] - 1] + token.start[1]
            pieces.append((REST, text[done:start]))
            done = start + len(token.string)
            if token.type == tokenize.NAME:
                pieces.append((NAME, token.string))
            elif token.type == tokenize.STRING:
                pieces += _string(token.string)
            else:
                pieces.append((PROSE, token.string))
    except (tokenize.TokenError, SyntaxError):
        return None
    return [*pieces, (REST, text[done:])]


def _string(text: str) -> list[Piece]:
    """A string with its prefix and quotes."""
    prefix = text[: min(text.find(quote) % (len(text) + 1) for quote in "\"'")]
    return _f_string(text, 0, False)[0] if "f" in prefix.lower() else [(PROSE, text)]


def _f_string(text: str, at: int, is_format: bool) -> tuple[list[Piece], int]:
    """(pieces from `at` on, where they end): of a whole f-string, or of a format in it."""
    pieces, start = [], at
    while at < len(text) and not (is_format and text[at] == "}"):
        if text.startswith("\\N{", at):
            at = text.index("}", at) + 1
        elif text[at : at + 2] in ("{{", "}}"):
            at += 2
        elif text[at] == "{":
            pieces.append((PROSE, text[start : at + 1]))
            field, at = _field(text, at + 1)
            pieces, start = pieces + field, at
        else:
            at += 1
    return [*pieces, (PROSE, text[start:at])], at


def _field(text: str, at: int) -> tuple[list[Piece], int]:
    """(pieces of the replacement field that starts at `at`, where the text behind it starts)."""
    pieces: list[Piece] = []
    depth = 0
    while found := _FIELD.match(text, at):
        part, at = found[0], found.end()
        if found["string"]:
            pieces += _string(part)
            continue
        pieces.append((NAME if found["name"] else REST, part))
        if not depth and part == "}":
            break
        if not depth and part == ":":
            more, at = _f_string(text, at, True)
            pieces += more
        depth += (part in "([{") - (part in ")]}")
    return pieces, at


def _replaced(piece: Piece, new: Mapping[str, str]) -> str:
    """The piece's text with new names."""
    kind, text = piece
    if kind == NAME:
        return new.get(text, text)
    if kind == PROSE:
        return _IN_STRING.sub(lambda m: new.get(m[0], m[0]) if _CODE.search(m[0]) else m[0], text)
    return text
