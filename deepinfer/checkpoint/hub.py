"""Where a checkpoint lies: a folder, or a hub id in the local Hugging Face cache."""

from __future__ import annotations

import os
import re
import reprlib
from pathlib import Path

MADE = ("nano", "tiny")  # what an Engine makes by that name, without a path


def locate(path: str | os.PathLike, *, download: bool = False) -> Path:
    """The folder of a checkpoint.

    path: a folder, or 'owner/name' looked up in the local Hugging Face cache (HF_HUB_CACHE, HF_HOME).
    download: fetch it if it is not there (needs huggingface_hub; the size is logged first).
    Raises FileNotFoundError saying what was looked at, ValueError for a damaged cache.
    """
    folder = Path(path)
    if folder.is_dir():
        return folder
    name = str(path)
    if folder.is_absolute() or name.count("/") != 1 or name.startswith("."):
        made = (
            f"; the one that comes with the package is di.Engine.{name}()" if name in MADE else ""
        )
        raise FileNotFoundError(f"{name}: no such folder, and not a hub id (owner/name){made}")
    cached = cache_folder() / f"models--{name.replace('/', '--')}"
    found = snapshot(cached)
    if found is not None:
        return found
    if not download:
        raise FileNotFoundError(
            f"{name}: no such folder, and not in the local cache ({cached}); pass download=True to fetch it, "
            "or the folder of a checkpoint"
        )
    return fetch(name)


def cache_folder() -> Path:
    if "HF_HUB_CACHE" in os.environ:
        return Path(os.environ["HF_HUB_CACHE"])
    home = os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface"
    return Path(home) / "hub"


def snapshot(cached: Path) -> Path | None:
    """The snapshot that refs/main names, else the newest one with a config. ValueError for a
    refs/main that holds something else than the name of a snapshot."""
    main = cached / "refs" / "main"
    if main.is_file():
        name = main.read_bytes()[:256].decode("latin-1").strip()
        if not re.fullmatch(r"[0-9A-Za-z_-]+", name):  # a path would lead out of the cache
            raise ValueError(
                f"{main}: {reprlib.repr(name)} names no snapshot, which is the hash of a commit; "
                "delete the file, or pass the folder of a checkpoint"
            )
        named = cached / "snapshots" / name
        if (named / "config.json").is_file():
            return named
    every = [p for p in cached.glob("snapshots/*") if (p / "config.json").is_file()]
    return max(every, key=lambda p: p.stat().st_mtime) if every else None


def fetch(name: str) -> Path:
    """Download a checkpoint after its size was logged. ImportError names the package to install."""
    import logging

    try:
        from huggingface_hub import HfApi, snapshot_download
    except ImportError:
        raise ImportError(
            f"download=True of {name} needs huggingface_hub: pip install huggingface_hub"
        ) from None
    files = HfApi().model_info(name, files_metadata=True).siblings or []
    size = sum(f.size or 0 for f in files)
    logging.getLogger("deepinfer").warning(
        "downloading %s: %s bytes in %d files", name, f"{size:,}", len(files)
    )
    return Path(snapshot_download(name))
