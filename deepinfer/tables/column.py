"""Column: what `table["name"]` returns, a list that compares with one value row by row."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

from deepinfer.tables.jsonable import Cell


class Mask(list[bool]):
    """One bool a row. `&`, `|` and `~` combine masks; `table[mask]` has the rows of True."""

    def __and__(self, other: Mask) -> Mask:
        return Mask(a and b for a, b in zip(self, other, strict=True))

    def __or__(self, other: Mask) -> Mask:
        return Mask(a or b for a, b in zip(self, other, strict=True))

    def __invert__(self) -> Mask:
        return Mask(not a for a in self)

    def __bool__(self) -> bool:
        raise ValueError(
            "a mask has one bool a row and no truth of its own: use table[mask], any(mask) or "
            "all(mask); combine masks with & and |, not with `and` and `or`"
        )


class Column(list[Cell]):
    """The values of one column.

    A comparison with one value (`t["kl"] > 0.1`, `t["source"] == "draft"`) gives a Mask. None and
    NaN are in no order, so `<`, `<=`, `>` and `>=` are False there. `==` and `!=` with a list or
    another column compare the whole, as lists do.
    """

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> Any:
        if isinstance(other, (list, tuple)) or not _is_cell(other):
            return list.__eq__(self, other)
        return Mask(bool(value == other) for value in self)

    def __ne__(self, other: object) -> Any:
        if isinstance(other, (list, tuple)) or not _is_cell(other):
            return list.__ne__(self, other)
        return Mask(bool(value != other) for value in self)

    def __lt__(self, other: Any) -> Any:
        return self._ordered(other, operator.lt)

    def __le__(self, other: Any) -> Any:
        return self._ordered(other, operator.le)

    def __gt__(self, other: Any) -> Any:
        return self._ordered(other, operator.gt)

    def __ge__(self, other: Any) -> Any:
        return self._ordered(other, operator.ge)

    def isin(self, values: Iterable[object]) -> Mask:
        """The rows whose value is one of `values`."""
        values = list(values)
        return Mask(value in values for value in self)

    def _ordered(self, other: Any, test: Callable[[Any, Any], bool]) -> Any:
        if isinstance(other, list):
            return test(list(self), list(other))
        return Mask(value is not None and bool(test(value, other)) for value in self)


def _is_cell(value: object) -> bool:
    """Whether it is one value; a scalar of NumPy or torch is one too."""
    return (
        value is None or isinstance(value, (str, int, float)) or getattr(value, "ndim", None) == 0
    )
