"""Timing the implementations of an op: `python -m deepinfer.kernels.topk.bench --json out.json`.

For each problem a table of what every implementation takes, beside two floors: the time to move
its bytes and the time to do its multiplications at the rates measured on the same device just
before. Times are never asserted.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from . import registry


@dataclass(frozen=True)
class Problem:
    """One call to time. flops and nbytes: what any implementation has to do at the least."""

    label: str
    arguments: dict[str, Any]
    flops: float
    nbytes: float


def seconds(fn: Callable[[], Any], device: str, budget: float = 0.5) -> list[float]:
    """Times of single calls over about `budget` seconds (at least 5, at most 1000 calls)."""

    def once() -> float:
        start = time.perf_counter()
        fn()
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    once()
    calls = int(min(max(budget / max(once(), 1e-6), 5), 1000))
    return [once() for _ in range(calls)]


def rates(device: str, dtype: torch.dtype) -> tuple[float, float]:
    """(bytes per second of a copy, read and write counted; FLOP per second of a matrix product)."""
    size = 1 << (28 if device == "cuda" else 25)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    n = 4096 if device == "cuda" else 512
    a = torch.ones(n, n, dtype=dtype, device=device)
    copy = min(seconds(lambda: target.copy_(source), device, 0.2))
    product = min(seconds(lambda: a @ a, device, 0.2))
    return 2 * size / copy, 2 * n**3 / product


@torch.no_grad()
def measure(op: str, problems: Iterable[Problem], device: str, dtype: torch.dtype) -> list[dict]:
    """One row per problem and implementation."""
    moved, done = rates(device, dtype)
    rows = []
    for p in problems:
        for i in registry.get(op).ordered():
            why = i.why_unavailable() or i.why_refused(**p.arguments)
            row: dict[str, Any] = {"op": op, "problem": p.label, "implementation": i.name}
            row["refused"] = why or ""
            if why is None:
                times = seconds(lambda: i.fn(**p.arguments), device)
                row["median_us"] = statistics.median(times) * 1e6
                row["best_us"] = min(times) * 1e6
                row["bytes_floor_us"] = p.nbytes / moved * 1e6
                row["flops_floor_us"] = p.flops / done * 1e6
            rows.append(row)
    return rows


def table(rows: list[dict]) -> str:
    """The rows as text."""
    columns = ("median_us", "best_us", "bytes_floor_us", "flops_floor_us")
    wide = max(len(r["problem"]) for r in rows)
    head = f"{'problem':{wide}}  {'implementation':14}" + "".join(f"{c:>16}" for c in columns)
    lines = [head]
    for r in rows:
        line = f"{r['problem']:{wide}}  {r['implementation']:14}"
        if r["refused"]:
            lines.append(f"{line}  {r['refused']}")
        else:
            lines.append(line + "".join(f"{r[c]:16.1f}" for c in columns))
    return "\n".join(lines)


def main(op: str, problems: Callable[[str, torch.dtype], Iterable[Problem]]) -> None:
    """The command line of an op's bench: prints the table, writes JSON when asked."""
    parser = argparse.ArgumentParser(description=f"time the implementations of {op}")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float64"))
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (decode wants one)")
    parser.add_argument("--json", help="write rows and set-up to this file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    rows = measure(op, problems(options.device, dtype), options.device, dtype)
    cuda = options.device == "cuda"
    setup = {
        "device": torch.cuda.get_device_name() if cuda else platform.processor() or "CPU",
        "dtype": options.dtype,
        "threads": options.threads,
        "torch": torch.__version__,
    }
    print(", ".join(f"{k} {v}" for k, v in setup.items()))
    print(table(rows))
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"setup": setup, "rows": rows}, file, indent=1)
