"""Measure a nano checkpoint: every figure of its model card, as tables and JSON, by one command.

    python -m experiments.nano.report --checkpoint STORED --unquantised BF16 --out results.json \\
        --jobs 2

STORED: the checkpoint as it ships (FP8 and FP4 storage); BF16: the same weights unquantised, the
control on the same paths: `unquantised/` of the backbone stage, for that of a drafter stage has the
backbone as it is stored. Both are loaded in float32 at fidelity 1. `--only` runs some sections.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from deepinfer.checkpoint.reader import Checkpoint
from deepinfer.engine.weights import weights_digest
from experiments.nano.report import (
    ablations,
    acceptance,
    calibration,
    drafts,
    evaluation,
    quality,
    routing,
    summary,
)
from experiments.nano.report.calibration import Observed
from experiments.nano.report.findings import Finding, Report
from experiments.nano.report.study import Sizes, Study, load
from experiments.nano.report.texts import Document, documents
from experiments.nano.train import checks

SECTIONS = ("quality", "paths", "drafts", "calibration", "routing", "ablations")


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(
        prog="python -m experiments.nano.report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("--checkpoint", required=True, help="folder of the stored checkpoint")
    p.add_argument(
        "--unquantised",
        required=True,
        help="folder of the same weights in BF16: the backbone stage's",
    )
    p.add_argument("--second-seed", help="stored checkpoint of another training run")
    p.add_argument("--out", type=Path, help="JSON file to write")
    p.add_argument("--quick", action="store_true", help="small sizes, to try the command")
    p.add_argument(
        "--only",
        nargs="+",
        choices=SECTIONS,
        default=SECTIONS,
        metavar="SECTION",
        help=f"sections to run: {', '.join(SECTIONS)}",
    )
    p.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    p.add_argument("--jobs", type=_count, default=1, help="processes over documents, on a CPU")
    p.add_argument("--threads", type=_count, default=1, help="of torch's operations (default 1)")
    p.add_argument(
        "--texts",
        type=Path,
        nargs=3,
        metavar=("HELDOUT", "PROSE", "DEV"),
        help="folders of text files instead of the package's own texts",
    )
    return p.parse_args(arguments)


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text[:6]) <= 1024:
        raise argparse.ArgumentTypeError(f"{text!r}: a whole number from 1 to 1024 is needed")
    return int(text)


def main(arguments: Sequence[str] | None = None) -> int:
    o = options(arguments)
    torch.set_num_threads(o.threads)
    sizes = Sizes().quick() if o.quick else Sizes()
    if o.device != "cpu":
        sizes = replace(sizes, rows=sizes.piece)  # an accelerator wants long steps
    try:
        check(o)
        found = list(texts(o.texts, o.quick))
        stored = load(o.checkpoint, sizes, o.device)
        unquantised = load(o.unquantised, sizes, o.device)
        heldout, prose, dev = (documents(stored.tokenizer, t) for t in found)
        study = Study(stored, unquantised, heldout, prose, dev, sizes, o.jobs)
        facts = dict(
            vars(o),
            out=None,
            texts=bool(o.texts),
            checkpoint=None,
            unquantised=None,
            second_seed=None,
            only=list(o.only),
            torch=torch.__version__,
            stored=weights_digest(Checkpoint.open(o.checkpoint)),
            bf16=weights_digest(Checkpoint.open(o.unquantised)),
        )
        report = Report(o.out, facts)
        where = f"{o.device}, {o.jobs} job(s) of {o.threads} thread(s), torch {torch.__version__}"
        print(f"nano report: {study.said}; {where}")
        if o.quick:
            print("QUICK: small sizes, to try the command; the figures are not the model's.")
        measure(study, report, o)
    except (OSError, ValueError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    return 0


def check(o: argparse.Namespace) -> None:
    """ValueError for wishes that would fail only after long work."""
    if o.device != "cpu" and o.jobs > 1:
        raise ValueError("--jobs is for a CPU: an accelerator's state does not survive a fork")
    if o.jobs > 1 and o.threads > 1:
        raise ValueError(f"--jobs {o.jobs} --threads {o.threads}: jobs have one thread each")
    if o.out is not None and (o.out.is_dir() or not o.out.parent.is_dir()):
        raise ValueError(f"--out {o.out}: a file in a folder that is there is needed")
    opened = {
        wish: checks.checkpoint(getattr(o, wish), "--" + wish.replace("_", "-"))
        for wish in ("checkpoint", "unquantised", "second_seed")
        if getattr(o, wish) is not None
    }
    checks.not_rounded(opened["unquantised"], opened["checkpoint"])


def texts(folders: Sequence[Path] | None, quick: bool) -> Iterator[Sequence[str]]:
    """Held-out, prose and dev texts: the package's own, or the files of three folders.

    ValueError for a folder without text.
    """
    if folders is not None:
        found = [of_folder(folder) for folder in folders]
    else:
        from deepinfer import data

        found = [data.heldout(None), data.prose(None), data.dev(None)]
    for each in found:
        yield each[:: max(1, len(each) // 12)] if quick else each


class Text(str):
    """A file's text with the module that it belongs to: its name without what follows a dash."""

    module: str


def of_folder(folder: Path) -> list[Text]:
    """The files of a folder that are not empty."""
    if not folder.is_dir():
        raise ValueError(f"--texts {folder}: no such folder")
    found = [read_text(path) for path in sorted(folder.rglob("*")) if path.is_file()]
    if not any(found):
        raise ValueError(f"--texts {folder}: {len(found)} files, none with text in it")
    return [text for text in found if text]


def read_text(path: Path) -> Text:
    try:
        text = Text(path.read_text("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"--texts: {path} is not UTF-8 text: {error}") from error
    text.module = path.stem.partition("-")[0]
    return text


# ------------------------------------------------------------------------------------- sections


def measure(study: Study, report: Report, o: argparse.Namespace) -> None:
    """Run the sections that were asked for, then the summary."""
    want, s = set(o.only), study.sizes
    scored, routed = [], []
    if want & {"quality", "routing"}:
        scored, routed = routing.scored_and_routed(
            study.stored, study.bos, study.heldout, s.piece, study.jobs
        )
    if "quality" in want:
        report.add("Quality", quality.findings(study, scored))
    if "paths" in want:
        report.add("Evaluation paths", evaluation.findings(study, o.unquantised))
    if "routing" in want:
        report.add("Routing", routing.findings(study, routed))
    if "ablations" in want:
        report.add("Ablations of the backbone", ablations.findings(study))
    if not want & {"drafts", "calibration"}:
        return
    mine = Drafting(study)
    report.add("Drafter", mine.measure())
    if "calibration" in want:
        report.add("Calibration", mine.calibration())
    if "ablations" in want:
        report.add("Ablation of the Markov head", mine.without_markov())
    known = {name: f.table for name, f in report.findings.items()}
    of_xz = known["quality.held-out"][0]["of_xz"] if "quality" in want else None
    second = None if o.second_seed is None else second_figures(o.second_seed, study, o.device)
    report.add("Summary", [summary.finding(study, known, mine.figures(of_xz), second)])


class Drafting:
    """The drafter's measurements, which several sections share."""

    def __init__(self, study: Study) -> None:
        self.study = study

    def measure(self) -> Iterator[Finding]:
        study = self.study
        self.runs = drafts.run(study.stored, study.heldout, study)
        yield from drafts.findings(study, self.runs)
        self.found = on_text(study, study.heldout)
        self.length = acceptance.mean_length(self.found).value
        self.seen = observed(self.runs, self.found)
        yield from acceptance.findings(study, self.found)

    def figures(self, of_xz: float | None) -> dict[str, summary.Figure]:
        seen, bins = self.seen["1 - TV on text"], self.study.sizes.bins
        return summary.figures(of_xz, self.runs, self.length, seen, bins)

    def calibration(self) -> Iterator[Finding]:
        study = self.study
        dev = observed(drafts.run(study.stored, study.dev, study), on_text(study, study.dev))
        yield from calibration.findings(study, self.seen, dev)

    def without_markov(self) -> Iterator[Finding]:
        study, s = self.study, self.study.sizes
        prompts = drafts.contexts(study.heldout, s.contexts, s.prompt)
        with ablations.markov(study.stored) as eng:
            with drafts.drafting(eng) as drafter:
                greedy = drafts.write(drafter, prompts, s.written, 0.0, study.jobs)
            length = acceptance.mean_length(on_text(study, study.heldout)).value
        before, after = drafts.accepted(self.runs.greedy).value, drafts.accepted(greedy).value
        rows = [
            dict(figure="accepted a step, temperature 0", with_it=before, without=after),
            dict(figure="expected length, temperature 1", with_it=self.length, without=length),
        ]
        says = (
            "The drafter without its Markov head, so that each draft ignores the token before it. "
            "The texts at temperature 0 are the same, for the target writes them."
        )
        yield Finding("ablations.markov", says, study.table(rows, "the Markov head"))


def on_text(study: Study, docs: Sequence[Document]) -> list[acceptance.Acceptance]:
    s = study.sizes
    with drafts.drafting(study.stored) as eng:
        return acceptance.measure(eng, study.bos, docs, s.piece, s.apart, study.jobs)


def observed(runs: drafts.Runs, found: Sequence[acceptance.Acceptance]) -> dict[str, Observed]:
    """Outcomes that confidences are held against, by name."""
    return {
        "1 - TV on text": Observed.of_laws(found),
        "sampled, temperature 1": Observed.of_steps(runs.sampled),
        "greedy, temperature 0": Observed.of_steps(runs.greedy, cut=True),
    }


def second_figures(folder: str, study: Study, device: str) -> dict[str, summary.Figure]:
    """Headline figures of another checkpoint on the same texts."""
    other = Study(
        load(folder, study.sizes, device),
        None,
        study.heldout,
        study.prose,
        study.dev,
        study.sizes,
        study.jobs,
    )
    scored = other.score(other.stored.logits, other.heldout, study.sizes.piece)
    mine = Drafting(other)
    list(mine.measure())
    return mine.figures(quality.against_xz(other.heldout, scored).value)
