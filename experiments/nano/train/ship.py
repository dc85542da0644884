"""Put a trained checkpoint into `deepinfer.checkpoint.nano`, with the SHA-256 of its files."""

from __future__ import annotations

import os
from pathlib import Path

from deepinfer.checkpoint import nano
from deepinfer.checkpoint.reader import Checkpoint
from experiments.nano.train import checks

MODEL = Path(nano.__file__).parent
MOST_BYTES = 24_000_000  # of the checkpoint: every user downloads it with the package


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
