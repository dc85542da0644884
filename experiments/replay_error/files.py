"""The files of the results: one a part, JSON with tables and the facts of the run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepinfer.tables.table import Table

FORMAT = "deepinfer.replay_error.part/1"


@dataclass(frozen=True)
class Part:
    """name; facts: where the numbers come from; tables: by name; took: CPU seconds, which no two runs share."""

    name: str
    facts: dict[str, Any]
    tables: dict[str, Table]
    took: float = 0.0

    def write(self, folder: Path) -> Path:
        whole = {
            "format": FORMAT,
            "part": self.name,
            "facts": self.facts,
            "took": round(self.took, 1),
            "tables": {
                name: dict(
                    title=t.title, columns=list(t.columns), rows=[list(r.values()) for r in t]
                )
                for name, t in self.tables.items()
            },
        }
        text = json.dumps(whole, allow_nan=False, separators=(",", ":"))
        text = text.replace("],[", "],\n[").replace('"tables":', '\n"tables":')
        path = folder / f"{self.name}.json"
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", "utf-8")
        return path


def read(path: Path) -> Part:
    """The part that `Part.write` wrote. ValueError for another file."""
    whole: Mapping[str, Any] = json.loads(Path(path).read_text("utf-8"))
    if not isinstance(whole, dict) or whole.get("format") != FORMAT:
        raise ValueError(f"{path} is no part of these results: format {FORMAT!r} expected")
    tables = {
        name: Table(
            [dict(zip(t["columns"], row, strict=True)) for row in t["rows"]],
            t["columns"],
            title=t["title"],
            provenance=whole["facts"],
        )
        for name, t in whole["tables"].items()
    }
    return Part(whole["part"], whole["facts"], tables, whole["took"])


def read_all(folder: Path) -> dict[str, Part]:
    """The parts of a folder by name. ValueError where there is none."""
    found = {p.stem: read(p) for p in sorted(Path(folder).glob("*.json"))}
    if not found:
        raise ValueError(f"no results in {folder}: run experiments.replay_error.run")
    return found
