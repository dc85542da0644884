"""Where an exception comes from: the line of the object's own code that raised it."""

from __future__ import annotations

import os
import sys
import traceback
from dataclasses import dataclass
from types import FrameType

_NOT_USERS = {"deepinfer", "torch"} | set(sys.stdlib_module_names) - {"__main__"}
_CELLS = ("ipykernel_", "<ipython-input")


@dataclass(frozen=True)
class Origin:
    """words: the exception and its place, without folders. mistake: equal for two exceptions that
    one mistake raised: the same kind from the same line of the object's code. Where none of its
    code was running (a result of the wrong kind), the same message is what tells."""

    words: str
    mistake: tuple[object, ...]


def origin(e: BaseException) -> Origin:
    """Where the object's code raised e: the innermost line outside this library, torch and Python's
    own library, or the innermost of all where there is none."""
    frames = [(f, n) for f, n in traceback.walk_tb(e.__traceback__)]
    told = f"{type(e).__name__}: {e}"
    if not frames:
        return Origin(told, (type(e), str(e)))
    own = [(f, n) for f, n in frames if _users(f)]
    frame, number = (own or frames)[-1]
    path, method = frame.f_code.co_filename, frame.f_code.co_name
    words = f"{told} ({_file(path)} line {number}, in {method})"
    if not own and _module(frame).startswith(__package__ or "deepinfer.conformance"):
        words = told  # the laws' own line says nothing about the object
    return Origin(words, (type(e), path, number) if own else (type(e), str(e)))


def _users(frame: FrameType) -> bool:
    return _module(frame).partition(".")[0] not in _NOT_USERS


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _file(path: str) -> str:
    return "notebook cell" if any(c in path for c in _CELLS) else os.path.basename(path)
