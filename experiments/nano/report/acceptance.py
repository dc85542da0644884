"""Acceptance on real text at temperature 1: what the drafter's laws are worth against the target's.

A draft of law q is accepted with probability sum min(p, q) = 1 - TV(p, q), p the target's law at
the same place, and the text before both is the real one. The expected length of a step is then

    1 + sum_k prod_{j <= k} (1 - TV_j)

All draft blocks of a text are run at once, through the model's own drafter: its context keys are
computed for every position from one teacher-forced pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deepinfer.engine.engine import Engine
from deepinfer.engine.step.batch import Work, build
from deepinfer.kernels.records import Layout, Records
from deepinfer.measure.bootstrap import Estimate
from deepinfer.model.context import ForwardContext
from deepinfer.model.drafter import SequenceContext
from experiments.nano.report.findings import Finding
from experiments.nano.report.intervals import aligned, over_modules, ratio
from experiments.nano.report.parallel import each
from experiments.nano.report.study import Study
from experiments.nano.report.texts import Document, pieces

AT_ONCE = 128  # draft blocks: each of their two laws takes AT_ONCE * drafts * vocabulary numbers


@dataclass(frozen=True)
class Laws:
    """Of a draft blocks on a text: target, draft [a, n, v] and confidence [a, n]. Row k of block a
    is about token starts[a] + 1 + k; the Markov head is fed with the text."""

    starts: Tensor
    target: Tensor
    draft: Tensor
    confidence: Tensor


@torch.no_grad()
def laws_on_text(eng: Engine, ids: list[int], starts: Tensor) -> Iterator[Laws]:
    """The laws of draft blocks that continue ids[: start + 1], in groups of AT_ONCE.

    eng: one whose verifier drafts. ids: bos and the text; starts: [a] positions of the last token
    before each block, 1 <= start <= len(ids) - drafts. Raises ValueError for others.
    """
    n, t = eng.config.max_draft, len(ids)
    if len(starts) and not 1 <= int(starts.min()) <= int(starts.max()) <= t - n:
        raise ValueError(
            f"blocks start at {int(starts.min())}..{int(starts.max())}: "
            f"{t} tokens and {n} drafts allow 1..{t - n}"
        )
    with eng.trace("features") as seen:
        logits = eng.logits(ids)
    rt, drafter, text = eng.runtime, eng.model.drafter, torch.tensor(ids, device=eng.model.device)
    ctx = replace(rt.context(build([Work(ids)], eng.config, text.device)), cache=None)
    context = _sequence_context(eng, seen["features"].as_subclass(Tensor), ctx)
    for at in starts.to(text.device).split(AT_ONCE):
        rows = at[:, None] + torch.arange(n, device=text.device)
        step = drafter.block_context(context, torch.zeros_like(at), text[at], at, ctx)
        h, base = drafter.states(text[at], at, n, step)
        draft, score = drafter.slot_logits(
            h.flatten(0, 1), base.flatten(0, 1), text[rows].flatten(), step
        )
        yield Laws(
            at,
            logits[rows].softmax(-1),
            draft.softmax(-1).view_as(base),
            score.view_as(rows).clamp(-60, 60).sigmoid(),
        )


def _sequence_context(eng: Engine, features: Tensor, ctx: ForwardContext) -> SequenceContext:
    """The drafter's window keys at every position of a text, of features [t, ...] that an engine
    computed in chunks."""
    keys = eng.model.drafter.context_keys(features, ctx.batch.row_set, ctx)
    windows = {}
    for layer, key in zip(eng.model.mtp, keys):
        fmt = ctx.attention.kv_spec(eng.config, layer.layer).window_format
        windows[layer.layer] = Records(ctx.round(key, fmt), None, Layout("float", key.shape[-1]))
    return SequenceContext(windows, len(features))


# ----------------------------------------------------------------------------------- statistics


@dataclass(frozen=True)
class Acceptance:
    """Of the draft blocks of one document, FP64: accept [a, n] = 1 - TV, confidence [a, n], and
    equal [a, n] bool: the draft's likeliest token is the target's."""

    module: str
    accept: Tensor
    confidence: Tensor
    equal: Tensor


def expected_length(accept: Tensor) -> Tensor:
    """[a] expected tokens of a step, bonus included, of acceptance probabilities [a, n]."""
    return 1 + accept.cumprod(-1).sum(-1)


def measure(
    eng: Engine, bos: int, docs: Sequence[Document], size: int, apart: int, jobs: int = 1
) -> list[Acceptance]:
    """Acceptance of draft blocks every `apart` tokens of the documents' pieces."""

    def of(doc: Document) -> list[Acceptance]:
        ids = [[bos, *doc.ids[a : b - 1]] for a, b in pieces(len(doc.ids), size)]
        return [of_piece(eng, doc.module, x, apart) for x in ids if len(x) > eng.config.max_draft]

    return [found for of_doc in each(of, docs, jobs) for found in of_doc]


def of_piece(eng: Engine, module: str, ids: list[int], apart: int) -> Acceptance:
    """Acceptance of draft blocks every `apart` tokens of one piece, bos included."""
    starts = torch.arange(1, len(ids) - eng.config.max_draft + 1, apart)
    parts = []
    for law in laws_on_text(eng, ids, starts):
        overlap = torch.minimum(law.target, law.draft).sum(-1)
        equal = law.target.argmax(-1) == law.draft.argmax(-1)
        parts.append([x.double().cpu() for x in (overlap, law.confidence)] + [equal.cpu()])
    return Acceptance(module, *(torch.cat(x) for x in zip(*parts)))


def mean_length(found: Sequence[Acceptance]) -> Estimate:
    """The mean expected length over all blocks, with its interval over modules."""
    return over_modules(aligned(_sums(found, lambda x: expected_length(x.accept))), ratio)


def _sums(found: Sequence[Acceptance], value) -> dict[str, list[float]]:
    """module -> [sum of value over its blocks, blocks]."""
    out: dict[str, list[float]] = {}
    for x in found:
        row = out.setdefault(x.module, [0.0, 0.0])
        each = value(x)
        row[0] += float(each.sum())
        row[1] += len(each)
    return out


def findings(study: Study, found: Sequence[Acceptance]) -> Iterator[Finding]:
    e, blocks = mean_length(found), sum(len(x.accept) for x in found)
    rows = [dict(blocks=blocks, expected_length=e.value, low=e.low, high=e.high)]
    says = (
        "Expected tokens a step on real held-out text at temperature 1: 1 + sum over k of the "
        "chance that drafts 1..k are all accepted, each with probability 1 - TV of the two laws. "
        f"Draft blocks every {study.sizes.apart} tokens; the Markov head is fed with the text."
    )
    yield Finding("acceptance.length", says, study.table(rows, "expected length, temperature 1"))
    rows = []
    for k in range(found[0].accept.shape[1]):
        a = over_modules(aligned(_sums(found, lambda x, k=k: x.accept[:, k])), ratio)
        c = over_modules(aligned(_sums(found, lambda x, k=k: x.confidence[:, k])), ratio)
        q = over_modules(aligned(_sums(found, lambda x, k=k: x.equal[:, k])), ratio)
        rows.append(
            dict(
                draft=k + 1,
                accept=a.value,
                low=a.low,
                high=a.high,
                confidence=c.value,
                same_first=q.value,
            )
        )
    says = (
        "By position in the draft: accept, the mean of 1 - TV; confidence, what the head says of "
        "it on average; same_first, how often both laws have the same likeliest token."
    )
    yield Finding("acceptance.position", says, study.table(rows, "acceptance on text by position"))
