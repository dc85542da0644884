"""Writes what the package ships: texts in the form that `deepinfer.data` reads,

    manifest.json         source, licence; for each set its digest and its files
    SET.txt.xz            the set's files one after another, as `xz -9` packs them
    LICENSE-PYTHON.txt    the licence of all of them

and a trained checkpoint beside `deepinfer.checkpoint.nano`, with the SHA-256 of its files.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import os
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from deepinfer.checkpoint import nano
from deepinfer.checkpoint.reader import Checkpoint
from experiments.nano import checks
from experiments.nano.split import Source

__all__ = ["FOLDER", "checkpoint", "manifest", "unit_of", "write"]

FOLDER = Path(str(resources.files("deepinfer.data")))
MODEL = Path(nano.__file__).parent
MOST_BYTES = 24_000_000  # of the checkpoint, which everybody downloads with the package
LICENCE = "LICENSE-PYTHON.txt"


def unit_of(file: Source) -> str:
    """The name of what an interval is drawn over: the file's module, or the help topic."""
    return file.path.partition("#")[2] or file.module


def manifest(sets: Mapping[str, Sequence[Source]], version: str) -> dict[str, Any]:
    """The content of manifest.json for the sets of one Python version ("3.11.7")."""
    return {
        "source": f"CPython {version}",
        "licence": f"PSF-2.0 ({LICENCE})",
        "sets": {name: _set(files) for name, files in sets.items()},
    }


def write(
    sets: Mapping[str, Sequence[Source]],
    version: str,
    licence: str,
    folder: Path = FOLDER,
    replace: bool = False,
) -> None:
    """Write the files. One whose content is there already is left alone, a damaged one is mended.

    FileExistsError when other texts are there, or nobody knows which, and `replace` is not set.
    """
    new = manifest(sets, version)
    place = folder / "manifest.json"
    if place.exists() and not replace:
        _refuse_others(place, new)
    for name, files in sets.items():
        packed, data = folder / f"{name}.txt.xz", _joined(files)
        if _unpacked(packed) != data:  # not the packed bytes: versions of liblzma differ in them
            packed.write_bytes(lzma.compress(data, preset=9))
    text = json.dumps(new, indent=1, ensure_ascii=False) + "\n"
    for file, content in ((folder / LICENCE, licence), (place, text)):
        data = content.encode("utf-8")
        if not file.exists() or file.read_bytes() != data:
            file.write_bytes(data)


def _refuse_others(place: Path, new: Mapping[str, Any]) -> None:
    """FileExistsError unless the manifest at `place` is the new one."""
    try:
        old = json.loads(place.read_text(encoding="utf-8"))
        source = f"texts of {old['source']}"
    except (ValueError, LookupError, TypeError):
        old, source = None, f"texts of an unknown source ({place.name} cannot be read)"
    if old != new:
        raise FileExistsError(
            f"{place.parent} holds {source}, and the rule makes others from {new['source']}: "
            "figures published for the first do not hold for the second; run the command with that "
            "Python, or with --replace"
        )


def _unpacked(file: Path) -> bytes | None:
    """What an xz file holds; None where it is missing or damaged."""
    try:
        return lzma.decompress(file.read_bytes())
    except (FileNotFoundError, lzma.LZMAError):
        return None


def _set(files: Sequence[Source]) -> dict[str, Any]:
    return {
        "sha256": _sha256(_joined(files)),
        "bytes": sum(file.size for file in files),
        "files": [
            {
                "path": file.path,
                "module": unit_of(file),
                "bytes": file.size,
                "sha256": _sha256(file.text.encode()),
            }
            for file in files
        ],
    }


def _joined(files: Sequence[Source]) -> bytes:
    return "".join(file.text for file in files).encode()


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


# ---------------------------------------------------------------------------------- the weights


def checkpoint(source: Path, folder: Path = MODEL) -> dict[str, int]:
    """Copy a stored checkpoint to where the package has its own, and write its SHA-256 sums.

    Returns {file: bytes}. CheckpointError or ValueError, before anything is written, for a folder
    that is no checkpoint or not one to ship: unquantised, of other files, too large.
    """
    held = Checkpoint.open(source)
    names = {path.name for path in source.iterdir() if path.suffix in (".safetensors", ".json")}
    if names != set(nano.FILES):
        apart = ", ".join(sorted(names ^ set(nano.FILES)))
        raise ValueError(
            f"{source}: a checkpoint to ship has the files {', '.join(nano.FILES)} and no others; "
            f"this one differs in {apart}; write it with one shard"
        )
    checks.stored(held, "--checkpoint")
    sizes = {name: (source / name).stat().st_size for name in nano.FILES}
    if sum(sizes.values()) > MOST_BYTES:
        raise ValueError(f"{source} has {sum(sizes.values()):,} bytes, more than {MOST_BYTES:,}")
    for name in nano.FILES:
        _put(folder / name, (source / name).read_bytes())
    said = "".join(f"{digest}  {name}\n" for name, digest in nano.sums(source).items())
    _put(folder / nano.SUMS, said.encode("ascii"))  # last: until then the files do not load
    return sizes


def _put(file: Path, data: bytes) -> None:
    """Write a file whole; an engine that has the old one mapped keeps it."""
    new = file.with_name(file.name + ".new")
    new.write_bytes(data)
    os.replace(new, file)
