"""A progress bar where a person is watching, nothing elsewhere."""

import os
import sys


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
    return tqdm(total=total, desc=what, unit=unit, leave=False)
