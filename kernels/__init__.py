"""Ops of the model, each with a readable reference and faster implementations.

    names()            the ops                      get("topk")        one op and its contract
    bind(...)          an object with every op      use(topk="...")    choose inside a block
    explain("topk", scores, 64)                     why a call runs what it runs

torch is imported when the first op is asked for, not with this package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .registry import (
    Explanation,
    Implementation,
    Op,
    Ops,
    bind,
    explain,
    get,
    names,
    register,
    use,
)

if TYPE_CHECKING:
    from .quantised import Quantised
    from .records import Layout, Records

__all__ = [
    "Explanation",
    "Implementation",
    "Layout",
    "Op",
    "Ops",
    "Quantised",
    "Records",
    "bind",
    "explain",
    "get",
    "names",
    "register",
    "use",
]

_LAZY = {"Layout": "records", "Records": "records", "Quantised": "quantised"}


def __getattr__(name: str):
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(f"deepinfer.kernels.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'deepinfer.kernels' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
