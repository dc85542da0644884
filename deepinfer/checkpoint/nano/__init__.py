"""The nano model: a small DeepSeek-V4.1 that is really trained, as it ships with the package.

This folder is a checkpoint in the official layout, so whatever reads checkpoints reads it. What it
was trained on, how, and how well it does is in README.md beside the weights. A weight whose bytes
changed would still load, so the files are compared with sha256.txt, which came with them.
"""

from __future__ import annotations

import hashlib
from importlib import resources
from pathlib import Path

from deepinfer.checkpoint.header import CheckpointError

__all__ = ["FILES", "SUMS", "folder", "sums", "verified"]

# Every file of the checkpoint, as `checkpoint.writer` names them.
FILES = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "model.safetensors.index.json",
    "model-00001-of-00001.safetensors",
)
SUMS = "sha256.txt"  # of each of them, in the form that `sha256sum -c` reads

_AGAIN = "install the package again, in a checkout `git checkout -- deepinfer/checkpoint/nano`"


def folder() -> Path:
    """Where the checkpoint lies on disk.

    FileNotFoundError where a file of it is missing, or where the package is inside an archive:
    weights are mapped from their file, which an archive does not allow.
    """
    found = resources.files(__name__)
    if not isinstance(found, Path) or not found.is_dir():
        raise FileNotFoundError(
            f"the nano model is in {found}, which is no folder on disk: its weights are mapped "
            "from their file; install the package unpacked (pip install does)"
        )
    missing = [name for name in (*FILES, SUMS) if not (found / name).is_file()]
    if missing:
        raise FileNotFoundError(
            f"the nano model is not complete: {found} lacks {', '.join(missing)}; {_AGAIN}, or use "
            "di.Engine.tiny(), whose random weights need no file"
        )
    return found


def verified() -> Path:
    """`folder`, every file compared with its SHA-256, which takes below 0.1 s.

    CheckpointError names a file that is not the one that was shipped; FileNotFoundError as of
    `folder`.
    """
    found = folder()
    lines = [line.split() for line in (found / SUMS).read_bytes().decode("latin-1").splitlines()]
    expected = {words[1]: words[0] for words in lines if len(words) == 2}
    for name, digest in sums(found).items():
        if digest != expected.get(name):
            raise CheckpointError(
                f"the nano model is damaged: {found / name} has the SHA-256 {digest}, {SUMS} "
                f"beside it says {expected.get(name, 'nothing of it')}; {_AGAIN}; other weights "
                "are put there by `python -m experiments.nano.train ship --checkpoint FOLDER`"
            )
    return found


def sums(path: Path) -> dict[str, str]:
    """The SHA-256 of every file of a checkpoint that has the names of this one's."""
    return {name: hashlib.sha256((path / name).read_bytes()).hexdigest() for name in FILES}
