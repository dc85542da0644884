"""The nano model: a small DeepSeek-V4.1 that is really trained, as it ships with the package.

This folder is a checkpoint in the official layout, so whatever reads checkpoints reads it. What it
was trained on, how, and how well it does is in README.md beside the weights.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path

__all__ = ["FILES", "folder"]

# Every file of the checkpoint, as `checkpoint.writer` names them.
FILES = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "model.safetensors.index.json",
    "model-00001-of-00001.safetensors",
)


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
    missing = [name for name in FILES if not (found / name).is_file()]
    if missing:
        raise FileNotFoundError(
            f"the nano model is not complete: {found} lacks {', '.join(missing)}; install the "
            "package again, in a checkout `git checkout -- deepinfer/checkpoint/nano`, or use "
            "di.Engine.tiny(), whose random weights need no file"
        )
    return found
