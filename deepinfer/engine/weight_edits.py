"""Notices that a model's weights were changed in place, so that nothing says or serves the old ones.

torch counts the in-place changes of every tensor. The counts and addresses of all weights are kept
as they were after loading and compared when an identity is asked for and when a request is
admitted to a prefix cache. One change is not counted: values written through `parameter.data`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


class WeightEdits:
    """The identity of one model's weights, with the changes since they were loaded.

    generation: how many changes have been noticed; fingerprint: `loaded`, with `+edited` behind it
    after the first one and a number from the second one on.
    """

    def __init__(self, model: nn.Module, loaded: str) -> None:
        self._model = weakref.ref(model)
        self._tensors = _finder(model)
        self._stamp = _stamp(self._tensors())
        self._loaded = loaded
        self._known = [loaded]  # the fingerprint last noticed, also for readers that outlive this
        self._generation = 0

    @property
    def generation(self) -> int:
        """Looks at every weight once: a fraction of a millisecond."""
        stamp = _stamp(self._tensors())
        if stamp != self._stamp:
            self._stamp = stamp
            self._generation += 1
            number = "" if self._generation == 1 else str(self._generation)
            self._known[0] = f"{self._loaded}+edited{number}"
        return self._generation

    @property
    def fingerprint(self) -> str:
        """Also finds modules that were replaced."""
        model = self._model()
        if model is not None:
            self._tensors = _finder(model)
        return (self.generation, self._known[0])[1]

    def reader(self) -> Callable[[], str]:
        """Reads the fingerprint later, without holding any weight; of weights that are gone, the
        last one noticed."""
        mine, known = weakref.ref(self), self._known

        def read() -> str:
            edits = mine()
            return known[0] if edits is None else edits.fingerprint

        return read


def _finder(model: nn.Module) -> Callable[[], list[Tensor]]:
    """What lists the tensors of a model's modules as they are now; quicker than a walk."""
    modules = list(getattr(model, "modules", list)())
    stores = [s for m in modules for s in (m._parameters, m._buffers) if s]
    quantised = [m for m in modules if _is_quantised(getattr(m, "weight", None))]

    def tensors() -> list[Tensor]:
        found = [x for store in stores for x in store.values() if x is not None]
        for module in quantised:
            weight: Any = module.weight
            found += [weight.data, weight.scale] if _is_quantised(weight) else [weight]
        return found

    return tensors


def _is_quantised(weight: Any) -> bool:
    return not isinstance(weight, Tensor) and hasattr(weight, "scale")


def _stamp(tensors: list[Tensor]) -> list[tuple[int, int]]:
    return [(x.data_ptr(), 0 if x.is_inference() else x._version) for x in tensors]
