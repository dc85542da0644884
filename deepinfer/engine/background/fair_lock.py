"""FairLock: one thread at a time touches an engine's loop, in the order of asking.

With a background engine running, every call from a cell waits for the step that runs and for who
asked before it: the stepping thread asks anew for each step, so that it cannot keep a cell out.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")


class FairLock:
    """A lock that is fair and can be taken again by who has it.

    Exclusion is one lock of the interpreter's, held in a `with`, so that an interrupt at any line
    gives it back. The queue in front of it (everybody waits for who came before) is only
    politeness: an interrupt may cost somebody the place, never the lock.
    """

    __slots__ = ("_lock", "_guard", "_last", "_inside")

    def __init__(self) -> None:
        self._lock, self._guard = threading.RLock(), threading.RLock()
        self._last = threading.RLock()  # held by the last who asked, until done
        self._inside: set[int] = set()  # threads that wait or have their turn

    def run(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """work(...) in this thread's turn; at once where it has the turn already."""
        me = threading.get_ident()
        if me in self._inside:
            with self._lock:
                return work(*args, **kwargs)
        mine = threading.RLock()
        try:
            self._inside.add(me)
            with mine:
                with self._guard:
                    before, self._last = self._last, mine
                with before:  # free once who came before is done
                    pass
                with self._lock:
                    return work(*args, **kwargs)
        finally:
            self._inside.discard(me)


def locked(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Decorator: the method runs in its thread's turn at `self._lock`."""

    @functools.wraps(method)
    def call(self: Any, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._lock.run(method, self, *args, **kwargs)

    return call
