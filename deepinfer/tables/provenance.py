"""Where a measurement comes from: enough to repeat it, nothing that names a person's machine."""

from __future__ import annotations

import functools
import importlib.metadata
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

Facts = Callable[[], dict[str, object]]


def collect(**more: object) -> dict[str, object]:
    """The facts of this process that a result may depend on.

    Returns `version` of deepinfer, `commit` (of a checkout; "+changes" when files differ from it;
    None for an installed package), `torch`, `python`, `device` ("cpu" unless told), `threads` (of
    torch's operations; None while torch is not loaded), and then `more` (weights, data and config
    hashes, slots, seeds), which wins over a fact of the same name. Never a path or a host name.
    """
    import deepinfer

    torch = sys.modules.get("torch")  # loading torch to describe it would cost a second
    facts: dict[str, object] = {
        "version": deepinfer.__version__,
        "commit": commit(),
        "torch": str(torch.__version__) if torch else _installed("torch"),
        "python": platform.python_version(),
        "device": "cpu",
        "threads": torch.get_num_threads() if torch else None,
    }
    return {**facts, **more}


@functools.cache
def commit() -> str | None:
    """The commit of the checkout this package runs from, or None outside one. Read once."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists() or not (root / "pyproject.toml").exists():
        return None  # a venv inside another project's repository is not our checkout
    head = _git(root, "rev-parse", "HEAD")
    if not head:
        return None
    return head + ("+changes" if _git(root, "status", "--porcelain", "-uno") else "")


def _git(root: Path, *args: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *args], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
