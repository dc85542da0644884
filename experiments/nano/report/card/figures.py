"""The card on what was measured: the report's findings, each with the sentence it came with."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from deepinfer.tables.table import Table
from experiments.nano.report.card import markdown as md
from experiments.nano.report.card.inputs import Results, Row, Runs
from experiments.nano.report.drafts import GRAM

Columns = Mapping[str, str | tuple[str, str]]  # heading -> a column, or (low, high)

_CI = {"95 %": ("low", "high")}

# (heading of the card's part, [(finding, its columns, significant digits)])
PARTS: tuple[tuple[str, tuple[tuple[str, Columns, int], ...]], ...] = (
    (
        "Compression of held-out text",
        (
            (
                "quality.held-out",
                {
                    "weights": "weights",
                    "tokens": "tokens",
                    "bits/byte": "bits_per_byte",
                    "xz -9": "xz_bits_per_byte",
                    "of xz": "of_xz",
                }
                | _CI,
                4,
            ),
        ),
    ),
    (
        "Stored against unquantised",
        (
            (
                "quality.rounding",
                {"rounded": "rounded", "change, %": "change_percent"} | _CI | {"verdict": "says"},
                3,
            ),
        ),
    ),
    (
        "Loss by position",
        (
            (
                "quality.position",
                {
                    "positions": "positions",
                    "tokens": "tokens",
                    "nats/token": "nats_per_token",
                    "whole pieces": "whole_nats",
                    "rise, %": "rise_percent",
                }
                | _CI,
                4,
            ),
            (
                "quality.context",
                {"positions": "positions", "tokens": "tokens", "change, %": "change_percent"}
                | _CI
                | {"verdict": "says"},
                3,
            ),
        ),
    ),
    (
        "Second domain",
        (
            (
                "quality.prose",
                {
                    "weights": "weights",
                    "tokens": "tokens",
                    "bits/byte": "bits_per_byte",
                    "xz -9": "xz_bits_per_byte",
                    "of xz": "of_xz",
                }
                | _CI,
                4,
            ),
        ),
    ),
    (
        "Ways to compute it that must agree",
        (
            (
                "paths",
                {
                    "path": "path",
                    "files": "files",
                    "tokens": "tokens",
                    "change, %": "change_percent",
                    "mean difference": "mean_dnats",
                    "agrees": "agrees",
                },
                3,
            ),
        ),
    ),
    (
        "Accepted drafts",
        (
            (
                "drafts.accepted",
                {"text": "text", "contexts": "contexts", "steps": "steps", "accepted": "accepted"}
                | _CI
                | {"repeats": "repeats", "of its prompt": "in_prompt", "distinct": "distinct"},
                3,
            ),
            (
                "acceptance.length",
                {"blocks": "blocks", "expected length": "expected_length"} | _CI,
                3,
            ),
            (
                "acceptance.position",
                {"draft": "draft", "accept": "accept"}
                | _CI
                | {"confidence": "confidence", "same first": "same_first"},
                3,
            ),
        ),
    ),
    (
        "Calibration of confidence",
        (
            (
                "calibration",
                {
                    "ECE": "ece",
                    "by chance": "by_chance",
                    "temperature": "temperature",
                    "ECE after": "ece_after",
                },
                3,
            ),
        ),
    ),
    (
        "Load of experts",
        (
            (
                "routing.layers",
                {
                    "layer": "layer",
                    "unused": "unused",
                    "least": "least_over_mean",
                    "all": "all",
                    "prefill": "prefill",
                    "decode": "decode",
                    "document": "document",
                },
                3,
            ),
            (
                "routing.skew",
                {
                    "per": "per",
                    "tokens": "tokens",
                    "p50": "p50",
                    "p99": "p99",
                    "largest": "largest",
                    "by chance": "by_chance",
                },
                3,
            ),
        ),
    ),
    (
        "What each mechanism is worth",
        (
            (
                "ablations",
                {"without": "removed", "how": "how", "change, %": "change_percent"}
                | _CI
                | {"verdict": "says"},
                3,
            ),
            (
                "ablations.markov",
                {"without the Markov head": "figure", "with it": "with_it", "without": "without"},
                3,
            ),
        ),
    ),
)

SUMMARY = ("figure", "target", "measured", "reached", "second_seed")


def headline(results: Results, runs: Runs) -> list[str]:
    lines = ["## Headline figures", ""]
    table = results.table("summary", *SUMMARY)
    if table is None:
        return lines + not_measured("summary")
    rows = [row for row in table if not _own_table(row)]
    second = any(row["second_seed"] is not None for row in rows)
    columns = {"figure": "figure", "target": "target", "measured": "measured", "reached": "reached"}
    columns |= {"second seed": "second_seed"} if second else {}
    lines += shown(rows, columns, 4)
    lines += md.paragraph(where(results))
    if not second:
        lines += md.paragraph("A second seed: not measured.")
    elif runs.others:
        lines += md.paragraph(
            'How the second seed was trained, and on how much: "Other seeds" below.'
        )
    return lines


def _own_table(row: Row) -> bool:
    """Whether a figure of the summary stands in the ablations' table, with its interval."""
    return str(row["figure"]).startswith(("without ", "Markov head: "))


def where(results: Results) -> str:
    """What the figures were measured on and with."""
    known, facts = results.provenance, results.facts
    commit, _, changed = str(known.get("commit") or "").partition("+")
    commit = f", commit {commit[:12]}" + " and changes to it" * bool(changed) if commit else ""
    settings = known.get("settings") or {}
    return (
        f"Measured through the stored checkpoint (fingerprint {facts['stored']}) at fidelity "
        f"{settings.get('fidelity')}, in {known.get('dtype')} on {known.get('device')}, torch "
        f"{facts['torch']}, deepinfer {known.get('version')}{commit}. Intervals are 95 %, by "
        "bootstrap over modules."
    )


def section(results: Results, paths: list[dict[str, Any]] | None) -> list[str]:
    lines = ["## Measured", ""]
    for title, wanted in PARTS:
        lines += [f"### {title}", ""]
        for name, columns, digits in wanted:
            lines += finding(results, name, columns, digits)
        if any(name == "paths" for name, _, _ in wanted):
            lines += on_the_trainer(paths)
    return lines


def finding(results: Results, name: str, columns: Columns, digits: int) -> list[str]:
    """The finding's sentence and table, or that there is none."""
    needed = [c for x in columns.values() for c in ((x,) if isinstance(x, str) else x)]
    needed += ["outcome", "draft"] if name == "calibration" else []
    table = results.table(name, *needed)
    if table is None:
        return not_measured(name)
    said = md.paragraph(in_headings(results.says(name), columns))
    if name == "calibration":
        return [*said, *by_draft(table, columns, digits)]
    return [*said, *shown(table.rows, columns, digits)]


def in_headings(text: str, columns: Columns) -> str:
    """A finding's sentence with the card's headings in place of the report's column names."""
    for heading, column in columns.items():
        if isinstance(column, str) and "_" in column:  # others are words of the sentence as well
            text = re.sub(rf"(?<!\w){column}(?!\w)", heading, text)
    return text


def not_measured(name: str) -> list[str]:
    return md.paragraph(f"Not measured: `{name}`.")


def shown(rows: list[Row], columns: Columns, digits: int) -> list[str]:
    """A table of some columns; pairs become intervals, changes get their sign."""

    def cell(row: Row, heading: str, column: str | tuple[str, str]) -> str:
        if isinstance(column, tuple):
            return md.interval(row[column[0]], row[column[1]], digits)
        return md.number(row[column], digits, signed=heading.endswith(", %"))

    cells = [[cell(row, heading, column) for heading, column in columns.items()] for row in rows]
    return md.table(list(columns), cells)


def by_draft(table: Table, columns: Columns, digits: int) -> list[str]:
    """Rows of (outcome, draft) as one row an outcome and figure, one column a draft."""
    drafts, cells = list(dict.fromkeys(table["draft"])), []
    for outcome, of in results_by(table).items():
        for heading, column in columns.items():
            values = [of[draft][str(column)] for draft in drafts]
            if any(values):  # by_chance of probabilities is 0
                cells.append([outcome, heading, *(md.number(x, digits) for x in values)])
    return md.table(["outcome", "figure", *(f"draft {k}" for k in drafts)], cells)


def results_by(table: Table) -> dict[str, dict[Any, Row]]:
    """{outcome: {draft: row}}"""
    found: dict[str, dict[Any, Row]] = {}
    for row in table:
        found.setdefault(str(row["outcome"]), {})[row["draft"]] = row
    return found


def on_the_trainer(paths: list[dict[str, Any]] | None) -> list[str]:
    """What `train paths` found on the machine that trained."""
    if not paths:
        return md.paragraph("Not measured: the paths of the training machine (`train paths`).")
    words = {
        "dtype": "{}",
        "slots": "{} slots",
        "compiled": ("eager", "compiled"),
        "gradient": ("without gradients", "with gradients"),
    }
    kinds = []
    for key, word in words.items():
        values = dict.fromkeys(row[key] for row in paths)
        named = [word.format(x) if isinstance(word, str) else word[x] for x in values]
        kinds.append(" or ".join(named))
    said = []
    for kind in dict.fromkeys(row["dtype"] for row in paths):
        most = max(abs(row["percent"]) for row in paths if row["dtype"] == kind)
        said.append(f"{md.number(float(most))} % in {kind}")
    return md.paragraph(
        f"On the training machine, stored weights, dev text: {len(paths)} ways ({'; '.join(kinds)}). "
        f"Most that one is from the first in nats a token: {', '.join(said)}."
    )


# ------------------------------------------------------------------------------------ weaknesses


def weaknesses(results: Results, runs: Runs) -> list[str]:
    found = [
        *missed(results),
        *over_fitting(runs),
        *repetition(results),
        *second_domain(results),
        *cold_confidence(results),
        *nulls(results),
        *spread(results),
    ]
    if runs.backbone is not None:
        found.append(
            f"It was trained on sequences of {runs.backbone.recipe['length']:,} tokens; nothing was "
            "measured beyond them."
        )
    found += [
        "All of its text is Python of one project, so its held-out figures are of familiar style.",
        "It has seen its training text several times and may recite it.",
        "It never saw an image or a chat: the image placeholder and the biases for images are in "
        "the format and mean nothing.",
    ]
    return ["## Known weaknesses", "", *map(md.bullet, found), ""]


def missed(results: Results) -> list[str]:
    found = [
        f"{row['figure']}: {md.number(row['measured'], 4)}, wanted {row['target']}"
        for row in results.rows("summary", *SUMMARY)
        if row["reached"] == "NO" and not _own_table(row)
    ]
    return ["Targets not reached: " + "; ".join(found) + "."] if found else []


def over_fitting(runs: Runs) -> list[str]:
    dev = runs.backbone.dev if runs.backbone is not None else ()
    if not dev:
        return []
    best, end = min(dev, key=lambda row: row["nats"]), dev[-1]
    if best is end:
        return []
    return [
        f"It over-fits at the end: the dev loss was least at step {best['step']:,} "
        f"({md.number(best['nats'], 4)} nats) and is {md.number(end['nats'], 4)} in the last."
    ]


def repetition(results: Results) -> list[str]:
    rows = results.rows("drafts.accepted", "text", "contexts", "repeats", "distinct", "accepted")
    return [
        f"Its text repeats itself ({row['text']}): {row['repeats']:,} of {row['contexts']:,} texts, "
        f"{md.number(row['distinct'])} of their {GRAM}-grams differ; such text is easy to draft, and "
        f"{md.number(row['accepted'])} tokens a step over all of it flatter the drafter."
        for row in rows
        if row["repeats"] and "whole" in str(row["text"])
    ]


def second_domain(results: Results) -> list[str]:
    text = results.rows("quality.held-out", "weights", "of_xz")
    rows = results.rows("quality.prose", "weights", "of_xz")
    if not text or not rows or rows[0]["of_xz"] <= text[0]["of_xz"]:
        return []
    return [
        f"English is foreign to it: {md.number(rows[0]['of_xz'], 4)} of xz -9 on prose, "
        f"{md.number(text[0]['of_xz'], 4)} on held-out code."
    ]


def cold_confidence(results: Results) -> list[str]:
    rows = results.rows("calibration", "outcome", "draft", "ece", "ece_after")
    worst: dict[str, Row] = {}
    for row in rows:
        key = str(row["outcome"])
        if row["ece"] is not None and row["ece"] > worst.get(key, {"ece": -1.0})["ece"]:
            worst[key] = row
    greedy = next((row for name, row in worst.items() if "greedy" in name), None)
    if greedy is None:
        return []
    return [
        "The confidence is the chance of acceptance at temperature 1. At temperature 0 its "
        f"calibration error is up to {md.number(greedy['ece'])} (draft {greedy['draft']}; "
        f"{md.number(greedy['ece_after'])} with fitted temperatures)."
    ]


def nulls(results: Results) -> list[str]:
    rows = results.rows("ablations", "removed", "says", "change_percent")
    rows = [row for row in rows if row["removed"] != "nothing"]
    said = []
    for verdict, words in (
        (
            "null",
            "Nothing was shown for: {}: without it, held-out text is neither better nor worse.",
        ),
        ("better", "Held-out text is better without: {}."),
        ("too few", "Too few modules to tell: {}."),
    ):
        names = [str(row["removed"]) for row in rows if str(row["says"]).startswith(verdict)]
        if names:
            said.append(words.format(", ".join(names)))
    return said


def spread(results: Results) -> list[str]:
    rows = results.rows("summary", *SUMMARY)
    if not rows or any(row["second_seed"] is not None for row in rows):
        return []
    return ["One training run: how much another seed changes the figures is not known."]
