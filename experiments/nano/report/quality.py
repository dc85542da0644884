"""Quality: bits per byte on held-out files and prose, against xz, stored against unquantised, by
position, and what more context is worth.

Every token of a file is scored exactly once. A file is cut into pieces that the model reads cold,
bos in front; totals of nats are divided by totals of bytes, ratios of files are never averaged.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from deepinfer.engine.engine import Engine
from deepinfer.measure.bootstrap import Estimate
from experiments.nano.report.findings import Finding
from experiments.nano.report.intervals import (
    aligned,
    bits_per_byte,
    change,
    over_modules,
    ratio,
    verdict,
)
from experiments.nano.report.parallel import each
from experiments.nano.report.study import Study
from experiments.nano.report.texts import Document, Scored, pieces, token_nats, totals, xz_shares

NOT_SHOWN = "not shown"  # what a table says where there is no evidence either way


def findings(study: Study, stored: Sequence[Scored]) -> Iterator[Finding]:
    """The section, each finding as soon as it is measured. stored: held-out files, whole pieces."""
    s, size = study.sizes, study.sizes.piece
    plain = control(study, study.heldout, size)
    yield headline(study, "held-out", study.heldout, stored, plain)
    if plain is not None:
        yield rounding(study, stored, plain)
    yield by_position(study, stored)
    windows = each(
        lambda doc: halves(study.stored, study.bos, doc, s.older), study.heldout, study.jobs
    )
    cold, overlapped = [w[0] for w in windows], [w[1] for w in windows]
    yield older(study, cold, overlapped)
    yield more_context(study, stored, cold)
    yield headline(
        study,
        "prose",
        study.prose,
        study.score(study.stored.logits, study.prose, size),
        control(study, study.prose, size),
    )


def control(study: Study, docs: Sequence[Document], size: int) -> list[Scored] | None:
    """The unquantised weights on the same path."""
    if study.unquantised is None:
        return None
    return study.score(study.unquantised.logits, docs, size)


def against_xz(docs: Sequence[Document], scored: Sequence[Scored]) -> Estimate:
    """The model's bits over those of xz -9 on the same files, one after another."""
    xz = {m: [x] for m, x in xz_shares(docs).items()}
    return over_modules(
        aligned(totals(scored), xz), lambda x: x[..., 0] / math.log(2) / (8 * x[..., 2])
    )


def headline(
    study: Study,
    what: str,
    docs: Sequence[Document],
    stored: Sequence[Scored],
    plain: Sequence[Scored] | None,
) -> Finding:
    rows = []
    xz = 8 * sum(xz_shares(docs).values()) / sum(d.nbytes for d in docs)
    for name, scored in (("stored", stored), ("unquantised", plain)):
        if scored is None:
            continue
        bits = over_modules(aligned(totals(scored)), bits_per_byte)
        part = against_xz(docs, scored)
        rows.append(
            dict(
                weights=name,
                fidelity=1,
                tokens=sum(len(s.nats) for s in scored),
                bytes=sum(s.nbytes for s in scored),
                bits_per_byte=bits.value,
                xz_bits_per_byte=xz,
                of_xz=part.value,
                low=part.low,
                high=part.high,
            )
        )
    says = {
        "held-out": f"Bits per byte on held-out files ({study.said}), each token scored once in "
        f"cold pieces of {study.sizes.piece} tokens. of_xz: the share of the bits that xz -9 needs "
        "for the same files; low, high: 95 % over modules.",
        "prose": "The same on prose of the documentation, a domain that was never trained on.",
    }[what]
    return Finding(f"quality.{what}", says, study.table(rows, f"bits per byte, {what}"))


def rounding(study: Study, stored: Sequence[Scored], plain: Sequence[Scored]) -> Finding:
    """What storage and cache roundings cost: (weights, fidelity) against a control on its path."""
    assert study.unquantised is not None
    rows = [_cost("stored weights, all files", plain, stored)]
    reference = _part_scores(study, study.unquantised, 0)
    rows += [
        _cost("cache rounding alone", reference, _part_scores(study, study.unquantised, 1)),
        _cost("weight rounding alone", reference, _part_scores(study, study.stored, 0)),
        _cost("weights and caches", reference, study.part_scored),
    ]
    says = (
        "What rounding costs, in % more bits than the unrounded model on the same tokens and the "
        "same path. The first row is the claim about the stored model (both at fidelity 1); the "
        f"others take it apart on the first {study.sizes.part} tokens of each file."
    )
    return Finding("quality.rounding", says, study.table(rows, "cost of rounding"))


def _part_scores(study: Study, eng: Engine, fidelity: int) -> list[Scored]:
    with eng.with_(fidelity=fidelity) as other:
        return study.score(other.logits, study.part, study.sizes.part)


def _cost(what: str, before: Sequence[Scored], after: Sequence[Scored]) -> dict[str, object]:
    e = over_modules(aligned(totals(before), totals(after)), change)
    return dict(rounded=what, change_percent=e.value, low=e.low, high=e.high, says=verdict(e))


# ------------------------------------------------------------------------------------- position


def buckets(longest: int) -> list[tuple[int, int]]:
    """[(0, 64), (64, 256), (256, 512), (512, 1024), ...] up to `longest`."""
    edges = [0, 64, 256]
    while edges[-1] < longest:
        edges.append(2 * edges[-1])
    cuts = [(a, min(b, longest)) for a, b in zip(edges, edges[1:]) if a < longest]
    return cuts


def bucket_totals(
    scored: Sequence[Scored], a: int, b: int, full: int = 0
) -> dict[str, list[float]]:
    """module -> [nats, tokens] at positions a..b-1, of pieces with at least `full` tokens."""
    found: dict[str, list[float]] = {}
    for s in scored:
        here = (s.position >= a) & (s.position < b) & (s.length >= full)
        row = found.setdefault(s.module, [0.0, 0.0])
        row[0] += float(s.nats[here].sum())
        row[1] += int(here.sum())
    return found


def by_position(study: Study, scored: Sequence[Scored]) -> Finding:
    size, rows = study.sizes.piece, []
    whole: list[dict[str, list[float]]] = []
    for a, b in buckets(size):
        every = bucket_totals(scored, a, b)
        whole.append(bucket_totals(scored, a, b, size))
        e = over_modules(aligned(every), ratio)
        f = over_modules(aligned(whole[-1]), ratio)
        step = risen(*whole[-2:]) if len(whole) > 1 else Estimate(None)
        rows.append(
            dict(
                positions=f"{a}-{b - 1}",
                tokens=int(sum(n for _, n in every.values())),
                nats_per_token=e.value,
                whole_tokens=int(sum(n for _, n in whole[-1].values())),
                whole_nats=_number(f.value),
                rise_percent=_number(step.value),
                low=step.low,
                high=step.high,
                says=shown(step) if len(whole) > 1 else "",
            )
        )
    says = (
        "Loss by position in the piece, stored model: it must be flat or falling. whole_*: only "
        f"pieces of {size} tokens, so that every bucket has the same pieces; rise_percent: of "
        "whole_nats over the bucket before, with its 95 % interval over the modules that have such "
        "pieces. A bucket is worse only where low is above 0, and without an interval nothing is "
        "shown."
    )
    return Finding("quality.position", says, study.table(rows, "nats per token by position"))


def risen(before: dict[str, list[float]], after: dict[str, list[float]]) -> Estimate:
    """% that nats a token rose by, over the modules that have tokens in both; None where none has.

    before, after: module -> [nats, tokens]. Modules without tokens say nothing, so they must not
    count towards the modules that an interval needs.
    """
    names = [m for m in before if before[m][1] and after[m][1]]
    if not names:
        return Estimate(None)
    both = ({m: x[m] for m in names} for x in (before, after))
    return over_modules(aligned(*both), rise)


def shown(e: Estimate) -> str:
    """What an interval says of a change, or why it shows nothing."""
    if e.value is None:
        return f"{NOT_SHOWN}: no such tokens"
    return verdict(e) if e.low is not None else f"{NOT_SHOWN}: too few modules"


def rise(x: Tensor) -> Tensor:
    """[..., (nats, tokens) of the bucket before and of this one] -> % that the mean rose by."""
    return 100 * (x[..., 2] / x[..., 3] / (x[..., 0] / x[..., 1]) - 1)


def _number(x: float | None) -> float | None:
    return None if x is None or not math.isfinite(x) else x


# -------------------------------------------------------------------------- more or less context


def halves(eng: Engine, bos: int, doc: Document, size: int) -> tuple[Scored, Scored]:
    """(cold, overlapped): the document in cold pieces of `size`, and in pieces that overlap by
    half, of which only the second half counts (of the first piece all). One set of passes."""
    half, n = size // 2, len(doc.ids)
    cold, over = torch.full((n,), torch.nan).double(), torch.full((n,), torch.nan).double()
    place = torch.arange(n) % size
    for first in range(0, max(n - half, 1), half):
        nats = token_nats(eng.logits, bos, doc.ids[first : first + size]) if n else over
        stop = first + len(nats)
        if first % size == 0:
            cold[first:stop] = nats
        new = first + (half if first else 0)
        over[new:stop] = nats[new - first :]
    for a, b in pieces(n, size):
        if cold[a:b].isnan().any():  # the last cold piece is the second half of a window
            cold[a:b] = token_nats(eng.logits, bos, doc.ids[a:b])
    length = torch.full((n,), size)
    return (
        Scored(doc.module, doc.nbytes, cold, place, length),
        Scored(doc.module, doc.nbytes, over, place, length),
    )


def older(study: Study, cold: Sequence[Scored], overlapped: Sequence[Scored]) -> Finding:
    rows = []
    for name, scored in (("cold", cold), ("overlapping by half", overlapped)):
        e = against_xz(study.heldout, scored)
        bits = over_modules(aligned(totals(scored)), bits_per_byte)
        rows.append(
            dict(pieces=name, bits_per_byte=bits.value, of_xz=e.value, low=e.low, high=e.high)
        )
    says = (
        f"The same files in pieces of {study.sizes.older} tokens, cold and overlapping by half, "
        "the two ways in which older figures of this model were measured."
    )
    return Finding("quality.older", says, study.table(rows, f"pieces of {study.sizes.older}"))


def more_context(study: Study, long: Sequence[Scored], short: Sequence[Scored]) -> Finding:
    """The same tokens late in a long piece and early in a short one."""
    size, rows = study.sizes.older, []
    for a, b in buckets(study.sizes.piece - size):
        near, far = {}, {}
        for x, y in zip(long, short, strict=True):
            here = (x.position >= size + a) & (x.position < size + b)
            for found, s in ((near, y), (far, x)):
                row = found.setdefault(s.module, [0.0, 0.0])
                row[0] += float(s.nats[here].sum())
                row[1] += int(here.sum())
        e = risen(near, far)
        rows.append(
            dict(
                positions=f"{size + a}-{size + b - 1}",
                tokens=int(sum(n for _, n in far.values())),
                change_percent=_number(e.value),
                low=e.low,
                high=e.high,
                says=shown(e),
            )
        )
    says = (
        f"What {size} more tokens of context are worth: the same tokens at these positions of a "
        f"piece of {study.sizes.piece}, against a cold piece of {size}. Negative is better; here "
        "text differences between positions cancel."
    )
    return Finding("quality.context", says, study.table(rows, "loss with more context"))
