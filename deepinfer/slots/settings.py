"""How a slot object shows itself: its class and the settings that differ from their defaults."""

from __future__ import annotations

import inspect
import reprlib
from collections.abc import Iterator
from typing import Any


def shown(obj: Any, *first: str) -> str:
    """`Stride(stride=2)`: what the constructors of its class and bases take, by name.

    A parameter is shown if the object has an attribute of its name that is not the default, so
    objects that a comparison tells apart by their text differ in it. first: attributes that are
    always shown, in front and without their name. The name is that of the object's own class, so a
    subclass is never taken for its base.
    """
    parts = [_short(getattr(obj, name, None)) for name in first]
    for p in _parameters(type(obj)):
        if p.name in first:
            continue
        value = getattr(obj, p.name, p.empty)
        if value is p.empty or inspect.ismethod(value) or _equal(value, p.default):
            continue
        parts.append(f"{p.name}={_short(value)}")
    return f"{type(obj).__name__}({', '.join(parts)})"


def _parameters(cls: type) -> Iterator[inspect.Parameter]:
    seen: set[str] = set()
    for base in cls.__mro__:
        init = vars(base).get("__init__")
        if not inspect.isfunction(init):
            continue
        for p in list(inspect.signature(init).parameters.values())[1:]:
            if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and p.name not in seen:
                seen.add(p.name)
                yield p


def _equal(value: Any, default: Any) -> bool:
    try:
        return value is default or (type(value) is type(default) and bool(value == default))
    except Exception:  # tensors and arrays have no single answer
        return False


def _short(value: Any) -> str:
    """One line without addresses, which differ from run to run."""
    if callable(value) and hasattr(value, "__name__"):
        return str(value.__name__)
    most = reprlib.Repr()
    most.maxlist = most.maxtuple = most.maxdict = most.maxset = 32
    text = " ".join(most.repr(value).split())
    return type(value).__name__ if " at 0x" in text else text
