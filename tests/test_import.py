"""The namespace: cheap to import, the same for people, editors and type checkers."""

import ast
import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import deepinfer as di

PACKAGE = Path(di.__file__).parent
KERNELS = Path(importlib.import_module("deepinfer.kernels").__file__).parent
OPTIONAL = ("torch", "numpy", "einops", "safetensors", "tokenizers", "jaxtyping", "pandas")
OPTIONAL += ("matplotlib", "ipywidgets", "anywidget", "IPython", "tqdm", "xgrammar", "llguidance")


def run(code: str) -> str:
    """The output of `code` in a fresh interpreter, outside the checkout."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.anchor
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def stub_names() -> set[str]:
    names = {"__version__"}
    for node in ast.parse((PACKAGE / "__init__.pyi").read_text("utf-8")).body:
        if isinstance(node, ast.ImportFrom):
            assert all(alias.asname == alias.name for alias in node.names), "not a re-export"
            names |= {alias.name for alias in node.names}
    return names


def test_import_loads_nothing_else():
    loaded = json.loads(
        run(
            "import sys, json; before = set(sys.modules); import deepinfer; dir(deepinfer)\n"
            "print(json.dumps(sorted(set(sys.modules) - before)))"
        )
    )
    heavy = [name for name in loaded if name.split(".")[0] in OPTIONAL]
    assert heavy == []
    assert [name for name in loaded if name.startswith("deepinfer.")] == []


def test_import_adds_less_than_0_3_s():
    code = "import time; a = time.perf_counter(); import deepinfer; print(time.perf_counter() - a)"
    assert min(float(run(code)) for _ in range(3)) < 0.3


def test_stub_and_runtime_name_the_same():
    assert stub_names() == set(di.__all__)
    assert set(di.__all__) <= set(dir(di))


@pytest.mark.parametrize("name", sorted(di.__all__))
def test_every_name_is_there(name):
    assert getattr(di, name) is getattr(di, name)


def test_names_come_from_where_the_stub_says():
    for node in ast.parse((PACKAGE / "__init__.pyi").read_text("utf-8")).body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                module = importlib.import_module(node.module)
                found = getattr(module, alias.name, None)
                found = found or importlib.import_module(f"{node.module}.{alias.name}")
                assert getattr(di, alias.name) is found


def test_a_wrong_name_is_answered_with_the_right_one():
    with pytest.raises(AttributeError, match="did you mean 'Engine'"):
        di.Engin
    assert not hasattr(di, "nothing_like_it")


def test_kernels_is_ours_and_only_inside_the_package():
    code = "import deepinfer.kernels, importlib.util as u; s = u.find_spec('kernels')\n"
    code += "print(s.origin if s else None)"
    assert run(code).strip() != str(KERNELS / "__init__.py")


def test_a_new_kernel_folder_needs_no_new_install(tmp_path):
    """Every folder with an `__init__.py` under kernels/ can be imported as it stands."""
    found = sorted(p.parent.name for p in KERNELS.glob("*/__init__.py"))
    run(
        "import importlib\n"
        + "".join(f"importlib.import_module('deepinfer.kernels.{n}')\n" for n in found)
    )


@pytest.mark.parametrize("layout", ["installed", "checkout"])
def test_a_type_checker_resolves_every_name(tmp_path, layout):
    """pyright knows a type for each public name, in a wheel's layout and in a checkout's."""
    kernels = tmp_path / ("deepinfer/kernels" if layout == "installed" else "kernels")
    copied = shutil.ignore_patterns("__pycache__", "*.safetensors")
    shutil.copytree(PACKAGE, tmp_path / "deepinfer", ignore=copied)
    shutil.copytree(KERNELS, kernels, ignore=copied, dirs_exist_ok=True)
    if layout == "installed":
        (tmp_path / "deepinfer/kernels.pyi").unlink(missing_ok=True)
    probes = [f"di.{name}" for name in sorted(set(di.__all__) - {"__version__"})]
    probes += ["di.kernels.explain", "di.verifier.Fixed", "di.Engine.tiny().generate"]
    errors, types = pyright(tmp_path, [f"reveal_type({p})" for p in probes] + ["di.no_such_name"])
    assert len(errors) == 1 and "no_such_name" in errors[0], errors  # the check itself can fail
    assert len(types) == len(probes)
    assert [t for t in types if '"Unknown' in t] == []


def pyright(folder: Path, lines: list[str]) -> tuple[list[str], list[str]]:
    """The messages of errors and of reveal_type on a file with these lines."""
    (folder / "probe.py").write_text("\n".join(["import deepinfer as di", *lines]))
    (folder / "pyrightconfig.json").write_text("{}")
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable]
    done = subprocess.run([*command, "probe.py"], cwd=folder, capture_output=True, text=True)
    if not done.stdout.lstrip().startswith("{"):
        pytest.skip(f"pyright cannot start here (it fetches itself once): {done.stderr[-300:]}")
    report = json.loads(done.stdout)["generalDiagnostics"]
    return tuple(
        [d["message"] for d in report if d["severity"] == s] for s in ("error", "information")
    )
