"""The drafter's loss: what a frozen target says about blocks drafted all over its text.

    anchor a   the last accepted position; g = the text's token at a+1; the block's slots k = 1 .. n
               predict positions a+1+k, each after the text's own tokens (teacher forcing)
    p_k, q_k   laws of target and drafter for that position; 1 - TV_k = sum min(p_k, q_k) is the
               chance that rejection sampling accepts a token drawn from q_k
    loss       sum_k w_k [0.1 CE_k(text) + 0.9 TV_k + 1.0 BCE(c_k, 1 - TV_k)] / sum_k w_k,
               w_k = exp(-(k-1)/4), mean over anchors; no gradient through the target of BCE
Source of the loss: the published training recipe of DSpark drafters (DeepSpec). All of it stays on
the device: nothing here looks at a value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from deepinfer.kernels.numerics import acc_dtype
from deepinfer.model.context import ForwardContext
from deepinfer.model.drafter import Drafter
from deepinfer.model.stack import Model
from deepinfer.slots.protocols import Rows
from experiments.nano.train.draft_attend import DraftBlocks
from experiments.nano.train.fast import fused

# ----------------------------------------------------------------------------------- the anchors


@dataclass(frozen=True, slots=True)
class Anchors:
    """seq, last: [a] long, sequence of the training batch and last accepted position in it."""

    seq: Tensor
    last: Tensor

    def tokens(self, ids: Tensor, behind: int, n: int) -> Tensor:
        """[a, n] ids at positions last + behind, last + behind + 1, ... of ids [b, t]."""
        at = self.last[:, None] + behind + torch.arange(n, device=ids.device)
        return ids[self.seq[:, None], at]

    def target_rows(self, n: int, length: int) -> Tensor:
        """[a, n] rows, in a flat batch of sequences of `length` rows, whose logits are the target's
        laws for the slots: row last + k predicts position last + 1 + k."""
        first = self.seq * length + self.last + 1
        return first[:, None] + torch.arange(n, device=first.device)


def random_anchors(
    sequences: int,
    length: int,
    each: int,
    n: int,
    *,
    device: torch.device | str = "cpu",
    generator: torch.Generator | None = None,
) -> Anchors:
    """`each` different random anchors in every sequence of `length` tokens, so that the last slot's
    token is still text: last + 1 + n < length. Blocks may cross from one document into the next, as
    the backbone's own predictions do. generator: of `device`. Raises ValueError where none fit.
    """
    places = length - 1 - n
    if not 0 < each <= places:
        raise ValueError(
            f"{each} anchors in a sequence of {length} tokens, drafts of {n}: 1 to {places} fit"
        )
    order = torch.rand(sequences, places, device=device, generator=generator)
    last = order.topk(each, dim=1, sorted=False).indices
    seq = torch.arange(sequences, device=device).repeat_interleave(each)
    return Anchors(seq, last.flatten())


# ------------------------------------------------------------------------------------ comparison


@dataclass(frozen=True, slots=True)
class Slots:
    """Drafter against target, per anchor and slot, all [a, n]. cross_entropy: nats of the text's
    token under q; overlap: 1 - TV; score: logit of the confidence; as_target, as_text: whether the
    likeliest token of q is that of p, is the text's."""

    cross_entropy: Tensor
    overlap: Tensor
    score: Tensor
    as_target: Tensor
    as_text: Tensor


def laws(draft: Tensor, target: Tensor, text: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(cross_entropy, overlap, as_target, as_text), each [r], of logits [r, v] and tokens [r].

    Softmax in FP32 (FP64 for FP64 logits). One function of tensors, for torch.compile to fuse.
    """
    wide = acc_dtype(draft)
    log_q = draft.to(wide).log_softmax(1)
    p = target.to(wide).softmax(1)
    cross_entropy = -log_q.gather(1, text[:, None])[:, 0]
    overlap = torch.minimum(p, log_q.exp()).sum(1)
    best = draft.argmax(1)
    return cross_entropy, overlap, best == target.argmax(1), best == text


@torch.no_grad()
def target_logits(model: Model, rows: Rows, at: Tensor, ctx: ForwardContext) -> Tensor:
    """[q, v] logits of rows `at` [q] of a forward that has run: its Output.rows and its ctx. So the
    forward itself need not make those of all rows (logit_rows of length 0)."""
    return model.logits(rows, replace(ctx, batch=replace(ctx.batch, logit_rows=at)))


def compare(
    model: Model,
    rows: Rows,
    ids: Tensor,
    anchors: Anchors,
    ctx: ForwardContext,
    n: int,
    *,
    target: Tensor | None = None,
    chunk: int | None = None,
    compiled: bool = False,
) -> Slots:
    """Draft n tokens at every anchor of text ids [b, t] and compare with the target.

    rows, ctx: of the target's forward over ids, without a cache (of no gradient, but not in
    inference mode). target: [a*n, v] its logits at `anchors.target_rows`, None = made here.
    chunk: slots compared at a time, their laws made again in the backward pass, so that q, p and
    their gradients are held per chunk; None = all at once. compiled: fused by torch.compile.
    """
    drafter, (seq, last) = model.drafter, (anchors.seq, anchors.last)
    context = drafter.sequence_context(rows, ctx)
    token = anchors.tokens(ids, 1, 1)[:, 0]
    blocks = replace(ctx, attention=DraftBlocks(n, compiled))
    step = drafter.block_context(context, seq, token, last + 1, blocks)
    h, base = drafter.states(token, last + 1, n, step)
    if target is None:
        target = target_logits(model, rows, anchors.target_rows(n, context.ring).flatten(), ctx)
    given = (
        h.flatten(0, 1),
        base.flatten(0, 1),
        target,
        anchors.tokens(ids, 1, n).flatten(),
        anchors.tokens(ids, 2, n).flatten(),
    )
    found = in_chunks(slot_laws(drafter, step, compiled), given, chunk)
    return Slots(*(x.view(len(seq), n) for x in found))


def slot_laws(drafter: Drafter, ctx: ForwardContext, compiled: bool) -> Callable:
    """(h, base, target, previous, text) of some slots -> the fields of Slots."""
    find = fused(laws) if compiled else laws

    def run(h: Tensor, base: Tensor, target: Tensor, previous: Tensor, text: Tensor):
        logits, score = drafter.slot_logits(h, base, previous, ctx)
        cross_entropy, overlap, as_target, as_text = find(logits, target, text)
        return cross_entropy, overlap, score, as_target, as_text

    return run


def in_chunks(run: Callable, given: tuple[Tensor, ...], size: int | None) -> list[Tensor]:
    """run(*given) in pieces of `size` rows, made again in the backward pass."""
    if size is None or size >= len(given[0]):
        return list(run(*given))
    pieces = zip(*(x.split(size) for x in given))
    parts = [
        checkpoint(run, *piece, use_reentrant=False, preserve_rng_state=False) for piece in pieces
    ]
    return [torch.cat(x) for x in zip(*parts)]


# -------------------------------------------------------------------------------- loss and metrics


def slot_weights(like: Tensor) -> Tensor:
    """[n] exp(-(k-1)/4) over their sum: an early slot decides about all behind it."""
    k = torch.arange(like.shape[1], device=like.device, dtype=like.dtype)
    return (-k / 4).softmax(0)


def confidence_loss(slots: Slots) -> Tensor:
    """[a, n] BCE of the confidence against the chance that the slot is accepted."""
    return F.binary_cross_entropy_with_logits(
        slots.score, slots.overlap.detach().clamp(0, 1), reduction="none"
    )


def loss(slots: Slots) -> Tensor:
    """The scalar to minimise."""
    each = 0.1 * slots.cross_entropy + 0.9 * (1 - slots.overlap) + confidence_loss(slots)
    return (each.mean(0) * slot_weights(each)).sum()


@dataclass(frozen=True, slots=True)
class Metrics:
    """Means over anchors, on the device. Per slot [n]: overlap (1 - TV), as_target, as_text (how
    often the likeliest tokens agree), confidence, cross_entropy, confidence_loss. Scalars: loss;
    accepted: expected tokens a step by rejection sampling along the text, 1 + sum_k prod_{j<=k}
    (1 - TV_j), the bonus token included."""

    loss: Tensor
    accepted: Tensor
    overlap: Tensor
    as_target: Tensor
    as_text: Tensor
    confidence: Tensor
    cross_entropy: Tensor
    confidence_loss: Tensor

    def numbers(self) -> dict[str, float | list[float]]:
        """Plain numbers. Waits for the device, once."""
        values = [getattr(self, f.name) for f in fields(self)]
        flat = iter(torch.cat([x.flatten().double() for x in values]).tolist())
        return {
            f.name: [next(flat) for _ in range(len(x))] if x.ndim else next(flat)
            for f, x in zip(fields(self), values)
        }


@torch.no_grad()
def metrics(slots: Slots) -> Metrics:
    def mean(x: Tensor) -> Tensor:
        return x.to(slots.overlap.dtype).mean(0)

    return Metrics(
        loss=loss(slots),
        accepted=1 + slots.overlap.cumprod(1).sum(1).mean(),
        overlap=mean(slots.overlap),
        as_target=mean(slots.as_target),
        as_text=mean(slots.as_text),
        confidence=mean(slots.score.sigmoid()),
        cross_entropy=mean(slots.cross_entropy),
        confidence_loss=mean(confidence_loss(slots)),
    )
