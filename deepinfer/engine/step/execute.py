"""One engine step on the device: forward -> distribution and draw -> accepted prefix -> next drafts.

launch.py prepares it on the host, commit.py writes down what came out. `execute` sees tensors only:
no request, no grammar, nothing that waits for the host.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from deepinfer.engine.device import to_host
from deepinfer.engine.runtime import Runtime
from deepinfer.engine.stats.records import StepRecord
from deepinfer.engine.step.decode_inputs import (
    DecodeInputs,
    SamplingRequests,
    SamplingRows,
    resolve,
)
from deepinfer.engine.step.in_flight import Carried, StepOutput
from deepinfer.engine.step.non_finite import NonFiniteRows
from deepinfer.engine.step.speculation import proposed
from deepinfer.model.context import ForwardContext
from deepinfer.slots.protocols import Accepted, Draft, RowKeys, RowSet, Target
from deepinfer.slots.results import expect


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What the host hands over. context: of the forward, with the whole batch unless it is a decode
    step; decode: a decode step's inputs, from which its batch and sampled rows are made;
    sampling_rows: the sampled rows of any other step; sampling_requests: parameters of the e requests
    that it samples for; mask: [e, w+1, v] legal tokens by draft depth, None without a grammar; prompt:
    requests with prompt log-probabilities to give, as (number, rows of the logits, tokens that they
    predict); non_finite: what looks at the rows of chunks, None without one; draft: context of the
    next drafts, of the sampling requests `drafting`; top: most likely tokens to give of each row."""

    context: ForwardContext
    decode: DecodeInputs | None
    sampling_rows: SamplingRows | None
    sampling_requests: SamplingRequests
    mask: Tensor | None
    prompt: tuple[tuple[int, tuple[int, int], Tensor], ...]
    non_finite: NonFiniteRows | None
    draft: ForwardContext | None
    drafting: Tensor | None
    top: int


def execute(
    rt: Runtime, inputs: StepInputs, record: StepRecord, before: Carried | None
) -> tuple[StepOutput, Carried]:
    """Forward, sample, accept, draft, by tensor operations only. record: the step's, which the time
    of the drafter is marked in; before: what the step before carried. Returns what the host reads and
    what the next step reads."""
    context, rows = inputs.context, inputs.sampling_rows
    if inputs.decode is not None:
        batch, rows = resolve(rt, inputs.decode, before)
        context = replace(context, batch=batch)
    assert rows is not None
    logits = rt.model(context).logits
    prompt = {i: prompt_logprobs(logits, span, ids) for i, span, ids in inputs.prompt}
    accepted, target = (
        sample(rt, inputs, rows, logits) if len(inputs.sampling_requests) else (None, None)
    )
    carried = carry(rt, inputs, record, rows, accepted)
    return step_output(inputs, rows, accepted, target, carried, prompt), carried


def prompt_logprobs(logits: Tensor, span: tuple[int, int], tokens: Tensor) -> tuple[Tensor, Tensor]:
    """(log-probability [len(tokens)] of the tokens that a chunk's rows predict, [rows] whether one
    is not finite)."""
    rows = logits[span[0] : span[1]].log_softmax(-1)
    values = rows[: len(tokens)].gather(1, tokens[:, None])[:, 0]
    return to_host(values), to_host(rows.isnan().any(-1))


def sample(
    rt: Runtime, inputs: StepInputs, e: SamplingRows, logits: Tensor
) -> tuple[Accepted, Target]:
    """The target's distribution and draw at every sampled row, and the accepted prefix of each draft.
    Raises TypeError or ValueError for a result of another shape, naming the slot."""
    chosen = logits if e.at is None else logits[e.at]
    q, width, n = chosen.shape[0], e.drafts.shape[1], len(inputs.sampling_requests)
    params, _ = inputs.sampling_requests.rows(e.owner)
    mask = inputs.mask
    if mask is not None:
        mask = mask[e.owner, e.depth.clamp(max=mask.shape[1] - 1)]  # padding lies deeper
    keys = e.keys(inputs.sampling_requests.seeds)
    dist = rt.sampler.distribution(chosen, params, mask)
    sampled = rt.sampler.draw(dist, keys)

    def check(value: Any, shape: tuple[int, ...], slot: str, what: str, floating: bool | None):
        expect(value, shape, lambda: f"{slot} {getattr(rt, slot)!r}.{what}", floating)

    shape = tuple(chosen.shape)
    check(dist.probs, shape, "sampler", "distribution (probs)", True)
    check(dist.logprobs, shape, "sampler", "distribution (logprobs)", True)
    check(dist.finite, (q,), "sampler", "distribution (finite)", None)
    check(sampled.tokens, (q,), "sampler", "draw (tokens)", False)
    target = Target(dist, sampled, e.target_rows(), keys)
    zeros = torch.zeros(e.drafts.shape, dtype=torch.float32, device=e.drafts.device)
    draft = Draft(tokens=e.drafts, confidence=zeros, logprobs=zeros, dists=e.dists)
    accepted = rt.verifier.accept(draft, target)
    check(accepted.tokens, (n, width + 1), "verifier", "accept (tokens)", False)
    check(accepted.count, (n,), "verifier", "accept (count)", False)
    return accepted, target


def carry(
    rt: Runtime,
    inputs: StepInputs,
    record: StepRecord,
    e: SamplingRows,
    accepted: Accepted | None,
) -> Carried:
    """The sampling requests behind this step, with their next drafts."""
    recent, length, out, draft = e.recent, e.length, e.out, None
    if accepted is not None:
        count = accepted.count.clamp(0, accepted.tokens.shape[1])
        ids = torch.cat([e.recent, accepted.tokens], 1)
        behind = torch.arange(e.recent.shape[1], device=ids.device)
        recent, length, out = ids.gather(1, count[:, None] + behind), length + count, out + count
        recent = recent.masked_fill((recent < 0) | (recent >= rt.config.vocab_size), -1)
    if inputs.draft is not None and inputs.drafting is not None:
        draft = propose(rt, inputs, record, recent, length, out)
    drafts = proposed(draft, inputs.drafting, length, rt.verifier.max_draft)
    return Carried(recent=recent, length=length, out=out, drafts=drafts)


def propose(
    rt: Runtime,
    inputs: StepInputs,
    record: StepRecord,
    recent: Tensor,
    length: Tensor,
    out: Tensor,
) -> Draft:
    """The next block of every sampling request that goes on."""
    assert inputs.draft is not None and inputs.drafting is not None
    rt.stats.device_end(record)
    rt.stats.device_begin(record, "draft")
    at, batch = inputs.drafting, inputs.draft.batch
    tokens = recent[at, -1].clamp(min=0)  # a request without a last token ends
    positions = length[at] - 1
    params, seeds = inputs.sampling_requests.rows(at)
    rows = RowSet(positions, batch.seq, batch.row_set.first, positions)
    batch = replace(batch, ids=tokens, positions=positions, length=positions, row_set=rows)
    return rt.model.drafter.propose(
        tokens,
        positions,
        rt.verifier.max_draft,
        replace(inputs.draft, batch=batch),
        rt.sampler,
        params,
        RowKeys(seeds, out[at]),
        rt.verifier.rule == "rejection",
    )


def step_output(
    inputs: StepInputs,
    e: SamplingRows,
    accepted: Accepted | None,
    target: Target | None,
    carried: Carried,
    prompt: dict[int, tuple[Tensor, Tensor]],
) -> StepOutput:
    """What the commit reads, on its way to the host."""
    none = e.drafts[:0]
    count, tokens, logprobs, finite, top = none, none, none, none, None
    if accepted is not None and target is not None:
        count, tokens = accepted.count, accepted.tokens
        at, vocab = target.rows.clamp(min=0), target.dist.logprobs.shape[1]
        logprobs = target.dist.logprobs[at, tokens.clamp(0, vocab - 1)]
        finite = target.dist.finite[at]
        if inputs.top:  # ties to the lower id
            values, ids = target.dist.logprobs[at].sort(descending=True, stable=True)
            top = to_host(values[..., : inputs.top]), to_host(ids[..., : inputs.top])
    return StepOutput(
        rows=to_host(e.rows),
        asked=None if e.asked is None else to_host(e.asked),
        count=to_host(count),
        tokens=to_host(tokens),
        logprobs=to_host(logprobs),
        finite=to_host(finite),
        top=top,
        drafts=carried.drafts.to_host(),
        prompt=prompt,
        broken=None if inputs.non_finite is None else to_host(inputs.non_finite.lowest),
    )
