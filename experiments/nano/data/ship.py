"""Write the texts that the package ships, in the form that `deepinfer.data` reads:

manifest.json         source, licence; for each set its digest and its files
SET.txt.xz            the set's files one after another, as `xz -9` packs them
LICENSE-PYTHON.txt    the licence of all of them
"""

from __future__ import annotations

import hashlib
import json
import lzma
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from experiments.nano.data.split import Source

__all__ = ["FOLDER", "manifest", "unit_of", "write"]

FOLDER = Path(str(resources.files("deepinfer.data")))
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
