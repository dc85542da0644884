"""What serving costs around the model, beside what it may cost.

    python -m experiments.serving.bench --out experiments/serving/results/bench.json

Speeds against a bare loop, the device's idle gap, and the time to first token with a prefix hit.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import fill

import torch

from deepinfer.engine.engine import Engine
from deepinfer.engine.provenance import of_engine
from deepinfer.tables.provenance import collect
from deepinfer.tables.table import Table
from experiments.serving import first_token, gap, rate, setup

FORMAT = "deepinfer.serving.bench/1"
SECTIONS = ("speed", "gap", "first-token")
BATCHES = (1, 4, 16, 64)
GAP_BATCHES = (1, 4)  # a step of more computes longer than the simulated device takes
DEVICE_SECONDS = 0.020
MODEL_LEN = 512  # of the decoding engines

Found = tuple[str, str, Table]


def targets(found: Mapping[str, Table]) -> Table:
    """What was wanted, what was measured, and whether it is reached: the worst row of each."""
    rows: list[dict[str, object]] = []

    def judge(what: str, wanted: float, values: Sequence[object]) -> None:
        if values:
            worst = max(float(v) for v in values)  # type: ignore[arg-type]
            rows.append(dict(what=what, wanted=wanted, measured=worst, reached=worst <= wanted))

    if "speed" in found:
        share = found["speed"].where(batch=16)["engine share %"]
        judge("engine share of a step at 16 requests, %", 10, share)
    if "idle gap" in found:
        idle = found["idle gap"].where(engine="overlapped")
        for load in gap.LOADS:
            judge(f"device idle, overlapped, {load}, %", 3, idle.where(load=load)["at 20 ms, %"])
    if "first token" in found:
        table = found["first token"]
        judge("first token with a hit / cold at the same depth", 1.2, table["of same depth"])
        judge("first token with a hit / cold alone", 1.2, table["of alone"])
    return Table(rows, ("what", "wanted", "measured", "reached"))


def measured(o: argparse.Namespace) -> Iterator[Found]:
    """The tables that were asked for, one after another."""
    make = {"nano": Engine.nano, "tiny": Engine.tiny}[o.model]
    eng = make(dtype=o.dtype, max_num_seqs=max(o.batches), max_model_len=MODEL_LEN)
    if "speed" in o.only:
        yield from rate.tables(eng, o.batches, o.rounds, o.steps, o.clock)
    if "gap" in o.only:
        batches = [b for b in o.batches if b in GAP_BATCHES] or o.batches[:1]
        yield from gap.tables(eng, batches, DEVICE_SECONDS, o.rounds, o.steps)
    if "first-token" in o.only:
        cases = first_token.CASES[:1] if o.quick else first_token.CASES
        yield from first_token.tables(eng, cases, o.rounds, o.clock)


def facts(o: argparse.Namespace) -> dict[str, object]:
    """Where the figures come from."""
    eng = {"nano": Engine.nano, "tiny": Engine.tiny}[o.model](dtype=o.dtype)
    more = of_engine(eng)
    del more["settings"]  # each section has its own, see its table's text
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return collect(
        **more,
        processor=processor(),
        cores=os.cpu_count(),
        load=load,
        rounds=o.rounds,
        steps=o.steps,
        clock=o.clock,
        quick=o.quick,
    )


def processor() -> str:
    """The name of the processor's model, as far as the system says it."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(
        prog="python -m experiments.serving.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument(
        "--only",
        nargs="+",
        choices=SECTIONS,
        default=SECTIONS,
        metavar="SECTION",
        help=f"sections to run: {', '.join(SECTIONS)}",
    )
    p.add_argument(
        "--batches",
        nargs="+",
        type=_count,
        default=list(BATCHES),
        help="concurrent requests (default 1 4 16 64)",
    )
    p.add_argument("--rounds", type=_count, default=7, help="repeats of each case (default 7)")
    p.add_argument("--steps", type=_count, default=48, help="decode steps a round (default 48)")
    p.add_argument("--threads", type=_count, default=1, help="of torch's operations (default 1)")
    p.add_argument(
        "--clock",
        choices=tuple(setup.CLOCKS),
        default="wall",
        help="of speeds and first tokens: wall (default), or cpu, the time in which this "
        "thread had a core, where the machine is busy",
    )
    p.add_argument("--dtype", default="float32", help="float32 (default), bfloat16 or float64")
    p.add_argument("--model", choices=("nano", "tiny"), default="nano")
    p.add_argument("--quick", action="store_true", help="one round in small, to try the command")
    p.add_argument("--out", type=Path, help="JSON file to write")
    o = p.parse_args(arguments)
    if o.quick:
        o.rounds, o.steps, o.batches = 1, 4, o.batches[:2]
    return o


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text[:6]) <= 1024:
        raise argparse.ArgumentTypeError(f"{text!r}: a whole number from 1 to 1024 is needed")
    return int(text)


def main(arguments: Sequence[str] | None = None) -> int:
    o = options(arguments)
    torch.set_num_threads(o.threads)
    about, found, said = facts(o), {}, []
    print(
        f"{about['processor']}, {about['cores']} cores, {o.threads} threads, load {about['load']}"
    )
    for name, says, table in measured(o):
        found[name] = table
        said.append((name, says, table))
        print(f"\n=== {name} ===\n{fill(says, 100)}\n{table.to_text()}", flush=True)
    verdicts = targets(found)
    print(f"\n=== targets ===\n{verdicts.to_text()}")
    said.append(("targets", "The worst row against what was wanted.", verdicts))
    if o.out:
        write(o.out, about, said)
    return 0


def write(path: Path, about: Mapping[str, object], said: Sequence[Found]) -> None:
    """Facts and tables as JSON; `read` gives the tables back."""
    whole = {
        "format": FORMAT,
        "facts": dict(about),
        "tables": [dict(name=n, says=s, columns=list(t.columns), rows=t.rows) for n, s, t in said],
    }
    path.write_text(json.dumps(whole, indent=1, allow_nan=False) + "\n", "utf-8")


def read(path: Path) -> dict[str, Table]:
    """The tables of a file that `write` made, by name. Raises ValueError for another file."""
    whole = json.loads(Path(path).read_text("utf-8"))
    if not isinstance(whole, dict) or whole.get("format") != FORMAT:
        raise ValueError(f"{path} is no file of this benchmark: format {FORMAT!r} expected")
    return {
        t["name"]: Table(t["rows"], t["columns"], provenance=whole["facts"])
        for t in whole["tables"]
    }


if __name__ == "__main__":
    sys.exit(main())
