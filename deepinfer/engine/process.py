"""The process that a thread was started in: a forked process has the object and not the thread."""

from __future__ import annotations

import os


class Process:
    """The process in which something was made that needs threads. what: names it in an error."""

    __slots__ = ("_what", "_pid")

    def __init__(self, what: str) -> None:
        self._what, self._pid = what, os.getpid()

    @property
    def forked(self) -> bool:
        """Whether this is another process, a fork of that one."""
        return os.getpid() != self._pid

    def require(self) -> None:
        """Raise RuntimeError in a forked process, where waiting would never end."""
        if self.forked:
            raise RuntimeError(
                f"this process was forked from the one in which {self._what}, and a fork has no "
                "threads but its own: make an engine here (eng.with_() shares the weights), or start "
                "processes with the method 'spawn'"
            )
