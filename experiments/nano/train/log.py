"""A training log: one JSON object a line, and the same on the terminal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class Log:
    """Appends rows to a file (None: only shows them)."""

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = None if path is None else Path(path)
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)

    def row(self, **values: Any) -> None:
        rounded = {k: round(v, 5) if isinstance(v, float) else v for k, v in values.items()}
        print("  ".join(f"{k} {v}" for k, v in rounded.items()), flush=True)
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as f:
                f.write(json.dumps(rounded) + "\n")


def read(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a log."""
    with Path(path).open(encoding="utf-8") as f:
        return [json.loads(line) for line in f]
