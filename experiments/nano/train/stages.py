"""The stages of training, one command each, from the root of the repository.

    python -m experiments.nano.train backbone --out DIR [--seed 0]
    python -m experiments.nano.train drafter --backbone DIR/stored --out DIR2
    python -m experiments.nano.train paths --checkpoint DIR2/stored
    python -m experiments.nano.train ship --checkpoint DIR2/stored
    python -m experiments.nano.train bench

Each stage starts from the weights that the one before wrote (DIR/stored and DIR/unquantised) and
takes under nine minutes on an H200. `ship` makes a stored checkpoint the package's own.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from deepinfer.checkpoint.reader import Checkpoint
from deepinfer.engine.weights import weights_digest
from experiments.nano import WORK
from experiments.nano.config import Backbone, Drafter, nano_config
from experiments.nano.train import agreement, backbone, checks, ship, weights
from experiments.nano.train.batches import corpus, pieces
from experiments.nano.train.log import Log


def main(argv: list[str] | None = None) -> int:
    """Run a stage. Exit status: 0 done, 2 refused before it began, with a line that says why."""
    args = _parser().parse_args(argv)
    prepare, run = {
        "backbone": (for_backbone, run_backbone),
        "drafter": (for_drafter, run_drafter),
        "paths": (for_paths, run_paths),
        "ship": (shipped, say_shipped),
        "bench": (for_bench, run_bench),
    }[args.stage]
    try:
        if args.stage in ("backbone", "drafter"):
            checks.no_other_run(args.out)
        _place(args)
        ready = prepare(args)
        if getattr(args, "out", None):
            Path(args.out).mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        print(f"train {args.stage}: {error}", file=sys.stderr)
        return 2
    run(args, *ready)  # what fails from here on is a fault of the code: with its traceback
    return 0


def _place(args) -> None:
    """The device, and what follows from it. ValueError where it is none of this machine's."""
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.zeros(1, device=args.device)
    except (RuntimeError, AssertionError) as error:  # the latter: torch without CUDA
        raise ValueError(f"--device {args.device}: {str(error).splitlines()[0]}") from error
    args.dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    args.compiled = args.device == "cuda" and not args.eager
    args.capture = args.compiled and not args.launch
    if args.device == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = True


# ----------------------------------------------------------------------------------- the backbone


def for_backbone(args):
    """(recipe, config, tokenizer, data), which fit each other."""
    recipe = checks.changed(Backbone(), args.set)
    tokenizer, data = _data(args.work)
    config = nano_config(tokenizer)
    checks.recipe_fits(recipe, config, data)
    return recipe, config, tokenizer, data


def run_backbone(args, recipe, config, tokenizer, data) -> None:
    start = weights.initial(config, args.seed)
    model = weights.model_from(config, start, tokenizer, args.dtype, args.device)
    log = _log(args, recipe)
    began = time.perf_counter()
    held = backbone.train(
        model,
        recipe,
        data,
        seed=args.seed,
        log=log,
        compiled=args.compiled,
        capture=args.capture,
        stop_after=args.seconds,
    )
    stored = _write(args, config, held, tokenizer)
    peak = torch.cuda.max_memory_allocated() / 2**30 if args.device == "cuda" else 0.0
    seconds = time.perf_counter() - began
    log.row(stage="written", seconds=seconds, gigabytes=peak, stored=stored)


def _log(args, recipe: Any) -> Log:
    """The stage's log, which begins with what it was asked for."""
    log = Log(Path(args.out) / "log.jsonl")
    log.row(
        stage="start",
        seed=args.seed,
        recipe=str(recipe),
        torch=torch.__version__,
        device=torch.cuda.get_device_name() if args.device == "cuda" else args.device,
    )
    return log


def _write(args, config, held, tokenizer) -> str:
    """Write what a stage trained. The fingerprint of the stored checkpoint, which binds the log to
    its weights."""
    weights.write_both(args.out, config, weights.official(config, held), tokenizer)
    return weights_digest(Checkpoint.open(Path(args.out) / "stored"))


# ------------------------------------------------------------------------------------ the drafter


def for_drafter(args):
    """(recipe, checkpoint, tokenizer, data), which fit each other."""
    recipe = checks.changed(Drafter(), args.set)
    checkpoint = checks.checkpoint(args.backbone, "--backbone")
    checks.stored(checkpoint, "--backbone")
    tokenizer, data = _data(args.work)
    checks.same_vocabulary(checkpoint, tokenizer)
    checks.recipe_fits(recipe, checkpoint.config, data)
    return recipe, checkpoint, tokenizer, data


def run_drafter(args, recipe, checkpoint, tokenizer, data) -> None:
    from experiments.nano.train import drafter

    config = checkpoint.config
    model = weights.model_of(checkpoint, args.dtype, args.device)
    log = _log(args, recipe)
    began = time.perf_counter()
    held = drafter.train(
        model,
        recipe,
        data,
        seed=args.seed,
        log=log,
        compiled=args.compiled,
        capture=args.capture,
        stop_after=args.seconds,
    )
    stored = _write(args, config, held, tokenizer)
    log.row(stage="written", seconds=time.perf_counter() - began, stored=stored)


# ------------------------------------------------------------------------------------ other stages


def for_paths(args):
    """(checkpoint, ids): rows of dev text in the training length."""
    checkpoint = checks.checkpoint(args.checkpoint, "--checkpoint")
    tokenizer, data = _data(args.work)
    checks.same_vocabulary(checkpoint, tokenizer)
    length = Backbone().length
    ids = pieces(data["dev"], length + 1)[: args.rows]
    if not len(ids):
        held = len(data["dev"].ids)
        raise ValueError(f"the corpus has {held:,} dev tokens, {length + 1:,} are needed")
    return checkpoint, torch.from_numpy(ids)


def run_paths(args, checkpoint, ids) -> None:
    models = {
        str(dtype).removeprefix("torch."): weights.model_of(checkpoint, dtype, args.device)
        for dtype in (torch.float32, torch.bfloat16)
    }
    rows = agreement.agreement(models, ids.to(args.device), args.compiled)
    for row in rows:
        cells = (f"{k} {v:.5f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items())
        print("  ".join(cells))
    if args.out:
        (Path(args.out) / "paths.json").write_text(json.dumps(rows, indent=1))


def shipped(args):
    """Nothing is trained: a checkpoint is copied into the package, or refused."""
    return (ship.checkpoint(Path(args.checkpoint), Path(args.to)),)


def say_shipped(args, sizes: dict[str, int]) -> None:
    print("\n".join(f"{size:>13,}  {name}" for name, size in sizes.items()))
    print(
        f"{sum(sizes.values()):>13,}  in {args.to}; its README.md is `experiments.nano.report.card`'s"
    )


def for_bench(args):
    recipe, *others = for_backbone(args)
    return replace(recipe, steps=60, dev_every=1000), *others


def run_bench(args, recipe, config, tokenizer, data) -> None:
    """Throughput of the backbone stage on random weights, after the kernels are built; on an
    accelerator also where the time of a step goes."""
    start = weights.initial(config, 0)
    model = weights.model_from(config, start, tokenizer, args.dtype, args.device)
    backbone.train(
        model, recipe, data, seed=0, log=Log(), compiled=args.compiled, capture=args.capture
    )
    if args.device == "cuda":
        with torch.profiler.profile() as profile:
            backbone.train(
                model, replace(recipe, steps=5), data, seed=0, log=Log(), compiled=args.compiled
            )
        print(profile.key_averages().table(sort_by="self_cuda_time_total", row_limit=25))


# ------------------------------------------------------------------------------------- the wishes


def _data(work: str | Path):
    """(tokenizer, splits) that `experiments.nano.data` left. ValueError where one is not whole."""
    work = Path(work)
    for name in ("corpus.npz", "tokenizer.json"):
        if not (work / name).is_file():
            raise ValueError(f"{work} has no {name}: run `python -m experiments.nano.data` first")
    try:
        return Tokenizer.from_file(str(work / "tokenizer.json")), corpus(work / "corpus.npz")
    except Exception as error:  # tokenizers and zip files raise kinds of their own
        raise ValueError(
            f"{work}: corpus.npz or tokenizer.json cannot be read ({error}): run "
            "`python -m experiments.nano.data` again"
        ) from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.nano.train",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", help="default: cuda where there is one")
    parser.add_argument("--work", default=WORK, help="folder of corpus.npz and tokenizer.json")
    parser.add_argument("--eager", action="store_true", help="no torch.compile on an accelerator")
    parser.add_argument("--launch", action="store_true", help="no captured graph of a step")
    stages = parser.add_subparsers(dest="stage", required=True)
    for name in ("backbone", "drafter"):
        p = stages.add_parser(name)
        p.add_argument("--out", required=True, help="a folder without the log of another run")
        p.add_argument("--seed", type=int, default=0)
        p.add_argument(
            "--seconds", type=_positive(float), help="end the stage after so many seconds"
        )
        p.add_argument(
            "--set", action="append", default=[], metavar="NAME=VALUE", help="change the recipe"
        )
    stages.choices["drafter"].add_argument("--backbone", required=True, help="a stored checkpoint")
    p = stages.add_parser("paths")
    p.add_argument("--checkpoint", required=True)
    p.add_argument("--rows", type=_positive(int), default=4, help="sequences of dev text")
    p.add_argument("--out")
    p = stages.add_parser("ship", help="make a stored checkpoint the package's own")
    p.add_argument("--checkpoint", required=True, help="a stored checkpoint")
    p.add_argument("--to", default=ship.MODEL, help="default: the folder of the package")
    p = stages.add_parser("bench")
    p.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    return parser


def _positive(kind: type) -> Any:
    """An argument's type: a number of that kind above 0."""

    def read(text: str) -> Any:
        value = kind(text)
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text}: a number above 0 is needed")
        return value

    read.__name__ = kind.__name__  # argparse names it where the text is no number
    return read
