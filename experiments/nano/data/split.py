"""Which standard library file teaches the nano model, and which one judges it.

    sources(standard_library())    the `.py` files of this interpreter (CPython 3.11 only)
    split(files)                   -> Split: library and tests (trained on), dev (choices are made
                                   on it), heldout (measured once)

Modules stay whole, and modules that share text are one unit. Units of 3 to 50 kB are sorted by the
SHA-1 of their name: the first make up the held-out part, the next the dev part, all others are
trained on. Test suites are never in dev or held-out. What tests a dev or held-out module, or
is nearly a copy of its text, is not trained on either.
"""

from __future__ import annotations

import hashlib
import re
import sys
import sysconfig
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.nano.data.overlap import Shared, shared_text

__all__ = ["Source", "Split", "module_of", "sources", "split", "standard_library"]

PYTHON = (3, 11)
HELDOUT_MODULES = 28
DEV_MODULES = 9
UNIT_BYTES = (3_000, 50_000)  # smaller: too little to measure; larger: it would outweigh the rest
NEVER_JUDGE = ("test", "idlelib", "lib2to3", "encodings")
PROSE = "pydoc_data"  # the second domain: never trained on
GENERATED = ("_sysconfigdata", "config-")  # made by the build: another text on every platform
TEST_FOLDERS = ("test", "tests", "idle_test")
NEAR = 0.10  # files that share at least this part of their runs of words are near copies ...
NEAR_RUNS = 50  # ... if it is so many runs; two short files would be near copies by chance


@dataclass(frozen=True)
class Source:
    """One file. path: below the library, with "/"; text: its UTF-8 text, line ends as "\\n"."""

    path: str
    text: str

    @property
    def module(self) -> str:
        """The top-level module or package that the file belongs to."""
        return module_of(self.path)

    @property
    def size(self) -> int:
        """Bytes of the text."""
        return len(self.text.encode())

    @property
    def is_test(self) -> bool:
        """Whether the file is part of a test suite."""
        return any(part in TEST_FOLDERS for part in self.path.split("/")[:-1])


@dataclass(frozen=True)
class Split:
    """The parts, and what was found on the way.

    library, tests: trained on, by path; dev, heldout: not trained on, units in the order of the
    rule. units: modules that share text; near: the near copies behind that; dropped: {path: why} of
    files in no part; left: text that a trained file still shares with a dev or held-out one.
    """

    library: tuple[Source, ...]
    tests: tuple[Source, ...]
    dev: tuple[Source, ...]
    heldout: tuple[Source, ...]
    units: tuple[tuple[str, ...], ...]
    near: tuple[Shared, ...]
    dropped: dict[str, str]
    left: tuple[Shared, ...]


def module_of(path: str) -> str:
    """
    >>> module_of("json/decoder.py"), module_of("abc.py")
    ('json', 'abc')
    """
    return path.split("/")[0].removesuffix(".py")


def standard_library() -> Path:
    """The folder of this interpreter's standard library.

    RuntimeError when it is not CPython 3.11, whose text is the corpus.
    """
    found = f"{sys.implementation.name} {sys.version_info.major}.{sys.version_info.minor}"
    wanted = "cpython {}.{}".format(*PYTHON)
    if found != wanted:
        raise RuntimeError(
            f"the nano corpus is the standard library of {wanted}, and this is {found}: another "
            f"text gives another model and other figures; run the command with {wanted}"
        )
    return Path(sysconfig.get_paths()["stdlib"])


def sources(folder: Path) -> list[Source]:
    """Every `.py` file below `folder` that is UTF-8 and not blank, sorted by path; without
    site-packages and what the build of Python generates."""
    found = []
    for file in folder.rglob("*.py"):
        path = file.relative_to(folder).as_posix()
        if "site-packages" in path.split("/") or path.startswith(GENERATED):
            continue
        try:
            text = file.read_bytes().decode("utf-8").replace("\r\n", "\n")
        except UnicodeDecodeError:
            continue
        if text.strip():
            found.append(Source(path, text))
    return sorted(found, key=lambda source: source.path)


def split(
    files: Iterable[Source], heldout_modules: int = HELDOUT_MODULES, dev_modules: int = DEV_MODULES
) -> Split:
    """The rule. A part takes whole units until it has at least its number of modules."""
    files = [file for file in files if file.module != PROSE]
    shared = shared_text([(file.path, file.module, file.text) for file in files])
    near = [pair for pair in shared if pair.share >= NEAR and pair.runs >= NEAR_RUNS]
    can_judge = [file for file in files if not file.is_test and file.module not in NEVER_JUDGE]
    units = _units(can_judge, near)
    ordered = _ordered(units, can_judge)
    heldout, ordered = _take(ordered, heldout_modules)
    dev, _ = _take(ordered, dev_modules)
    held, devs = _files_of(heldout, can_judge), _files_of(dev, can_judge)

    judging = {file.path for file in held + devs}
    dropped = _not_trained(files, judging, heldout + dev, near)
    trained = [file for file in files if file.path not in judging and file.path not in dropped]
    left = {file.path for file in trained}
    return Split(
        library=tuple(file for file in trained if not file.is_test),
        tests=tuple(file for file in trained if file.is_test),
        dev=tuple(devs),
        heldout=tuple(held),
        units=tuple(unit for unit in units if len(unit) > 1),
        near=tuple(near),
        dropped=dropped,
        left=tuple(pair for pair in shared if _between(pair, judging, left)),
    )


def _units(files: Sequence[Source], near: Iterable[Shared]) -> list[tuple[str, ...]]:
    """The modules of `files`, those with near copies of one another together."""
    paths = {file.path for file in files}
    unit = {file.module: {file.module} for file in files}
    for pair in near:
        if {pair.a, pair.b} <= paths:
            joined = unit[module_of(pair.a)] | unit[module_of(pair.b)]
            unit.update(dict.fromkeys(joined, joined))
    return sorted({tuple(sorted(modules)) for modules in unit.values()})


def _ordered(units: Iterable[tuple[str, ...]], files: Sequence[Source]) -> list[tuple[str, ...]]:
    """The units of the right size by the SHA-1 of their first module's name."""
    low, high = UNIT_BYTES
    sizes = {unit: sum(file.size for file in files if file.module in unit) for unit in units}
    fitting = [unit for unit, size in sizes.items() if low <= size <= high]
    return sorted(fitting, key=lambda unit: hashlib.sha1(unit[0].encode()).hexdigest())


def _take(
    units: list[tuple[str, ...]], modules: int
) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
    """(the first units, as many as make that number of modules, the others)."""
    count = 0
    for place, unit in enumerate(units):
        if count >= modules:
            return units[:place], units[place:]
        count += len(unit)
    if count < modules:
        raise ValueError(f"{modules} modules wanted, and only {count} more of 3 to 50 kB are there")
    return units, []


def _files_of(units: Iterable[tuple[str, ...]], files: Sequence[Source]) -> list[Source]:
    return [file for unit in units for name in unit for file in files if file.module == name]


def _not_trained(
    files: Sequence[Source],
    judging: Collection[str],
    units: Iterable[tuple[str, ...]],
    near: Iterable[Shared],
) -> dict[str, str]:
    """{path: why} of the files that no part has: they would show the judging files' text."""
    names = {name for unit in units for name in unit}
    copies: dict[str, str] = {}
    for pair in near:
        for one, other in ((pair.a, pair.b), (pair.b, pair.a)):
            if one in judging:
                copies.setdefault(other, f"near copy of {one} ({pair.share:.0%})")
    seen = {file.text: file.path for file in files if file.path in judging}
    dropped = {}
    for file in files:
        if file.path in judging:
            continue
        tested = next((name for name in sorted(names) if file.is_test and _tests(file, name)), None)
        if tested is not None:
            dropped[file.path] = f"tests {tested}"
        elif file.path in copies:
            dropped[file.path] = copies[file.path]
        elif seen.setdefault(file.text, file.path) != file.path:
            dropped[file.path] = f"copy of {seen[file.text]}"
    return dropped


def _tests(file: Source, module: str) -> bool:
    """Whether a test file is the module's own: it lies in its package, or a part of its path is
    test_X, test_X_..., test_X3 or X_tests (underscores of X do not count: test_strptime)."""
    name = re.escape(module.strip("_"))
    own = re.compile(rf"test_+{name}(?![A-Za-z]).*|{name}_tests?")
    parts = file.path.removesuffix(".py").split("/")
    return file.module == module or any(own.fullmatch(part) for part in parts)


def _between(pair: Shared, judging: Collection[str], trained: Collection[str]) -> bool:
    return (pair.a in judging and pair.b in trained) or (pair.b in judging and pair.a in trained)
