"""Routing: which experts held-out text uses, and how uneven their load is.

max/mean load is that of the busiest expert over the mean, the time of a step over that of a
perfectly even one where each expert has its own device. Few picks are uneven by chance alone, so
each figure stands beside that of experts drawn at random for as many tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.engine.engine import Engine
from experiments.nano.report.findings import Finding
from experiments.nano.report.parallel import each
from experiments.nano.report.study import Study
from experiments.nano.report.texts import Document, Scored, score_one

PREFILL = 2048  # tokens of a prefill batch
DECODE = 64  # sequences of a decode batch
QUANTILES = (0.5, 0.9, 0.99)
DRAWS = 64  # of random routings for the comparison


@dataclass(frozen=True)
class Routed:
    """ids: [l, t, k] experts that each layer chose for the tokens of a document, -1 none."""

    module: str
    ids: Tensor


class Watched:
    """An engine's logits, and what its layers chose meanwhile; not for bos, which is no text."""

    def __init__(self, eng: Engine) -> None:
        self._eng = eng
        self._names = [f"layers.{i}.ffn.experts" for i in range(eng.config.num_hidden_layers)]
        self._parts: list[Tensor] = []

    def __call__(self, ids: list[int]) -> Tensor:
        with self._eng.trace(*self._names) as seen:
            logits = self._eng.logits(ids)
        each = [seen[name].as_subclass(Tensor)[1:] for name in self._names]
        self._parts.append(torch.stack(each).to("cpu", torch.int16))
        return logits

    def routed(self, module: str) -> Routed:
        """All choices so far, as one document's."""
        return Routed(module, torch.cat(self._parts, 1))


def scored_and_routed(
    eng: Engine, bos: int, docs: Sequence[Document], size: int, jobs: int = 1
) -> tuple[list[Scored], list[Routed]]:
    """One pass for two sections. The last token of a piece is scored and never read, so its routing
    is missing."""

    def of(doc: Document) -> tuple[Scored, Routed]:
        watched = Watched(eng)
        return score_one(watched, bos, doc, size), watched.routed(doc.module)

    scored, routed = zip(*each(of, [doc for doc in docs if doc.ids], jobs))
    return list(scored), list(routed)


def load(ids: Tensor, experts: int) -> Tensor:
    """[..., experts] picks of each expert among ids [..., t, k]; -1 (padding) is nobody's."""
    flat = ids.long().flatten(-2)
    counts = torch.zeros(*flat.shape[:-1], experts + 1, dtype=torch.long)
    place = torch.where(flat < 0, experts, flat)
    return counts.scatter_add_(-1, place, torch.ones_like(flat))[..., :experts]


def skew(counts: Tensor) -> Tensor:
    """[...] max/mean load of counts [..., experts]; NaN where nothing was routed."""
    return counts.max(-1).values / counts.double().mean(-1)


def chance(tokens: int, top_k: int, experts: int) -> float:
    """Median max/mean load where each token has `top_k` different experts drawn at random."""
    generator = torch.Generator().manual_seed(0)
    drawn = [
        torch.rand(tokens, experts, generator=generator).topk(top_k, -1).indices
        for _ in range(DRAWS)
    ]
    return float(torch.stack([skew(load(ids, experts)) for ids in drawn]).median())


def decode_batches(routed: Sequence[Routed], rows: int) -> Tensor:
    """[l, batches, rows, k]: each batch has one token of each of `rows` places spread evenly over
    all documents, as sequences that are decoded together; the next batch has the next tokens."""
    every = torch.cat([r.ids for r in routed], 1)
    batches = every.shape[1] // rows
    return every[:, : batches * rows].unflatten(1, (rows, batches)).transpose(1, 2)


def findings(study: Study, routed: Sequence[Routed]) -> Iterator[Finding]:
    c = study.stored.config
    experts, k = c.n_routed_experts, c.num_experts_per_tok
    every = torch.cat([r.ids for r in routed], 1)
    prefill = list(every.split(PREFILL, 1))
    prefill = [p for p in prefill if p.shape[1] == PREFILL] or prefill
    decode = decode_batches(routed, DECODE)
    whole = load(every, experts)
    by_prefill = torch.stack([skew(load(p, experts)) for p in prefill], 1)
    by_decode = skew(load(decode, experts))
    by_document = torch.stack([skew(load(r.ids, experts)) for r in routed], 1)
    rows = [
        dict(
            layer=layer,
            unused=int((whole[layer] == 0).sum()),
            least_over_mean=float(whole[layer].min() / whole[layer].double().mean()),
            all=float(skew(whole[layer])),
            prefill=_middle(by_prefill[layer]),
            decode=_middle(by_decode[layer]),
            document=_middle(by_document[layer]),
            worst_document=float(by_document[layer].max()),
        )
        for layer in range(len(whole))
    ]
    says = (
        f"Load of the {experts} experts (top-{k}) by layer on {every.shape[1]:,} held-out tokens. "
        "unused: experts nobody chose; the others are max/mean load: of all tokens, and the median "
        f"over prefill batches of {prefill[0].shape[1]} consecutive tokens, over decode batches of "
        f"{DECODE} sequences (one token each, from places spread over all files), over documents."
    )
    yield Finding("routing.layers", says, study.table(rows, "expert load by layer"))
    rows = []
    lengths = torch.tensor([r.ids.shape[1] for r in routed])
    longest = 4096  # tokens are enough for chance to show nothing any more
    for name, each, tokens in (
        ("all", skew(whole)[:, None], every.shape[1]),
        ("prefill batch", by_prefill, prefill[0].shape[1]),
        ("decode batch", by_decode, DECODE),
        ("document", by_document, int(lengths.median())),
    ):
        cells = each.flatten()
        at = torch.quantile(cells, torch.tensor(QUANTILES, dtype=torch.float64)).tolist()
        rows.append(
            dict(per=name, tokens=tokens, number=each.shape[1])
            | {f"p{100 * q:g}": x for q, x in zip(QUANTILES, at)}
            | dict(largest=float(cells.max()), by_chance=chance(min(tokens, longest), k, experts))
        )
    says = (
        "max/mean load over all layers: quantiles over (layer, batch) pairs. by_chance: the median "
        f"for random experts and as many tokens (at most {longest}), so what is above it is real "
        f"skew. Documents have {int(lengths.min())} to {int(lengths.max())} tokens, half of "
        f"them at most {int(lengths.median())}."
    )
    yield Finding("routing.skew", says, study.table(rows, "skew of expert load"))


def _middle(x: Tensor) -> float:
    return float(x.median())
