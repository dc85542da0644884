"""A progress bar where a person is watching, nothing elsewhere."""

import functools
import os
import sys
import threading
from weakref import WeakSet


class Silent:
    """Takes a bar's calls and shows nothing."""

    def update(self, n: int = 1) -> None: ...

    def close(self) -> None: ...

    def __enter__(self) -> "Silent":
        return self

    def __exit__(self, *exc: object) -> None: ...


def watched() -> bool:
    """True on a terminal and in a notebook; False in scripts, pipes and with DI_DISPLAY=test."""
    if os.environ.get("DI_DISPLAY") == "test":
        return False
    shell = sys.modules.get("IPython")  # never imported for this
    running = shell.get_ipython() if shell else None
    if hasattr(running, "kernel"):  # a terminal IPython has none
        return True
    return bool(getattr(sys.stderr, "isatty", lambda: False)())


def bar(total: int, what: str, unit: str = "tok", show: bool | None = None):
    """A context manager with `update(n)`: a tqdm bar, or `Silent`.

    show: None asks `watched`; True and False decide, but DI_DISPLAY=test and a missing tqdm
    always mean no bar (display only: results never depend on it).
    """
    if show is None:
        show = watched()
    if not show or os.environ.get("DI_DISPLAY") == "test":
        return Silent()
    try:
        from tqdm.auto import tqdm
    except ImportError:
        return Silent()
    shown = len(getattr(tqdm, "_instances", ()))  # below the bars of the caller's own loops
    made = with_own_lock(tqdm)
    return made(total=total, desc=what, unit=unit, leave=False, position=shown)


@functools.cache
def with_own_lock(tqdm: type) -> type:
    """A tqdm class whose bars share no lock with other bars.

    tqdm draws under one lock of the process, which it takes and gives back in two statements: an
    interrupt between them leaves it held, and every later bar of another thread waits for ever. A
    bar of this class draws under a lock of its own. That of the class guards the list of bars, and
    tqdm holds it in `with` blocks only, which an interrupt leaves properly.
    """

    class Bar(tqdm):  # type: ignore[misc, valid-type]
        _lock = threading.RLock()
        _instances: WeakSet = WeakSet()
        monitor_interval = 0  # no thread that looks after bars from outside

        def __init__(self, *args: object, **kwargs: object) -> None:
            self._lock = threading.RLock()
            super().__init__(*args, **kwargs)

    return Bar
