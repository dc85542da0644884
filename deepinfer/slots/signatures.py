"""Whether an object's methods fit a protocol, said in words."""

from __future__ import annotations

import inspect
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
    """One sentence for each way in which an object does not fit; empty where it fits."""
    found = []
    wanted = getattr(protocol, "version", 1)
    version = getattr(obj, "version", wanted)
    if version != wanted:
        found.append(
            f"it is written for version {version} of {protocol.__name__}, this is version {wanted}"
        )
    for name in protocol_data(protocol):
        types, words = _DATA[name]
        value = getattr(obj, name, None)
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            found.append(f"attribute {name!r} must be {words}, found {value!r}")
    for name in protocol_methods(protocol):
        method = getattr(obj, name, None)
        if method is None:
            close = _near(name, obj)
            hint = f" (it has {close!r})" if close else ""
            found.append(f"method {name!r} is missing{hint}: {line(protocol, name)}")
        elif not callable(method):
            found.append(
                f"{name!r} is a {type(method).__name__}, not a method: {line(protocol, name)}"
            )
        else:
            wrong = _wrong_parameters(method, getattr(protocol, name))
            found += [f"{name}: {w}; the protocol's line is {line(protocol, name)}" for w in wrong]
    return found


def _wrong_parameters(method: Any, stated: Any) -> list[str]:
    try:
        own = list(inspect.signature(method).parameters.values())
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
    import difflib

    public = [n for n in dir(obj) if not n.startswith("_") and callable(getattr(obj, n, None))]
    return next(iter(difflib.get_close_matches(name, public, 1)), None)
