"""Whether an object's methods fit a protocol, said in words."""

from __future__ import annotations

import difflib
import inspect
from itertools import groupby
from typing import Any

_CALLED_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)

# Data that a protocol asks for beside its methods: name -> (types, in words).
_DATA: dict[str, tuple[tuple[type, ...], str]] = {
    "max_draft": ((int,), "an integer >= 0 (0 = no speculation)"),
    "rule": ((str,), "'match' or 'rejection'"),
    "exact": ((bool,), "True or False"),
}


def protocol_methods(protocol: type) -> tuple[str, ...]:
    """Public methods in the order in which the protocol states them."""
    return tuple(
        n for n, v in vars(protocol).items() if inspect.isfunction(v) and not n.startswith("_")
    )


def protocol_data(protocol: type) -> tuple[str, ...]:
    """Attributes that the protocol asks for; `version` is optional."""
    return tuple(n for n in vars(protocol).get("__annotations__", {}) if n in _DATA)


def line(protocol: type, method: str) -> str:
    """A method as the protocol states it: `Sampler.draw(self, dist: Dist, ...) -> Sampled`."""
    signature = str(inspect.signature(getattr(protocol, method))).replace("'", "")
    return f"{protocol.__name__}.{method}{signature}"


def mismatches(obj: Any, protocol: type) -> list[str]:
    """One sentence for each way in which an object, or a class, does not fit; empty if it fits.

    Of a class only what its instances certainly have is judged: its methods, and data that it
    states itself (`max_draft` may come from the constructor).
    """
    found = []
    of_class = isinstance(obj, type)
    wanted = getattr(protocol, "version", 1)
    version = getattr(obj, "version", wanted)
    if version != wanted:
        found.append(
            f"it is written for version {version} of {protocol.__name__}, this is version {wanted}"
        )
    for name in protocol_data(protocol):
        types, words = _DATA[name]
        value = getattr(obj, name, None)
        if of_class and (value is None or hasattr(value, "__get__")):
            continue
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            found.append(f"attribute {name!r} must be {words}, found {value!r}")
    for name in protocol_methods(protocol):
        method = getattr(obj, name, None)
        if method is None:
            if of_class and hasattr(obj, "__getattr__"):
                continue
            close = _near(name, obj)
            hint = f" (it has {close!r})" if close else ""
            found.append(f"method {name!r} is missing{hint}: {line(protocol, name)}")
        elif not callable(method):
            found.append(
                f"{name!r} is a {type(method).__name__}, not a method: {line(protocol, name)}"
            )
        else:
            unbound = of_class and inspect.isfunction(inspect.getattr_static(obj, name))
            wrong = _wrong_parameters(method, getattr(protocol, name), unbound)
            found += [f"{name}: {w}; the protocol's line is {line(protocol, name)}" for w in wrong]
    return found + _misspelt(obj, protocol)


def _wrong_parameters(method: Any, stated: Any, unbound: bool = False) -> list[str]:
    try:
        own = list(inspect.signature(method).parameters.values())[unbound:]  # without self
    except (TypeError, ValueError):  # a builtin without a signature: calling it will tell
        return []
    want = list(inspect.signature(stated).parameters.values())[1:]  # without self
    if any(p.kind is p.VAR_POSITIONAL for p in own):
        return []
    positional = [p for p in own if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    wrong = []
    for i, p in enumerate(want):
        if i >= len(positional):
            wrong.append(f"parameter {i + 1}, {p.name!r}, is missing")
        elif positional[i].name != p.name or positional[i].kind not in _CALLED_BY_NAME:
            wrong.append(
                f"parameter {i + 1} is named {positional[i].name!r}, it should be {p.name!r}"
            )
        elif p.default is not p.empty and positional[i].default is p.empty:
            wrong.append(f"parameter {p.name!r} needs a default, {p.default!r}")
    for p in own:
        extra = p not in positional[: len(want)]
        if extra and p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL):
            wrong.append(f"parameter {p.name!r} is one too many; give it a default")
    return wrong


def _near(name: str, obj: Any) -> str | None:
    public = [n for n in dir(obj) if not n.startswith("_") and callable(getattr(obj, n, None))]
    return next(iter(difflib.get_close_matches(name, public, 1)), None)


# ------------------------------------------------------------------------------- misspelt methods

_METHODS = (staticmethod, classmethod)
_NOT_USERS = ("deepinfer", "torch", "builtins", "typing", "abc")


def _misspelt(obj: Any, protocol: type) -> list[str]:
    """Public methods that override nothing, though their names say that they should.

    An inherited method hides the mistake: `selct` in a subclass of CSA2 is never called. A name
    that a base has is a helper of that base, and a class that also overrides the near method
    means what it says.
    """
    wanted = (*protocol_methods(protocol), "start")
    found, overridden = [], set()
    mro = (obj if isinstance(obj, type) else type(obj)).__mro__
    for i, cls in enumerate(mro):
        if cls.__module__.partition(".")[0] in _NOT_USERS:
            continue
        overridden |= set(vars(cls))
        for name, value in vars(cls).items():
            if name.startswith("_") or not (
                inspect.isfunction(value) or isinstance(value, _METHODS)
            ):
                continue
            if name in wanted or any(name in vars(base) for base in mro[i + 1 :]):
                continue
            meant = next((m for m in wanted if _typo(name, m)), None)
            if meant and meant not in overridden and callable(getattr(obj, meant, None)):
                slot = protocol.__name__.lower()
                found.append(f"method {name!r} is not part of {slot}; did you mean {meant!r}?")
    return found


def _typo(name: str, method: str) -> bool:
    """Whether a name is more likely a slip of the keys than a word of its own.

    Short names have many neighbours that are words (plan: plain; start: stats), so there only
    swapped and doubled letters count. Longer words around the method's (selected, router) and
    words with another beginning (locate, raw) are helpers.
    """
    a, b = (n.lower().replace("_", "") for n in (name, method))
    if [k for k, _ in groupby(a)] == [k for k, _ in groupby(b)]:  # alocate, kvspec
        return True
    if len(a) == len(b) and sorted(a) == sorted(b):  # rotue: neighbours swapped
        apart = [i for i in range(len(a)) if a[i] != b[i]]
        return len(apart) == 2 and apart[1] - apart[0] == 1
    if a[0] != b[0] or b in a or len(b) < 5 or method == "start":
        return False
    return difflib.SequenceMatcher(None, a, b).ratio() >= (0.85 if len(b) == 5 else 0.83)
