"""The nano model's card, made from the report's JSON and the logs of training.

    python -m experiments.nano.report.card --results results.json --log BACKBONE/log.jsonl \\
        DRAFTER/log.jsonl [SECOND/log.jsonl ...] --out deepinfer/checkpoint/nano/README.md

The first log of each stage is of the weights that ship, later ones are of other seeds. Every number
of the card is from these files, the checkpoint or the texts' manifest; what was not measured is
named as such. The same files give the same card, byte for byte.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from deepinfer.checkpoint import nano
from deepinfer.checkpoint.reader import Checkpoint
from deepinfer.engine.weights import weights_digest
from experiments.nano import WORK
from experiments.nano.report.card import figures, model, training
from experiments.nano.report.card.inputs import Results, Runs, read_runs, there
from experiments.nano.report.card.markdown import paragraph


def main(arguments: Sequence[str] | None = None) -> int:
    o = options(arguments)
    try:
        checkpoint = Checkpoint.open(o.checkpoint)
        results, runs = Results(o.results), read_runs(o.log)
        if o.paths is not None:
            there(o.paths, "--paths", "`train paths` writes paths.json into its --out")
        paths = None if o.paths is None else json.loads(o.paths.read_text("utf-8"))
        text = card(checkpoint, results, runs, paths=paths, work=o.work, trial=o.trial)
    except (OSError, ValueError) as error:
        print(f"card: {error}", file=sys.stderr)
        return 2
    o.out.parent.mkdir(parents=True, exist_ok=True)
    o.out.write_text(text, "utf-8", newline="\n")
    print(f"{o.out}: {len(text.encode()):,} bytes")
    return 0


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(
        prog="python -m experiments.nano.report.card",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("--results", type=Path, help="the report's JSON; without it nothing is measured")
    p.add_argument("--log", type=Path, nargs="*", default=[], help="log.jsonl of each stage")
    p.add_argument("--out", type=Path, required=True, help="the card to write")
    p.add_argument(
        "--checkpoint",
        type=Path,
        default=Path(nano.__file__).parent,
        help="the stored checkpoint that the card is of (default: the package's)",
    )
    p.add_argument("--paths", type=Path, help="paths.json of `train paths`")
    p.add_argument("--work", type=Path, default=WORK, help="folder of corpus.npz")
    p.add_argument(
        "--trial",
        action="store_true",
        help="write it even where the results are of other weights or of small sizes",
    )
    return p.parse_args(arguments)


def card(
    checkpoint: Checkpoint,
    results: Results,
    runs: Runs,
    *,
    paths: list[dict] | None,
    work: Path,
    trial: bool,
) -> str:
    """The card's text. ValueError where results or log are not of these weights, unless a trial."""
    wrong = doubts(checkpoint, results, runs)
    if wrong and not trial:
        raise ValueError("; ".join(wrong) + "; --trial writes a card that says so")
    lines = ["# nano: a small DeepSeek-V4.1, trained on Python's standard library", ""]
    if wrong:
        lines += paragraph(
            "**A trial of the card, not the model's figures: " + "; ".join(wrong) + ".**"
        )
    lines += model.introduction(checkpoint)
    lines += figures.headline(results, runs)
    lines += model.architecture(checkpoint)
    lines += model.data(checkpoint, work)
    lines += training.section(runs)
    lines += figures.section(results, paths)
    lines += figures.weaknesses(results, runs)
    lines += model.licence()
    return "\n".join(lines).rstrip("\n") + "\n"


def doubts(checkpoint: Checkpoint, results: Results, runs: Runs) -> list[str]:
    """Why the results are not this checkpoint's figures, and the last log not its training's."""
    found, facts, mine = [], results.facts, weights_digest(checkpoint)
    wrote = runs.last.stored if runs.last else None  # older logs do not say
    if wrote not in (None, mine):
        found.append(f"the last stage's log is of weights {wrote}, the checkpoint is {mine}")
    if not facts:
        return found
    if facts["stored"] != mine:
        found.append(f"the report is of weights {facts['stored']}, the checkpoint is {mine}")
    if facts.get("quick"):
        found.append("the report ran with --quick, in small sizes")
    if facts.get("texts"):
        found.append("the report read other texts than the package's")
    return found
