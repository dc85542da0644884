"""What a slot returned, checked where it enters the engine: a wrong shape would broadcast in silence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def expect(
    value: Any,
    shape: tuple[int, ...],
    who: str | Callable[[], str],
    floating: bool | None = None,
) -> None:
    """Raise TypeError or ValueError, naming slot object and method, unless value is a tensor of shape.

    who: the name, or what makes it, called only for an error; floating: True or False if the dtype
    has to be a float or an integer (or bool).
    """
    if (
        isinstance(value, torch.Tensor)
        and value.shape == tuple(shape)
        and (floating is None or value.is_floating_point() == floating)
    ):
        return
    who = who if isinstance(who, str) else who()
    if not isinstance(value, torch.Tensor):
        raise TypeError(
            f"{who} returned {type(value).__name__} {value!r}: want a tensor of shape {list(shape)}"
        )
    if tuple(value.shape) != tuple(shape):
        raise ValueError(f"{who} returned shape {list(value.shape)}: want {list(shape)}")
    raise TypeError(
        f"{who} returned {value.dtype}: want {'a float' if floating else 'an integer'} dtype"
    )


def expect_record(value: Any, kind: type, who: str) -> None:
    """Raise TypeError, naming slot object and method, unless value is a record of this kind."""
    if not isinstance(value, kind):
        raise TypeError(
            f"{who} returned {type(value).__name__}: want a {kind.__name__} (slots/protocols.py)"
        )
