"""What the report says: findings, each a sentence and a Table, printed at once, kept as JSON."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import TextIO

from deepinfer.tables.table import Table

FORMAT = "deepinfer.nano.report/1"


@dataclass(frozen=True)
class Finding:
    """says: what the table means, in a sentence or two that hold whatever its numbers are."""

    name: str
    says: str
    table: Table


class Report:
    """Findings of one run. `add` prints a section's and writes the file anew, so that a run that is
    stopped leaves what it had found."""

    def __init__(
        self, path: Path | None, facts: Mapping[str, object], to: TextIO | None = None
    ) -> None:
        self.path, self.facts, self.to = path, dict(facts), to or sys.stdout
        self.findings: dict[str, Finding] = {}
        self.seconds: dict[str, float] = {}
        self._start = time.perf_counter()

    def add(self, section: str, findings: Iterable[Finding]) -> None:
        """Print and keep a section; `findings` may be a generator that does the section's work."""
        start = time.perf_counter()
        print(f"\n=== {section} ===", file=self.to, flush=True)
        for finding in findings:
            self.findings[finding.name] = finding
            print(f"\n{fill(finding.says, 100)}", file=self.to)
            print(finding.table.to_text(), file=self.to, flush=True)
        self.seconds[section] = time.perf_counter() - start
        so_far = time.perf_counter() - self._start
        print(f"\n({self.seconds[section]:.0f} s, {so_far:.0f} s so far)", file=self.to, flush=True)
        self.write()

    def write(self) -> None:
        if self.path is None:
            return
        whole = {
            "format": FORMAT,
            "facts": self.facts,
            "seconds": self.seconds,
            "findings": [
                {"name": f.name, "says": f.says, "table": json.loads(f.table.to_json())}
                for f in self.findings.values()
            ],
        }
        self.path.write_text(json.dumps(whole, indent=1, allow_nan=False) + "\n", "utf-8")


def read(path: Path) -> dict[str, Table]:
    """The tables of a report's file, by name. Raises ValueError for another file."""
    whole = json.loads(Path(path).read_text("utf-8"))
    if not isinstance(whole, dict) or whole.get("format") != FORMAT:
        raise ValueError(f"{path} is no report: format {FORMAT!r} expected")
    return {f["name"]: Table.from_json(json.dumps(f["table"])) for f in whole["findings"]}
