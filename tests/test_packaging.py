"""What is shipped and what the README promises are the same thing."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import deepinfer as di
from deepinfer import cli

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text("utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
SETUP = "python3 -m venv .venv && .venv/bin/pip install -e '.[lab]' && .venv/bin/deepinfer demo"
TEST = ".venv/bin/pip install -e '.[test]' && .venv/bin/pytest"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.M | re.S)


def test_readme_begins_with_the_two_commands():
    assert blocks("sh")[0].splitlines() == [SETUP, TEST]
    assert README.index(SETUP) < 600  # the first screen


def test_ci_runs_the_readme_s_test_command():
    script = (ROOT / ".ci/run").read_text("utf-8")
    assert re.findall(r'^TEST_COMMAND="(.*)"$', script, re.M) == [TEST]
    assert script.rstrip().endswith('eval "$TEST_COMMAND"')
    assert os.access(ROOT / ".ci/run", os.X_OK) or os.name == "nt"


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_ci_script_is_valid_bash():
    assert subprocess.run(["bash", "-n", str(ROOT / ".ci/run")]).returncode == 0


def test_readme_commands_are_understood():
    lines = [line for block in blocks("sh") + blocks("bat") for line in block.splitlines()]
    calls = [
        part.split("deepinfer ", 1)[1]
        for line in lines
        for part in line.split(" && ")
        if re.match(r"(\.venv\S)?(\S*[/\\])?deepinfer ", part)
    ]
    assert len(calls) >= 8
    commands = {cli._parser().parse_args(shlex.split(c, comments=True)).command for c in calls}
    assert commands == {"demo", "generate", "inspect", "make-tiny", "doctor", "lab"}


def test_readme_cells_run(capsys):
    """The cells as one notebook; what they show last is an object with a text form."""
    namespace: dict = {}
    for block in blocks("python"):
        *body, last = re.split(r"\n(?=\S)", block.rstrip())
        exec("\n".join(body), namespace)
        assert repr(eval(last, namespace))
    assert capsys.readouterr().out == ""  # the library prints nothing


def test_readme_names_files_that_are_there():
    for name in re.findall(r"\b(engine/\w+\.py|\w+\.cff|CHANGELOG\.md|LICENSE)\b", README):
        assert (ROOT / name).exists() or (ROOT / "deepinfer" / name).exists(), name


def test_versions_and_metadata_agree():
    assert PROJECT["name"] == "deepinfer-lab" and PROJECT["version"] == di.__version__
    assert f"version: {di.__version__}\n" in (ROOT / "CITATION.cff").read_text("utf-8")
    assert f"## {di.__version__}" in (ROOT / "CHANGELOG.md").read_text("utf-8")
    assert PROJECT["scripts"] == {"deepinfer": "deepinfer.cli:main"}
    assert set(PROJECT["optional-dependencies"]) == {"lab", "grammar", "test", "gpu"}


MOST_BYTES = 24_000_000  # of a wheel: a user downloads it
IGNORED = shutil.ignore_patterns(
    ".git", ".venv", "build", "*.egg-info", "__pycache__", ".*cache", "work"
)


def build(tmp_path: Path) -> Path:
    """The wheel, built from a copy so that the checkout stays as it is."""
    shutil.copytree(ROOT, tmp_path / "tree", ignore=IGNORED)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path)]
    done = subprocess.run([*command, str(tmp_path / "tree")], capture_output=True, text=True)
    if done.returncode and "setuptools" in done.stderr and "No matching" in done.stderr:
        pytest.skip("building a wheel needs setuptools, which cannot be fetched here")
    assert done.returncode == 0, done.stderr
    return next(tmp_path.glob("*.whl"))


def in_wheel(site: Path, *arguments: str, cwd: Path) -> str:
    """Run Python with the unpacked wheel in front of everything."""
    env = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_every_data_file_of_the_trees_ships(monkeypatch):
    """What setup.py hands to a build, without building: whatever is no code is data."""
    pytest.importorskip("setuptools", minversion="77")
    from distutils.core import run_setup

    monkeypatch.chdir(ROOT)
    command = run_setup("setup.py", stop_after="init").get_command_obj("build_py")
    command.ensure_finalized()
    shipped = {
        Path(folder, name).resolve() for _, folder, _, names in command.data_files for name in names
    }
    for tree in (ROOT / "deepinfer", ROOT / "kernels"):
        there = {path for path in tree.rglob("*") if path.is_file()}
        data = {path for path in there if path.suffix not in (".py", ".pyc")}
        data.discard(ROOT / "deepinfer/kernels.pyi")  # a stub of the checkout's
        assert {p for p in shipped if tree in p.parents} == data
    assert {ROOT / "deepinfer/data/README.md", ROOT / "deepinfer/py.typed"} <= shipped
    assert ROOT / "deepinfer/checkpoint/nano/README.md" in shipped


@pytest.mark.slow
def test_wheel_holds_everything_and_works(tmp_path):
    wheel, site = build(tmp_path), tmp_path / "site"
    assert wheel.stat().st_size <= MOST_BYTES
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(site)
    tops = {name.split("/")[0] for name in names}
    assert tops == {"deepinfer", f"deepinfer_lab-{di.__version__}.dist-info"}, "kernels on top"
    copy = tmp_path / "tree"  # others may be at work in the checkout itself
    for tree, inside in (("deepinfer", "deepinfer"), ("kernels", "deepinfer/kernels")):
        for path in (copy / tree).rglob("*"):
            if path.is_file() and path.suffix != ".pyc":
                place = f"{inside}/{path.relative_to(copy / tree).as_posix()}"
                assert (place in names) == (place != "deepinfer/kernels.pyi"), place
    shipped = {name.rsplit("/", 1)[1] for name in names if name.startswith("deepinfer/tutorials/")}
    assert {p.name for p in (copy / "tutorials").glob("*.ipynb")} == shipped

    code = "import deepinfer.kernels as k, deepinfer as di; print(k.__file__, di.kernels.names())"
    assert str(site / "deepinfer" / "kernels") in in_wheel(site, "-c", code, cwd=tmp_path)
    code = "import deepinfer as di; eng = di.Engine.nano(); print(eng.generate('def ')[0].text)"
    assert in_wheel(site, "-c", code, cwd=tmp_path).strip()
    said = in_wheel(site, "-m", "deepinfer.cli", "doctor", "--json", cwd=tmp_path)
    facts = {row["name"]: row["detail"] for row in json.loads(said)["rows"]}
    assert "commit unknown (installed)" in facts["deepinfer"]
    if any(name.endswith(".ipynb") for name in shipped):
        in_wheel(site, "-m", "deepinfer.cli", "lab", "--copy", "mine", cwd=tmp_path)
        copied = {p.name for p in (tmp_path / "mine").glob("*.ipynb")}
        assert copied == shipped


@pytest.mark.slow
def test_source_distribution_holds_what_the_wheel_and_the_tests_need(tmp_path):
    """Every file of the trees: also the nano weights, their recipe, and the tests' data."""
    pytest.importorskip("setuptools", minversion="77")  # the build needs it
    shutil.copytree(ROOT, tmp_path / "tree", ignore=IGNORED)
    code = f"import setuptools.build_meta as b; b.build_sdist({str(tmp_path)!r})"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path / "tree", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    for tree in ("deepinfer", "kernels", "experiments", "tutorials", "tests"):
        for path in (tmp_path / "tree" / tree).rglob("*"):
            name = path.relative_to(tmp_path / "tree").as_posix()
            if path.is_file():
                assert name in held, name
