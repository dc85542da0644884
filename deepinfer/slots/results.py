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


def expect_ids(value: Any, rows: int, who: str) -> None:
    """Raise TypeError or ValueError, naming slot object and method, unless value is an integer tensor
    [rows, any]."""
    columns = value.shape[1:2] if isinstance(value, torch.Tensor) and value.dim() == 2 else (-1,)
    if columns == (-1,) and isinstance(value, torch.Tensor):
        raise ValueError(f"{who} returned shape {list(value.shape)}: want [{rows}, any]")
    expect(value, (rows, *columns), who, False)


def expect_below(ids: torch.Tensor, end: Any, who: str, what: str) -> None:
    """Raise ValueError, naming slot object and method, unless -1 <= ids < end. what: ids stand for.

    Only in a step of an engine on a CPU: on an accelerator the host would wait for the answer, and
    training runs the same code there.
    """
    if ids.device.type != "cpu" or not ids.numel() or not torch.is_inference_mode_enabled():
        return
    wrong = (ids < -1) | (ids >= end)
    if wrong.any():
        at = tuple(wrong.nonzero()[0].tolist())
        end = torch.as_tensor(end).expand_as(ids)
        raise ValueError(
            f"{who} returned id {int(ids[at])} at {list(at)}: want {what}, here below {int(end[at])}, "
            "or -1 for none"
        )


def expect_bool(value: Any, who: str) -> bool:
    """The value. Raises TypeError, naming slot object and method, unless it is True or False."""
    if type(value).__name__ not in ("bool", "bool_"):  # Python's and numpy's
        raise TypeError(f"{who} returned {type(value).__name__} {value!r}: want True or False")
    return bool(value)


def expect_record(value: Any, kind: type, who: str) -> None:
    """Raise TypeError, naming slot object and method, unless value is a record of this kind."""
    if not isinstance(value, kind):
        raise TypeError(
            f"{who} returned {type(value).__name__}: want a {kind.__name__} (slots/protocols.py)"
        )
