"""Run the tutorials anew and store their outputs: `python tutorials/refresh.py [NOTEBOOK ...]`.

Outputs are made under the settings of conftest.py, so that nbval compares like with like. What
changes from run to run (timings, widget state, the interpreter's version) is not stored. A cell
that raises without the tag `raises-exception` stops the script and leaves its notebook as it was.
"""

import argparse
import os
import sys
from pathlib import Path

os.environ["IPYKERNEL_CELL_NAME"] = "<cell>"
os.environ["DI_DISPLAY"] = "test"
os.environ["OMP_NUM_THREADS"] = "1"

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).resolve().parent
TIMEOUT_S = 600  # of a cell; nbval allows 120 (pyproject.toml), but this may run on a busy machine


def cleaned(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """`notebook` without what differs between two runs; changed in place and returned."""
    notebook.metadata = nbformat.from_dict(
        {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
    )
    for cell in notebook.cells:
        kept = {k: v for k, v in cell.metadata.items() if k in ("tags", "jupyter", "collapsed")}
        cell.metadata = nbformat.from_dict(kept)
        for output in cell.get("outputs", ()):
            if output.output_type == "error":  # frames hold paths; nbval compares name and text
                output.traceback = [f"{output.ename}: {output.evalue}"]
        if cell.cell_type == "code" and "skip-execution" in kept.get("tags", ()):
            cell.outputs, cell.execution_count = [], None
    return notebook


def refresh(path: Path) -> bool:
    """Run one notebook and write it back. True when the file changed."""
    before = path.read_text("utf-8")
    notebook = nbformat.reads(before, as_version=4)
    NotebookClient(
        notebook,
        timeout=TIMEOUT_S,
        kernel_name="python3",
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(path.parent)}},
    ).execute()
    after = nbformat.writes(cleaned(notebook)).rstrip("\n") + "\n"
    if after != before:
        path.write_text(after, "utf-8", newline="\n")
    return after != before


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("notebooks", nargs="*", type=Path, help="default: all in this folder")
    for path in parser.parse_args(argv).notebooks or sorted(HERE.glob("*.ipynb")):
        print(f"{path.name}: {'changed' if refresh(path) else 'as before'}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
