"""The floors of the package: who may import whom, and how large a circle of imports may be.

FLOORS lists them, lowest first. A module imports from its own floor and from lower ones; an import
from a higher floor is an arrow up. Imports are read from the source, nothing is run. Each has a kind:

    top      at the top of the module or in a class: it runs when the module is imported
    lazy     inside a function: it runs when the function is called
    typing   under `if TYPE_CHECKING:`: only editors and type checkers follow it

A lazy import of the display floor is not counted as an arrow up: an object that shows itself
(`_repr_html_`) reaches for its display code when it is asked to, and so does a progress bar.

How an `__init__` counts. It is one module like any other, under its package's name: `from
deepinfer.slots.replay import register` is an arrow to slots/replay/__init__.py, and that file's
re-exports are arrows from it. `from package import submodule` is an arrow to the submodule.
Importing a.b.c also runs the `__init__` of a and of a.b; this is no arrow, or every package that
re-exports would be in a circle with all of its files. What `deepinfer.__init__` resolves by name at
run time, and what the registries do, are strings and no imports.

RATCHET holds the largest numbers that are allowed. They only fall: when a change makes one smaller,
lower it here in the same commit. The goal is 8 for the largest circle (all kinds) and for arrows up.

    python tests/test_layers.py     today's numbers, the circles, every arrow up
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

TOP, LAZY, TYPING = KINDS = ("top", "lazy", "typing")
DISPLAY = "display"

# Floor -> module prefixes; the longest prefix of a module that is listed decides. A place that does
# not exist yet may be listed, so that a move needs no change here.
FLOORS: dict[str, tuple[str, ...]] = {
    "ground": (
        "deepinfer",  # the namespace: it imports by name, when a name is used
        "deepinfer.rng",
        "deepinfer.kernels",
        "deepinfer.config",
        "deepinfer.tables",
        "deepinfer.session",
        "deepinfer.data",
    ),
    "parallel": ("deepinfer.parallel", "deepinfer.costmodel"),
    "protocols": (
        "deepinfer.slots",
        "deepinfer.slots.protocols",
        "deepinfer.slots.registry",
        "deepinfer.slots.results",
        "deepinfer.slots.settings",
        "deepinfer.slots.signatures",
    ),
    "cache": ("deepinfer.cache",),
    "model and variants": (
        "deepinfer.model",
        "deepinfer.slots.attention",
        "deepinfer.slots.experts",
        "deepinfer.slots.grammar",
        "deepinfer.slots.replay",
        "deepinfer.slots.sampler",
        "deepinfer.slots.verifier",
    ),
    "checkpoint": ("deepinfer.checkpoint",),
    "engine": (
        "deepinfer.engine",
        "deepinfer.engine.scheduling",
        "deepinfer.engine.prefix",
        "deepinfer.engine.stats",
        "deepinfer.engine.step",
        "deepinfer.engine.background",
    ),
    "compat": ("deepinfer.compat",),
    "measure": (
        "deepinfer.measure",
        "deepinfer.conformance",
    ),
    DISPLAY: ("deepinfer.display",),
    "commands": (
        "deepinfer.cli",
        "deepinfer.cluster",
        "deepinfer.demo",
        "deepinfer.doctor",
        "deepinfer.lab",
    ),
}

RATCHET = {
    "largest circle of top": 0,
    "largest circle of top and lazy": 5,
    "largest circle of top, lazy and typing": 8,
    "arrows up of top": 2,
    "arrows up of lazy": 2,
    "arrows up of typing": 3,
    "arrows up": 7,
}
SETS = ((TOP,), (TOP, LAZY), KINDS)  # the kinds whose circles are counted


# -------------------------------------------------------------------------- reading the imports


@dataclass(frozen=True, order=True)
class Arrow:
    """One import statement's name: `importer` imports `imported` at `line` of `file`."""

    importer: str
    imported: str
    kind: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.importer} -> {self.imported} ({self.kind})"


def sources() -> dict[str, tuple[str, str]]:
    """Module -> (file as it is shown, source) of the package and its kernels."""
    out = {}
    for package in ("deepinfer", "deepinfer.kernels"):
        spec = importlib.util.find_spec(package)
        assert spec is not None and spec.origin is not None
        folder = Path(spec.origin).parent
        for file in sorted(folder.rglob("*.py")):
            parts = file.relative_to(folder).with_suffix("").parts
            module = ".".join((package, *(p for p in parts if p != "__init__")))
            out[module] = (f"{folder.name}/{file.relative_to(folder)}", file.read_text("utf-8"))
    return out


def read(modules: Mapping[str, tuple[str, str]]) -> list[Arrow]:
    """Every import of one of these modules by another, in the order of the files."""
    return [arrow for module in modules for arrow in _of(module, modules)]


def _of(module: str, modules: Mapping[str, tuple[str, str]]) -> Iterator[Arrow]:
    file, source = modules[module]
    package = module if file.endswith("__init__.py") else module.rpartition(".")[0]
    for node, kind in _imports(ast.parse(source), TOP):
        for name in _names(node, package):
            found = next((n for n in (name, name.rpartition(".")[0]) if n in modules), None)
            if found is not None and found != module:
                yield Arrow(module, found, kind, file, node.lineno)


def _imports(node: ast.AST, kind: str) -> Iterator[tuple[ast.Import | ast.ImportFrom, str]]:
    """Import statements below a node, each with its kind."""
    for child in ast.iter_child_nodes(node):
        inner = kind
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)) and kind == TOP:
            inner = LAZY
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            inner = TYPING if child in node.body else kind
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child, inner
        else:
            yield from _imports(child, inner)


def _names(node: ast.Import | ast.ImportFrom, package: str) -> list[str]:
    """Full names that a statement imports; of `from a import b` that is a.b, whatever b is."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    base = [node.module] if node.module else []
    if node.level:
        base = [".".join(package.split(".")[: len(package.split(".")) - node.level + 1]), *base]
    return [".".join((*base, alias.name)) for alias in node.names]


# ------------------------------------------------------------------------------ floors, circles


def floor(module: str, floors: Mapping[str, Iterable[str]] = FLOORS) -> int:
    """Number of a module's floor, 0 the lowest. Raises KeyError if it has none of its own: the
    bare package name says nothing about what lies in it."""
    best, height = "", -1
    for number, prefixes in enumerate(floors.values()):
        for prefix in prefixes:
            inside = module == prefix or (module.startswith(f"{prefix}.") and "." in prefix)
            if inside and len(prefix) > len(best):
                best, height = prefix, number
    if not best:
        raise KeyError(f"{module} is on no floor: add its folder to FLOORS in tests/test_layers.py")
    return height


def arrows_up(arrows: Iterable[Arrow]) -> list[Arrow]:
    """Arrows to a higher floor, one of each importer, imported and kind: the first in the file."""
    top = list(FLOORS).index(DISPLAY)
    seen: dict[tuple[str, str, str], Arrow] = {}
    for a in arrows:
        high = floor(a.imported)
        if high > floor(a.importer) and not (a.kind == LAZY and high == top):
            seen.setdefault((a.importer, a.imported, a.kind), a)
    return list(seen.values())


def circles(arrows: Iterable[Arrow], kinds: Iterable[str] = KINDS) -> list[list[str]]:
    """Sets of modules that reach each other by imports of these kinds, the largest first."""
    after: dict[str, set[str]] = {}
    for a in arrows:
        if a.kind in kinds:
            after.setdefault(a.importer, set()).add(a.imported)
            after.setdefault(a.imported, set())
    order: list[str] = []
    seen: set[str] = set()
    for start in after:
        _walk(start, after, seen, order)
    before: dict[str, set[str]] = {module: set() for module in after}
    for module, imported in after.items():
        for other in imported:
            before[other].add(module)
    found, seen = [], set()
    for start in reversed(order):  # Kosaraju's second pass, against the arrows
        one: list[str] = []
        _walk(start, before, seen, one)
        if len(one) > 1:
            found.append(sorted(one))
    return sorted(found, key=lambda c: (-len(c), c))


def _walk(start: str, after: Mapping[str, set[str]], seen: set[str], order: list[str]) -> None:
    """Append to `order` what can be reached from start and is not seen yet, what is reached last
    first."""
    if start in seen:
        return
    seen.add(start)
    stack = [(start, iter(sorted(after[start])))]
    while stack:
        module, rest = stack[-1]
        following = next((m for m in rest if m not in seen), None)
        if following is None:
            order.append(module)
            stack.pop()
        else:
            seen.add(following)
            stack.append((following, iter(sorted(after[following]))))


def largest(arrows: Iterable[Arrow], kinds: Iterable[str] = KINDS) -> int:
    """Files in the largest circle; 0 without any circle."""
    return max((len(c) for c in circles(arrows, kinds)), default=0)


def numbers(arrows: list[Arrow]) -> dict[str, int]:
    """Today's number for each name in RATCHET."""
    up = arrows_up(arrows)
    out = {f"largest circle of {words(kinds)}": largest(arrows, kinds) for kinds in SETS}
    out |= {f"arrows up of {kind}": sum(a.kind == kind for a in up) for kind in KINDS}
    return out | {"arrows up": len({(a.importer, a.imported) for a in up})}


def words(kinds: tuple[str, ...]) -> str:
    return " and ".join(filter(None, (", ".join(kinds[:-1]), kinds[-1])))


def openers(arrows: list[Arrow], kinds: tuple[str, ...], most: int = 8) -> list[str]:
    """The arrows of the largest circle without which it is smaller, those that help most first. If
    no single one helps, its arrows up, then any."""
    inside = [a for a in arrows if a.kind in kinds]
    circle = set(next(iter(circles(inside)), []))
    inside = [a for a in inside if {a.importer, a.imported} <= circle]
    pairs: dict[tuple[str, str], list[Arrow]] = {}
    for a in inside:
        pairs.setdefault((a.importer, a.imported), []).append(a)
    left = {
        pair: largest([a for a in inside if (a.importer, a.imported) != pair]) for pair in pairs
    }
    ranked = sorted(
        pairs,
        key=lambda pair: (left[pair], floor(pair[1]) <= floor(pair[0]), pair),
    )
    return [
        f"{first}; without it: {left[pair]} files"
        for pair in ranked[:most]
        for first in pairs[pair][:1]
    ]


def report(arrows: list[Arrow]) -> str:
    """Numbers, circles and arrows up as text."""
    lines = [f"{name}: {n} (at most {RATCHET[name]})" for name, n in numbers(arrows).items()]
    for kinds in SETS:
        lines += ["", f"circles of {words(kinds)}:"]
        lines += [f"  {len(c)}: {', '.join(c)}" for c in circles(arrows, kinds)]
    return "\n".join([*lines, "", "arrows up:", *(f"  {a}" for a in sorted(arrows_up(arrows)))])


# ------------------------------------------------------------------------------------- the laws


def test_circles_and_arrows_up_only_fall():
    arrows = read(sources())
    found = numbers(arrows)
    assert found.keys() == RATCHET.keys()
    told = []
    for kinds in SETS:
        name = f"largest circle of {words(kinds)}"
        if found[name] > RATCHET[name]:
            told += [f"{name}: {found[name]} files, at most {RATCHET[name]}; the way out of it:"]
            told += [f"  {line}" for line in openers(arrows, kinds)]
    for name in (n for n in found if n.startswith("arrows up")):
        if found[name] > RATCHET[name]:
            told += [f"{name}: {found[name]}, at most {RATCHET[name]}:"]
            up = [a for a in arrows_up(arrows) if name in ("arrows up", f"arrows up of {a.kind}")]
            told += [f"  {a}" for a in sorted(up)]
    assert not told, (
        "\n".join(told) + "\nImport downwards only: pass what is needed as an argument, or move it "
        "to the floor of those that need it. A new import is among the lines above; `python "
        "tests/test_layers.py` shows all. RATCHET is never raised."
    )


def test_every_module_is_on_a_floor():
    for module in sources():
        floor(module)


def test_a_prefix_is_on_one_floor():
    listed = [prefix for prefixes in FLOORS.values() for prefix in prefixes]
    assert len(listed) == len(set(listed))


# A small package: each line of it is found, with its kind, as a circle or as an arrow up.
SNAPSHOTS = """from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from deepinfer.engine.engine import Engine
else:
    import deepinfer.rng
class A:
    def f(self):
        from ..cache.pages import Pages
    def _repr_html_(self):
        from deepinfer.display import html
"""
SMALL = {
    "deepinfer.cache": ("cache/__init__.py", "from .pages import Pages"),
    "deepinfer.cache.pages": ("cache/pages.py", "import os\nfrom deepinfer.cache import snapshots"),
    "deepinfer.cache.snapshots": ("cache/snapshots.py", SNAPSHOTS),
    "deepinfer.display.html": ("display/html.py", ""),
    "deepinfer.engine.engine": ("engine/engine.py", "from deepinfer.cache.snapshots import A"),
    "deepinfer.rng": ("rng.py", "from deepinfer.display.html import table"),
}


def test_imports_are_read_with_their_kinds():
    told = [str(a).replace("deepinfer.", "") for a in read(SMALL)]
    assert told == [
        "cache/__init__.py:1: cache -> cache.pages (top)",
        "cache/pages.py:2: cache.pages -> cache.snapshots (top)",
        "cache/snapshots.py:3: cache.snapshots -> engine.engine (typing)",
        "cache/snapshots.py:5: cache.snapshots -> rng (top)",
        "cache/snapshots.py:8: cache.snapshots -> cache.pages (lazy)",
        "cache/snapshots.py:10: cache.snapshots -> display.html (lazy)",
        "engine/engine.py:1: engine.engine -> cache.snapshots (top)",
        "rng.py:1: rng -> display.html (top)",
    ]


def test_circles_and_arrows_up_are_found():
    arrows = read(SMALL)
    assert [largest(arrows, kinds) for kinds in SETS] == [0, 2, 3]
    assert [f"{a.file}:{a.line}" for a in arrows_up(arrows)] == ["cache/snapshots.py:3", "rng.py:1"]
    first = openers(arrows, KINDS)[0]
    assert first.startswith("cache/snapshots.py:3") and first.endswith("2 files")


def test_a_module_without_a_floor_is_named():
    for module in ("deepinfer.attic", "deepinfer.attic.old"):
        try:
            floor(module)
        except KeyError as error:
            assert module in str(error)
        else:
            raise AssertionError(module)


if __name__ == "__main__":
    print(report(read(sources())))
