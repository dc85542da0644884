"""The stages of training, one command each, from the root of the repository.

    python -m experiments.nano.train backbone --out DIR [--seed 0]      tokens -> DIR/stored, DIR/unquantised
    python -m experiments.nano.train drafter --backbone DIR/stored --out DIR2
    python -m experiments.nano.train paths --checkpoint DIR/unquantised
    python -m experiments.nano.train bench

Each stage starts from the weights that the one before wrote and takes under nine minutes on an H200.
"""

from __future__ import annotations

import argparse
import ast
import json
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from deepinfer.checkpoint.reader import Checkpoint

from . import agreement, backbone, weights
from .batches import corpus, pieces
from .config import Backbone, Drafter, nano_config
from .log import Log

WORK = Path(__file__).parent / "work"


def main(argv: list[str] | None = None) -> None:
    args = _parser().parse_args(argv)
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    args.dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    args.compiled = args.device == "cuda" and not args.eager
    args.capture = args.compiled and not args.launch
    if args.device == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = True
    {"backbone": run_backbone, "drafter": run_drafter, "paths": run_paths, "bench": run_bench}[
        args.stage
    ](args)


def run_backbone(args) -> None:
    recipe = _recipe(Backbone(), args.set)
    tokenizer, data = _data(args.work)
    config = nano_config(tokenizer)
    start = weights.initial(config, args.seed)
    model = weights.model_from(config, start, tokenizer, args.dtype, args.device)
    log = Log(Path(args.out) / "log.jsonl")
    log.row(
        stage="start", seed=args.seed, recipe=str(recipe), torch=torch.__version__,
        device=torch.cuda.get_device_name() if args.device == "cuda" else args.device,
    )
    began = time.perf_counter()
    held = backbone.train(
        model, recipe, data, seed=args.seed, log=log, compiled=args.compiled,
        capture=args.capture, stop_after=args.seconds,
    )
    weights.write_both(args.out, config, weights.official(config, held), tokenizer)
    peak = torch.cuda.max_memory_allocated() / 2**30 if args.device == "cuda" else 0.0
    log.row(stage="written", seconds=time.perf_counter() - began, gigabytes=peak)


def run_drafter(args) -> None:
    from . import drafter

    recipe = _recipe(Drafter(), args.set)
    tokenizer, data = _data(args.work)
    checkpoint = Checkpoint.open(args.backbone)
    config = checkpoint.config
    model = weights.model_of(checkpoint, args.dtype, args.device)
    log = Log(Path(args.out) / "log.jsonl")
    log.row(
        stage="start", seed=args.seed, recipe=str(recipe), torch=torch.__version__,
        device=torch.cuda.get_device_name() if args.device == "cuda" else args.device,
    )
    began = time.perf_counter()
    held = drafter.train(
        model, recipe, data, seed=args.seed, log=log, compiled=args.compiled,
        capture=args.capture, stop_after=args.seconds,
    )
    weights.write_both(args.out, config, weights.official(config, held), tokenizer)
    log.row(stage="written", seconds=time.perf_counter() - began)


def run_paths(args) -> None:
    checkpoint = Checkpoint.open(args.checkpoint)
    _, data = _data(args.work)
    length = Backbone().length
    ids = torch.from_numpy(pieces(data["dev"], length + 1)[: args.rows]).to(args.device)
    models = {
        str(dtype).removeprefix("torch."): weights.model_of(checkpoint, dtype, args.device)
        for dtype in (torch.float32, torch.bfloat16)
    }
    rows = agreement.agreement(models, ids, args.compiled)
    for row in rows:
        print("  ".join(f"{k} {v:.5f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()))
    if args.out:
        Path(args.out).mkdir(parents=True, exist_ok=True)
        (Path(args.out) / "paths.json").write_text(json.dumps(rows, indent=1))


def run_bench(args) -> None:
    """Throughput of the backbone stage on random weights, after the kernels are built; on an
    accelerator also where the time of a step goes."""
    recipe = replace(_recipe(Backbone(), args.set), steps=60, dev_every=1000)
    tokenizer, data = _data(args.work)
    config = nano_config(tokenizer)
    model = weights.model_from(config, weights.initial(config, 0), tokenizer, args.dtype, args.device)
    backbone.train(
        model, recipe, data, seed=0, log=Log(), compiled=args.compiled, capture=args.capture
    )
    if args.device == "cuda":
        with torch.profiler.profile() as profile:
            backbone.train(
                model, replace(recipe, steps=5), data, seed=0, log=Log(), compiled=args.compiled
            )
        print(profile.key_averages().table(sort_by="self_cuda_time_total", row_limit=25))


def _data(work: str | Path):
    work = Path(work)
    if not (work / "corpus.npz").exists():
        raise SystemExit(f"{work} has no corpus.npz: run `python -m experiments.nano.data` first")
    return Tokenizer.from_file(str(work / "tokenizer.json")), corpus(work / "corpus.npz")


def _recipe(recipe: Any, changes: list[str]) -> Any:
    """The recipe with `name=value` changes; values are Python literals."""
    known = {f.name: getattr(recipe, f.name) for f in fields(recipe)}
    values = {}
    for change in changes:
        name, _, text = change.partition("=")
        try:
            value = ast.literal_eval(text)
        except (SyntaxError, ValueError):
            value = None
        held = known.get(name)
        if isinstance(held, float) and isinstance(value, int):
            value = float(value)
        if held is None or type(value) is not type(held):
            raise SystemExit(f"--set {change}: the recipe has {known}")
        values[name] = value
    return replace(recipe, **values)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m experiments.nano.train", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="default: cuda where there is one")
    parser.add_argument("--work", default=WORK, help="folder of corpus.npz and tokenizer.json")
    parser.add_argument("--eager", action="store_true", help="no torch.compile on an accelerator")
    parser.add_argument("--launch", action="store_true", help="no captured graph of a step")
    stages = parser.add_subparsers(dest="stage", required=True)
    for name in ("backbone", "drafter"):
        p = stages.add_parser(name)
        p.add_argument("--out", required=True)
        p.add_argument("--seed", type=int, default=0)
        p.add_argument("--seconds", type=float, help="end the stage after so many seconds")
        p.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="change the recipe")
    stages.choices["drafter"].add_argument("--backbone", required=True, help="a stored checkpoint")
    p = stages.add_parser("paths")
    p.add_argument("--checkpoint", required=True)
    p.add_argument("--rows", type=int, default=4)
    p.add_argument("--out")
    p = stages.add_parser("bench")
    p.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    return parser


if __name__ == "__main__":
    main()
