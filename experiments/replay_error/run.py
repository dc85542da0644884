"""What bounded replay changes in the tokens behind a prompt, and what it saves, on the small trained model.

    python -m experiments.replay_error.run --out experiments/replay_error/results

A part that is in the folder is not measured again; --again does it anew.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from deepinfer.engine.engine import Engine
from deepinfer.engine.provenance import of_engine
from deepinfer.tables.provenance import collect
from experiments.replay_error.config import FULL, QUICK, TINY, Sizes
from experiments.replay_error.files import Part, read
from experiments.replay_error.parts import PARTS
from experiments.serving.bench import processor


def facts(eng: Engine, sizes: dict[str, object]) -> dict[str, Any]:
    return collect(**of_engine(eng), processor=processor(), cores=os.cpu_count(), sizes=sizes)


def done(path: Path, about: dict[str, Any]) -> bool:
    """Whether a file has this part with the same weights and sizes."""
    if not path.exists():
        return False
    old, sizes = read(path).facts, about["sizes"]
    same = all(old["sizes"].get(k) == v for k, v in sizes.items())
    return same and all(old[k] == about[k] for k in ("weights", "config", "dtype"))


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(
        prog="python -m experiments.replay_error.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("--out", type=Path, required=True, help="folder of the results, a file a part")
    p.add_argument(
        "--only",
        nargs="+",
        choices=tuple(PARTS),
        default=tuple(PARTS),
        metavar="PART",
        help=f"parts to run: {', '.join(PARTS)}",
    )
    p.add_argument("--quick", action="store_true", help="in small, to try the command")
    p.add_argument("--again", action="store_true", help="also parts that are there")
    p.add_argument(
        "--model", choices=("nano", "tiny"), default="nano", help="tiny: random weights, for tests"
    )
    p.add_argument("--threads", type=int, default=1, help="of torch's operations (default 1)")
    return p.parse_args(arguments)


def part(eng: Engine, name: str, sizes: Sizes, o: argparse.Namespace) -> None:
    """Measure a part and write its file, if it is not there."""
    about = facts(eng, sizes.of(name))
    path = o.out / f"{name}.json"
    if not o.again and done(path, about):
        print(f"{name}: there already (--again measures it anew)", flush=True)
        return
    if not o.again and path.exists():
        raise SystemExit(
            f"{path} has this part in other sizes, of other weights or another dtype: give "
            "another --out, or --again to replace it"
        )
    start, cpu = time.perf_counter(), time.process_time()

    def say(words: str) -> None:
        print(f"  {time.perf_counter() - start:6.0f} s  {words}", flush=True)

    print(f"{name}: {(PARTS[name].__doc__ or '').strip()}", flush=True)
    tables = PARTS[name](eng, sizes, say)
    Part(name, about, tables, time.process_time() - cpu).write(o.out)
    print(f"  {time.perf_counter() - start:6.0f} s  written: {path.name}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    o = options(arguments)
    torch.set_num_threads(o.threads)
    make = {"nano": Engine.nano, "tiny": Engine.tiny}[o.model]
    sizes = TINY if o.model == "tiny" else QUICK if o.quick else FULL
    for name in o.only:
        with make() as eng:  # its own: what a cache held before shows in the last digits of float32
            part(eng, name, sizes, o)
    return 0


if __name__ == "__main__":
    sys.exit(main())
