"""Ops by name, their implementations, and the choice between them.

An op is one signature with several implementations: `reference` (plain torch, runs anywhere),
our own faster ones, and adapters to vendor kernels. A choice is made in this order:

1. `with kernels.use(topk="reference"):` as it stood when the ops were bound,
2. the mapping given to `kernels.bind`,
3. automatic: the first that is available and supports the call, vendor before own before
   reference.

An implementation that is asked for by name and cannot run raises with its reason; nothing else
is tried in its place.
"""

from __future__ import annotations

import contextvars
import difflib
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

KINDS = ("vendor", "own", "reference")

#: The folders of this package that hold ops; imported when the first op is asked for.
FOLDERS = (
    "rms_norm",
    "linear",
    "group_linear",
    "rope",
    "mhc_mix",
    "mhc_collapse",
    "mhc_expand",
    "cache_round",
    "pack",
    "unpack",
    "compress",
    "index_scores",
    "topk",
    "candidate_blocks",
    "sparse_attend",
    "route",
    "experts",
    "swiglu",
    "engram_hash",
    "engram_gate",
)

_OPS: dict[str, Op] = {}
_USED: contextvars.ContextVar[tuple[tuple[str, str], ...]] = contextvars.ContextVar(
    "deepinfer.kernels.use", default=()
)


@dataclass(frozen=True)
class Implementation:
    """One way to compute an op.

    fn: takes the op's arguments.
    supports: same arguments -> None, or why this call is refused. None: every call is supported.
    available: () -> None, or why it cannot run on this machine. None: it always can.
    batch_invariant: a row's bits do not depend on which other rows are in the call.
    late: tried after the reference, because it is slower: kept for what it promises.
    """

    op: str
    name: str
    fn: Callable[..., Any]
    kind: str
    batch_invariant: bool
    supports: Callable[..., str | None] | None = None
    available: Callable[[], str | None] | None = None
    late: bool = False

    def why_unavailable(self) -> str | None:
        return self.available() if self.available is not None else None

    def why_refused(self, *args, **kwargs) -> str | None:
        return self.supports(*args, **kwargs) if self.supports is not None else None


@dataclass
class Op:
    """A named operation: its contract and everything that computes it.

    signature: arguments and results with their shapes, as text.
    rows: the arguments whose first axis is the row axis t (for the laws about rows).
    cases: (generator, dtype) -> iterator of (label, arguments by name), the shapes every
        implementation is held to.
    tolerance: dtype name -> (rtol, atol) against the reference; (0, 0) means equal bits.
    differentiable: the result has a gradient with respect to float arguments.
    """

    name: str
    signature: str
    rows: tuple[str, ...]
    cases: Callable[..., Iterator[tuple[str, dict[str, Any]]]]
    tolerance: Mapping[str, tuple[float, float]]
    differentiable: bool = True
    implementations: dict[str, Implementation] = field(default_factory=dict)

    def implement(
        self,
        name: str,
        *,
        kind: str = "own",
        batch_invariant: bool,
        supports: Callable[..., str | None] | None = None,
        available: Callable[[], str | None] | None = None,
        late: bool = False,
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Decorator that adds an implementation, also from a notebook cell (which may run twice:
        the later one replaces the earlier one)."""
        if kind not in KINDS:
            raise ValueError(f"kind={kind!r} of {self.name}/{name}: use one of {', '.join(KINDS)}")
        if name == "auto":
            raise ValueError(f'"auto" stands for the automatic choice; name {self.name} otherwise')

        def add(fn: Callable[..., Any]) -> Callable[..., Any]:
            self.implementations[name] = Implementation(
                self.name, name, fn, kind, batch_invariant, supports, available, late
            )
            return fn

        return add

    def ordered(self) -> list[Implementation]:
        """Implementations in the order the automatic choice tries them."""
        return sorted(self.implementations.values(), key=lambda i: (i.late, KINDS.index(i.kind)))

    def implementation(self, name: str) -> Implementation:
        """The implementation called `name`; ValueError with a suggestion when there is none."""
        if name not in self.implementations:
            raise ValueError(
                f"op {self.name} has no implementation {name!r}"
                + _suggest(name, self.implementations)
            )
        return self.implementations[name]

    def __repr__(self) -> str:
        lines = [self.signature]
        for i in self.ordered():
            invariant = ", batch invariant" if i.batch_invariant else ""
            lines.append(f"  {i.name} ({i.kind}{invariant})")
        return "\n".join(lines)


def register(op: Op) -> Op:
    """Make an op known by its name."""
    _OPS[op.name] = op
    return op


def names() -> tuple[str, ...]:
    """The names of all ops."""
    _load()
    return tuple(_OPS)


def get(name: str) -> Op:
    """The op called `name`; ValueError with a suggestion when there is none."""
    _load()
    if name not in _OPS:
        raise ValueError(f"there is no op {name!r}" + _suggest(name, _OPS))
    return _OPS[name]


class use:
    """`with kernels.use(topk="reference", experts="gathered"):` ops bound inside the block run the
    named implementations. Blocks nest, the inner one wins; "auto" gives an op back to the
    automatic choice. Names are checked at once (ValueError)."""

    def __init__(self, **choices: str):
        self.choices = tuple(_checked(choices).items())
        self._tokens: list[contextvars.Token] = []

    def __enter__(self) -> use:
        merged = dict(_USED.get()) | dict(self.choices)
        self._tokens.append(_USED.set(tuple(merged.items())))
        return self

    def __exit__(self, *_: object) -> None:
        _USED.reset(self._tokens.pop())


class Ops:
    """Every op as a method, with the choice of implementation made once.

    `ops.rms_norm(x, weight, eps)`. `ops.counts` says what ran: {(op, implementation): calls}.
    Made by `kernels.bind`.
    """

    def __init__(
        self,
        mapping: Mapping[str, str],
        batch_invariant: bool,
        calls: dict[tuple[str, str], int] | None = None,
    ):
        self._mapping = dict(mapping)
        self._used = _USED.get()
        self._calls = {} if calls is None else calls
        self.batch_invariant = batch_invariant
        chosen = self._mapping | dict(self._used)
        for op in map(get, names()):
            name = chosen.get(op.name, "auto")
            run = self._automatic(op) if name == "auto" else self._named(op.implementation(name))
            setattr(self, op.name, run)

    def current(self) -> Ops:
        """These ops under the `use` blocks in force now: self when nothing changed, otherwise
        bound again, counting calls in the same place."""
        if _USED.get() == self._used:
            return self
        return Ops(self._mapping, self.batch_invariant, self._calls)

    if TYPE_CHECKING:  # the ops are attributes of the instance, set above

        def __getattr__(self, name: str) -> Callable[..., Any]: ...

    @property
    def counts(self) -> dict[tuple[str, str], int]:
        """{(op, implementation): calls so far}, only what ran."""
        return {key: n for key, n in self._calls.items() if n}

    def __repr__(self) -> str:
        ran = ", ".join(f"{op}/{name} {n}" for (op, name), n in self.counts.items())
        return f"Ops(batch_invariant={self.batch_invariant}, ran: {ran or 'nothing yet'})"

    def _counted(self, implementation: Implementation) -> Callable[..., Any]:
        calls, fn = self._calls, implementation.fn
        key = (implementation.op, implementation.name)
        calls.setdefault(key, 0)

        def run(*args, **kwargs):
            calls[key] += 1
            return fn(*args, **kwargs)

        return run

    def _named(self, implementation: Implementation) -> Callable[..., Any]:
        label = f"{implementation.op}/{implementation.name}"
        why = implementation.why_unavailable()
        if why is not None:
            raise ValueError(f"{label} was asked for and is not available: {why}")
        if self.batch_invariant and not implementation.batch_invariant:
            raise ValueError(f"{label} was asked for and is not batch invariant")
        run, supports = self._counted(implementation), implementation.supports
        if supports is None:
            return run

        def checked(*args, **kwargs):
            why = supports(*args, **kwargs)
            if why is not None:
                raise ValueError(f"{label} was asked for and refuses this call: {why}")
            return run(*args, **kwargs)

        return checked

    def _automatic(self, op: Op) -> Callable[..., Any]:
        able = [
            i
            for i in op.ordered()
            if (i.batch_invariant or not self.batch_invariant) and i.why_unavailable() is None
        ]
        if not able:
            need = "batch-invariant " if self.batch_invariant else ""
            raise ValueError(f"no {need}implementation of {op.name} is available here")
        choices = []
        for i in able:
            choices.append((i.supports, self._counted(i)))
            if i.supports is None:
                break  # what follows would never be asked
        if choices[0][0] is None:
            return choices[0][1]

        def run(*args, **kwargs):
            for supports, call in choices:
                if supports is None or supports(*args, **kwargs) is None:
                    return call(*args, **kwargs)
            why = explain(op.name, *args, **kwargs)
            raise ValueError(f"no implementation supports this call:\n{why}")

        return run


def bind(mapping: Mapping[str, str] | None = None, batch_invariant: bool = False) -> Ops:
    """Choose an implementation for every op.

    mapping: op name -> implementation name or "auto"; ops not in it are chosen automatically. The
        `use` blocks in force now come before it.
    batch_invariant: choose only implementations whose rows do not depend on their batch.
    Raises ValueError for an unknown name, and for a named implementation that cannot run.
    """
    return Ops(_checked(mapping or {}), batch_invariant)


@dataclass(frozen=True)
class Explanation:
    """Why an op runs what it runs; `rows` has one dict an implementation, the repr is a table."""

    op: str
    rows: tuple[dict[str, str], ...]

    def __repr__(self) -> str:
        columns = list(self.rows[0])
        widths = {c: max(len(c), *(len(r[c]) for r in self.rows)) for c in columns}
        lines = ["  ".join(c.ljust(widths[c]) for c in columns).rstrip()]
        for row in self.rows:
            lines.append("  ".join(row[c].ljust(widths[c]) for c in columns).rstrip())
        return "\n".join(lines)


def explain(op: str, *args, **kwargs) -> Explanation:
    """The implementations of `op` in the order they are tried, and why each can or cannot take
    these arguments. Without arguments only availability is looked up."""
    asked = bool(args or kwargs)
    used = dict(_USED.get()).get(get(op).name, "auto")
    rows, chosen = [], None
    for i in get(op).ordered():
        missing = i.why_unavailable()
        refused = i.why_refused(*args, **kwargs) if asked and missing is None else None
        able = missing is None and refused is None
        if used == i.name or (used == "auto" and able and chosen is None and asked):
            chosen = i.name
        rows.append(
            {
                "implementation": i.name,
                "kind": i.kind,
                "batch invariant": "yes" if i.batch_invariant else "no",
                "available": "yes" if missing is None else "no",
                "supports this call": ("yes" if able else "no") if asked else "-",
                "chosen": "yes" if chosen == i.name else "",
                "reason": missing or refused or "",
            }
        )
    return Explanation(op, tuple(rows))


def _load() -> None:
    for folder in FOLDERS:
        importlib.import_module(f"deepinfer.kernels.{folder}")


def _checked(choices: Mapping[str, str]) -> dict[str, str]:
    for op, name in choices.items():
        if name != "auto":
            get(op).implementation(name)
        else:
            get(op)
    return dict(choices)


def _suggest(name: str, known: Iterable[str]) -> str:
    known = list(known)
    close = difflib.get_close_matches(str(name), known, n=1)
    guess = f"; did you mean {close[0]!r}?" if close else ""
    return f"{guess} (there are: {', '.join(sorted(known))})"
