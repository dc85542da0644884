"""The card on training: recipes, the commands that remake them, and the curves."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from experiments.nano.config import Backbone, Drafter
from experiments.nano.report.card import markdown as md
from experiments.nano.report.card.inputs import Row, Run, Runs

MOST_ROWS = 14  # of a curve

WHAT = {
    "backbone": (
        "The language model: mean cross-entropy of the next token, and the indexer's own loss "
        "(KL from the attention mass of the layers that use its picks to the softmax of its "
        "scores, its inputs detached). Experts are balanced by their selection biases, without an "
        "auxiliary loss. Muon for matrices, AdamW for the rest."
    ),
    "drafter": (
        "DSpark on the frozen backbone as it is stored: cross-entropy, total variation distance to "
        "the target's law, and a confidence whose aim is 1 - TV, with weights that fall along the "
        "draft (`experiments/nano/train/draft_loss.py`)."
    ),
}
# What a recipe's value adds where it is not 0 or empty.
MORE = {
    "dropout": "Residual dropout.",
    "unseen": "Some n-grams are passed off as unseen.",
    "noise": "Some input tokens are replaced by the noise token.",
    "dense": "At first every entry is attended to, in shorter sequences.",
    "renamed": "Part of the library text has other names in it.",
    "written": "Part of its text is what the target wrote.",
}


def section(runs: Runs) -> list[str]:
    lines = ["## Training", ""]
    for stage in ("backbone", "drafter"):
        run = getattr(runs, stage)
        more = [] if run is None else [said for name, said in MORE.items() if run.recipe.get(name)]
        lines += [f"### {stage.capitalize()}", "", *md.paragraph(" ".join([WHAT[stage], *more]))]
        if run is None:
            lines += md.paragraph(
                f"No log of the {stage} stage was given: its course is not known."
            )
            continue
        lines += md.paragraph(course(run))
        lines += backbone_curve(run) if stage == "backbone" else drafter_curve(run)
    if runs.more is not None:
        lines += md.paragraph("It then went on from its stored weights. " + course(runs.more))
        lines += drafter_curve(runs.more)
    shown = runs.shipped
    if shown:
        lines += ["### Recipe and commands", ""]
        lines += md.paragraph("The recipes, with names as in `experiments/nano/config.py`:")
        lines += md.code([line for run in shown for line in folded(recipe(run), "")])
        lines += md.paragraph("One command a stage, from the root of the repository:")
        lines += md.code([line for words in commands(runs) for line in folded(words, " \\")])
        lines += older_code((*shown, *runs.others))
    return lines + other_seeds(runs)


def course(run: Run) -> str:
    """What happened, in sentences."""
    said = [f"Seed {run.seed}, {run.last_step:,} step{'s' * (run.last_step != 1)}"]
    if run.stage == "backbone":
        said[0] += f" of {run.tokens_a_step:,} tokens, {millions(run.last_step, run)} M in all"
    where = f"on {run.device}, torch {run.torch}" if run.device else f"torch {run.torch}"
    said.append(where if run.device else f"{where} (the log does not name the device)")
    if run.seconds is None:
        said.append("the stage had not finished when its log was read")
    else:
        compiled = run.device not in (None, "cpu")  # the default there
        said.append(f"{run.seconds:.0f} s" + " with compilation" * compiled)
    if run.peak_gb:
        said.append(f"at most {md.number(run.peak_gb)} GiB of memory")
    text = "; ".join(said) + "."
    text += epochs(run.steps[-1])
    for row in run.own:
        name, different = row.get("text", "mixed"), row.get("different")
        text += f" The target wrote {row['tokens']:,} tokens of {name} text"
        text += (
            "."
            if different is None
            else f" (different tokens over length: {md.number(different)})."
        )
    if run.stopped is not None:
        text += f" A limit of {md.number(run.limit)} s ended it at step {run.stopped:,} of "
        text += f"{run.recipe['steps']:,}, so another machine would stop elsewhere."
    return text


def epochs(last: Row) -> str:
    """How often each kind of text had been begun at a logged step."""
    kinds = {"library": "library text", "tests": "test suites", "renamed": "the renamed copies"}
    times = {words: last.get(f"{kind}_epochs") for kind, words in kinds.items()}
    said = [f"{words} for the {ordinal(n)} time" for words, n in times.items() if n]
    never = [words for words, n in times.items() if n == 0]
    text = f" In its last step it read {', '.join(said)}." if said else ""
    return text + (f" It never read {', '.join(never)}." if never else "")


def millions(step: int, run: Run) -> str:
    return md.number(step * run.tokens_a_step / 1e6)


def ordinal(n: int) -> str:
    last = {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
    return f"{n}{'th' if n % 100 in (11, 12, 13) else last}"


# ---------------------------------------------------------------------------------------- curves


def marks(run: Run) -> list[int]:
    """The steps that a curve's table has: the first one logged, and those with a dev measurement;
    the last 14 or so evenly thinned, first and last kept."""
    steps = sorted({run.steps[0]["step"], *(row["step"] for row in run.dev), run.last_step})
    while len(steps) > MOST_ROWS:
        steps = [*steps[:-1:2], steps[-1]]
    return steps


def between(run: Run, steps: Sequence[int]) -> list[tuple[int, list[Row]]]:
    """(step, the logged rows after the step before and up to it)."""
    found, before = [], 0
    for step in steps:
        found.append((step, [row for row in run.steps if before < row["step"] <= step]))
        before = step
    return [(step, rows) for step, rows in found if rows]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def backbone_curve(run: Run) -> list[str]:
    dev = {row["step"]: row["nats"] for row in run.dev}
    rows = []
    for step, logged in between(run, marks(run)):
        rows.append(
            [
                f"{step:,}",
                millions(step, run),
                md.number(mean([x["nats"] for x in logged]), 4),
                md.number(dev.get(step), 4),
                md.number(mean([x["index_kl"] for x in logged])),
                md.number(max(x["max_load"] for x in logged)),
                md.number(min(x["min_load"] for x in logged)),
                f"{median(x['tokens_per_second'] for x in logged):,.0f}",
            ]
        )
    columns = (
        "step",
        "M tokens",
        "train nats",
        "dev nats",
        "index KL",
        "most load",
        "least load",
        "tokens/s",
    )
    return [
        *md.table(columns, rows),
        *md.paragraph(
            "Of the logged steps since the row above: mean training loss (nats a token, with "
            "dropout) and indexer's loss (sum over its layers), worst max/mean and min/mean load of "
            "an expert in any layer, median speed. dev: without dropout, weights unrounded."
        ),
    ]


def drafter_curve(run: Run) -> list[str]:
    rows, dev = [], {row["step"]: row for row in run.dev}
    places = range(len(run.steps[0]["overlap"]))
    for step, logged in between(run, marks(run)):
        found = dev.get(step)
        cells = [
            f"{step:,}",
            md.number(mean([x["loss"] for x in logged])),
            md.number(mean([x["accepted"] for x in logged])),
        ]
        cells += [md.number(found["accepted"] if found else None)]
        cells += [md.number(found["overlap"][k] if found else None) for k in places]
        rows.append([*cells, md.number(max(x["max_load"] for x in logged))])
    columns = (
        "step",
        "train loss",
        "train length",
        "dev length",
        *(f"dev {k + 1}" for k in places),
        "most load",
    )
    return [
        *md.table(columns, rows),
        *md.paragraph(
            "length: expected tokens a step at temperature 1 along the text, bonus included; in "
            "training over all kinds of text. dev 1, 2, ...: overlap of drafter and target (1 - TV) "
            "by position in the draft. most load: max/mean of an expert."
        ),
    ]


# --------------------------------------------------------------------------- recipe and commands


def recipe(run: Run) -> list[str]:
    """The stage and its recipe in words that are not to be parted."""
    return [f"{run.stage}:", *(f"{name}={plain(value)}" for name, value in run.recipe.items())]


def plain(value: Any) -> str:
    return repr(value).replace(" ", "")


def today(run: Run) -> dict[str, Any]:
    """The stage's recipe in today's code."""
    return asdict({"backbone": Backbone(), "drafter": Drafter()}[run.stage])


def older_code(runs: Sequence[Run]) -> list[str]:
    """Where today's code cannot run the recipe of a log: said, not hidden."""
    said = []
    for run in runs:
        names = sorted(set(run.recipe) ^ set(today(run)))
        if names:
            said.append(f"{run.stage} of seed {run.seed} ({', '.join(f'`{n}`' for n in names)})")
    if not said:
        return []
    return md.paragraph(
        "**Trained by other code than today's**, with other names in the recipe: "
        f"{'; '.join(said)}. The commands do not remake these exactly."
    )


def commands(runs: Runs) -> list[list[str]]:
    """What remakes everything, each command in words that are not to be parted."""
    everything = [*runs.shipped, *runs.others]
    stored, plain_ = f"{folder((runs.shipped or [None])[-1])}/stored", folder(runs.backbone)
    second = [run for run in runs.others if run.stage == "drafter"]
    module = "python -m experiments.nano."
    return [
        [module + "data"],
        *(train(run, runs) for run in everything),
        [module + "train paths", f"--checkpoint {stored}", "--out paths"],
        [
            module + "report",
            f"--checkpoint {stored}",
            f"--unquantised {plain_}/unquantised",
            *(f"--second-seed {folder(run)}/stored" for run in second[:1]),
            "--out results.json",
        ],
        [module + "train ship", f"--checkpoint {stored}"],
        [
            module + "report.card",
            "--results results.json",
            "--log",
            *(f"{folder(run)}/log.jsonl" for run in everything),
            "--paths paths/paths.json",
            "--out deepinfer/checkpoint/nano/README.md",
        ],
    ]


def train(run: Run, runs: Runs) -> list[str]:
    words = [f"python -m experiments.nano.train {run.stage}"]
    if run.stage == "drafter":
        before = folder(runs.drafter) if run is runs.more else f"backbone{run.seed}"
        words.append(f"--backbone {before}/stored")
    words += [f"--out {folder(run)}", f"--seed {run.seed}"]
    if run.stopped is not None:
        words.append(f"--seconds {run.limit:g}")
    return words + [
        "--set " + shlex.quote(f"{name}={plain(value)}")
        for name, value in run.recipe.items()
        if name in today(run) and value != today(run)[name]
    ]


def folder(run: Run | None) -> str:
    return "BACKBONE" if run is None else f"{run.stage}{run.seed}"


def folded(words: Sequence[str], mark: str) -> list[str]:
    """Words over several lines, later ones indented; `mark` where a line goes on."""
    lines = [""]
    for word in words:
        longer = f"{lines[-1]} {word}" if lines[-1].strip() else lines[-1] + word
        if len(longer) <= 90 or not lines[-1].strip():
            lines[-1] = longer
        else:
            lines.append("    " + word)
    return [line + mark for line in lines[:-1]] + lines[-1:]


# ----------------------------------------------------------------------------------- other seeds


def other_seeds(runs: Runs) -> list[str]:
    if not runs.others:
        return []
    rows = []
    for run in runs.others:
        last = run.dev[-1] if run.dev else {}
        on_dev = last.get("nats") if run.stage == "backbone" else last.get("accepted")
        tokens = millions(run.last_step, run) if run.stage == "backbone" else ""
        rows.append([run.stage, str(run.seed), f"{run.last_step:,}", tokens, md.number(on_dev, 4)])
    return [
        "### Other seeds",
        "",
        *md.table(("stage", "seed", "steps", "M tokens", "dev at the end"), rows),
        *md.paragraph(
            "dev at the end: nats a token of a backbone, expected length of a drafter. "
            + " ".join(differences(run, runs) for run in runs.others)
        ),
    ]


def differences(run: Run, runs: Runs) -> str:
    """How another seed's recipe differs from the shipped one's, in a sentence."""
    shipped = runs.backbone if run.stage == "backbone" else runs.drafter
    if shipped is None:
        return ""
    said = [
        f"{name}={plain(value)} in place of {plain(shipped.recipe.get(name))}"
        for name, value in run.recipe.items()
        if shipped.recipe.get(name) != value
    ]
    if run.stage == "drafter" and runs.more is not None:
        said.append("one stage in place of two")
    same = "the recipe of the shipped one"
    return f"The {run.stage} of seed {run.seed} had {', '.join(said) or same}."
