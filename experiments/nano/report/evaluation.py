"""Evaluation paths that must agree: the same weights and tokens, computed in other ways.

A number that compares two models means nothing where the way it was computed matters as much. So
bits per byte of the unquantised weights are measured through the engine's cache in chunks, in one
forward without a cache, by the slots that training runs, in float64 and in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from deepinfer.engine.engine import Engine
from deepinfer.engine.step.batch import Work, build
from experiments.nano.report.findings import Finding
from experiments.nano.report.intervals import aligned, bits_per_byte, change, over_modules
from experiments.nano.report.study import Study, load
from experiments.nano.report.texts import Document, Logits, firsts, totals
from experiments.nano.train import fast

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
    """Through the engine's cache, `rows` tokens a step: later ones read what earlier ones wrote."""

    def logits(ids: list[int]) -> Tensor:
        whole, rest = divmod(len(ids), rows)
        return eng.logits(ids, chunks=[rows] * whole + [rest] * (rest > 0))

    return logits


def training(eng: Engine, compiled: bool = False) -> Logits:
    """The batched slots that training runs, eager or compiled, one sequence at a time. It wants
    whole windows, so pads follow the sequence, which no row before them sees."""

    @torch.no_grad()
    def logits(ids: list[int]) -> Tensor:
        c = eng.config
        padded = [*ids, *[c.pad_token_id] * (-len(ids) % c.sliding_window)]
        rows = torch.tensor([padded], device=eng.model.device)
        ctx = fast.context(
            c, rows, fidelity=eng.settings.fidelity, compiled=compiled, dtype=eng.model.dtype
        )
        return eng.model(ctx).logits[: len(ids)]

    return logits


def findings(study: Study, folder: str) -> Iterator[Finding]:
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
        ("training path, float32", docs, lambda: training(eng)),
        ("engine in chunks, float64", few, lambda: wide("float64")),
        ("engine in chunks, bfloat16", few, lambda: wide("bfloat16")),
    ]
    if device != "cpu":
        paths.append(("training path compiled, float32", docs, lambda: training(eng, True)))
    reference = study.score(chunked(eng, max(s.paths // 4, 1)), docs, s.paths)
    rows = [_row("engine in chunks, float32", study, docs, reference, reference)]
    for name, which, make in paths:
        logits = make()
        before = [r for r, doc in zip(reference, docs) if any(doc is w for w in which)]
        rows.append(_row(name, study, which, before, study.score(logits, which, s.paths)))
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
        path=name,
        files=len(docs),
        tokens=len(apart),
        bits_per_byte=bits.value,
        change_percent=e.value,
        low=e.low,
        high=e.high,
        mean_dnats=float(apart.mean()),
        agrees=abs(e.value) <= AGREE,
    )
