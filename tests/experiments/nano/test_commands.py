"""The commands of training, before anything is trained: what they refuse, and what ships."""

import json
import shutil

import numpy as np
import pytest
import torch

from deepinfer.checkpoint import nano
from deepinfer.checkpoint.reader import Checkpoint
from deepinfer.checkpoint.tiny import write_tiny
from deepinfer.checkpoint.tiny_tokenizer import tiny_tokenizer
from deepinfer.engine.engine import Engine
from deepinfer.engine.weights import weights_digest
from experiments.nano.config import Backbone, Drafter, small_config
from experiments.nano.train import agreement, backbone, drafter, ship, stages, weights
from experiments.nano.train.log import read


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A corpus of the tiny tokenizer, long enough for the recipe."""
    folder = tmp_path_factory.mktemp("work")
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    corpus = {}
    for name, tokens in (("library", 9000), ("renamed", 9000), ("tests", 9000), ("dev", 4200)):
        corpus[f"{name}_ids"] = np.arange(tokens, dtype=np.uint16) % 900
        corpus[f"{name}_offsets"] = np.array([0, tokens])
    np.savez(folder / "corpus.npz", **corpus)
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """What a stage leaves: folders `stored` and `unquantised` of a small model."""
    folder = tmp_path_factory.mktemp("trained")
    tokenizer = tiny_tokenizer()
    config = small_config(tokenizer)
    weights.write_both(folder, config, weights.initial(config, 0), tokenizer)
    return folder


@pytest.fixture
def call(work, tmp_path, capsys, monkeypatch):
    """call(*words) -> (exit status, standard error); a stage that begins to train says so."""

    def began(*_, **__):
        raise AssertionError("it began")

    for module, name in ((backbone, "train"), (drafter, "train"), (agreement, "agreement")):
        monkeypatch.setattr(module, name, began)
    monkeypatch.setattr(stages.weights, "initial", lambda *_: None)
    monkeypatch.setattr(stages.weights, "model_from", lambda *_: None)

    def run(stage, *words, begin=("--device", "cpu", "--work", str(work))):
        out = ["--out", str(tmp_path / "out")] if stage in ("backbone", "drafter", "paths") else []
        try:
            status = stages.main([*begin, stage, *out, *words])
        except SystemExit as stop:
            status = stop.code
        return status, capsys.readouterr().err

    return run


GOOD = [
    [],
    ["length=128", "dense_length=64"],
    ["rows=1"],
    ["warmup=0"],
    ["unseen=()"],
    ["steps=1"],
    ["dense=0.0"],
    ["bias_rates=((1.0,0.1),)"],
]


@pytest.mark.parametrize("changes", GOOD, ids=str)
def test_a_recipe_that_can_run_begins(call, changes):
    with pytest.raises(AssertionError, match="it began"):
        call("backbone", *(x for change in changes for x in ("--set", change)))


BAD = [
    ("steps=0", "steps=0: at least 1"),
    ("steps=-3", "at least 1"),
    ("rows=0", "at least 1"),
    ("length=100", "length=100 is no multiple of the window, 64 tokens: 128 is"),
    ("dense_length=1000", "dense_length=1000 is no multiple of the window, 64 tokens: 1024 is"),
    ("dense_length=1536", "16,384 tokens a step, which sequences of dense_length=1536"),
    ("dense_length=65536", "do not divide"),
    ("length=4160", "dense_length=1024 do not divide"),
    ("dev_every=0", "at least 1"),
    ("index_every=0", "at least 1"),
    ("dropout=2", "0 to 1"),
    ("dropout=-0.1", "0 to 1"),
    ("muon_rate=1e999", "from 0 on"),
    ("clip=-1.0", "from 0 on"),
    ("bias_rates=((0.5,0.1),)", "the last until 1.0"),
    ("bias_rates=()", "pairs"),
    ("bias_rates=(1,2)", "pairs"),
    ("library_shares=((1.0,1.5),)", "at most 1"),
    ("unseen=(0.1,)", "3 n-gram sizes"),
    ("unseen=(1.0,2.0,3.0)", "3 n-gram sizes"),
    ("steps=three", "steps is an integer, as in steps=4500, and 'three' is none"),
    ("steps='x'", "steps is an integer"),
    ("steps", "steps is an integer"),
    ("steps=1.5", "steps is an integer"),
    ("rows=True", "rows is an integer"),
    ("dropout=True", "dropout is a number"),
    ("clip=" + "9" * 400, "clip is a number"),
    ("unseen=0.1", "unseen is a tuple"),
    ("unseen={[]: 1}", "unseen is a tuple"),
    ("renamed=1.5", "0 to 1"),
    ("renamed=-0.1", "0 to 1"),
    ("length=8192", "the corpus has 4,200 dev tokens, at least 8,193"),
]


@pytest.mark.parametrize("change, why", BAD, ids=[change[:30] for change, _ in BAD])
def test_a_recipe_that_cannot_run_is_refused_at_once(call, change, why, tmp_path):
    for stage in ("backbone", "bench"):
        status, said = call(stage, "--set", change)
        assert status == 2 and why in said and said.startswith(f"train {stage}: ")
        assert len(said.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_an_unknown_name_gets_near_ones_and_the_list(call, trained):
    stored = ["--backbone", str(trained / "stored")]
    for stage, more, names in (("backbone", [], Backbone()), ("drafter", stored, Drafter())):
        for change, near in (("step=3", " (near: steps"), ("zzz=1", "; it has")):
            status, said = call(stage, *more, "--set", change)
            name = change.partition("=")[0]
            assert status == 2 and f"the {stage} recipe has no '{name}'{near}" in said
            first, *lines = said.splitlines()
            assert len(lines) > 1 and max(map(len, lines)) <= 100
            assert " ".join(x.strip() for x in lines).split(", ") == list(vars(names))


@pytest.mark.parametrize(
    "change, why",
    [
        ("steps=0", "at least 1"),
        ("length=100", "no multiple of the window"),
        ("written_length=100", "no multiple of the window"),
        ("prompt=300", "prompt=300: at most half"),
        ("written_length=8", "written_length=8: more than 8"),
        ("shares=(1.0,)", "3 numbers"),
        ("shares=(0.0,0.0,0.0)", "not all 0"),
        ("temperatures=(0.5,)", "2 numbers"),
        ("written=0", "at least 1"),
        ("anchors=0", "at least 1"),
    ],
)
def test_a_drafter_recipe_too(call, trained, change, why):
    stored = str(trained / "stored")
    status, said = call("drafter", "--backbone", stored, "--set", change)
    assert status == 2 and why in said and len(said.splitlines()) == 1


def test_what_is_no_checkpoint_is_refused_at_once(call, trained, tmp_path):
    (tmp_path / "empty").mkdir()
    for stage, option in (("drafter", "--backbone"), ("paths", "--checkpoint")):
        for folder in ("nowhere", "empty"):
            status, said = call(stage, option, str(tmp_path / folder))
            assert status == 2 and said.startswith(f"train {stage}: {option} ")
            assert "config.json" in said and len(said.splitlines()) == 1
        other = write_tiny(tmp_path / stage)
        whole = json.loads((other / "tokenizer.json").read_text())
        ids = whole["model"]["vocab"]
        ids["a"], ids["b"] = ids["b"], ids["a"]
        (other / "tokenizer.json").write_text(json.dumps(whole))
        status, said = call(stage, option, str(other))
        assert status == 2 and "another tokenizer" in said and len(said.splitlines()) == 1
        with pytest.raises(AssertionError, match="it began"):
            call(stage, option, str(trained / "stored"))
    assert call("paths", "--checkpoint", str(trained / "stored"), "--rows", "0")[0] == 2


def test_a_drafter_wants_a_stored_backbone(call, trained):
    status, said = call("drafter", "--backbone", str(trained / "unquantised"))
    assert status == 2 and said.startswith("train drafter: --backbone ")
    assert "is unquantised" in said and "`stored`" in said and len(said.splitlines()) == 1


def test_a_folder_with_a_log_is_left_alone(call, trained, tmp_path):
    log = tmp_path / "out" / "log.jsonl"
    log.parent.mkdir()
    log.write_text("as it was")
    for stage, more in (("backbone", []), ("drafter", ["--backbone", str(trained / "stored")])):
        status, said = call(stage, *more)
        assert status == 2 and f"--out {log.parent} holds the log of another run" in said
        assert "delete" in said and len(said.splitlines()) == 1 and log.read_text() == "as it was"
        with pytest.raises(AssertionError, match="it began"):
            call(stage, *more, "--out", str(tmp_path / stage))


@pytest.mark.parametrize("stage", ["backbone", "drafter"])
def test_a_log_ends_with_the_fingerprint_of_what_was_written(
    work, trained, tmp_path, monkeypatch, stage
):
    state = weights.initial(small_config(tiny_tokenizer()), 3)
    monkeypatch.setattr(stages, "nano_config", small_config)
    for module in (backbone, drafter):
        monkeypatch.setattr(module, "train", lambda *_, **__: {})
    monkeypatch.setattr(weights, "official", lambda *_: state)
    more = ["--backbone", str(trained / "stored")] if stage == "drafter" else []
    begin = ["--device", "cpu", "--work", str(work), stage, "--out", str(tmp_path / "out")]
    assert stages.main([*begin, *more]) == 0
    last = read(tmp_path / "out" / "log.jsonl")[-1]
    assert last["stage"] == "written"
    assert last["stored"] == weights_digest(Checkpoint.open(tmp_path / "out" / "stored"))
    assert last["stored"] != weights_digest(Checkpoint.open(trained / "stored"))


def test_a_corpus_without_renamed_text_is_refused_where_it_is_wanted(call, work, tmp_path):
    (tmp_path / "old").mkdir()
    shutil.copy(work / "tokenizer.json", tmp_path / "old")
    with np.load(work / "corpus.npz") as whole:
        old = {name: whole[name] for name in whole if not name.startswith("renamed")}
    np.savez(tmp_path / "old" / "corpus.npz", **old)
    begin = ["--device", "cpu", "--work", str(tmp_path / "old")]
    status, said = call("backbone", begin=begin)
    assert status == 2 and len(said.splitlines()) == 1
    assert "renamed=0.5" in said and "`python -m experiments.nano.data`" in said
    with pytest.raises(AssertionError, match="it began"):
        call("backbone", "--set", "renamed=0.0", begin=begin)


def test_a_broken_corpus_and_device_are_refused(call, work, tmp_path, capsys):
    copy = tmp_path / "work"
    shutil.copytree(work, copy)
    for name in ("corpus.npz", "tokenizer.json"):
        whole = (copy / name).read_bytes()
        for data, why in ((whole[:99], "cannot be read"), (None, f"has no {name}")):
            (copy / name).unlink() if data is None else (copy / name).write_bytes(data)
            assert stages.main(["--work", str(copy), "backbone", "--out", str(tmp_path / "o")]) == 2
            said = capsys.readouterr().err
            assert why in said and "experiments.nano.data" in said
        (copy / name).write_bytes(whole)
    assert stages.main(["--device", "toaster", "backbone", "--out", str(tmp_path / "o")]) == 2
    assert "--device toaster: " in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert call("backbone", "--out", str(tmp_path / "file"))[0] == 2


# ----------------------------------------------------------------------------------------- ship


@pytest.fixture
def package(tmp_path, monkeypatch):
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "README.md").write_text("a card")
    monkeypatch.setattr(nano.resources, "files", lambda name: folder)
    return folder


def test_ship_puts_a_checkpoint_in_the_package(trained, package, capsys):
    source = trained / "stored"
    assert stages.main(["ship", "--checkpoint", str(source), "--to", str(package)]) == 0
    names = {*nano.FILES, nano.SUMS, "README.md"}
    assert {path.name for path in package.iterdir()} == names
    for name in nano.FILES:
        assert (package / name).read_bytes() == (source / name).read_bytes()
        assert name in capsys.readouterr().out or name != nano.FILES[0]
    with (
        Engine.nano(dtype="float64") as mine,
        Engine.from_pretrained(str(source), dtype="float64") as theirs,
    ):
        assert mine.fingerprint == theirs.fingerprint
        assert torch.equal(mine.logits([0, 5, 6, 7]), theirs.logits([0, 5, 6, 7]))


def test_ship_refuses_what_is_not_to_ship(trained, package, tmp_path, monkeypatch, capsys):
    def refused(source, why):
        assert stages.main(["ship", "--checkpoint", str(source), "--to", str(package)]) == 2
        said = capsys.readouterr().err
        assert why in said and len(said.splitlines()) == 1
        assert [path.name for path in package.iterdir()] == ["README.md"]

    refused(tmp_path / "nowhere", "not a folder")
    refused(trained / "unquantised", "is unquantised")
    stored = shutil.copytree(trained / "stored", tmp_path / "stored")
    (stored / "generation_config.json").write_text(json.dumps({}))
    refused(stored, "differs in generation_config.json")
    (stored / "generation_config.json").unlink()
    (stored / "tokenizer_config.json").unlink()
    refused(stored, "differs in tokenizer_config.json")
    monkeypatch.setattr(ship, "MOST_BYTES", 1000)
    refused(trained / "stored", "more than 1,000")
