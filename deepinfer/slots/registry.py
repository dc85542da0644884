"""Names of slot variants, and what makes an object fit a slot.

    @di.verifier.register("mine")            # each slot's folder has its own `register`
    class Mine(di.verifier.BaseVerifier): ...

    eng.with_(verifier="mine")               # a slot value is a name, a class or an instance

A slot object is settings. `start(obj, info)` gives an engine its own copy, which holds what it
learns, so two engines never share one.
"""

from __future__ import annotations

import copy
import difflib
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from deepinfer.slots import protocols
from deepinfer.slots.protocols import SLOTS
from deepinfer.slots.signatures import mismatches, protocol_methods

C = TypeVar("C", bound=Callable[..., Any])

PROTOCOLS: dict[str, type] = {slot: getattr(protocols, slot.capitalize()) for slot in SLOTS}


class Registry:
    """The variants of one slot by name."""

    def __init__(self, slot: str, protocol: type) -> None:
        self.slot = slot
        self.protocol = protocol
        self._variants: dict[str, Callable[..., Any]] = {}

    def __repr__(self) -> str:
        return f"<{self.slot} variants: {', '.join(self.names())}>"

    def register(self, name: str) -> Callable[[C], C]:
        """Decorator that names a class (or a function that makes an object) of this slot.

        Running a notebook cell again replaces what it registered before. Any other second use of a
        name raises ValueError: no engine should change because a module was imported. A class whose
        methods do not fit the slot raises TypeError now, with what `resolve` would say later.
        """
        if not isinstance(name, str) or not name.replace("_", "").replace("-", "").isalnum():
            raise ValueError(
                f"di.{self.slot}.register({name!r}): the name must be a string of letters, digits, "
                f'_ and -; write @di.{self.slot}.register("name") above the class'
            )

        def put(made_by: C) -> C:
            held = self._variants.get(name)
            if held is not None and not _same_cell(held, made_by):
                raise ValueError(
                    f"di.{self.slot} already has {name!r}: {held.__module__}.{held.__qualname__}; "
                    f"register {made_by.__module__}.{made_by.__qualname__} under another name"
                )
            if isinstance(made_by, type):  # what a function makes is seen once it is made
                self._require_fit(made_by.__name__, mismatches(made_by, self.protocol))
            self._variants[name] = made_by
            return made_by

        return put

    def names(self) -> tuple[str, ...]:
        """All names, sorted; imports the slot's own variants first."""
        self._load()
        return tuple(sorted(self._variants))

    def get(self, name: str) -> Callable[..., Any]:
        """What a name stands for. Raises ValueError with the nearest name."""
        self._load()
        if name in self._variants:
            return self._variants[name]
        raise ValueError(self._unknown(name))

    def resolve(self, value: Any) -> Any:
        """A name, a class or an instance -> an instance whose methods fit the protocol.

        Raises ValueError for an unknown name and TypeError for anything that does not fit, with the
        protocol's own line for each method.
        """
        if isinstance(value, str):
            value = self.get(value)
        if isinstance(value, type) or (
            inspect.isfunction(value) and value in self._variants.values()
        ):
            value = self._make(value)
        if (
            value is None
            or isinstance(value, (dict, list, tuple, int, float, bool))
            or inspect.ismodule(value)
        ):
            raise TypeError(
                f"{self.slot}={value!r}: want a name ({', '.join(map(repr, self.names()))}), "
                f"a class or an instance such as {self._example()}"
            )
        wrong = mismatches(value, self.protocol)
        self._require_fit(type(value).__name__, wrong or _mislabelled(value))
        return value

    def _require_fit(self, name: str, wrong: list[str]) -> None:
        if wrong:
            lines = "".join(f"\n  - {w}" for w in wrong)
            raise TypeError(f"{name} is no {self.slot} variant:{lines}")

    def _make(self, made_by: Callable[..., Any]) -> Any:
        try:
            inspect.signature(made_by).bind()
        except TypeError as e:
            name = made_by.__name__
            raise TypeError(
                f"{self.slot}={name}: {name} cannot be made without arguments ({e}); "
                f"pass an instance, {name}{inspect.signature(made_by)}"
            ) from None
        return made_by()

    def _load(self) -> None:
        importlib.import_module(f"deepinfer.slots.{self.slot}")

    def _unknown(self, name: str) -> str:
        head, colon, tail = name.partition(":")
        if not colon:
            head, colon, tail = name.partition("(")
        if colon and head in self._variants:
            made_by = self._variants[head].__name__
            return (
                f"{self.slot}={name!r}: a name takes no settings; pass an instance, "
                f"di.{self.slot}.{made_by}({tail.rstrip(')')})"
            )
        close = difflib.get_close_matches(name, self._variants, 1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        names = ", ".join(sorted(self._variants))
        return f"no {self.slot} variant is named {name!r}: {hint}the names are {names}"

    def _example(self) -> str:
        made_by = next(iter(self._variants.values()), None)
        return f"di.{self.slot}.{made_by.__name__}()" if made_by else f"di.{self.slot}.Mine()"


REGISTRIES: dict[str, Registry] = {slot: Registry(slot, PROTOCOLS[slot]) for slot in SLOTS}


def registry(slot: str) -> Registry:
    """The registry of a slot. Raises ValueError naming the six slots."""
    if slot not in REGISTRIES:
        close = difflib.get_close_matches(slot, SLOTS, 1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"there is no slot {slot!r}: the slots are {', '.join(SLOTS)}{hint}")
    return REGISTRIES[slot]


def resolve(slot: str, value: Any) -> Any:
    """`registry(slot).resolve(value)`."""
    return registry(slot).resolve(value)


def slot_of(obj: Any) -> str:
    """The slot whose protocol an object's methods fit best. Raises TypeError where none is near.

    A subclass of a protocol belongs to it. Otherwise the slot of which the object has the most
    methods wins, then the one of which it has the largest share; it must have at least one.
    """

    def fit(slot: str) -> tuple[bool, int, float]:
        names = protocol_methods(PROTOCOLS[slot])
        present = sum(callable(getattr(obj, n, None)) for n in names)
        stated = PROTOCOLS[slot] in (obj if isinstance(obj, type) else type(obj)).__mro__
        return stated, present, present / len(names)

    best = max(SLOTS, key=fit)
    if not any(fit(best)):
        every = "; ".join(f"{s}: {', '.join(protocol_methods(PROTOCOLS[s]))}" for s in SLOTS)
        raise TypeError(
            f"{type(obj).__name__} has no method of any slot ({every}); "
            "pass slot= to say which is meant"
        )
    return best


# ------------------------------------------------------------------------------ starting, promises


def start(obj: Any, info: protocols.EngineInfo) -> Any:
    """The engine's own copy of a slot object: `obj.start(info)`, or a deep copy where it has none.

    Never the object itself, whatever its `start` returns.
    """
    if not hasattr(obj, "start"):
        return copy.deepcopy(obj)
    own = obj.start(info)
    if own is None:
        raise TypeError(
            f"{type(obj).__name__}.start(info) returned None: return the object the engine should "
            "use, for example copy.deepcopy(self)"
        )
    return copy.deepcopy(own) if own is obj else own


@dataclass(frozen=True)
class Promises:
    """What a slot object claims of itself. exact: computes the model's own function.
    batch_invariant: a row's bits do not depend on its company. on_device: tensor operations only,
    so an overlapped engine need not wait for it."""

    exact: bool
    batch_invariant: bool
    on_device: bool


# Overriding one of these without saying so again drops an inherited claim.
_DECIDES = {
    "attention": ("plan", "select", "attend"),
    "experts": ("route", "forward"),
    "sampler": ("distribution", "draw"),
    "grammar": ("compile",),
    "verifier": ("accept",),
    "replay": ("plan",),
}


def promises(obj: Any, slot: str | None = None) -> Promises:
    """The claims of an object; what it does not say it does not promise.

    A claim is a statement about methods. So a subclass that overrides one of the slot's deciding
    methods (for example `select` of CSA2) and does not state `exact` or `batch_invariant` again
    does not inherit them.
    """
    methods = _DECIDES[slot or slot_of(obj)]
    return Promises(
        exact=bool(_claim(obj, "exact", methods)),
        batch_invariant=bool(_claim(obj, "batch_invariant", methods)),
        on_device=bool(_claim(obj, "on_device", methods)),
    )


def _claim(obj: Any, name: str, methods: tuple[str, ...]) -> Any:
    if name in getattr(obj, "__dict__", {}):
        return obj.__dict__[name]
    for cls in type(obj).__mro__:
        if name in cls.__dict__:
            return getattr(obj, name)
        if any(m in cls.__dict__ for m in methods):
            return False
    return False


def _mislabelled(obj: Any) -> list[str]:
    """One sentence if an inherited repr names another class: results would carry the base's name."""
    cls = type(obj)
    owner = next(c for c in cls.__mro__ if "__repr__" in vars(c))
    if owner in (cls, object) or cls.__name__ in (text := repr(obj)):
        return []
    return [
        f"it shows itself as {text}, by the __repr__ of {owner.__name__}, and results would carry "
        f"that name: begin {owner.__name__}.__repr__ with type(self).__name__, or give "
        f"{cls.__name__} a __repr__"
    ]


def _same_cell(held: Any, new: Any) -> bool:
    return held.__module__ == new.__module__ == "__main__" and held.__qualname__ == new.__qualname__
