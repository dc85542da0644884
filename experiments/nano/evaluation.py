"""Evaluation paths that must agree: the same weights and tokens, computed in other ways.

A number that compares two models means nothing where the way it was computed matters as much. So
bits per byte of the unquantised weights are measured through the engine's cache in chunks, in one
forward without a cache, in float64, in bfloat16, and by the training code when it is given.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from deepinfer.engine.batch import Work, build
from deepinfer.engine.engine import Engine
from experiments.nano.findings import Finding
from experiments.nano.intervals import aligned, bits_per_byte, change, over_modules
from experiments.nano.study import Study, load
from experiments.nano.texts import Document, Logits, firsts, score, totals

AGREE = 0.2  # percent of bits: paths further apart than this do not compute the same model


def uncached(eng: Engine) -> Logits:
    """One forward over the whole sequence: no cache, no chunks, as training sees it."""

    @torch.no_grad()
    def logits(ids: list[int]) -> Tensor:
        rt = eng.runtime
        batch = build([Work(list(ids), logits="all")], eng.config, eng.model.device)
        return eng.model(replace(rt.context(batch), cache=None)).logits

    return logits


def chunked(eng: Engine, rows: int) -> Logits:
    """Through the engine's cache, `rows` tokens a step: later chunks read what earlier ones wrote."""

    def logits(ids: list[int]) -> Tensor:
        whole, rest = divmod(len(ids), rows)
        return eng.logits(ids, chunks=[rows] * whole + [rest] * (rest > 0))

    return logits


def named(spec: str) -> Callable[[Engine, Tensor], Tensor]:
    """'package.module:function', a training path: (engine, ids "b t") -> logits "b t v"."""
    module, _, name = spec.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"training path {spec!r}: {error}; want package.module:function of a function that "
            "takes an engine and ids [b, t] and returns logits [b, t, v]"
        ) from None


def batched(eng: Engine, path: Callable[[Engine, Tensor], Tensor]) -> Logits:
    """A training path, one sequence at a time."""

    @torch.no_grad()
    def logits(ids: list[int]) -> Tensor:
        return path(eng, torch.tensor([ids], device=eng.model.device))[0]

    return logits


def findings(study: Study, folder: str, training: str | None = None) -> Iterator[Finding]:
    """The section. folder: of the unquantised checkpoint, loaded again in other dtypes."""
    eng, s = study.unquantised, study.sizes
    assert eng is not None
    docs = firsts(eng.tokenizer, study.heldout, s.paths)
    few = docs[:: max(1, len(docs) // s.paths_slow)]
    device = eng.settings.device

    def wide(dtype: str) -> Logits:
        return chunked(load(folder, s, device, dtype), max(s.paths // 4, 1))

    paths: list[tuple[str, Sequence[Document], Callable[[], Logits]]] = [
        ("one forward without a cache, float32", docs, lambda: uncached(eng)),
        ("engine in chunks, float64", few, lambda: wide("float64")),
        ("engine in chunks, bfloat16", few, lambda: wide("bfloat16")),
    ]
    if training is not None:
        function = named(training)
        paths.append((f"training path {training}", docs, lambda: batched(eng, function)))
    reference = [
        score(chunked(eng, max(s.paths // 4, 1)), study.bos, [doc], s.paths)[0] for doc in docs
    ]
    rows = [_row("engine in chunks, float32", study, docs, reference, reference)]
    for name, which, make in paths:
        logits = make()
        before = [r for r, doc in zip(reference, docs) if any(doc is w for w in which)]
        rows.append(_row(name, study, which, before, score(logits, study.bos, which, s.paths)))
    says = (
        "The same unquantised weights and tokens on paths that share little code: they must agree "
        f"within {AGREE} %. change_percent is against the first row on the same files; mean_dnats: "
        "mean difference of a token's loss without its sign, which does not cancel."
    )
    yield Finding("paths", says, study.table(rows, "evaluation paths, unquantised, fidelity 1"))


def _row(name: str, study: Study, docs: Sequence[Document], before, after) -> dict[str, object]:
    e = over_modules(aligned(totals(before), totals(after)), change)
    bits = over_modules(aligned(totals(after)), bits_per_byte)
    apart = torch.cat([(a.nats - b.nats).abs() for a, b in zip(after, before, strict=True)])
    assert e.value is not None
    return dict(
        path=name, files=len(docs), tokens=len(apart), bits_per_byte=bits.value,
        change_percent=e.value, low=e.low, high=e.high, mean_dnats=float(apart.mean()),
        agrees=abs(e.value) <= AGREE,
    )  # fmt: skip
