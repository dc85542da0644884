"""The command: each part does what its help says, and refuses in one line."""

import importlib.metadata
import json
import subprocess
import sys

import pytest

import deepinfer as di
from deepinfer import cli, doctor, lab

COMMANDS = ("demo", "generate", "inspect", "make-tiny", "doctor", "lab")


@pytest.fixture(autouse=True)
def keep_threads():
    import torch

    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    status = cli.main(arguments)
    return (status, *capsys.readouterr())


# -- every command --------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example_that_is_understood(command, capsys):
    import shlex

    with pytest.raises(SystemExit) as stop:
        cli.main([command, "--help"])
    assert stop.value.code == 0
    example = " ".join(capsys.readouterr().out.split("example: deepinfer ", 1)[1].split())
    assert cli._parse(shlex.split(example)).command == command


def test_wrong_usage_is_answered(capsys):
    for wrong in ([], ["demos"], ["inspect"], ["generate", "--top-k", "many", "x"]):
        with pytest.raises(SystemExit) as stop:
            cli.main(wrong)
        assert stop.value.code == 2 and "usage: deepinfer" in capsys.readouterr().err


def test_version(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"deepinfer {di.__version__}\n"


def test_errors_are_one_line_and_say_why(capsys, tmp_path):
    status, out, err = run(capsys, "inspect", str(tmp_path / "nowhere"))
    assert status == 1 and out == "" and len(err.splitlines()) == 1 and "nowhere" in err
    with pytest.raises((ValueError, OSError)):
        cli.main(["--traceback", "inspect", str(tmp_path / "nowhere")])


def test_help_does_not_load_torch():
    code = "import sys; from deepinfer import cli\ntry: cli.main(['--help'])\n"
    code += "except SystemExit: print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.rstrip().endswith("False")


# -- running a model ------------------------------------------------------------------------------


def test_demo_shows_text_steps_and_timing(capsys):
    status, out, err = run(capsys, "demo", "--max-tokens", "6", "--seed", "4")
    assert status == 0 and "threads: 1" in err
    for shown in (
        "MB in FP8 and FP4",
        "  | def getline(",
        "at temperature 0:\n  > ",
        "with seed 4:\n  > ",
        "tokens per step",
        "Without drafts: 6 steps",
        "1 thread",
    ):
        assert shown in out
    assert max(map(len, out.splitlines())) <= 100


def test_demo_s_steps_spell_the_text(capsys):
    import ast

    from deepinfer import demo

    found = demo.run(max_tokens=12)
    assert [len(c.token_ids) for c in found.drafted] == [12, 12]
    text = demo.said(found, threads=1)
    lines = text.split("text\n", 1)[1].split("\n\n", 1)[0].splitlines()[1:]
    rows = [line.split(maxsplit=2) for line in lines]
    assert [int(row[0]) for row in rows] == list(range(len(rows)))
    assert sum(int(row[1]) for row in rows) == 12
    assert "".join(ast.literal_eval(row[2]) for row in rows) == found.drafted[0].text


def test_demo_as_json(capsys):
    status, out, _ = run(capsys, "demo", "--max-tokens", "1", "--json")
    whole = json.loads(out)
    assert status == 0 and whole["tokens"] == 2 and 20e6 < whole["bytes"] <= 24e6
    assert whole["steps"] == whole["drafted_steps"] == [1, 1] and whole["same"]
    assert set(whole["seconds"]) == {"load", "plain", "drafted"}
    assert whole["tokens_per_step"] == [None, None]
    assert "tokens per step" not in run(capsys, "demo", "--max-tokens", "1")[1]


def test_demo_without_the_weights_says_what_to_do(capsys, monkeypatch):
    from deepinfer.checkpoint import nano

    monkeypatch.setattr(nano, "FILES", (*nano.FILES, "more.safetensors"))
    status, out, err = run(capsys, "demo")
    last = err.splitlines()[-1]
    assert status == 1 and out == "" and last.startswith("deepinfer demo: the nano model is not")
    assert "lacks more.safetensors; install the package again" in last


def test_generate_repeats_with_a_seed_and_drafts_change_nothing(capsys):
    texts = []
    for more in ([], [], ["--draft", "3"]):
        arguments = ["generate", "--model", "tiny", "--dtype", "float64", "--max-tokens", "6"]
        arguments += ["--seed", "7", "--json"]
        status, out, err = run(capsys, *arguments, *more, "one", "two")
        assert status == 0 and "random weights" in err
        texts.append([c["token_ids"] for c in json.loads(out)["completions"]])
    assert texts[0] == texts[1] == texts[2] and [len(ids) for ids in texts[0]] == [6, 6]


def test_generate_refuses_bad_values(capsys):
    for arguments, said in (
        (["--top-p", "0"], "--top-p 0.0: a number in (0, 1] (1 = off) is needed"),
        (["--max-tokens", "0"], "--max-tokens 0: an integer >= 1 is needed"),
        (["--draft", "-1"], "--draft -1: this model drafts 0 to 5 tokens a step"),
        (["--draft", "99"], "--draft 99: this model drafts 0 to 5 tokens a step"),
        (["--device", "foo"], "--device foo"),
        (["--model", "owner/name"], "--model owner/name: no such folder"),
        (["--model", "nowhere"], "--model nowhere: no such folder"),
    ):
        status, out, err = run(capsys, "generate", *arguments, "x")
        assert status == 1 and out == "" and said in err
        assert not any(word in err for word in ("download=", "Fixed(", "SamplingParams", "='"))
        assert len([line for line in err.splitlines() if line.startswith("deepinfer")]) == 1


def test_generate_s_help_says_every_default(capsys):
    with pytest.raises(SystemExit):
        cli.main(["generate", "--help"])
    options = capsys.readouterr().out.split("options:", 1)[1].split("\n  --")[1:]
    silent = [text.split()[0] for text in options if "default" not in text]
    assert len(options) == 11 and silent == ["json"]


@pytest.mark.parametrize("seed", ["-1", str(2**64), "9" * 5000, "1.5"])
def test_seeds_are_checked(capsys, seed, tmp_path):
    for command in (["generate", "x"], ["demo"], ["make-tiny", str(tmp_path / "a")]):
        with pytest.raises(SystemExit):
            cli.main([*command, f"--seed={seed}"])
        assert "an integer in 0..2**64-1 is needed" in capsys.readouterr().err


def test_generate_and_inspect_know_nano(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = ["generate", "--max-tokens", "4", "--temperature", "0", "import"]
    status, out, err = run(capsys, *arguments)
    assert status == 0 and out.startswith("import") and "model: nano, the trained model" in err
    assert "./nano" not in err
    (tmp_path / "nano").mkdir()
    assert "the folder ./nano is --model ./nano" in run(capsys, *arguments)[2]
    status, out, _ = run(capsys, "inspect", "nano")
    assert status == 0 and "12 layers (6 encoder, 6 decoder) and 3 draft" in out
    assert "fit the config" in out.splitlines()[0]


@pytest.mark.parametrize(
    "word, hint",
    [
        ("nanoo", "did you mean nano?"),
        ("Nano", "did you mean nano?"),
        ("v41-flsh", "did you mean v41-flash?"),
        ("elsewhere", "a config.json, nano or v41-flash"),
        ("tiny", "make-tiny ./tiny` writes them, and nano is the trained model"),
    ],
)
def test_inspect_says_what_was_meant(capsys, tmp_path, monkeypatch, word, hint):
    monkeypatch.chdir(tmp_path)
    status, out, err = run(capsys, "inspect", word)
    assert status == 1 and out == "" and hint in err and len(err.splitlines()) == 1
    assert err.startswith(f"deepinfer inspect: {word}: no such file or folder; ")
    run(capsys, "make-tiny", f"./{word}")
    assert run(capsys, "inspect", word)[0] == 0  # a folder of that name is what is asked for


def test_the_word_tiny_and_a_folder_of_that_name(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = ("generate", "--model", "tiny", "--max-tokens", "1", "x")
    assert "./tiny" not in run(capsys, *arguments)[2]
    assert "generate --model ./tiny 'a prompt'" in run(capsys, "make-tiny", "tiny")[1]
    err = run(capsys, *arguments)[2]
    assert "random weights" in err and "the folder ./tiny is --model ./tiny" in err
    status, _, err = run(capsys, "generate", "--model", "./tiny", "--max-tokens", "1", "x")
    assert status == 0 and "random weights" not in err


@pytest.mark.parametrize("count", ["0", "-1", "1025", "9" * 5000, "many", "1.5", ""])
def test_threads_are_a_small_number(capsys, count):
    for command in (["demo"], ["generate", "x"]):
        with pytest.raises(SystemExit) as stop:
            cli.main([*command, f"--threads={count}"])
        assert stop.value.code == 2 and "an integer in 1..1024" in capsys.readouterr().err
    assert cli._parser().parse_args(["demo", "--threads", "1024"]).threads == 1024


@pytest.mark.parametrize("error", [MemoryError(), MemoryError("of 1 TB")])
def test_no_memory_is_one_line(capsys, monkeypatch, error):
    def fail(args):
        raise error

    monkeypatch.setattr(cli, "_engine", fail)
    status, out, err = run(capsys, "generate", "x")
    last = err.splitlines()[-1]
    assert status == 1 and out == "" and "Traceback" not in err
    assert last == f"deepinfer generate: out of memory {error}".rstrip()


def test_make_tiny_then_generate_and_inspect(capsys, tmp_path):
    path = tmp_path / "tiny"
    status, out, _ = run(capsys, "make-tiny", str(path), "--seed", "3", "--json")
    files = json.loads(out)["files"]
    assert status == 0 and {"config.json", "tokenizer.json"} <= set(files)
    assert {p.name: p.stat().st_size for p in path.iterdir()} == files
    status, out, _ = run(
        capsys, "generate", "--model", str(path), "--max-tokens", "2", "--json", "x"
    )
    assert status == 0 and len(json.loads(out)["completions"][0]["token_ids"]) == 2
    status, _, err = run(capsys, "make-tiny", str(path))
    assert status == 1 and "is there already" in err
    for place in (path, path / "config.json"):
        assert run(capsys, "inspect", str(place))[0] == 0


def test_inspect_knows_the_release_without_a_checkpoint(capsys):
    """Counts and bytes published for the released checkpoint."""
    status, out, _ = run(capsys, "inspect", "v41-flash")
    assert status == 0
    counts = ("96,085", "510,286,023,000", "763,205,315,794", "1,415,040")
    for number in (*counts, "510 GB", "1.42 MB"):
        assert number in out
    assert max(map(len, out.split("weights:")[1].split("\n\n")[0].splitlines())) <= 110
    rows = json.loads(run(capsys, "inspect", "v41-flash", "--json")[1])["weights"]
    assert rows[-1]["disk"] == 510286023000 and "size" not in rows[-1]


# -- doctor ---------------------------------------------------------------------------------------


def test_doctor_has_a_reason_for_every_no(capsys):
    status, out, _ = run(capsys, "doctor", "--json")
    report = json.loads(out)
    assert (status == 0) == report["ok"] == (report["problems"] == [])
    groups = {row["group"] for row in report["rows"]}
    assert groups == {"packages", "optional packages", "devices", "kernels"}
    assert all(row["detail"] for row in report["rows"])
    ops = {row["name"].split("/")[0] for row in report["rows"] if row["group"] == "kernels"}
    assert ops == set(di.kernels.names())
    text = run(capsys, "doctor")[1]
    assert all(row["name"] in text for row in report["rows"])


def test_doctor_says_what_packages_are_for():
    """It names no view that is not there, and advises no package that nothing uses."""
    rows = {row["name"]: row["detail"] for row in doctor.examine().rows}
    assert "anywidget" not in rows and "progress bars in a notebook" in rows["ipywidgets"]
    for name in ("xgrammar", "llguidance"):
        assert "does not use it yet" in rows[name] and "pip install" not in rows[name]


def test_doctor_notices_the_other_distribution(monkeypatch, capsys):
    real = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: "0.1.0" if name == "deepinfer" else real(name)
    )
    status, out, _ = run(capsys, "doctor")
    assert status == 1 and "problem: the distribution 'deepinfer' 0.1.0 is another project" in out


def test_doctor_notices_what_is_old_or_missing(monkeypatch):
    def version(name):
        if name in ("einops", "pandas"):
            raise importlib.metadata.PackageNotFoundError(name)
        return "2.9.1+cu128" if name == "torch" else "1.0"

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(sys, "version_info", (3, 10, 1))
    report = doctor.examine()
    said = " ".join(report.problems)
    assert "einops is missing" in said and "torch 2.9.1+cu128 is too old" in said
    assert "older than 3.11" in said and "pandas" not in said
    states = {row["name"]: row["state"] for row in report.rows}
    assert states["pandas"] == "no" and states["matplotlib"] == "ok"


def test_doctor_notices_missing_weights(monkeypatch, capsys):
    from deepinfer.checkpoint import nano

    monkeypatch.setattr(nano, "FILES", (*nano.FILES, "more.safetensors"))
    status, out, _ = run(capsys, "doctor")
    assert status == 1 and "problem: the nano model is not complete" in out
    assert "more.safetensors" in out


def test_doctor_survives_a_torch_that_cannot_load(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)  # import torch raises ImportError
    report = doctor.Report()
    doctor._devices(report)
    assert "torch cannot be imported" in report.problems[0]


# -- lab ------------------------------------------------------------------------------------------


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    for name in ("00.ipynb", "01.ipynb"):
        (folder / name).write_text("{}")
    return folder


def test_lab_never_overwrites_a_changed_notebook(tmp_path, source):
    target = tmp_path / "mine"
    assert lab.copy(target, source) == ["00.ipynb: copied", "01.ipynb: copied"]
    (target / "00.ipynb").write_text("my work")
    kept = "00.ipynb: yours is changed, and is kept"
    assert lab.copy(target, source) == [kept, "01.ipynb: up to date"]

    for name in ("00.ipynb", "01.ipynb"):  # the package brings another version
        (source / name).write_text('{"v": 2}')
    beside = f"00-{di.__version__}.ipynb"
    said = [f"{kept}; the package's version is in {beside}", "01.ipynb: brought up to date"]
    assert lab.copy(target, source) == said
    assert (target / "00.ipynb").read_text() == "my work"
    assert (target / beside).read_text() == (target / "01.ipynb").read_text() == '{"v": 2}'
    assert lab.copy(target, source) == [kept, "01.ipynb: up to date"]


def test_lab_keeps_files_it_never_saw(tmp_path, source):
    target = tmp_path / "mine"
    target.mkdir()
    (target / "00.ipynb").write_text("not from us")
    (target / f"00-{di.__version__}.ipynb").write_text("mine as well")
    said = lab.copy(target, source)
    assert said[0].endswith(f"is in 00-{di.__version__}-2.ipynb")
    assert (target / "00.ipynb").read_text() == "not from us"
    assert (target / f"00-{di.__version__}.ipynb").read_text() == "mine as well"


def test_lab_without_jupyterlab_is_refused_before_any_file(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(lab.importlib.util, "find_spec", lambda name: None)
    status, _, err = run(capsys, "lab", str(tmp_path / "mine"))
    assert status == 1 and "pip install 'deepinfer-lab[lab]'" in err
    assert not (tmp_path / "mine").exists()


def test_lab_on_a_file_says_so(tmp_path, monkeypatch, source, capsys):
    monkeypatch.setattr(lab, "packaged", lambda: source)
    file = tmp_path / "notes.txt"
    file.write_text("mine")
    status, _, err = run(capsys, "lab", "--copy", str(file))
    assert status == 1 and f"{file} is a file: name a new folder" in err
    assert len(err.splitlines()) == 1 and file.read_text() == "mine"


class Server:
    """Stands in for JupyterLab: notes its commands, ends with a status."""

    def __init__(self, monkeypatch, status=0):
        self.commands, self.returncode = [], status
        monkeypatch.setattr(lab.subprocess, "run", self.run)
        monkeypatch.setattr(lab, "_root", lambda: False)

    def run(self, command, **_):
        self.commands.append(command)
        return self


def test_lab_opens_copies_never_a_checkout_s_own(tmp_path, monkeypatch, source, capsys):
    server = Server(monkeypatch)
    monkeypatch.setattr(lab, "packaged", lambda: source)
    run(capsys, "lab", str(tmp_path / "mine"))
    assert server.commands[-1] == [sys.executable, "-m", "jupyterlab", str(tmp_path / "mine")]
    monkeypatch.chdir(tmp_path)
    run(capsys, "lab")
    assert server.commands[-1][-1] == lab.FOLDER and (tmp_path / lab.FOLDER / "00.ipynb").exists()
    assert all(str(lab.checkout()) != command[-1] for command in server.commands)


def test_lab_follows_no_link(tmp_path, source):
    """A link in the folder may point anywhere: what it points to is neither made nor changed."""
    target, outside = tmp_path / "mine", tmp_path / "outside"
    target.mkdir(), outside.mkdir()
    (outside / "theirs").write_text("theirs")
    (target / "00.ipynb").symlink_to(outside / "nothing")
    (target / "01.ipynb").symlink_to(outside / "theirs")
    (target / f"01-{di.__version__}.ipynb").symlink_to(outside / "nothing")
    (target / lab.MANIFEST).symlink_to(outside / "record")
    said = lab.copy(target, source)
    beside = (f"00-{di.__version__}.ipynb", f"01-{di.__version__}-2.ipynb")
    for line, name in zip(said, beside, strict=True):
        assert line.endswith(f"is in {name}") and (target / name).read_text() == "{}"
    assert [file.name for file in outside.iterdir()] == ["theirs"]
    assert (outside / "theirs").read_text() == "theirs"
    lab.copy(target, source)  # and again with the record of the first time
    (source / "01.ipynb").write_text('{"v": 2}')
    (outside / "theirs").write_text("{}")
    lab.copy(target, source)
    assert (outside / "theirs").read_text() == "{}"
    (tmp_path / "dangling").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(NotADirectoryError, match="is a link to nothing: name a new folder"):
        lab.copy(tmp_path / "dangling", source)
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("text", ["[]", "null", "{", '{"00.ipynb": 5}', "[" * 100_000, "\x80"])
def test_lab_says_what_to_do_about_a_damaged_record(tmp_path, source, text):
    target = tmp_path / "mine"
    lab.copy(target, source)
    (target / "00.ipynb").write_text("my work")
    (target / lab.MANIFEST).write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match="is damaged; delete it and run again"):
        lab.copy(target, source)
    (target / lab.MANIFEST).unlink()
    said = lab.copy(target, source)
    assert "kept" in said[0] and (target / "00.ipynb").read_text() == "my work"


@pytest.mark.parametrize("ended, status", [(0, 0), (1, 1), (-15, 143)])
def test_lab_ends_as_jupyterlab_does(tmp_path, monkeypatch, source, capsys, ended, status):
    Server(monkeypatch, ended)
    monkeypatch.setattr(lab, "packaged", lambda: source)
    monkeypatch.chdir(tmp_path)
    assert run(capsys, "lab")[0] == status


def test_lab_speaks_before_the_server_starts(tmp_path, monkeypatch, source, capsys):
    server, said = Server(monkeypatch), []
    monkeypatch.setattr(lab, "packaged", lambda: source)

    def start(command, **_):
        said.append(capsys.readouterr())
        return server

    monkeypatch.setattr(lab.subprocess, "run", start)
    cli.main(["lab", str(tmp_path / "mine")])
    assert "00.ipynb: copied" in said[0].err and capsys.readouterr().err == ""


@pytest.mark.parametrize("before", [[], ["mine"]])
def test_lab_passes_what_follows_the_dashes(tmp_path, monkeypatch, source, capsys, before):
    server = Server(monkeypatch)
    monkeypatch.setattr(lab, "packaged", lambda: source)
    monkeypatch.chdir(tmp_path)
    run(capsys, "lab", *before, "--", "--no-browser", "--port", "8899", "--", "x")
    target = before or [lab.FOLDER]
    assert server.commands[-1][3:] == [*target, "--no-browser", "--port", "8899", "--", "x"]
    assert cli._parse(["generate", "--", "--lab", "--"]).prompts[0] == "--lab"


@pytest.mark.parametrize(
    "root, options, warned",
    [
        (True, [], True),
        (True, ["--", "--allow-root"], False),
        (True, ["--", "--ServerApp.allow_root=True"], False),
        (False, [], False),
    ],
)
def test_lab_says_what_root_needs(tmp_path, monkeypatch, source, capsys, root, options, warned):
    Server(monkeypatch)
    monkeypatch.setattr(lab, "packaged", lambda: source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(lab, "_root", lambda: root)
    err = run(capsys, "lab", *options)[2]
    assert ("deepinfer lab -- --allow-root" in err) == warned
    assert len(err.splitlines()) == 2 + warned  # a line for each notebook


def test_lab_says_when_there_is_nothing_to_copy(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="no tutorials"):
        lab.copy(tmp_path / "mine", tmp_path / "empty")


def test_doctor_notices_damaged_weights(monkeypatch, capsys):
    from deepinfer.checkpoint import nano

    real = nano.sums
    monkeypatch.setattr(nano, "sums", lambda path: real(path) | {"tokenizer.json": "0" * 64})
    status, out, _ = run(capsys, "doctor")
    assert status == 1 and "problem: the nano model is damaged" in out and "tokenizer.json" in out
