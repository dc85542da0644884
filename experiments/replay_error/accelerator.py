"""Seconds of a prefill on an accelerator: python -m experiments.replay_error.accelerator --out FOLDER

Wall seconds from the start of a request to its first token, on an otherwise idle device. This is a
command of its own because most machines that run the other parts have no accelerator.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

import deepinfer as di
from deepinfer.engine.provenance import of_engine
from deepinfer.slots.replay import Bounded, Halo
from deepinfer.tables.provenance import collect
from deepinfer.tables.table import Table
from experiments.replay_error.files import Part

LENGTHS, REPEATS = (512, 2048, 8192, 32000), 5
DTYPES = ("float32", "bfloat16")
POLICIES = {"compact": Bounded(), "mask": Bounded(mode="mask"), "halo": Halo()}


def measured(device: str, lengths: Sequence[int] = LENGTHS, repeats: int = REPEATS) -> Part:
    rows, facts, start = [], {}, time.process_time()
    for dtype in DTYPES:
        with di.Engine.nano(device=device, dtype=dtype, max_model_len=max(lengths) + 2) as eng:
            text = [i for t in di.data.heldout(None) for i in eng.encode(t, bos=False)]
            ids = [eng.config.bos_token_id, *text[: max(lengths)]]
            found = di.measure.replay_seconds(eng, [ids], POLICIES, list(lengths), repeats)
            rows += [dict(dtype=dtype, **row) for row in found]
            facts = collect(**of_engine(eng))
        print(f"  {dtype} is measured", flush=True)
    facts["device"] = torch.cuda.get_device_name() if device == "cuda" else device
    title = f"seconds of a prefill, median of {repeats} runs"
    tables = {"seconds": Table(rows, title=title)}
    return Part("accelerator", facts, tables, time.process_time() - start)


def main(arguments: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(
        prog="python -m experiments.replay_error.accelerator",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("--out", type=Path, required=True, help="folder of the result")
    p.add_argument("--device", default="cuda", help="cuda, or cpu to try the command")
    p.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="tokens of a prompt")
    p.add_argument("--repeats", type=int, default=REPEATS, help="runs of each, the median counts")
    o = p.parse_args(arguments)
    if o.device == "cuda" and not torch.cuda.is_available():
        p.error("torch sees no accelerator here: run it where there is one, or try --device cpu")
    print(f"written: {measured(o.device, o.lengths, o.repeats).write(o.out)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
