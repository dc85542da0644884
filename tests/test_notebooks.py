"""The tutorials: what nbval cannot see. nbval itself runs them (tutorials/conftest.py)."""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

ROOT = Path(__file__).resolve().parents[1]
TUTORIALS = ROOT / "tutorials"
NOTEBOOKS = sorted(TUTORIALS.glob("*.ipynb")) + sorted((ROOT / "experiments").rglob("*.ipynb"))
LIMIT_BYTES = 400_000

# What nbval skips, misreads or cannot compare; each was seen to pass or fail for the wrong reason.
BANNED = {
    r"\bclear_output\b": "nbval ignores clear_output",
    r"\binteract(ive|ive_output)?\(": "text leaks out of interact under nbval; use a value",
    r"\bOutput\(": "text leaks out of an Output widget under nbval",
    r"\bdisplay_id\b": "nbval ignores updates of a display",
    r"^\s*%%": "cell magics are not allowed",
    r"^\s*%(?!matplotlib\b|config\b)": "an unknown magic ends the cell and still passes",
    r"^\s*!": "shell commands differ between machines",
    r"(?<!\w)input\(": "a notebook under test cannot answer",
    r"\btime\.time\b|\bperf_counter\b": "times differ from run to run",
    r"\bOut\[": "nbval numbers the history differently",
}
PATH = re.compile(r"(?<![\w./<])(/(home|root|Users|tmp|work|opt|usr|var|mnt)/\S*|[A-Z]:\\\w+)")
ADDRESS = re.compile(r"\b0x[0-9a-f]{6,}\b")


def problems(text: str) -> list[str]:
    """What is wrong with a notebook's file, one sentence each."""
    notebook = nbformat.reads(text, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    found = _file_problems(text, notebook)
    ignored = 0
    for n, cell in enumerate(code):
        found += [f"code cell {n + 1}: {what}" for what in _cell_problems(cell)]
        ignored += "nbval-ignore-output" in _marks(cell)
    if ignored > 0.1 * len(code):
        found.append(f"{ignored} of {len(code)} code cells ignore their output; 10% may")
    runs = [cell.execution_count for cell in code if "nbval-skip" not in _marks(cell)]
    if runs != list(range(1, len(runs) + 1)):
        found.append(f"execution counts {runs}: run it anew with tutorials/refresh.py")
    if not code or "di.notebook(seed=0)" not in code[0].source:
        found.append("the first code cell calls di.notebook(seed=0)")
    if not any(re.search(r"\bdi\.verdict\(|^\s*assert ", cell.source, re.M) for cell in code):
        found.append("no cell asserts the claim: di.verdict(...)")
    return found


def _file_problems(text: str, notebook: nbformat.NotebookNode) -> list[str]:
    found = []
    try:
        nbformat.validate(notebook)
    except nbformat.ValidationError as error:
        found.append(f"not a valid notebook: {error.message}")
    if len(text.encode()) >= LIMIT_BYTES:
        found.append(f"{len(text.encode())} bytes; less than {LIMIT_BYTES} are allowed")
    if "widgets" in notebook.metadata:
        found.append("widget state is stored; use tutorials/refresh.py")
    if notebook.metadata.get("kernelspec", {}).get("name") != "python3":
        found.append("the kernel is not python3")
    if not notebook.cells or notebook.cells[0].cell_type != "markdown":
        found.append("the first cell is not text")
    return found


def _marks(cell: nbformat.NotebookNode) -> set[str]:
    """nbval's marks on a cell: tags, and comment lines, which count the same."""
    comments = re.findall(r"^\s*#\s*((?:nbval-)?(?:[a-z]+-)+[a-z]+)", cell.source, re.M | re.I)
    return {*cell.metadata.get("tags", ()), *(c.lower().replace("_", "-") for c in comments)}


def _cell_problems(cell: nbformat.NotebookNode) -> list[str]:
    marks = _marks(cell)
    found = [why for what, why in BANNED.items() if re.search(what, cell.source, re.M)]
    if not cell.source.strip():
        found.append("empty")
    if "execution" in cell.metadata:
        found.append("timings are stored; use tutorials/refresh.py")
    if ("nbval-skip" in marks) != ("skip-execution" in marks):
        found.append("a skipped cell has both tags, nbval-skip and skip-execution")
    if "nbval-ignore-output" in marks and not re.search(r"#\s*(?!nbval)\w+", cell.source):
        found.append("an ignored output needs a comment with the reason")
    raised = [o for o in cell.outputs if o.output_type == "error"]
    if raised and not marks & {"raises-exception", "nbval-raises-exception"}:
        found.append(f"raised {raised[0].ename}: {raised[0].evalue}")
    shown = " ".join(text for output in cell.outputs for text in _texts(output))
    for what, pattern in (("an absolute path", PATH), ("an address", ADDRESS)):
        if match := pattern.search(shown):
            found.append(f"{what} in the output: {match[0][:60]}")
    return found


def _texts(output: nbformat.NotebookNode) -> list[str]:
    """The texts of an output but for its images, whose base64 may look like anything."""
    data = {k: v for k, v in output.get("data", {}).items() if not k.startswith("image/")}
    plain = [v if isinstance(v, str) else json.dumps(v) for v in data.values()]
    frames = "\n".join(output.get("traceback", ()))
    return [*plain, output.get("text", ""), output.get("evalue", ""), frames]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebook_is_in_order(path):
    assert problems(path.read_text("utf-8")) == []


# ----------------------------------------------------------------------- what a tutorial has

HEAD = ("**Claim.**", "**You will be able to**", "**Time**: ", "**Needs**: ")
INTERNALS = re.compile(r"deepinfer\.engine\.(step|scheduling\.output|runtime)\b|\blaunch\.work\b")
OPENING_LINES = 25  # of code before a reader sees a result: a page opens with its claim


def tutorial_problems(text: str) -> list[str]:
    """What a tutorial lacks for a person who learns from it, one sentence each."""
    cells = nbformat.reads(text, as_version=4).cells
    found = [f"its head has no {part}" for part in HEAD if part not in cells[0].source]
    code = [cell for cell in cells if cell.cell_type == "code"]
    for n, cell in enumerate(code):
        if match := INTERNALS.search(cell.source):
            found.append(f"code cell {n + 1} needs {match[0]}, which is not public")
    before = 0
    for cell in code:
        before += len(cell.source.splitlines())
        if cell.outputs:
            break
    if before > OPENING_LINES:
        found.append(f"{before} lines of code before the first output; {OPENING_LINES} may be")
    return found + _exercise_problems(cells)


def _exercise_problems(cells: list[nbformat.NotebookNode]) -> list[str]:
    """The exercise: a stub that runs and says 'not yet', then folded cells that solve it."""
    starts = [i for i, cell in enumerate(cells) if cell.source.startswith("## Exercise")]
    if len(starts) != 1:
        return [f"{len(starts)} exercises; one is wanted"]
    code = [cell for cell in cells[starts[0] :] if cell.cell_type == "code"]
    if len(code) < 2:
        return ["the exercise wants a stub and a solution"]
    found = []
    if "nbval-skip" in _marks(code[0]) or "not yet" not in " ".join(
        text for output in code[0].outputs for text in _texts(output)
    ):
        found.append("the stub of the exercise is run and prints 'not yet'")
    for cell in code[1:]:
        jupyter = cell.metadata.get("jupyter", {})
        if not (jupyter.get("source_hidden") and jupyter.get("outputs_hidden")):
            found.append("behind the stub every code cell is folded, source and outputs")
    return found


@pytest.mark.parametrize("path", sorted(TUTORIALS.glob("*.ipynb")), ids=lambda path: path.name)
def test_tutorial_has_goals_an_exercise_and_a_folded_solution(path):
    assert tutorial_problems(path.read_text("utf-8")) == []


def notebook(*cells, first="import deepinfer as di\ndi.notebook(seed=0)", outputs=()) -> str:
    """A notebook in order, with code cells of the given sources added."""
    code = [new_code_cell(first), new_code_cell("di.verdict(True, 'holds')"), *cells]
    for count, cell in enumerate(code, 1):
        cell.execution_count = count
    spec = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
    return nbformat.writes(new_notebook(cells=[new_markdown_cell("# t"), *code], metadata=spec))


def cell(source, *outputs, tags=()) -> nbformat.NotebookNode:
    return new_code_cell(source, outputs=list(outputs), metadata={"tags": list(tags)})


def printed(text) -> nbformat.NotebookNode:
    return new_output("stream", name="stdout", text=text)


def test_guard_lets_good_notebooks_pass():
    error = new_output("error", ename="ValueError", evalue="bad", traceback=[])
    good = notebook(
        cell("%matplotlib inline\n_ = 1 % 2\nx = 'a/b'", printed("1/2 0x1f 3 m/s")),
        cell("raise ValueError('bad')", error, tags=["raises-exception"]),
    )
    assert problems(good) == []


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (cell(source), why)
        for source, why in [
            ("%nope", "unknown magic"),
            ("%%time\n1", "cell magics"),
            ("!ls", "shell"),
            ("clear_output()", "clear_output"),
            ("interact(f, x=1)", "interact"),
            ("o = widgets.Output()", "Output"),
            ("display(x, display_id=True)", "updates"),
            ("input('?')", "answer"),
            ("print(time.time())", "times"),
            ("Out[1]", "history"),
            (" ", "empty"),
        ]
    ]
    + [
        (cell("1/0", new_output("error", ename="E", evalue="v", traceback=[])), "raised E"),
        (cell("x", printed("<object at 0x7f3a2b1c>")), "an address"),
        (cell("x", printed("saved to\n/home/me/x.json")), "an absolute path"),
        (cell("x", printed("C:\\Users\\me")), "an absolute path"),
        (cell("x", tags=["nbval-skip"]), "both tags"),
        (cell("x", tags=["nbval-ignore-output"]), "the reason"),
        (cell("# nbval-ignore-output: differs\nx"), "10% may"),
        (cell("x = '" + "v" * LIMIT_BYTES + "'"), "bytes"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_guard_finds(bad, why):
    assert any(why in found for found in problems(notebook(bad)))


def test_guard_finds_what_concerns_the_whole_file():
    assert any("first code cell" in p for p in problems(notebook(first="import deepinfer")))
    text = json.loads(notebook())
    text["cells"][2]["execution_count"] = 5
    text["metadata"]["widgets"] = {}
    text["cells"][1]["metadata"] = {"execution": {}}
    del text["cells"][0]
    found = " ".join(problems(json.dumps(text)))
    for why in ("execution counts [1, 5]", "widget state", "timings", "first cell is not text"):
        assert why in found
    assert any("asserts" in p for p in problems(notebook().replace("di.verdict", "print")))


def test_nbval_is_the_version_that_conftest_patches():
    assert importlib.metadata.version("nbval") == "0.11.0", "read tutorials/conftest.py again"


def test_sanitize_rules_are_all_read_and_cut_no_number():
    from nbval.plugin import get_sanitize_patterns

    text = (TUTORIALS / "sanitize.cfg").read_text("utf-8")
    rules = get_sanitize_patterns(text)
    assert len(dict(rules)) == text.count("regex:") == 3  # a rule with nothing to put is dropped

    def sanitized(shown):
        for pattern, replacement in dict(rules).items():
            shown = re.sub(pattern, replacement, shown)
        return shown

    assert sanitized("<f at 0x7f12ab34cd>") == "<f at 0xADDR>"
    assert sanitized("/tmp/ipykernel_12/345.py:1: W") == "<cell>:1: W"
    assert sanitized("torch 2.13.0+cpu") == "torch VERSION"
    assert sanitized("0.12345 1.2.3 0x1f") == "0.12345 1.2.3 0x1f"


def run_nbval(folder: Path, *arguments: str) -> dict[str, str]:
    """Outcome by cell of the notebooks in `folder`, run with the tutorials' settings."""
    for name in ("conftest.py", "sanitize.cfg"):
        shutil.copy(TUTORIALS / name, folder / name)
    (folder / "pytest.ini").write_text("[pytest]\n")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "--nbval",
            "--nbval-current-env",
            "-rA",
            "-q",
            "--nbval-sanitize-with=sanitize.cfg",
            "-p",
            "no:cacheprovider",
            *arguments,
        ],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "200"},
    )
    lines = re.findall(r"^(\w+) (\S+::Cell \d+|\S+)", done.stdout, re.M)
    return {name: outcome for outcome, name in lines if "::" in name}


@pytest.mark.slow
def test_a_broken_cell_fails_under_these_settings(tmp_path):
    """Wrong text, a failed assert, all after a dead kernel or a timeout; `;` hides a value."""
    write = lambda name, *cells: (tmp_path / name).write_text(  # noqa: E731
        notebook(*cells, first="1;").replace("di.verdict(True, 'holds')", "2;")
    )
    write(
        "good.ipynb",
        cell("print(1)", printed("1\n")),
        cell(
            "import warnings; warnings.warn('w')",
            new_output(
                "stream",
                name="stderr",
                text="<cell>:1: UserWarning: w\n  import warnings; warnings.warn('w')\n",
            ),
        ),
    )
    write("wrong.ipynb", cell("print(1)", printed("2\n")), cell("assert False"))
    write("dead.ipynb", cell("import os; os._exit(1)"), cell("3;"), cell("4;"))
    write("late.ipynb", cell("import time; time.sleep(60)"), cell("3;"), cell("4;"))
    found = run_nbval(tmp_path, "--nbval-cell-timeout=4")
    assert [found[f"good.ipynb::Cell {i}"] for i in range(4)] == ["PASSED"] * 4, found
    assert [found[f"wrong.ipynb::Cell {i}"] for i in range(4)] == ["PASSED"] * 2 + ["FAILED"] * 2
    for name in ("dead.ipynb", "late.ipynb"):
        assert [found[f"{name}::Cell {i}"] for i in range(5)] == ["PASSED"] * 2 + ["FAILED"] * 3


@pytest.mark.slow
def test_refresh_stores_what_nbval_accepts(tmp_path):
    """A notebook run by refresh.py passes, has no trace of the run, and stays as it is."""
    path = tmp_path / "fresh.ipynb"
    path.write_text(notebook(cell("for i in range(3):\n    print(i)")))
    command = [sys.executable, str(TUTORIALS / "refresh.py"), str(path)]
    for said in ("changed", "as before"):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0 and said in done.stdout, done.stderr
    assert problems(path.read_text()) == []
    assert set(run_nbval(tmp_path).values()) == {"PASSED"}
    path.write_text(notebook(cell("raise ValueError('stop')")))
    before = path.read_bytes()
    assert subprocess.run(command, capture_output=True).returncode != 0
    assert path.read_bytes() == before


def tutorial(head="".join(HEAD), stub="not yet", folded=True, code="x = 1") -> str:
    """A tutorial in order, with the parts that a test breaks."""
    hidden = {"jupyter": {"source_hidden": True, "outputs_hidden": True}} if folded else {}
    cells = [
        new_markdown_cell(head),
        new_code_cell(code, outputs=[printed("1")]),
        new_markdown_cell("## Exercise"),
        new_code_cell("x", outputs=[printed(stub)]),
        new_code_cell("x = 2", metadata=hidden),
    ]
    return nbformat.writes(new_notebook(cells=cells))


def test_tutorial_problems_are_found():
    assert tutorial_problems(tutorial()) == []
    for broken, why in [
        (tutorial(head="# Start"), "no **Time**"),
        (tutorial(stub="solved"), "prints 'not yet'"),
        (tutorial(folded=False), "folded"),
        (tutorial(code="from deepinfer.engine.step import launch"), "not public"),
        (tutorial(code="x = 1\n" * 26), "26 lines of code"),
        (tutorial().replace("## Exercise", "## The end"), "0 exercises"),
    ]:
        assert any(why in problem for problem in tutorial_problems(broken)), why
