"""What the card and the plots are made of: training logs and the report's JSON, read and checked.

A finding or a log that is not there is a fact that the card states. One that is there and does not
hold what its name promises is an error.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deepinfer.tables.table import Table
from experiments.nano.report import findings
from experiments.nano.train import log

Row = dict[str, Any]

_NEEDED = {
    "backbone": ("step", "nats", "index_kl", "max_load", "min_load", "tokens_per_second"),
    "drafter": ("step", "loss", "accepted", "overlap", "max_load"),
}
_NEEDED_DEV = {"backbone": ("step", "nats", "pieces"), "drafter": ("step", "accepted", "overlap")}


@dataclass(frozen=True)
class Run:
    """A stage as its log tells it: the rows since its last start.

    stage: "backbone" or "drafter". recipe: {name: value}, as it was when the stage ran. steps: the
    logged training steps; dev: measurements on dev text; own: texts the target wrote to train the
    drafter on. seconds, peak_gb: of the whole stage and the most memory held, None where it did not
    finish or did not say; stored: the fingerprint of the checkpoint it wrote, likewise. stopped:
    the step at which a time limit ended it, or None; limit: that limit in seconds.
    """

    stage: str
    seed: int
    recipe: dict[str, Any]
    torch: str
    device: str | None
    steps: tuple[Row, ...]
    dev: tuple[Row, ...]
    own: tuple[Row, ...]
    seconds: float | None
    peak_gb: float | None
    stopped: int | None
    limit: float | None
    stored: str | None = None

    @property
    def tokens_a_step(self) -> int:
        """Of a backbone step; a drafter step reads as many of the corpus."""
        return self.recipe["rows"] * self.recipe["length"]

    @property
    def last_step(self) -> int:
        return self.steps[-1]["step"]


def read_run(path: str | Path) -> Run:
    """A stage's log.jsonl. ValueError where it is no such log, or lacks what the card tells."""
    path = Path(path)
    there(path, "--log", "a training stage writes log.jsonl into its --out")
    try:
        rows = log.read(path)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is no training log: {error}") from error
    starts = [i for i, row in enumerate(rows) if row.get("stage") == "start"]
    if not starts:
        raise ValueError(f"{path} is no training log: it has no row with stage 'start'")
    start, rows = rows[starts[-1]], rows[starts[-1] + 1 :]
    _need(start, ("seed", "recipe", "torch"), f"{path}, the start row")
    stage, recipe = _recipe(start["recipe"], path)
    of = {name: [row for row in rows if row.get("stage") == name] for name in _STAGES}
    if not of[stage]:
        raise ValueError(f"{path}: the stage {stage!r} started and logged no step")
    for row in of[stage]:
        _need(row, _NEEDED[stage], f"{path}, step {row.get('step')}")
    for row in of["dev"]:
        _need(row, _NEEDED_DEV[stage], f"{path}, dev at step {row.get('step')}")
    own = [row for row in of["written"] if "tokens" in row]
    end = next((row for row in of["written"] if "tokens" not in row), {})
    stopped = of["stopped"][-1] if of["stopped"] else {}
    return Run(
        stage,
        start["seed"],
        recipe,
        start["torch"],
        start.get("device"),
        tuple(of[stage]),
        tuple(of["dev"]),
        tuple(own),
        end.get("seconds"),
        end.get("gigabytes"),
        stopped.get("step"),
        stopped.get("seconds"),
        end.get("stored"),
    )


def there(path: Path, wish: str, whence: str) -> None:
    """ValueError where the file that an option names is not there."""
    if not path.is_file():
        found = "a folder" if path.is_dir() else "no such file"
        raise ValueError(f"{wish} {path}: {found}; {whence}")


_STAGES = ("backbone", "drafter", "dev", "written", "stopped")


def _recipe(text: str, path: Path) -> tuple[str, dict[str, Any]]:
    """("backbone", {...}) of 'Backbone(steps=..., ...)'."""
    try:
        call = ast.parse(text, mode="eval").body
        assert isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
        stage = call.func.id.lower()
        values = {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
    except (AssertionError, SyntaxError, ValueError) as error:
        raise ValueError(f"{path}: not a recipe: {text!r}") from error
    if stage not in _NEEDED:
        raise ValueError(f"{path}: the recipe is of {stage!r}; known: {', '.join(_NEEDED)}")
    _need(values, ("steps", "rows", "length"), f"{path}, the recipe")
    if stage == "drafter":  # "fresh" was no choice in older recipes
        values = {"fresh": True, **values}
    return stage, values


def _need(row: Row, names: Sequence[str], where: str) -> None:
    missing = [name for name in names if name not in row]
    if missing:
        raise ValueError(f"{where} lacks {', '.join(missing)}; it has {', '.join(row)}")


@dataclass(frozen=True)
class Runs:
    """backbone, drafter: of the weights that ship, None without a log; others: other seeds; more:
    the drafter stage that went on from the drafter's weights, where there was one."""

    backbone: Run | None
    drafter: Run | None
    others: tuple[Run, ...]
    more: Run | None = None

    @property
    def shipped(self) -> list[Run]:
        """The stages that made the shipped weights, in order."""
        return [run for run in (self.backbone, self.drafter, self.more) if run is not None]

    @property
    def last(self) -> Run | None:
        """The stage that wrote what ships, a drafter's; None without its log."""
        return self.more or self.drafter

    @property
    def drafted(self) -> Run | None:
        """Both drafter stages as one, the steps of the second counted on."""
        if self.drafter is None or self.more is None:
            return self.drafter
        done = self.drafter.last_step
        later = [
            tuple({**row, "step": row["step"] + done} for row in rows)
            for rows in (self.more.steps, self.more.dev)
        ]
        return replace(
            self.drafter, steps=self.drafter.steps + later[0], dev=self.drafter.dev + later[1]
        )


def read_runs(paths: Sequence[str | Path]) -> Runs:
    """The first log of each stage is the shipped weights'; later ones are other runs. A drafter
    stage that did not start afresh went on from the first one."""
    first: dict[str, Run] = {}
    others = []
    for path in paths:
        run = read_run(path)
        same = [x for x in (*first.values(), *others) if (x.stage, x.seed) == (run.stage, run.seed)]
        if same:
            raise ValueError(
                f"{path}: a second log of the {run.stage} with seed {run.seed}; later logs are of "
                "other seeds"
            )
        if not run.recipe.get("fresh", True):
            if "drafter" not in first or "more" in first:
                raise ValueError(
                    f"{path}: this stage went on from a drafter (fresh=False): the log of that one "
                    "comes before it, and there is one such stage"
                )
            first["more"] = run
        elif run.stage in first:
            others.append(run)
        else:
            first[run.stage] = run
    return Runs(*map(first.get, ("backbone", "drafter")), tuple(others), first.get("more"))


class Results:
    """The report's findings. path None: nothing was measured.

    facts: how it ran. `table` and `says` are by a finding's name.
    """

    def __init__(self, path: str | Path | None) -> None:
        self._tables: dict[str, Table] = {}
        self._says: dict[str, str] = {}
        self.facts: dict[str, Any] = {}
        if path is None:
            return
        path = Path(path)
        there(path, "--results", "`python -m experiments.nano.report` writes it with its --out")
        try:
            self._tables = findings.read(path)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is no report: {error}") from error
        whole = json.loads(path.read_text("utf-8"))
        self._says = {f["name"]: f["says"] for f in whole["findings"]}
        self.facts = whole["facts"]
        _need(self.facts, ("stored", "torch"), f"{path}, its facts")

    def table(self, name: str, *columns: str) -> Table | None:
        """A finding's table, or None where it was not measured. ValueError where it lacks one of
        the columns: the report's form has changed and its readers have not."""
        table = self._tables.get(name)
        missing = [c for c in columns if table is not None and c not in table.columns]
        if table is not None and missing:
            raise ValueError(
                f"the report's finding {name!r} lacks {', '.join(missing)}; it has "
                f"{', '.join(table.columns)}"
            )
        return table

    def rows(self, name: str, *columns: str) -> list[Row]:
        """The rows of a finding, none where it was not measured."""
        table = self.table(name, *columns)
        return [] if table is None else table.rows

    def says(self, name: str) -> str:
        return self._says[name]

    @property
    def provenance(self) -> dict[str, Any]:
        """Of any of its tables: they are of one run."""
        return dict(next(iter(self._tables.values())).provenance) if self._tables else {}
