"""The tutorials on disk: a checkout's own, or copies from the package, never over a changed one."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

MANIFEST = (
    ".deepinfer-tutorials.json"  # name -> hash of what was copied, to tell whose change it is
)
FOLDER = "deepinfer-tutorials"


def checkout() -> Path | None:
    """The tutorials of the checkout this package runs from, or None where it was installed."""
    root = Path(__file__).resolve().parents[1]
    found = root / "tutorials"
    return found if (root / "pyproject.toml").exists() and found.is_dir() else None


def packaged() -> Path:
    """The folder of notebooks that came with the package."""
    return checkout() or Path(__file__).resolve().parent / "tutorials"


def copy(target: Path, source: Path | None = None) -> list[str]:
    """Copy the tutorials into `target`, a line for each file. A changed file is never touched.

    A file that a person changed keeps its place; when the package brings another version of it,
    that one is written beside it, with the package's version in its name.
    """
    source = packaged() if source is None else source
    notebooks = sorted(source.glob("*.ipynb"))
    if not notebooks:
        raise FileNotFoundError(f"no tutorials came with this installation (looked in {source})")
    if target.exists() and not target.is_dir():
        raise NotADirectoryError(f"{target} is a file: name a new folder or an existing one")
    target.mkdir(parents=True, exist_ok=True)
    record = target / MANIFEST
    copied = json.loads(record.read_text("utf-8")) if record.exists() else {}
    said = [_place(path, target, copied) for path in notebooks]
    record.write_text(json.dumps(copied, indent=1, sort_keys=True) + "\n", "utf-8")
    return said


def _place(path: Path, target: Path, copied: dict[str, str]) -> str:
    """Bring one notebook into `target`, note it in `copied`, and say what was done."""
    new, place = path.read_bytes(), target / path.name
    before, copied[path.name] = copied.get(path.name), _hash(new)
    if not place.exists():
        place.write_bytes(new)
        return f"{path.name}: copied"
    mine = place.read_bytes()
    if mine == new:
        return f"{path.name}: up to date"
    if before == _hash(new):
        return f"{path.name}: yours is changed, and is kept"
    if before == _hash(mine):
        place.write_bytes(new)
        return f"{path.name}: brought up to date"
    beside = _beside(place, new)
    return f"{path.name}: yours is changed, and is kept; the package's version is in {beside.name}"


def _beside(place: Path, new: bytes) -> Path:
    """A file next to `place` that holds `new`; one that holds something else is not touched."""
    import deepinfer

    stem, count = f"{place.stem}-{deepinfer.__version__}", 1
    while True:
        beside = place.with_name(f"{stem}{f'-{count}' if count > 1 else ''}{place.suffix}")
        if not beside.exists():
            beside.write_bytes(new)
        if beside.read_bytes() == new:
            return beside
        count += 1


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def open_lab(
    folder: Path | None,
    *,
    start: bool = True,
    options: Sequence[str] = (),
    say: Callable[[str], object] = lambda line: None,
) -> int:
    """Open JupyterLab on the tutorials; returns its exit status (0 where it is not started).

    folder: None opens a checkout's own tutorials, or `deepinfer-tutorials` here where the package
    was installed; otherwise they are copied there. start=False only copies. options: of JupyterLab.
    say: is called with each line about files and, before the server starts, about it.
    Raises ImportError, before any file is made, when JupyterLab is needed and missing.
    """
    if start and importlib.util.find_spec("jupyterlab") is None:
        raise ImportError(
            "JupyterLab is not installed in this Python; pip install 'deepinfer-lab[lab]' "
            "(in a checkout: pip install -e '.[lab]'), or `deepinfer lab --copy DIR` for the files"
        )
    in_place = checkout() if folder is None else None
    target = in_place or folder or Path(FOLDER)
    for line in [f"{target}: opened in place"] if in_place else copy(target):
        say(line)
    if not start:
        return 0
    if _root() and not any("allow-root" in o or "allow_root" in o for o in options):
        say("running as root, which JupyterLab refuses: `deepinfer lab -- --allow-root` allows it")
    command = [sys.executable, "-m", "jupyterlab", str(target), *options]
    status = subprocess.run(command, check=False).returncode
    return status if status >= 0 else 128 - status  # ended by a signal: as a shell reports it


def _root() -> bool:
    return hasattr(os, "geteuid") and os.geteuid() == 0
