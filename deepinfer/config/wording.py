"""Values from a file as they are shown in errors and logs: printable, and not endless."""

from __future__ import annotations

import reprlib
from typing import Any

MOST = 2000  # characters of a message

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 120
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = 50


def shown(value: Any) -> str:
    """The repr of a value, cut if it is long. An integer beyond what Python prints is named so."""
    try:
        return _SHORT.repr(value)
    except ValueError:  # more than 4,300 digits
        return f"{type(value).__name__} with a number of thousands of digits"


def printable(text: str, most: int = MOST) -> str:
    """One line that a terminal shows as it is: control characters are escaped, a long text is cut
    in its middle and says how much is left out."""
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    if len(text) <= most:
        return text
    half = most // 2 - 30
    return f"{text[:half]} [... {len(text) - 2 * half:,} more characters ...] {text[-half:]}"
