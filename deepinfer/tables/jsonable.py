"""Values that JSON can hold without loss: JSON knows no NaN and no infinity, so they are tagged."""

import math
from collections.abc import Mapping

Cell = int | float | str | bool | None

TAG = "$float"  # {"$float": "nan"}, in a text that is otherwise strict JSON


def cell(value: object, column: str, row: int) -> Cell:
    """`value` as a plain int, float, str, bool or None; scalars of NumPy and torch are unpacked.

    Raises TypeError with the column and the row for anything else.
    """
    value = _unpacked(value)
    if isinstance(value, str):
        return str.__str__(value)  # a subclass, such as an enum's, becomes a plain string
    for kind in (bool, int, float):
        if isinstance(value, kind):
            return kind(value)
    if value is None:
        return None
    raise TypeError(
        f"column {column!r}, row {row}: a cell is an int, float, str, bool or None, got "
        f"{type(value).__name__}; give each element a row of its own, or a text"
    )


def plain(value: object) -> object:
    """Nested mappings and sequences of cells as dicts and lists; other objects as their text."""
    value = _unpacked(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        items = sorted(value, key=str) if isinstance(value, (set, frozenset)) else value
        return [plain(item) for item in items]
    if isinstance(value, (bool, int, float, str)) or value is None:
        return cell(value, "", 0)
    return str(value)


def encode(value: object) -> object:
    """`value` (dicts, lists, cells) with its non-finite floats tagged."""
    if isinstance(value, dict):
        if TAG in value:
            raise ValueError(f"a key may not be {TAG!r}, which marks non-finite floats")
        return {key: encode(item) for key, item in value.items()}
    if isinstance(value, list):
        return [encode(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {TAG: str(value)}
    return value


def decode(value: object) -> object:
    """The inverse of `encode`."""
    if isinstance(value, dict):
        if TAG in value:
            return float(value[TAG])
        return {key: decode(item) for key, item in value.items()}
    if isinstance(value, list):
        return [decode(item) for item in value]
    return value


def _unpacked(value: object) -> object:
    """The Python number in a NumPy scalar or a tensor of one element."""
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        return value.item()  # type: ignore[attr-defined]
    return value
