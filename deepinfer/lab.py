"""Copies of the tutorials to work in; a changed copy is never overwritten."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

MANIFEST = (
    ".deepinfer-tutorials.json"  # name -> hash of what was copied, to tell whose change it is
)
FOLDER = "deepinfer-tutorials"


def checkout() -> Path | None:
    """The tutorials of the checkout this package runs from, or None for an installed package."""
    root = Path(__file__).resolve().parents[1]
    found = root / "tutorials"
    return found if (root / "pyproject.toml").exists() and found.is_dir() else None


def packaged() -> Path:
    """The folder of notebooks that came with the package."""
    return checkout() or Path(__file__).resolve().parent / "tutorials"


def copy(target: Path, source: Path | None = None) -> list[str]:
    """Copy the tutorials into `target`, a line for each file. A changed file is never touched.

    A file that a person changed keeps its place. If the package brings another version of it, that
    one is written beside it, with the package's version in its name. Nothing is written through a
    symbolic link. Raises ValueError for a damaged record of earlier copies.
    """
    source = packaged() if source is None else source
    notebooks = sorted(source.glob("*.ipynb"))
    if not notebooks:
        raise FileNotFoundError(f"no tutorials came with this installation (looked in {source})")
    if os.path.lexists(target) and not target.is_dir():
        kind = "a link to nothing" if target.is_symlink() else "a file"
        raise NotADirectoryError(f"{target} is {kind}: name a new folder or an existing one")
    target.mkdir(parents=True, exist_ok=True)
    record = target / MANIFEST
    copied = _record(record)
    said = [_place(path, target, copied) for path in notebooks]
    _write(record, (json.dumps(copied, indent=1, sort_keys=True) + "\n").encode())
    return said


def _record(file: Path) -> dict[str, str]:
    """Name and hash of what was copied before."""
    if not file.is_file():
        return {}
    try:
        copied = json.loads(file.read_bytes())
    except (ValueError, RecursionError):
        copied = None
    texts = isinstance(copied, dict) and all(isinstance(value, str) for value in copied.values())
    if not texts:
        raise ValueError(
            f"{file}: the record of what was copied is damaged; delete it and run again: no "
            "notebook is lost, those that differ from the package's are kept"
        )
    return copied


def _write(file: Path, data: bytes) -> None:
    """Write whole or not at all. A link of this name is replaced, what it points to is not."""
    handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}-")
    try:
        with os.fdopen(handle, "wb") as opened:
            opened.write(data)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)  # mkstemp made it private
        os.replace(temporary, file)
    except BaseException:
        os.unlink(temporary)
        raise


def _place(path: Path, target: Path, copied: dict[str, str]) -> str:
    """Bring one notebook into `target`, note it in `copied`, and say what was done."""
    new, place = path.read_bytes(), target / path.name
    before, copied[path.name] = copied.get(path.name), _hash(new)
    if not os.path.lexists(place):
        _write(place, new)
        return f"{path.name}: copied"
    mine = place.read_bytes() if place.is_file() else None  # None: a folder, or a link to nothing
    if mine == new:
        return f"{path.name}: up to date"
    if before == _hash(new) and mine is not None:
        return f"{path.name}: yours is changed, and is kept"
    if mine is not None and before == _hash(mine) and not place.is_symlink():
        _write(place, new)
        return f"{path.name}: brought up to date"
    beside = _beside(place, new)
    return f"{path.name}: yours is changed, and is kept; the package's version is in {beside.name}"


def _beside(place: Path, new: bytes) -> Path:
    """A file next to `place` that holds `new`; one that holds something else is not touched."""
    import deepinfer

    stem, count = f"{place.stem}-{deepinfer.__version__}", 1
    while True:
        beside = place.with_name(f"{stem}{f'-{count}' if count > 1 else ''}{place.suffix}")
        if not os.path.lexists(beside):
            _write(beside, new)
        if beside.is_file() and beside.read_bytes() == new:
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
    """Open JupyterLab on the tutorials; returns its exit status (0 if it is not started).

    folder: where the tutorials are copied to, by default `deepinfer-tutorials` in the current folder;
    a checkout's own notebooks stay as they are. start=False only copies. options: of JupyterLab.
    say: is called with each line about files and, before the server starts, about it.
    Raises ImportError, before any file is made, when JupyterLab is needed and missing.
    """
    if start and importlib.util.find_spec("jupyterlab") is None:
        raise ImportError(
            "JupyterLab is not installed in this Python; pip install 'deepinfer-lab[lab]' "
            "(in a checkout: pip install -e '.[lab]'), or `deepinfer lab --copy DIR` for the files"
        )
    target = folder or Path(FOLDER)
    for line in copy(target):
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
