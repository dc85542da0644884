"""What this machine can run, each fact with its reason. Nothing is installed, nothing raises."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepinfer.tables.table import Table

PYTHON = (3, 11)
REQUIRED = {
    "torch": (2, 11),
    "numpy": (),
    "einops": (),
    "safetensors": (),
    "tokenizers": (),
    "jaxtyping": (),
}
# Package -> (extra that brings it, what it is for).
OPTIONAL = {
    "matplotlib": ("lab", "drawings"),
    "pandas": ("lab", "Table.to_pandas"),
    "tqdm": ("lab", "progress bars"),
    "jupyterlab": ("lab", "deepinfer lab"),
    "ipywidgets": ("lab", "progress bars in a notebook"),
    "xgrammar": ("", "for a grammar of your own; deepinfer itself does not use it yet"),
    "llguidance": ("", "for a grammar of your own; deepinfer itself does not use it yet"),
    "nbval": ("test", "notebooks as tests"),
    "hypothesis": ("test", "property tests"),
    "triton": ("gpu", "fused kernels"),
    "torch_npu": ("", "Ascend devices; see Huawei's instructions"),
}


@dataclass
class Report:
    """Rows of (group, name, state, detail), and the sentences of what is wrong.

    state: "ok"; "no" (not there, and not needed); "problem" (has a sentence in `problems`).
    """

    rows: list[dict[str, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def add(self, group: str, name: str, detail: str, state: str = "ok") -> None:
        self.rows.append({"group": group, "name": name, "state": state, "detail": detail})

    def problem(self, group: str, name: str, detail: str, sentence: str) -> None:
        self.add(group, name, detail, "problem")
        self.problems.append(sentence)

    def table(self) -> Table:
        from deepinfer.tables.table import Table

        return Table(self.rows, ["group", "name", "state", "detail"])

    def __str__(self) -> str:
        """Every row (a Table would hide some), one block a group, and the problems last."""
        lines = []
        for group in dict.fromkeys(row["group"] for row in self.rows):
            rows = [row for row in self.rows if row["group"] == group]
            width = max(len(row["name"]) for row in rows)
            lines += [
                group,
                *(f"  {row['state']:<7}  {row['name']:<{width}}  {row['detail']}" for row in rows),
            ]
        lines += ["", *(f"problem: {text}" for text in self.problems or ["none"])]
        return "\n".join(line.rstrip() for line in lines)


def examine() -> Report:
    """Look at Python, the packages, the devices and the kernels of this process."""
    report = Report()
    _packages(report)
    _other_distribution(report)
    _nano(report)
    _devices(report)
    _kernels(report)
    return report


def version_of(package: str) -> str | None:
    """The installed version of a distribution, without importing it; None where there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _packages(report: Report) -> None:
    import deepinfer
    from deepinfer.tables.provenance import commit

    report.add(
        "packages",
        "deepinfer",
        f"{deepinfer.__version__}, commit {commit() or 'unknown (installed)'}",
    )
    if sys.version_info < PYTHON:
        report.problem(
            "packages",
            "python",
            platform.python_version(),
            f"Python {platform.python_version()} is older than 3.11: make the venv with a newer",
        )
    else:
        report.add(
            "packages",
            "python",
            f"{platform.python_version()}, {platform.system()} {platform.machine()}",
        )
    for name, least in REQUIRED.items():
        found = version_of(name)
        if found is None:
            report.problem("packages", name, "missing", f"{name} is missing: pip install {name}")
        elif least and _numbers(found) < least:
            want = ".".join(map(str, least))
            report.problem(
                "packages",
                name,
                f"{found}, need {want} or newer",
                f"{name} {found} is too old: pip install '{name}>={want}'",
            )
        else:
            report.add("packages", name, found)
    for name, (extra, purpose) in OPTIONAL.items():
        found = version_of(name)
        hint = f"; pip install 'deepinfer-lab[{extra}]'" if extra else ""
        if found:
            report.add("optional packages", name, f"{found} ({purpose})")
        else:
            report.add("optional packages", name, f"not installed ({purpose}{hint})", "no")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])


def _other_distribution(report: Report) -> None:
    """`deepinfer` 0.1.0 on the package index is another project with our import name."""
    other = version_of("deepinfer")
    if other is None:
        report.add("packages", "other 'deepinfer'", "not installed, as it should be")
        return
    report.problem(
        "packages",
        "other 'deepinfer'",
        f"{other} is installed",
        f"the distribution 'deepinfer' {other} is another project with the same import name, and "
        "one overwrites the other: pip uninstall deepinfer, then install deepinfer-lab again",
    )


def _nano(report: Report) -> None:
    from deepinfer.checkpoint import nano
    from deepinfer.checkpoint.header import CheckpointError

    try:
        folder = nano.verified()
    except (FileNotFoundError, CheckpointError) as error:
        state = "damaged" if isinstance(error, CheckpointError) else "not complete"
        report.problem("packages", "nano model", state, str(error))
        return
    size = sum((folder / name).stat().st_size for name in nano.FILES)
    report.add("packages", "nano model", f"{size / 1e6:.1f} MB")


def _devices(report: Report) -> None:
    cores = _cores()
    try:
        import torch
    except Exception as error:  # a broken build raises OSError, not ImportError
        report.problem("devices", "cpu", "unknown", f"torch cannot be imported: {error}")
        return
    capability = torch.backends.cpu.get_cpu_capability()
    threads = torch.get_num_threads()
    report.add("devices", "cpu", f"{capability}, {cores} cores, float32 / bfloat16 / float64")
    report.add(
        "devices",
        "threads",
        f"{threads} now; decode-sized work wants 1 (OMP_NUM_THREADS, --threads)",
    )
    built = torch.version.cuda or torch.version.hip
    if not built:
        report.add("devices", "cuda", f"torch {torch.__version__} is a build without CUDA", "no")
    elif not torch.cuda.is_available():
        report.add(
            "devices", "cuda", f"torch is built for {built}, but no GPU or driver is found", "no"
        )
    else:
        for i in range(torch.cuda.device_count()):
            found = torch.cuda.get_device_properties(i)
            detail = (
                f"{found.name}, SM{found.major}{found.minor}, {found.total_memory / 1e9:.0f} GB"
            )
            report.add("devices", f"cuda:{i}", detail)
    if version_of("torch_npu") is None:
        report.add("devices", "npu", "torch_npu is not installed", "no")
    else:
        report.add("devices", "npu", f"torch_npu {version_of('torch_npu')}; never run on by us")


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _kernels(report: Report) -> None:
    try:
        from deepinfer import kernels

        ops = kernels.names()
    except Exception as error:
        report.problem("kernels", "ops", "unknown", f"the kernels cannot be imported: {error}")
        return
    for op in ops:
        for found in kernels.get(op).ordered():
            why = found.why_unavailable()
            invariant = "batch invariant" if found.batch_invariant else "depends on the batch"
            name = f"{op}/{found.name}"
            report.add("kernels", name, why or f"{found.kind}, {invariant}", "no" if why else "ok")
