"""Numbers as text that holds on every machine."""

import math
from collections.abc import Iterable

DIGITS = 3  # two CPUs agree on three significant digits of a well-conditioned float32 result


def fmt(x: object, digits: int = DIGITS) -> str:
    """`x` as short text: floats to 3 significant digits, everything else exactly.

    Takes numbers, tensors and arrays of one element, None, and sequences of those. Values from
    1e-4 up to below 1e6 are written plainly, others with an exponent.

    >>> fmt(0.123456), fmt(1234.5), fmt(2.5e-7), fmt([1, 2.0])
    ('0.123', '1230', '2.5e-07', '[1, 2]')
    """
    if isinstance(x, (str, bool, int)) or x is None:
        return str(x)
    if isinstance(x, float):
        return _float(x, digits)
    if getattr(x, "ndim", None) == 0:  # a tensor, an array, or a NumPy scalar
        return fmt(x.item(), digits)  # type: ignore[attr-defined]
    if hasattr(x, "tolist"):
        return fmt(x.tolist(), digits)  # type: ignore[attr-defined]
    if isinstance(x, Iterable):
        return "[" + ", ".join(fmt(item, digits) for item in x) + "]"
    raise TypeError(f"fmt takes numbers, tensors and sequences of them, got {type(x).__name__}")


def _float(x: float, digits: int) -> str:
    if not math.isfinite(x):
        return str(x)
    mantissa, _, exponent = f"{x:.{digits - 1}e}".partition("e")
    if float(mantissa) == 0:
        return "0"
    if not -4 <= int(exponent) < 6:
        return _trimmed(mantissa) + "e" + exponent
    places = max(0, digits - 1 - int(exponent))
    return _trimmed(f"{float(mantissa + 'e' + exponent):.{places}f}")


def _trimmed(text: str) -> str:
    return text.rstrip("0").rstrip(".") if "." in text else text


def counted(n: int, one: str, many: str = "") -> str:
    """A count and its noun. >>> counted(1, "text"), counted(2, "text") -> ('1 text', '2 texts')"""
    return f"{n} {one if n == 1 else many or one + 's'}"


def size(count: float) -> str:
    """Bytes as text, in decimal units. >>> size(7_200_000_000) -> '7.2 GB'"""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(count) < 999.5 or unit == "TB":
            return f"{fmt(float(count))} {unit}"
        count /= 1000
    raise AssertionError("unreachable")
