"""One engine step on the device: forward -> distribution and draw -> accepted prefix -> next drafts.

launch.py prepares it on the host, commit.py writes down what came out. Nothing here touches a
request; a grammar is asked here, and such steps run synchronously (overlap.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deepinfer.engine.device import to_host
from deepinfer.engine.runtime import Runtime
from deepinfer.engine.step.decode_inputs import (
    DecodeInputs,
    SamplingRequests,
    SamplingRows,
    resolve,
)
from deepinfer.engine.step.grammar_mask import grammar_mask
from deepinfer.engine.step.in_flight import Carried, InFlightStep, StepOutput
from deepinfer.engine.step.non_finite import NonFiniteRows
from deepinfer.model.context import ForwardContext
from deepinfer.slots.protocols import Accepted, Dist, Draft, RowKeys, RowSet, Target
from deepinfer.slots.results import expect


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What the host hands over. rows: a decode step's, None where `context` has the whole batch;
    emitting: then where it emits; wanted: requests with prompt log-probabilities to give, as (number,
    rows of the logits, tokens that they predict); broken: what looks at the rows of chunks, None
    where there is none; draft: context of the next drafts, of the emitters `drafting`."""

    context: ForwardContext
    rows: DecodeInputs | None
    sampling_requests: SamplingRequests
    sampling_rows: SamplingRows | None
    wanted: tuple[tuple[int, tuple[int, int], Tensor], ...]
    broken: NonFiniteRows | None
    draft: ForwardContext | None
    drafting: Tensor | None
    top: int


def execute(
    rt: Runtime, plan: StepInputs, step_in_flight: InFlightStep, before: InFlightStep | None
) -> StepOutput:
    """Forward, sample, accept, draft. Tensor operations only, but where a grammar is asked."""
    rt.stats.device_begin(step_in_flight.record)
    context, sampling_rows = plan.context, plan.sampling_rows
    if plan.rows is not None:
        batch, sampling_rows = resolve(rt, plan.rows, None if before is None else before.carried)
        context = replace(context, batch=batch)
    assert sampling_rows is not None
    logits = rt.model(context).logits
    prompt = {i: prompt_logprobs(logits, span, ids) for i, span, ids in plan.wanted}
    nobody = not plan.sampling_requests.requests
    accepted, target, errors = (
        (None, None, {}) if nobody else sample(rt, plan, sampling_rows, logits)
    )
    step_in_flight.carried, confidence = carry(rt, plan, step_in_flight, sampling_rows, accepted)
    out = outcome(
        plan, sampling_rows, accepted, target, step_in_flight.carried, confidence, prompt, errors
    )
    rt.device.finish()
    rt.stats.device_end(step_in_flight.record)
    return out


def prompt_logprobs(logits: Tensor, span: tuple[int, int], tokens: Tensor) -> tuple[Tensor, Tensor]:
    """(log-probability [len(tokens)] of the tokens that a chunk's rows predict, [rows] whether one
    is not finite)."""
    rows = logits[span[0] : span[1]].log_softmax(-1)
    values = rows[: len(tokens)].gather(1, tokens[:, None])[:, 0]
    return to_host(values), to_host(rows.isnan().any(-1))


def sample(
    rt: Runtime, plan: StepInputs, e: SamplingRows, logits: Tensor
) -> tuple[Accepted, Target, dict[int, Exception]]:
    """The target's distribution and draw at every emitting row, the accepted prefix of each draft, and the
    errors of grammars by request id."""
    chosen = logits if e.at is None else logits[e.at]
    q, width = chosen.shape[0], e.drafts.shape[1]
    params, _ = plan.sampling_requests.rows(e.owner)
    mask, errors = None, {}
    if any(r.grammar is not None for r in plan.sampling_requests.requests):
        mask, errors = grammar_masks(plan.sampling_requests, e, q, rt.config.vocab_size)
    keys = e.keys(plan.sampling_requests.seeds)
    dist = rt.sampler.distribution(chosen, params, mask)
    sampled = rt.sampler.draw(dist, keys)
    expect(dist.probs, tuple(chosen.shape), f"sampler {rt.sampler!r}.distribution (probs)", True)
    expect(
        dist.logprobs, tuple(chosen.shape), f"sampler {rt.sampler!r}.distribution (logprobs)", True
    )
    expect(dist.finite, (q,), f"sampler {rt.sampler!r}.distribution (finite)")
    expect(sampled.tokens, (q,), f"sampler {rt.sampler!r}.draw (tokens)", False)
    target = Target(dist, sampled, e.target_rows(), keys)
    zeros = torch.zeros(e.drafts.shape, dtype=torch.float32, device=e.drafts.device)
    accepted = rt.verifier.accept(Draft(e.drafts, zeros, zeros, e.dists), target)
    n = len(plan.sampling_requests.requests)
    expect(accepted.tokens, (n, width + 1), f"verifier {rt.verifier!r}.accept (tokens)", False)
    expect(accepted.count, (n,), f"verifier {rt.verifier!r}.accept (count)", False)
    return accepted, target, errors


def grammar_masks(
    sampling_requests: SamplingRequests, e: SamplingRows, q: int, vocab: int
) -> tuple[Tensor | None, dict[int, Exception]]:
    """Legal tokens [q, vocab] of the sampled rows. The host has to see the drafts for it."""
    rows, drafts = e.rows.tolist(), e.drafts.tolist()
    verified = [tuple(d[: n - 1]) for d, n in zip(drafts, rows)]
    mask, errors = grammar_mask(list(sampling_requests.requests), verified, vocab, e.rows.device)
    if mask is not None and mask.shape[0] < q:
        mask = torch.cat([mask, mask.new_ones(q - mask.shape[0], vocab)])  # padding
    return mask, errors


def carry(
    rt: Runtime,
    plan: StepInputs,
    step_in_flight: InFlightStep,
    e: SamplingRows,
    accepted: Accepted | None,
) -> tuple[Carried, Tensor]:
    """(the emitters behind this step with their next drafts, the confidences [e, n] of those)."""
    n, seqs = rt.verifier.max_draft, e.length.shape[0]
    recent, length, out = e.recent, e.length, e.out
    if accepted is not None:
        count = accepted.count.clamp(0, accepted.tokens.shape[1])
        ids = torch.cat([e.recent, accepted.tokens], 1)
        behind = torch.arange(e.recent.shape[1], device=ids.device)
        recent, length, out = ids.gather(1, count[:, None] + behind), length + count, out + count
        recent = recent.masked_fill((recent < 0) | (recent >= rt.config.vocab_size), -1)
    drafts = length.new_full((seqs, n), -1)
    confidence = torch.zeros(seqs, n, dtype=torch.float64, device=length.device)
    if plan.draft is None or plan.drafting is None:
        return Carried(recent, length, out, drafts, confidence), confidence
    draft = propose(rt, plan, step_in_flight, recent, length, out)
    drafts[plan.drafting] = draft.tokens
    confidence[plan.drafting] = draft.confidence.double()
    dists = tuple(spread(d, plan.drafting, seqs) for d in draft.dists)
    return Carried(recent, length, out, drafts, confidence.cumprod(-1), dists), confidence


def spread(dist: Dist, at: Tensor, rows: int) -> Dist:
    """A distribution of some emitters as one of all, zeros for the others."""

    def wide(x: Tensor) -> Tensor:
        return x.new_zeros(rows, *x.shape[1:]).index_copy(0, at, x)

    return replace(
        dist, probs=wide(dist.probs), logprobs=wide(dist.logprobs), finite=wide(dist.finite)
    )


def propose(
    rt: Runtime,
    plan: StepInputs,
    step_in_flight: InFlightStep,
    recent: Tensor,
    length: Tensor,
    out: Tensor,
) -> Draft:
    """The next block of every emitter that goes on."""
    assert plan.draft is not None and plan.drafting is not None
    rt.stats.device_end(step_in_flight.record)
    rt.stats.device_begin(step_in_flight.record, "draft")
    at, batch = plan.drafting, plan.draft.batch
    tokens = recent[at, -1].clamp(min=0)  # a request without a last token ends
    positions = length[at] - 1
    params, seeds = plan.sampling_requests.rows(at)
    rows = RowSet(positions, batch.seq, batch.row_set.first, positions)
    batch = replace(batch, ids=tokens, positions=positions, length=positions, row_set=rows)
    return rt.model.drafter.propose(
        tokens,
        positions,
        rt.verifier.max_draft,
        replace(plan.draft, batch=batch),
        rt.sampler,
        params,
        RowKeys(seeds, out[at]),
        rt.verifier.rule == "rejection",
    )


def outcome(
    plan: StepInputs,
    e: SamplingRows,
    accepted: Accepted | None,
    target: Target | None,
    carried: Carried,
    confidence: Tensor,
    prompt: dict,
    errors: dict[int, Exception],
) -> StepOutput:
    """What the commit reads, on its way to the host."""
    none = e.drafts[:0]
    count, tokens, logprobs, finite, top = none, none, none, none, None
    if accepted is not None and target is not None:
        count, tokens = accepted.count, accepted.tokens
        at, vocab = target.rows.clamp(min=0), target.dist.logprobs.shape[1]
        logprobs = target.dist.logprobs[at, tokens.clamp(0, vocab - 1)]
        finite = target.dist.finite[at]
        if plan.top:  # ties to the lower id
            values, ids = target.dist.logprobs[at].sort(descending=True, stable=True)
            top = to_host(values[..., : plan.top]), to_host(ids[..., : plan.top])
    return StepOutput(
        to_host(e.rows),
        None if e.asked is None else to_host(e.asked),
        to_host(count),
        to_host(tokens),
        to_host(logprobs),
        to_host(finite),
        top,
        to_host(carried.drafts),
        to_host(confidence),
        to_host(carried.survival),
        prompt,
        None if plan.broken is None else to_host(plan.broken.lowest),
        errors,
    )
