"""The model card and the plots: every number comes from a file, and what is missing is named."""

import argparse
import difflib
import json
import re
import shlex
from importlib import util
from itertools import groupby
from pathlib import Path
from statistics import mean, median

import numpy as np
import pytest

from deepinfer.checkpoint import names
from deepinfer.checkpoint import nano as checkpoint
from deepinfer.checkpoint.reader import Checkpoint
from deepinfer.checkpoint.tiny import write_tiny
from deepinfer.display.numbers import fmt
from deepinfer.engine.weights import weights_digest
from deepinfer.tables.table import Table
from experiments import nano
from experiments.nano.config import Backbone, Drafter
from experiments.nano.report import card, findings, plots, sections
from experiments.nano.report.card import model, training
from experiments.nano.report.card.inputs import Results, read_run, read_runs
from experiments.nano.train import checks, stages

# The report's findings and their columns.
COLUMNS = {
    "quality.held-out": "weights fidelity tokens bytes bits_per_byte xz_bits_per_byte of_xz low high",
    "quality.rounding": "rounded change_percent low high says",
    "quality.position": "positions tokens nats_per_token whole_tokens whole_nats rise_percent low high",
    "quality.context": "positions tokens change_percent low high says",
    "quality.prose": "weights fidelity tokens bytes bits_per_byte xz_bits_per_byte of_xz low high",
    "paths": "path files tokens bits_per_byte change_percent low high mean_dnats agrees",
    "drafts.accepted": "text contexts tokens steps accepted low high repeats in_prompt distinct",
    "acceptance.length": "blocks expected_length low high",
    "acceptance.position": "draft accept low high confidence same_first",
    "calibration": "outcome draft observed confidence accept ece by_chance ece_product temperature "
    "ece_after product_after",
    "routing.layers": "layer unused least_over_mean all prefill decode document worst_document",
    "routing.skew": "per tokens number p50 p90 p99 largest by_chance",
    "ablations": "removed how change_percent low high says",
    "ablations.markov": "figure with_it without",
    "summary": "figure target measured reached second_seed",
}
TEXT = {
    "weights": ("stored", "unquantised"),
    "removed": ("sinks", "Engram"),
    "says": ("null: 0 is inside", "worse"),
    "positions": ("0-63", "64-255"),
    "outcome": ("1 - TV on text", "greedy, temperature 0"),
    "per": ("document", "all"),
    "text": ("temperature 0, whole text", "temperature 1, rejection"),
    "agrees": (True, True),
    "figure": ("worst ECE", "without sinks, %"),
    "target": ("<= 0.0512", "worse"),
    "reached": ("NO", "yes"),
    "draft": (1, 1),
    "layer": (0, 1),
    "rounded": ("weights", "caches"),
    "path": ("in chunks", "at once"),
    "how": ("their logits are low", "its values are zero"),
}
WHOLE = {
    "tokens",
    "bytes",
    "files",
    "contexts",
    "steps",
    "repeats",
    "blocks",
    "observed",
    "unused",
    "whole_tokens",
    "number",
    "fidelity",
}


def finding(name, seed):
    """Two rows of numbers that no other finding has."""
    random = np.random.default_rng(seed)

    def cell(column, i):
        if column in TEXT:
            return TEXT[column][i]
        if column in WHOLE:
            return int(random.integers(1_000, 900_000))
        return float(random.uniform(0.01, 9))

    rows = [{c: cell(c, i) for c in COLUMNS[name].split()} for i in range(2)]
    says = f"What {name} means, on {random.integers(100, 999)} texts."
    says += " of_xz is a share." if "of_xz" in rows[0] else ""
    return findings.Finding(
        name,
        says,
        Table(
            rows,
            title=name,
            provenance={
                "settings": {"fidelity": 1},
                "dtype": "float32",
                "commit": "0123456789abcdef+changes",
            },
        ),
    )


def write_report(path, stored, without=(), **facts):
    report = findings.Report(path, {"stored": stored, "torch": "2.99.1", **facts})
    for i, name in enumerate(COLUMNS):
        if name not in without:
            report.findings[name] = finding(name, i)
    report.write()
    return path


def write_log(path, recipe, seed, stopped=False, finished=True):
    rows = [{"stage": "start", "seed": seed, "recipe": str(recipe), "torch": "2.98.7"}]
    random = np.random.default_rng(seed + 7 * recipe.steps)

    def x(low=0.1, high=9.0):
        return round(float(random.uniform(low, high)), 5)

    stage = type(recipe).__name__.lower()
    if stage == "drafter":
        rows.append(
            {
                "stage": "written",
                "text": "sampled",
                "seconds": x(),
                "tokens": 51_717,
                "different": x(0, 1),
            }
        )
    for step in range(20, recipe.steps + 1, 20):
        row = {"stage": stage, "step": step, "seconds": x(), "max_load": x(1, 5)}
        if stage == "backbone":
            row |= {
                "nats": x(),
                "index_kl": x(),
                "min_load": x(0, 1),
                "tokens_per_second": x(1e5, 2e5),
                "library_epochs": 3,
                "tests_epochs": 2,
                "renamed_epochs": 4,
            }
        else:
            row |= {
                "text": "corpus",
                "loss": x(),
                "accepted": x(1, 6),
                "overlap": [x(0, 1), x(0, 1)],
            }
        rows.append(row)
        if step % 40 == 0:
            dev = (
                {"nats": x(), "pieces": 19}
                if stage == "backbone"
                else {"loss": x(), "accepted": x(1, 6), "overlap": [x(0, 1), x(0, 1)]}
            )
            rows.append({"stage": "dev", "step": step, **dev})
    if stopped:
        rows.append({"stage": "stopped", "step": recipe.steps, "seconds": 77.0})
    if finished:
        rows.append({"stage": "written", "seconds": 234.56, "gigabytes": 12.345})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


BACKBONE = Backbone(steps=80, rows=3, length=64, bias_rates=((0.25, 7e-3), (1.0, 0.0)))
DRAFTER = Drafter(steps=40, rows=5, length=32)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Everything that a card is made of, in one folder."""
    root = tmp_path_factory.mktemp("card")
    checkpoint = Checkpoint.open(write_tiny(root / "stored"))
    work = root / "work"
    work.mkdir()
    (work / "tokenizer.json").write_bytes(checkpoint.tokenizer_path.read_bytes())
    sizes = {"library": (41, 5_501), "tests": (43, 7_703), "dev": (47, 1_907)}
    np.savez(
        work / "corpus.npz",
        **{
            f"{name}_{what}": np.zeros(n, np.int64)
            for name, (documents, ids) in sizes.items()
            for what, n in (("ids", ids), ("offsets", documents + 1))
        },
    )
    logs = [
        write_log(root / "a" / "log.jsonl", BACKBONE, 5),
        write_log(root / "b" / "log.jsonl", DRAFTER, 5, stopped=True),
        write_log(root / "c" / "log.jsonl", Backbone(steps=40, rows=3, length=64), 6),
    ]
    (root / "paths.json").write_text(
        json.dumps(
            [
                dict(
                    dtype=d, slots="batched", compiled=True, gradient=False, nats=2.3456, percent=p
                )
                for d, p in (("float32", 0.0), ("bfloat16", -0.0479))
            ]
        )
    )
    report = write_report(root / "results.json", weights_digest(checkpoint))
    return argparse.Namespace(
        root=root,
        checkpoint=checkpoint,
        work=work,
        logs=logs,
        report=report,
        sizes=sizes,
        paths=root / "paths.json",
    )


def make(files, *more, out=None, report=None, logs=None):
    """(exit status, the card's text)."""
    out = out or files.root / "README.md"
    arguments = ["--out", out, "--checkpoint", files.checkpoint.path, "--work", files.work]
    arguments += [
        "--results",
        report or files.report,
        "--log",
        *(files.logs if logs is None else logs),
    ]
    status = card.main([str(x) for x in (*arguments, *more)])
    return status, out.read_text() if status == 0 else ""


# --------------------------------------------------------------------------- where numbers come from

NAMES = (
    "DeepSeek-V4.1-Flash",
    "DeepSeek-V4.1",
    "FP8",
    "FP4",
    "xz -9",
    "95 %",
    "SHA-256",
    "SHA-1",
    "Apache-2.0",
    "1 - TV",
    "temperature 0",
    "temperature 1",
    "max_tokens=64",
    "8-grams",
    "dev 1, 2, ...",
)
NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?")


def forms(value):
    """How a card may write a value of its inputs."""
    if isinstance(value, dict):
        return {f for v in value.values() for f in forms(v)}
    if isinstance(value, (list, tuple)):
        return {f for v in value for f in forms(v)}
    if isinstance(value, bool) or value is None:
        return set()
    if isinstance(value, int):
        return {f"{value:,}", str(value)}
    if isinstance(value, float):
        whole = {f"{abs(value):,.0f}"} if abs(value) > 100 else set()
        return {fmt(abs(value), 3), fmt(abs(value), 4), *whole}
    return set(NUMBER.findall(re.sub(r"\b[0-9a-f]{12,}\b", "", value)))  # no pieces of digests


def derived(files):
    """What the card reckons from its inputs, reckoned here anew."""
    found = set()
    for path, recipe in zip(files.logs, (BACKBONE, DRAFTER, Backbone(steps=40, rows=3, length=64))):
        run = read_run(path)
        found |= forms([recipe.rows * recipe.length])
        marks = sorted({20, *(row["step"] for row in run.dev)})
        for before, step in zip([0, *marks], marks):
            part = [row for row in run.steps if before < row["step"] <= step]
            found |= forms(step * recipe.rows * recipe.length / 1e6)
            for key in ("nats", "index_kl", "loss", "accepted"):
                if key in part[0]:
                    found |= forms(mean(row[key] for row in part))
            found |= forms(max(row["max_load"] for row in part))
            if "tokens_per_second" in part[0]:
                found |= forms(float(median(row["tokens_per_second"] for row in part)))
    weights = names.weights(files.checkpoint.config)
    for component in {w.component for w in weights} | {None}:
        group = [w for w in weights if component in (None, w.component)]
        drafter = sum(w.parameters for w in group if w.component == "drafter")
        count = sum(w.parameters for w in group)
        found |= forms([count, sum(t.nbytes for w in group for t in w.stored())])
        found |= forms([count / 1e6, drafter / 1e6, (count - drafter) / 1e6])
    config = files.checkpoint.config
    found |= forms(
        [len(config.encoder_layers), len(config.decoder_layers), len(config.draft_layers)]
    )
    found |= forms([len(list(same)) for _, same in groupby(config.roles)])
    found |= forms(sum(f.stat().st_size for f in files.checkpoint.path.iterdir()) / 1e6)
    for each in model.manifest()["sets"].values():
        found |= forms([len(each["files"]), len({f["module"] for f in each["files"]})])
    return (
        found | forms(list(files.sizes.values())) | forms([2, 0.0479])
    )  # paths and their distance


def test_every_number_of_the_card_is_from_a_file(files):
    status, text = make(files, "--paths", files.paths)
    assert status == 0
    known = derived(files)
    known |= forms(json.loads(files.report.read_text())) | forms(files.checkpoint.config.to_dict())
    known |= forms(model.manifest())
    for log in files.logs:
        known |= forms([json.loads(line) for line in log.read_text().splitlines()])
    text = re.sub(r"`[0-9a-f]{64}(  ?[\w.]+)?`|\b[0-9a-f]{12,16}\b|\w+\.(npz|json|py)", "", text)
    for name in NAMES:
        text = text.replace(name, "")
    numbers = NUMBER.findall(text)
    assert len(numbers) > 300 and [n for n in numbers if n not in known] == []


def test_the_card_says_what_the_report_says(files):
    text = make(files)[1]
    found = Results(files.report)
    for name in COLUMNS:
        if name != "summary":
            assert found.says(name).replace("of_xz", "of xz") in " ".join(text.split())
    row = found.rows("summary")[0]
    assert f"| {fmt(row['measured'], 4)} | NO" in re.sub(" +", " ", text)
    for row in found.rows("ablations"):
        interval = f"{fmt(row['low'])} to {fmt(row['high'])} | {row['says']}"
        assert f"| +{fmt(row['change_percent'])} | {interval}" in re.sub(" +", " ", text)


def test_the_same_files_give_the_same_card_and_no_path_of_a_machine(files, tmp_path):
    one, other = make(files)[1], make(files, out=tmp_path / "deep" / "card.md")[1]
    assert one == other and len(one) > 8_000
    assert str(files.root) not in one and not re.search(r"(?<![\w.])/(tmp|home|root|usr|work)", one)
    assert "<" not in re.sub(r"<= |< ", "", one)  # no HTML


def test_tables_stand_in_columns(files):
    lines = make(files)[1].splitlines()
    blocks = "\n".join(line if line.startswith("|") else "" for line in lines).split("\n\n")
    tables = [block.strip().splitlines() for block in blocks if block.strip()]
    assert len(tables) >= 20
    for table in tables:
        assert len({len(line) for line in table}) == 1, table[0]
        assert len({line.count(" | ") for line in table}) == 1, table[0]
    assert max(len(line) for line in lines if not line.startswith("|")) <= 100


# ------------------------------------------------------------------------------ what is not there


def test_without_results_and_logs_everything_is_named_as_not_measured(files):
    out = files.root / "bare.md"
    status = card.main(
        [
            "--out",
            str(out),
            "--checkpoint",
            str(files.checkpoint.path),
            "--work",
            str(files.root / "nowhere"),
        ]
    )
    text = out.read_text()
    assert status == 0
    for name in COLUMNS:
        assert f"Not measured: `{name}`." in text
    for stage in ("backbone", "drafter"):
        assert f"No log of the {stage} stage was given" in text
    assert "Not counted: the trained tokens" in text and "`train paths`" in text


@pytest.mark.parametrize("name", list(COLUMNS))
def test_a_missing_finding_is_named_and_the_others_stay(files, tmp_path, name):
    stored = weights_digest(files.checkpoint)
    text = make(files, report=write_report(tmp_path / "x.json", stored, without=[name]))[1]
    assert re.findall(r"Not measured: `([\w.-]+)`", text) == [name]


@pytest.mark.parametrize("name", [name for name in COLUMNS if name != "summary"])
def test_a_finding_without_its_columns_is_an_error(files, tmp_path, capsys, name):
    path = write_report(tmp_path / "x.json", weights_digest(files.checkpoint))
    whole = json.loads(path.read_text())
    for one in whole["findings"]:
        if one["name"] == name:
            one["table"]["columns"] = [c + "_then" for c in one["table"]["columns"]]
    path.write_text(json.dumps(whole))
    assert make(files, report=path)[0] == 2
    said = capsys.readouterr().err
    assert f"finding '{name}' lacks" in said and len(said.splitlines()) == 1


def test_results_of_other_weights_or_sizes_are_refused(files, tmp_path, capsys):
    path = write_report(tmp_path / "x.json", "feedfacefeedface", quick=True, texts=True)
    assert make(files, report=path)[0] == 2
    assert "of weights feedfacefeedface, the checkpoint is" in capsys.readouterr().err
    text = make(files, "--trial", report=path)[1]
    for word in ("A trial of the card", "feedfacefeedface", "--quick", "other texts"):
        assert word in " ".join(text.split())
    assert "A trial" not in make(files)[1]


def test_a_corpus_with_another_tokenizer_is_refused(files, tmp_path, capsys):
    for name in ("corpus.npz", "tokenizer.json"):
        (tmp_path / name).write_bytes((files.work / name).read_bytes() + b" ")
    assert make(files, "--work", tmp_path)[0] == 2
    assert "another corpus" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------ logs


def words(line):
    """A command's words, as a shell sees them: brackets that are not quoted stand alone."""
    found = shlex.shlex(line, posix=True, punctuation_chars=True)
    found.whitespace_split = True
    return list(found)


def test_the_commands_remake_the_recipes(files):
    text = make(files)[1]
    block = next(x for x in text.split("```") if x.startswith("\npython"))
    lines = block.replace("\\\n", " ").strip().splitlines()
    trained = [words(line)[3:] for line in lines if ".train " in line]
    parsed = [stages._parser().parse_args(stage) for stage in trained]
    assert [(p.stage, getattr(p, "seed", None)) for p in parsed] == [
        ("backbone", 5),
        ("drafter", 5),
        ("backbone", 6),
        ("paths", None),
        ("ship", None),
    ]
    assert checks.changed(Backbone(), parsed[0].set) == BACKBONE
    assert checks.changed(Drafter(), parsed[1].set) == DRAFTER
    assert parsed[1].seconds == 77 and parsed[0].seconds is None
    assert parsed[1].backbone == parsed[0].out + "/stored"
    assert parsed[3].checkpoint == parsed[4].checkpoint == parsed[1].out + "/stored"
    assert "other code than today's" not in text


def cells(text, heading):
    """The rows of the first table below a heading."""
    lines = text.split(f"{heading}\n")[1].split("\n")
    first = next(i for i, line in enumerate(lines) if line.startswith("|"))
    rows = []
    for line in lines[first + 2 :]:
        if not line.startswith("|"):
            return rows
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def test_a_drafter_that_went_on_has_its_own_command_and_curve(files, tmp_path, capsys):
    more = Drafter(steps=60, rows=5, length=32, fresh=False)
    logs = [*files.logs[:2], write_log(tmp_path / "d" / "log.jsonl", more, 9)]
    status, text = make(files, logs=logs)
    assert status == 0 and "It then went on from its stored weights. Seed 9, 60 steps" in text
    assert "drafter --backbone drafter5/stored --out drafter9 --seed 9" in text.replace(
        "\\\n    ", ""
    )
    assert "ship --checkpoint drafter9/stored" in text and "Other seeds" not in text
    drawn = plots.drafter(read_runs(logs)).axes[0]
    shown = next(x for x in drawn.lines if x.get_label() == "draft 1, dev")
    assert list(shown.get_xdata()) == [40, 80]
    assert [row["step"] for row in read_runs(logs).drafted.steps] == [20, 40, 60, 80, 100]
    joint = next(x for x in drawn.lines if x.get_label().startswith("went on"))
    assert list(joint.get_xdata()) == [40, 40]
    assert make(files, logs=[files.logs[0], logs[2]])[0] == 2
    assert "the log of that one comes before it" in capsys.readouterr().err
    again = write_log(tmp_path / "e" / "log.jsonl", more, 8)
    assert make(files, logs=[*logs, again])[0] == 2
    assert "there is one such stage" in capsys.readouterr().err


def test_what_was_read_and_where_paths_and_seeds_differ(files):
    text = " ".join(make(files, "--paths", files.paths)[1].split())
    assert (
        "read library text for the 3rd time, test suites for the 2nd time, the renamed copies"
        in text
    )
    assert "2 ways (float32 or bfloat16; batched slots; compiled; without gradients)" in text
    assert "from the first in nats a token: 0 % in float32, 0.0479 % in bfloat16." in text
    assert "The backbone of seed 6 had steps=40 in place of 80, bias_rates=" in text
    assert "on how much" in text and "on how much" not in make(files, logs=files.logs[:2])[1]


def test_curves_are_of_the_steps_since_the_row_above(files):
    text = make(files)[1]
    run = read_run(files.logs[0])
    want, before = [], 0
    for step, dev in ((20, None), (40, run.dev[0]), (80, run.dev[1])):
        part = [row for row in run.steps if before < row["step"] <= step]
        want.append(
            [
                str(step),
                fmt(step * 3 * 64 / 1e6),
                fmt(mean(x["nats"] for x in part), 4),
                fmt(dev["nats"], 4) if dev else "",
                fmt(mean(x["index_kl"] for x in part)),
                fmt(max(x["max_load"] for x in part)),
                fmt(min(x["min_load"] for x in part)),
                f"{median(x['tokens_per_second'] for x in part):,.0f}",
            ]
        )
        before = step
    assert cells(text, "### Backbone") == want
    run = read_run(files.logs[1])
    last, dev = run.steps[-1], run.dev[-1]
    assert cells(text, "### Drafter")[-1] == [
        "40",
        fmt(last["loss"]),
        fmt(last["accepted"]),
        fmt(dev["accepted"]),
        *map(fmt, dev["overlap"]),
        fmt(last["max_load"]),
    ]


def test_every_finding_shows_its_own_columns(files):
    text = make(files)[1]
    found = Results(files.report)
    row = found.rows("routing.skew")[1]
    least = found.rows("routing.layers")[1]["least_over_mean"]
    assert cells(text, "### Load of experts")[1][2] == fmt(least)
    skew = [
        row["per"],
        f"{row['tokens']:,}",
        *(fmt(row[c]) for c in ("p50", "p99", "largest", "by_chance")),
    ]
    assert f"| {' | '.join(skew)} |" in re.sub(" +", " ", text)
    for row, calibrated in zip(found.rows("calibration"), (0, 4)):
        figures = cells(text, "### Calibration of confidence")[calibrated : calibrated + 4]
        wanted = ("ece", "by_chance", "temperature", "ece_after")
        assert figures == [
            [row["outcome"], name, fmt(row[column])]
            for name, column in zip(("ECE", "by chance", "temperature", "ECE after"), wanted)
        ]
    accepted = found.rows("drafts.accepted")[1]
    assert cells(text, "### Accepted drafts")[1] == [
        accepted["text"],
        *(f"{accepted[c]:,}" for c in ("contexts", "steps")),
        fmt(accepted["accepted"]),
        f"{fmt(accepted['low'])} to {fmt(accepted['high'])}",
        f"{accepted['repeats']:,}",
        fmt(accepted["in_prompt"]),
        fmt(accepted["distinct"]),
    ]


def test_a_recipe_that_the_code_no_longer_knows_is_said(files, tmp_path):
    path = write_log(tmp_path / "log.jsonl", BACKBONE, 5)
    path.write_text(path.read_text().replace("muon_decay=", "weight_decay="))
    text = make(files, logs=[path])[1]
    assert "other code than today's" in text and "`muon_decay`, `weight_decay`" in text


def test_a_drafter_before_there_was_a_choice_started_afresh(files, tmp_path):
    path = write_log(tmp_path / "log.jsonl", DRAFTER, 5)
    path.write_text(path.read_text().replace("fresh=True, ", ""))
    runs = read_runs([files.logs[0], path])
    assert runs.drafter.recipe["fresh"] and runs.more is None
    assert "other code than today's" not in make(files, logs=[files.logs[0], path])[1]


def test_a_log_counts_from_its_last_start(files, tmp_path):
    path = write_log(tmp_path / "log.jsonl", BACKBONE, 5)
    again = write_log(tmp_path / "again.jsonl", DRAFTER, 8, finished=False)
    path.write_text(path.read_text() + again.read_text())
    run = read_run(path)
    assert (run.stage, run.seed, run.seconds, run.last_step) == ("drafter", 8, None, 40)
    assert "had not finished" in make(files, logs=[path])[1]


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("{}\n", "no row with stage 'start'"),
        ("not json\n", "no training log"),
        ('{"stage": "start", "seed": 0, "recipe": "print(1)", "torch": ""}\n', "recipe"),
        (
            '{"stage": "start", "seed": 0, "recipe": "Backbone(steps=1)", "torch": ""}\n',
            "lacks rows",
        ),
        (
            '{"stage": "start", "seed": 0, "recipe": "Backbone(steps=1, rows=1, length=1)", "torch": ""}\n'
            '{"stage": "backbone", "step": 1}\n',
            "lacks nats",
        ),
    ],
)
def test_a_file_that_is_no_log_is_one_line(files, tmp_path, capsys, text, wrong):
    (tmp_path / "log.jsonl").write_text(text)
    assert make(files, logs=[tmp_path / "log.jsonl"])[0] == 2
    said = capsys.readouterr().err
    assert wrong in said and len(said.splitlines()) == 1


def test_a_file_that_is_not_there_is_a_sentence(files, tmp_path, capsys):
    gone = tmp_path / "gone.json"
    for path, found in ((gone, "no such file"), (tmp_path, "a folder")):
        cases = (
            ("--log", "log.jsonl into its --out", dict(logs=[path]), ()),
            ("--results", "experiments.nano.report", dict(report=path), ()),
            ("--paths", "`train paths`", {}, ("--paths", path)),
        )
        for option, whence, inputs, more in cases:
            assert make(files, *more, **inputs)[0] == 2
            said = [capsys.readouterr().err]
            if option != "--paths":
                assert plots.main([option, str(path), "--out", str(tmp_path / "plots")]) == 2
                said.append(capsys.readouterr().err)
            for text, command in zip(said, ("card", "plots")):
                assert text.startswith(f"{command}: {option} {path}: {found}; ")
                assert whence in text and "Errno" not in text and len(text.splitlines()) == 1


def test_a_log_of_other_weights_is_refused(files, tmp_path, capsys):
    """The last stage's says which weights it wrote: an earlier one's are others."""
    mine, rows = weights_digest(files.checkpoint), files.logs[1].read_text().splitlines()
    logs = {}
    for name, wrote in (("same", mine), ("other", "feedfacefeedface")):
        logs[name] = tmp_path / f"{name}.jsonl"
        end = json.dumps({**json.loads(rows[-1]), "stored": wrote})
        logs[name].write_text("\n".join([*rows[:-1], end]) + "\n")
    first = files.logs[0]
    assert make(files, logs=[first, logs["same"]])[1] == make(files, logs=files.logs[:2])[1]
    assert make(files, logs=[first, logs["other"]])[0] == 2
    said = capsys.readouterr().err
    assert f"log is of weights feedfacefeedface, the checkpoint is {mine}" in said
    text = make(files, "--trial", logs=[first, logs["other"]])[1]
    assert "A trial of the card" in text and "feedfacefeedface" in text
    more = write_log(tmp_path / "more.jsonl", Drafter(steps=20, rows=5, length=32, fresh=False), 8)
    assert make(files, logs=[first, logs["other"], more])[0] == 0  # the last one does not say


def test_the_course_of_a_short_stage_in_words(files, tmp_path):
    path = write_log(tmp_path / "log.jsonl", BACKBONE, 5)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    step = {**next(row for row in rows if row["stage"] == "backbone"), "step": 1}
    step |= {"library_epochs": 1, "tests_epochs": 0, "renamed_epochs": 0}

    def course(device):
        start = rows[0] if device is None else {**rows[0], "device": device}
        path.write_text("".join(json.dumps(x) + "\n" for x in (start, step, rows[-1])))
        return training.course(read_run(path))

    assert "Seed 5, 1 step of" in course(None)
    assert course(None).endswith(
        "In its last step it read library text for the 1st time. It never read test suites, the "
        "renamed copies."
    )
    assert "with compilation" in course("GPU X")
    assert not any("with compilation" in course(x) for x in (None, "cpu"))


def test_two_logs_of_one_seed_are_refused(files, capsys):
    assert make(files, logs=[files.logs[0], files.logs[0]])[0] == 2
    assert "a second log of the backbone with seed 5" in capsys.readouterr().err


def test_weaknesses_are_those_that_the_files_show(files, tmp_path):
    rows = [json.loads(line) for line in files.logs[0].read_text().splitlines()]
    dev = [row for row in rows if row["stage"] == "dev"]
    for falls in (True, False):
        dev[0]["nats"], dev[1]["nats"] = (3.25, 2.75) if falls else (2.75, 3.25)
        path = tmp_path / f"{falls}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        weak = make(files, logs=[path])[1].split("## Known weaknesses")[1]
        said = "the dev loss was least at step 40 (2.75 nats) and is 3.25" in " ".join(weak.split())
        assert said is not falls
    measured = fmt(Results(files.report).rows("summary")[0]["measured"], 4)
    assert f"Targets not reached: worst ECE: {measured}, wanted <= 0.0512." in weak
    assert "Nothing was shown for: sinks:" in weak


# ----------------------------------------------------------------------------------------- plots


def width(path):
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(data[16:20], "big")


def test_plots_are_written_or_named(files, tmp_path, capsys):
    everything = [
        "loss",
        "load",
        "drafter",
        "position",
        "acceptance",
        "calibration",
        "routing",
        "ablations",
    ]
    logs = [str(x) for x in files.logs]
    assert plots.main(["--log", *logs, "--results", str(files.report), "--out", str(tmp_path)]) == 0
    assert {p.stem: width(p) for p in tmp_path.iterdir()} == dict.fromkeys(everything, 700)
    capsys.readouterr()
    assert plots.main(["--out", str(tmp_path / "none")]) == 0
    said = capsys.readouterr().out
    assert not list((tmp_path / "none").iterdir())
    assert all(f"{name}: not drawn" in said for name in everything)


def test_a_plot_shows_the_numbers_of_its_files(files):
    figures = dict(plots.figures(card.read_runs(files.logs), Results(files.report)))
    drawn = {name: figures[name].axes[0] for name in ("loss", "ablations")}
    run = read_run(files.logs[0])
    dev = next(x for x in drawn["loss"].lines if x.get_label() == "dev modules, seed 5")
    assert list(dev.get_ydata()) == [row["nats"] for row in run.dev]
    assert list(dev.get_xdata()) == [row["step"] * 3 * 64 / 1e6 for row in run.dev]
    rows = Results(files.report).rows("ablations")
    points = [float(x.get_xdata()[0]) for x in drawn["ablations"].lines if len(x.get_xdata()) == 1]
    assert points == [row["change_percent"] for row in rows[::-1]]
    for name, figure in figures.items():
        assert figure.axes[0].get_title(loc="left"), name


# ------------------------------------------------------------------------------------ the whole way


@pytest.mark.slow
def test_a_report_as_it_is_makes_a_whole_card(files, docs, tmp_path):
    text = docs[0].data.decode()
    for name, count in (("heldout", 9), ("prose", 2), ("dev", 3)):
        (tmp_path / name).mkdir()
        for i in range(count):
            line = f"class {name.title()}{i}:\n    size = {i * 37}\n\n"
            (tmp_path / name / f"m{i}.py").write_text(line + text[i:])
    folders = [str(tmp_path / name) for name in ("heldout", "prose", "dev")]
    plain = write_tiny(tmp_path / "plain", quantised=False)
    out, stored = tmp_path / "results.json", str(files.checkpoint.path)
    assert (
        sections.main(
            [
                "--checkpoint",
                stored,
                "--unquantised",
                str(plain),
                "--quick",
                "--out",
                str(out),
                "--second-seed",
                stored,
                "--texts",
                *folders,
            ]
        )
        == 0
    )
    assert make(files, report=out)[0] == 2  # small sizes and other texts
    status, found = make(files, "--trial", "--paths", files.paths, report=out)
    assert status == 0 and "Not measured" not in found and "not measured" not in found
    assert plots.main(["--results", str(out), "--out", str(tmp_path / "plots")]) == 0
    assert len(list((tmp_path / "plots").iterdir())) == 5  # all but the three of training


# ------------------------------------------------------------------------------- the folder's README

FOLDER = Path(nano.__file__).parent
RESULTS = FOLDER / "results"


def test_the_readme_names_every_file_and_no_other():
    part = (FOLDER / "README.md").read_text().split("## The files")[1].split("\n## ")[0]
    folder, named = "", set()
    for line in part.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        folder = cells[1].strip("`") if len(cells) > 3 and cells[1] else folder
        if folder.endswith("/"):
            named |= {folder + name for name in re.findall(r"`(\w+(?:\.py|/))`", line)}
    named -= {f"{name}/{name}/" for name in ("data", "train", "report")}
    inner = {f"report/{p.name}" for p in (FOLDER / "report/card").glob("*.py")}
    there = {str(p.relative_to(FOLDER)) for p in FOLDER.glob("*/*.py")} - {
        f"{folder}/__{name}__.py"
        for folder in ("data", "train", "report")
        for name in ("init", "main")
    }
    assert there | {"report/card/"} <= named, there - named
    assert named - {"report/card/"} <= there | inner, named - there


def test_the_readmes_trials_are_those_of_the_logs():
    """Each row of its tables that names a log ends with a measurement on dev of that log."""
    dev = {
        name: run["dev"] for name, run in json.loads((RESULTS / "trials.json").read_text()).items()
    }
    for path in RESULTS.glob("*.jsonl"):
        run = read_run(path)
        dev[path.stem] = [(x["step"], x.get("nats", x.get("accepted"))) for x in run.dev]
    seen = set()
    for line in (FOLDER / "README.md").read_text().split("## What was tried")[1].splitlines():
        if named := re.match(r"\| `([\w-]+)`", line):
            seen.add(named[1])
            value = line.rstrip(" |").rpartition("|")[2].strip(" *")
            assert value in {f"{y:.3f}" for _, y in dev[named[1]]}, line
    assert set(dev) - seen == {"C", "dY"}  # the text says what became of these two


def test_the_shipped_card_is_what_the_command_writes(tmp_path):
    """From the stored logs and results; the corpus alone, which is not stored, is not counted."""
    logs = [
        RESULTS / f"{x}.jsonl"
        for x in ["backbone", "drafter", "more", "second-backbone", "second-drafter"]
    ]
    more = ["--paths", str(RESULTS / "paths.json"), "--work", str(tmp_path)]
    out = tmp_path / "card.md"
    words = ["--results", str(RESULTS / "results.json"), "--log", *map(str, logs), *more]
    assert card.main([*words, "--out", str(out)]) == 0
    made = out.read_text().splitlines()
    stored = (Path(checkpoint.__file__).parent / "README.md").read_text().splitlines()
    changes = difflib.SequenceMatcher(None, made, stored, autojunk=False).get_opcodes()
    apart = [made[a:b] for kind, a, b, _, _ in changes if kind != "equal"]
    assert [len(x) for x in apart] == [1] and apart[0][0].startswith("Not counted")


def test_the_readmes_commands_are_understood():
    block = (FOLDER / "README.md").read_text().split("```")[1].replace("\\\n", " ")
    lines = [
        line.split("#")[0].replace("$W", "w").replace("$LOGS", "a b") for line in block.split("\n")
    ]
    seen = []
    for line in lines:
        if line.startswith("python -m experiments.nano."):
            module, *rest = words(line)[2:]
            name = module.rpartition(".")[2]
            assert util.find_spec(module) is not None, module
            parse = {
                "train": stages._parser().parse_args,
                "report": sections.options,
                "card": card.options,
            }
            parse |= {"data": list, "plots": list}
            parse[name](rest)
            seen.append((name, rest[0] if name == "train" else ""))
    assert seen == [
        ("data", ""),
        ("train", "backbone"),
        ("train", "drafter"),
        ("train", "drafter"),
        ("train", "paths"),
        ("report", ""),
        ("train", "ship"),
        ("card", ""),
        ("plots", ""),
    ]
