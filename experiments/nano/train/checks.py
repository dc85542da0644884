"""Whether a stage can run at all, asked before anything is: a recipe's numbers, and folders.

A stage that fails after minutes, or that trains on something else than was meant, costs more than
the question.
"""

from __future__ import annotations

import ast
import difflib
import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from deepinfer.checkpoint.reader import Checkpoint
from deepinfer.config import ModelConfig
from experiments.nano.config import Backbone, Drafter
from experiments.nano.train.batches import Split

NONE = ("warmup", "index_random")  # counts that may be 0
KINDS = {bool: "True or False", int: "an integer", float: "a number", tuple: "a tuple"}
FACTORS = ("_rate", "_decay", "clip", "index_weight")  # how names of numbers without a limit end


def changed(recipe: Any, changes: Sequence[str]) -> Any:
    """The recipe with `name=value` changes, whose values are Python literals. ValueError for a name
    that it lacks and for a value of another kind."""
    known = {f.name: getattr(recipe, f.name) for f in fields(recipe)}
    values = {}
    for change in changes:
        name, _, text = change.partition("=")
        if name not in known:
            raise ValueError(f"--set {change}: {_unknown(name, recipe, list(known))}")
        held = known[name]
        try:
            value = ast.literal_eval(text)
            if isinstance(held, float) and type(value) is int:
                value = float(value)
        except (SyntaxError, ValueError, TypeError, OverflowError):
            value = None
        if type(value) is not type(held):
            wanted = f"{name} is {KINDS[type(held)]}, as in {name}={held}"
            raise ValueError(f"--set {change}: {wanted}, and {text!r} is none")
        values[name] = value
    return replace(recipe, **values)


def _unknown(name: str, recipe: Any, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known)
    hint = f" (near: {', '.join(near)})" if near else ""
    every = textwrap.fill(", ".join(known), 96, initial_indent="    ", subsequent_indent="    ")
    stage = type(recipe).__name__.lower()
    return f"the {stage} recipe has no {name!r}{hint}; it has\n{every}"


def no_other_run(out: str | Path) -> None:
    """ValueError where a stage has written its log to the folder already: the rows of two runs
    would stand beside the weights of one."""
    log = Path(out) / "log.jsonl"
    if log.exists():
        raise ValueError(
            f"--out {out} holds the log of another run ({log.name}): name another folder, or "
            "delete this one"
        )


def recipe_fits(recipe: Backbone | Drafter, config: ModelConfig, data: dict[str, Split]) -> None:
    """ValueError, naming every wish that cannot be met with its reason."""
    found = [*_numbers(recipe), *_schedules(recipe)]
    if not found:  # the others divide by these
        more = _backbone if isinstance(recipe, Backbone) else _drafter
        found = [*_windows(recipe, config.sliding_window), *more(recipe, config)]
    found += _text(recipe, data)
    if found:
        name = type(recipe).__name__.lower()
        raise ValueError(f"the {name} recipe cannot run: {'; '.join(found)}")


def checkpoint(folder: str | Path, wish: str) -> Checkpoint:
    """The checkpoint that the option `wish` names. ValueError says what is wrong with it."""
    try:
        return Checkpoint.open(folder)
    except (ValueError, OSError) as error:
        raise ValueError(f"{wish} {folder}: {error}") from error


def stored(checkpoint: Checkpoint, wish: str) -> None:
    """ValueError where a checkpoint is not in FP8 and FP4."""
    if checkpoint.config.quantization is None:
        raise ValueError(
            f"{wish} {checkpoint.path} is unquantised: one stored in FP8 and FP4 is needed; name "
            "the folder `stored` that the stage wrote beside it"
        )


def not_rounded(plain: Checkpoint, stored: Checkpoint) -> None:
    """ValueError where the control of `stored` has its rounded weights: the cost of storage would
    be 0. That is so of `unquantised` of the drafter stage, which starts from the stored backbone.

    Compares the first matrices of the first and the last layer.
    """
    wanted = ("attn.wq_a.weight", "ffn.experts.0.w1.weight")
    last = stored.config.num_hidden_layers - 1
    names = [f"layers.{layer}.{name}" for layer in (0, last) for name in wanted]
    both = [name for name in names if name in stored.weights and name in plain.weights]
    if both and all(
        torch.equal(stored.read(name, torch.float32), plain.read(name, torch.float32))
        for name in both
    ):
        raise ValueError(
            f"--unquantised {plain.path} has the rounded weights of --checkpoint {stored.path}: "
            "storage would seem to cost nothing; name the folder `unquantised` of the backbone "
            "stage (that of a drafter stage has the backbone as it is stored)"
        )


def same_vocabulary(checkpoint: Checkpoint, tokenizer: Any) -> None:
    """ValueError where the corpus was written with another tokenizer than the model's."""
    mine, size = checkpoint.config.vocab_size, tokenizer.get_vocab_size(with_added_tokens=True)
    path = checkpoint.tokenizer_path
    own = None if path is None else Tokenizer.from_file(str(path)).to_str()
    if mine != size or own != tokenizer.to_str():
        raise ValueError(
            f"{checkpoint.path} has another tokenizer ({mine:,} entries) than the corpus ({size:,} "
            "entries): train the backbone on this corpus, or name the folder of its own (--work)"
        )


def _numbers(recipe: Any) -> Iterator[str]:
    for field in fields(recipe):
        name, value = field.name, getattr(recipe, field.name)
        least = 0 if name in NONE else 1
        if type(value) is int and value < least:
            yield f"{name}={value}: at least {least} is needed"
        if isinstance(value, float):
            most = math.inf if name.endswith(FACTORS) else 1.0
            if not (math.isfinite(value) and 0 <= value <= most):
                yield f"{name}={value}: a number from 0 {'on' if most > 1 else 'to 1'} is needed"


def _schedules(recipe: Any) -> Iterator[str]:
    """(until a share of the steps, value) pairs that cover all steps; tuples of numbers."""
    for name in ("bias_rates", "library_shares"):
        pairs = getattr(recipe, name, ((1.0, 0.0),))
        good = bool(pairs) and all(isinstance(p, tuple) and _all_numbers(p, 2) for p in pairs)
        until = [p[0] for p in pairs] if good else []
        if not good or until != sorted(until) or until[-1] < 1:
            yield f"{name}={pairs}: pairs (until a share of the steps, value), the last until 1.0"
        elif name == "library_shares" and any(value > 1 for _, value in pairs):
            yield f"{name}={pairs}: shares are at most 1"
    for name, count in (("shares", 3), ("temperatures", 2)):
        value = getattr(recipe, name, (1.0,) * count)
        if not _all_numbers(value, count) or not sum(value):
            yield f"{name}={value}: {count} numbers from 0 on are needed, not all 0"


def _all_numbers(values: tuple, count: int) -> bool:
    kinds = all(type(x) in (int, float) and math.isfinite(x) and x >= 0 for x in values)
    return len(values) == count and kinds


def _windows(recipe: Any, window: int) -> Iterator[str]:
    for name in ("length", "dense_length", "written_length"):
        value = getattr(recipe, name, window)
        if value % window:
            near = max(1, round(value / window)) * window
            yield f"{name}={value} is no multiple of the window, {window} tokens: {near} is"


def _backbone(r: Backbone, config: ModelConfig) -> Iterator[str]:
    tokens = r.rows * r.length
    if tokens % r.dense_length:
        yield (
            f"rows={r.rows} of length={r.length} are {tokens:,} tokens a step, which sequences of "
            f"dense_length={r.dense_length} do not divide"
        )
    sizes = config.engram_max_ngram_size - 1
    if r.unseen and (not _all_numbers(r.unseen, sizes) or max(r.unseen) > 1):
        yield f"unseen={r.unseen}: none, or a share for each of {sizes} n-gram sizes"


def _drafter(r: Drafter, config: ModelConfig) -> Iterator[str]:
    n, half = config.max_draft, r.written_length // 2
    if half <= n + 1:
        yield f"written_length={r.written_length}: more than {2 * n + 2} for drafts of {n} tokens"
    if r.length <= n + 2:
        yield f"length={r.length}: more than {n + 2} for drafts of {n} tokens"
    if r.prompt > half:
        yield f"prompt={r.prompt}: at most half of written_length={r.written_length}"


def _text(recipe: Backbone | Drafter, data: dict[str, Split]) -> Iterator[str]:
    for name in ("library", "tests", "dev"):
        held = len(data[name].ids) if name in data else 0
        least = recipe.length + 1 if name == "dev" else 1
        if held < least:
            yield f"the corpus has {held:,} {name} tokens, at least {least:,} are needed"
    if getattr(recipe, "renamed", 0.0) and not ("renamed" in data and len(data["renamed"].ids)):
        yield (
            f"renamed={recipe.renamed}, and the corpus has no renamed text, for an older version "
            "wrote it: run `python -m experiments.nano.data` again, or set renamed=0.0"
        )
