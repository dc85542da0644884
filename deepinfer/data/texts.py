"""Reading the shipped texts, and cutting them into passages.

A set is stored as one xz file of UTF-8 text and its file list in manifest.json. Both are checked
against their SHA-256 when they are read. They are read through the package's loader, so a package
inside an archive works too.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import operator
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from importlib import resources
from typing import Any

__all__ = ["Text", "dev", "heldout", "prose", "xz_bits_per_byte"]


class Text(str):
    """A string from a shipped file.

    module: its module or, in prose, its topic: the unit of an interval, since texts of one module
    resemble one another. path: the file, below the standard library. offset: where the string
    starts in the file, in characters. sha256: of the whole file. licence: its name and file.
    """

    module: str
    path: str
    offset: int
    sha256: str
    licence: str
    __slots__ = ("licence", "module", "offset", "path", "sha256")

    def __new__(
        cls, text: str, *, module: str, path: str, sha256: str, licence: str, offset: int = 0
    ) -> Text:
        self = super().__new__(cls, text)
        about = {"module": module, "path": path, "sha256": sha256, "licence": licence}
        for name, value in {**about, "offset": offset}.items():
            object.__setattr__(self, name, value)
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"a Text is immutable, as every string: cannot set {name!r}")

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Copies, and pickles of every protocol, are made by __new__ alone."""
        about = {name: getattr(self, name) for name in Text.__slots__}
        return _text_of, (type(self), str(self), about)

    def __repr__(self) -> str:
        place = f" from {self.offset:,}" if self.offset else ""
        first = next((line for line in self.splitlines() if line.strip()), "")
        shown = str(first) if len(first) <= 40 else first[:39] + "…"
        return f"<Text {self.path}{place}: {len(self):,} characters, {shown!r}>"

    def _repr_html_(self) -> str:
        from deepinfer.display.report import passage_html

        return passage_html(self)


def _text_of(kind: type[Text], text: str, about: dict[str, Any]) -> Text:
    """A Text from what a pickle of it holds."""
    return kind(text, **about)


def heldout(characters: int | None = 1500, count: int | None = None) -> list[Text]:
    """Texts of the standard library modules that nano was never trained on.

    characters=None: every file whole. Otherwise passages: whole lines, at least that many
    characters. count=None: one for each module, the beginning of its largest file (all of it, if it
    is shorter). Else `count` passages that do not overlap and are all long enough: first one of
    each module that has one, then a second of each that has two, and so on.

    ValueError when the set has fewer such passages.
    """
    return _texts("heldout", characters, count)


def dev(characters: int | None = 1500, count: int | None = None) -> list[Text]:
    """Texts of the modules that nano was not trained on, but that its recipe was chosen by.

    Arguments as of `heldout`.
    """
    return _texts("dev", characters, count)


def prose(characters: int | None = 1500, count: int | None = None) -> list[Text]:
    """English about Python, a domain that nano was never trained on: help topics and the licence.

    Arguments as of `heldout`; a topic counts as a module.
    """
    return _texts("prose", characters, count)


def xz_bits_per_byte(texts: Iterable[str]) -> float:
    """What `xz -9` needs for these texts, one after another: its bits for a byte of UTF-8 text."""
    data = "".join(texts).encode("utf-8")
    if not data:
        raise ValueError("no text: there is no byte to divide the bits by")
    return len(lzma.compress(data, preset=9)) * 8 / len(data)


def _texts(name: str, characters: int | None, count: int | None) -> list[Text]:
    files = _files(name)
    if characters is None:
        if count is not None:
            raise ValueError("count is of passages, and characters=None asks for whole files")
        return files
    wished = f"characters={characters!r}, count={count!r}"
    characters = _whole(characters, 1, wished)
    count = None if count is None else _whole(count, 0, wished)
    modules: dict[str, list[Text]] = {}
    for file in files:
        modules.setdefault(file.module, []).append(file)
    if count is None:
        largest = [max(of_module, key=len) for of_module in modules.values()]
        return [next(_passages(file, characters)) for file in largest]
    found = list(_in_rounds(modules.values(), characters))
    if len(found) < count:
        raise ValueError(
            f"di.data.{name}(characters={characters}, count={count}): it has {len(found)} passages "
            f"of {characters} characters that do not overlap; ask for fewer or shorter ones"
        )
    return found[:count]


def _whole(value: Any, least: int, wished: str) -> int:
    """An integer of any kind, NumPy's too, as Python's; a bool is none."""
    try:
        found = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        found = -1
    if found < least:
        raise ValueError(
            f"characters and count are whole numbers, at least 1 and 0; found {wished}"
        )
    return found


def _in_rounds(modules: Iterable[list[Text]], characters: int) -> Iterator[Text]:
    """The first long passage of each module, then the second of each, ...; largest files first."""
    queues = []
    for files in modules:
        files = sorted(files, key=len, reverse=True)
        passages = [passage for file in files for passage in _passages(file, characters)]
        queues.append([passage for passage in passages if len(passage) >= characters])
    for turn in range(max(map(len, queues))):
        yield from (queue[turn] for queue in queues if turn < len(queue))


def _passages(file: Text, characters: int) -> Iterator[Text]:
    """The file in passages of whole lines; only the last may have fewer characters."""
    start = 0
    while start < len(file):
        line_end = file.find("\n", start + characters - 1)
        end = len(file) if line_end < 0 else line_end + 1
        yield _part(file, start, end)
        start = end


def _part(file: Text, start: int, end: int) -> Text:
    about = {name: getattr(file, name) for name in ("module", "path", "sha256", "licence")}
    return Text(file[start:end], offset=start, **about)


def _files(name: str) -> list[Text]:
    """The whole files of a set, checked."""
    described, licence = _described(name)
    stored = f"{name}.txt.xz"
    try:
        data = lzma.decompress(_read(name, stored))
    except lzma.LZMAError as error:
        raise _damaged(name, f"{stored}: {error}") from error
    _check(name, stored, data, described["sha256"])
    texts, start = [], 0
    for file in described["files"]:
        part = data[start : start + file["bytes"]]
        start += file["bytes"]
        _check(name, f"{stored}, {file['path']}", part, file["sha256"])
        about = {key: file[key] for key in ("module", "path", "sha256")}
        texts.append(Text(part.decode("utf-8"), licence=licence, **about))
    if start != len(data):
        found = f"the files of {name} have {start:,} bytes, {stored} has {len(data):,}"
        raise _damaged(name, f"manifest.json: {found}")
    return texts


_FILE = {"path": str, "module": str, "bytes": int, "sha256": str}  # what is said of each file


def _described(name: str) -> tuple[dict[str, Any], str]:
    """What manifest.json says of a set, and its licence."""
    stored = _read(name, "manifest.json")
    try:
        manifest = json.loads(stored)
    except ValueError as error:
        raise _damaged(name, f"manifest.json: not JSON: {error}") from error
    sets = manifest.get("sets") if isinstance(manifest, dict) else None
    if not isinstance(sets, dict) or not isinstance(manifest.get("licence"), str):
        raise _damaged(name, "manifest.json: it lacks its sets or their licence")
    if name not in sets:
        raise _damaged(name, f"manifest.json: it has no such set, only {', '.join(sets) or 'none'}")
    described = sets[name]
    files = described.get("files") if isinstance(described, dict) else None
    if not isinstance(files, list) or not isinstance(described.get("sha256"), str):
        raise _damaged(name, f"manifest.json: {name} lacks its files or its SHA-256")
    for i, file in enumerate(files):
        known = file if isinstance(file, dict) else {}
        wrong = [key for key, kind in _FILE.items() if type(known.get(key)) is not kind]
        if wrong:
            raise _damaged(name, f"manifest.json: file {i} of {name} lacks its {', '.join(wrong)}")
    return described, manifest["licence"]


def _read(name: str, file: str) -> bytes:
    """The bytes of a file of this folder, which the set `name` needs."""
    folder = resources.files("deepinfer.data")
    try:
        return folder.joinpath(file).read_bytes()
    except (FileNotFoundError, KeyError):  # the latter from an archive
        raise FileNotFoundError(
            f"di.data.{name} reads {file}, and {folder} has no such file; install the package "
            "again, in a checkout `git checkout -- deepinfer/data`"
        ) from None
    except (OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise _damaged(name, f"{file}: it cannot be read: {error}") from error


def _check(name: str, what: str, data: bytes, expected: str) -> None:
    found = hashlib.sha256(data).hexdigest()
    if found != expected:
        raise _damaged(name, f"{what}: its SHA-256 is {found}, manifest.json says {expected}")


def _damaged(name: str, what: str) -> RuntimeError:
    return RuntimeError(
        f"di.data.{name}: deepinfer/data/{what}; the shipped text is damaged, so figures on it "
        "would be wrong: install the package again, in a checkout `git checkout -- deepinfer/data`"
    )
