"""Prefill and decode speed of a checkpoint: `python -m deepinfer.measure.speed PATH --threads 1 2`.

Each figure stands beside two floors: the time to read the weights and keys a step touches once, and
the time for its multiplications, at the rates a copy and a matrix product reach on the same threads
just before. Times are never asserted. The best of several runs is reported, with the median.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch

from deepinfer.checkpoint import names
from deepinfer.config import ModelConfig
from deepinfer.engine.engine import Engine
from deepinfer.engine.provenance import of_engine
from deepinfer.kernels.benchmark import rates
from deepinfer.tables.table import Table

PROMPT = 300
CONTEXT = 64  # prompt tokens in front of the decode steps


def touched(config: ModelConfig, rows: int) -> tuple[float, float]:
    """(weights a step of `rows` rows multiplies with, summed over rows; distinct weights it reads).

    Routed experts: each row uses top-k of E; distinct ones by the expectation for even routing.
    Tables are looked up, not multiplied; the drafter is not counted.
    """
    used = distinct = 0.0
    share = config.num_experts_per_tok / config.n_routed_experts
    for w in names.weights(config):
        if (
            w.component in ("drafter", "vision")
            or w.name == "embed.weight"
            or "engram.embed" in w.name
        ):
            continue
        if w.component == "experts":
            used += w.parameters * share * rows
            distinct += w.parameters * (1 - (1 - share) ** rows)
        else:
            used += w.parameters * rows
            distinct += w.parameters
    return used, distinct


def prompts(config: ModelConfig, count: int, length: int) -> list[list[int]]:
    """Random ids from a fixed seed, each prompt its own."""
    g = torch.Generator().manual_seed(0)
    return torch.randint(3, config.vocab_size, (count, length), generator=g).tolist()


def prefill_seconds(eng: Engine, count: int, runs: int) -> list[float]:
    """Seconds of prefilling `count` prompts of PROMPT tokens, first token included."""
    out = []
    for _ in range(runs + 1):  # the first run warms up
        ids = [
            eng.add(p, max_tokens=2, temperature=0.0) for p in prompts(eng.config, count, PROMPT)
        ]
        start = time.perf_counter()
        while not all(eng.requests[i].output for i in ids):
            eng.step()
        out.append(time.perf_counter() - start)
        for i in ids:
            eng.abort(i)
    return out[1:]


def decode_seconds(eng: Engine, count: int, steps: int) -> list[float]:
    """Seconds of each decode step of `count` sequences."""
    ids = [
        eng.add(p, max_tokens=steps + 4, temperature=0.0, ignore_eos=True)
        for p in prompts(eng.config, count, CONTEXT)
    ]
    while not all(eng.requests[i].output for i in ids):
        eng.step()
    out = []
    for _ in range(steps + 2):
        start = time.perf_counter()
        eng.step()
        out.append(time.perf_counter() - start)
    for i in ids:
        eng.abort(i)
    return out[2:]


def measure(eng: Engine, threads: int, runs: int, steps: int) -> list[dict]:
    """One row per case on `threads` threads."""
    torch.set_num_threads(threads)
    moved, done = rates(eng.model.device.type, eng.model.dtype)
    rows = []
    for what, batch in (("prefill", 1), ("prefill", 16), ("decode", 1), ("decode", 16)):
        prefill = what == "prefill"
        seconds = (
            prefill_seconds(eng, batch, runs) if prefill else decode_seconds(eng, batch, steps)
        )
        tokens = batch * (PROMPT if prefill else 1)
        used, distinct = touched(eng.config, tokens)
        size = eng.model.dtype.itemsize
        rows.append(
            {
                "case": f"{what} {PROMPT}" if prefill else what,
                "batch": batch,
                "threads": threads,
                "best_s": min(seconds),
                "median_s": statistics.median(seconds),
                "tokens_per_s": tokens / min(seconds),
                "bytes_floor_s": distinct * size / moved,
                "flops_floor_s": 2 * used / done,
            }
        )
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", help="a checkpoint folder, 'nano' or 'tiny'")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--fidelity", type=int, default=1, choices=(0, 1, 2))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--runs", type=int, default=5, help="prefills timed")
    parser.add_argument("--steps", type=int, default=60, help="decode steps timed")
    parser.add_argument("--json", type=Path, help="write table and provenance here")
    args = parser.parse_args(argv)
    how = dict(device=args.device, dtype=args.dtype, fidelity=args.fidelity, prefix_cache=False)
    named = {"nano": Engine.nano, "tiny": Engine.tiny}.get(args.path)
    eng = named(**how) if named else Engine.from_pretrained(args.path, **how)
    rows = [r for n in args.threads for r in measure(eng, n, args.runs, args.steps)]
    table = Table(rows, provenance=of_engine(eng))
    print(table)
    if args.json:
        args.json.write_text(json.dumps(json.loads(table.to_json()), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
