"""Launch: the host's part of a step, from a schedule to work that is queued on the device.

What the host knows of the rows goes into `StepInputs`; each request counts what the step may bring
it (`mark_in_flight`); the rest is `execute.execute`, which reads what the step before carried.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

from deepinfer.engine.device import put
from deepinfer.engine.request import Request
from deepinfer.engine.runtime import Runtime
from deepinfer.engine.scheduling.output import ScheduledRequest, SchedulerOutput
from deepinfer.engine.step import execute
from deepinfer.engine.step.batch import Work, build
from deepinfer.engine.step.decode_inputs import SamplingRequests, decode_rows, known_rows
from deepinfer.engine.step.execute import StepInputs
from deepinfer.engine.step.grammar_mask import grammar_masks
from deepinfer.engine.step.in_flight import InFlightStep, StepOutput, mark_in_flight, surely_last
from deepinfer.engine.step.non_finite import NonFiniteRows
from deepinfer.engine.step.speculation import (
    allocate,
    ask_budget,
    draft_batch,
    pending_draft,
    require_rows,
    stale_survival,
)
from deepinfer.model.context import ForwardContext, Tap

# request ids, one a sequence -> what shows the values of their rows
TapOf = Callable[[list[int]], "Tap | None"]


def launch(
    rt: Runtime,
    schedule: SchedulerOutput,
    step: InFlightStep,
    before: InFlightStep | None,
    tap_of: TapOf,
) -> None:
    """Fill in `step`, mark its requests and queue its work. before: the step in flight."""
    stats, record = rt.stats, step.record
    stats.load(record, rt.resources, rt.scheduler.unfinished)
    stats.turn(record, "launch")
    inputs, most = prepare(rt, schedule, step, before, tap_of)
    for request, s, drafts in zip(step.requests, step.scheduled, most):
        mark_in_flight(request, s, drafts, step.step)
    stats.turn(record, rt.device.host_phase)
    step.job = rt.device.launch(partial(run, rt, inputs, step, before))


def run(
    rt: Runtime, inputs: StepInputs, step: InFlightStep, before: InFlightStep | None
) -> StepOutput:
    """The device's part of a step, timed. What it carries stays in `step`."""
    rt.stats.device_begin(step.record)
    carried = None if before is None else before.carried
    output, step.carried = execute.execute(rt, inputs, step.record, carried)
    rt.device.finish()
    rt.stats.device_end(step.record)
    return output


def prepare(
    rt: Runtime,
    schedule: SchedulerOutput,
    step: InFlightStep,
    before: InFlightStep | None,
    tap_of: TapOf,
) -> tuple[StepInputs, list[int]]:
    """(what the device is handed, most drafts that each scheduled request verifies)."""
    scheduled, requests, device = step.scheduled, step.requests, rt.model.device
    tap = tap_of([s.id for s in scheduled])
    numbers = step.sampling_requests = tuple(i for i, s in enumerate(scheduled) if s.emits)
    sampling = [requests[i] for i in numbers]
    decode, rows, prompt, non_finite = None, None, (), None
    if schedule.kind == "decode":
        decode = decode_rows(rt, scheduled, requests, before)
        step.budget, most = decode.budget, [decode.width] * len(scheduled)
        context = rt.context(decode.frame, tap)
        drafts = (
            [pending_tokens(r)[: decode.width] for r in requests] if constrained(sampling) else []
        )
    else:
        verified, step.budget = verified_drafts(rt, scheduled, requests)
        most = [len(d) for d in verified]
        works = [work(rt, r, s, d) for r, s, d in zip(requests, scheduled, verified)]
        if rt.prefix_cache is not None:
            step.capture = rt.prefix_cache.capture(scheduled, requests)
        if not all(s.decode for s in scheduled):
            non_finite = NonFiniteRows(len(scheduled), device)
        context = rt.context(build(works, rt.config, device), tap, step.capture, non_finite)
        spans = logit_spans(works)
        drafts = [verified[i] for i in numbers]
        rows = known_rows(
            rt, [scheduled[i] for i in numbers], sampling, drafts, [spans[i] for i in numbers]
        )
        prompt = tuple(
            (i, spans[i], put(r.prompt[s.start + 1 : s.stop + 1], device))
            for i, (r, s) in enumerate(zip(requests, scheduled))
            if r.wants_prompt_logprobs and not s.decode
        )
    draft = None
    if rt.verifier.max_draft:
        step.drafting = tuple(e for e, r in enumerate(sampling) if not surely_last(r))
    if step.drafting:
        chosen = [numbers[e] for e in step.drafting]
        draft = draft_context(
            rt, [scheduled[i] for i in chosen], [requests[i] for i in chosen], tap_of
        )
    return StepInputs(
        context=context,
        decode=decode,
        sampling_rows=rows,
        sampling_requests=SamplingRequests.of(sampling, device),
        mask=legal_tokens(rt, step, sampling, drafts),
        prompt=prompt,
        non_finite=non_finite,
        draft=draft,
        drafting=put(step.drafting, device),
        top=max([0, *(r.params.top_logprobs for r in sampling)]),
    ), most


def constrained(requests: Sequence[Request]) -> bool:
    """Whether one of these requests has a grammar."""
    return any(r.grammar is not None for r in requests)


def legal_tokens(
    rt: Runtime,
    step: InFlightStep,
    sampling: Sequence[Request],
    drafts: Sequence[tuple[int, ...]],
) -> Tensor | None:
    """The grammars' mask of a step, asked here on the host; None without a grammar. drafts: that
    each sampling request may verify. Errors of grammars are kept in `step` for its commit."""
    if not constrained(sampling):
        return None
    width = max([0, *map(len, drafts)])
    mask, errors = grammar_masks([r.grammar for r in sampling], drafts, width, rt.config.vocab_size)
    step.grammar_errors = {sampling[e].id: error for e, error in errors.items()}
    return None if mask is None else mask.to(rt.model.device)


def pending_tokens(request: Request) -> tuple[int, ...]:
    """The tokens of the draft that the host knows of a request."""
    draft = pending_draft(request)
    return () if draft is None else draft.whole


def work(rt: Runtime, request: Request, s: ScheduledRequest, drafts: tuple[int, ...]) -> Work:
    """The rows of a scheduled request: its tokens, then its drafts."""
    back = rt.config.engram_max_ngram_size - 1
    every = s.decode or request.wants_prompt_logprobs
    return Work(
        ids=[*request.token_slice(s.start, s.stop), *drafts],
        start=s.start,
        before=request.token_slice(max(s.start - back, 0), s.start),
        pages=request.pages,
        state=request.state_id,
        plan=request.plan,
        logits="all" if every else "last" if s.emits else "none",
    )


def logit_spans(works: list[Work]) -> list[tuple[int, int]]:
    """Rows of the logits of each work."""
    spans, at = [], 0
    for w in works:
        rows = {"all": len(w.ids), "last": 1, "none": 0}[w.logits]
        if w.logits == "all" and w.plan is not None:
            rows -= max(0, min(w.plan.rows_from[-1] - w.start, len(w.ids)))
        spans.append((at, at + rows))
        at += rows
    return spans


def verified_drafts(
    rt: Runtime, scheduled: Sequence[ScheduledRequest], requests: Sequence[Request]
) -> tuple[list[tuple[int, ...]], int]:
    """(the draft prefix that each sequence of a mixed step verifies, () if it prefills; the budget
    of those that decode). Raises ValueError if the verifier hands out impossible rows."""
    verified: list[tuple[int, ...]] = [()] * len(scheduled)
    decode = [i for i, s in enumerate(scheduled) if s.decode]
    if not rt.verifier.max_draft or not decode:
        return verified, 0
    others = sum(s.stop - s.start for s in scheduled if not s.decode)
    held = [pending_draft(requests[i]) for i in decode]
    stale = [stale_survival(requests[i], in_flight=False) for i in decode]
    budget = ask_budget(rt, stale, others)
    asked, rows = allocate(rt, draft_batch(rt, held, "cpu"), budget)
    assert asked is not None
    require_rows(rt, asked.tolist(), budget)
    for i, draft, n in zip(decode, held, rows.tolist()):
        verified[i] = () if draft is None else draft.tokens[: n - 1]
    return verified, budget


def draft_context(
    rt: Runtime,
    scheduled: Sequence[ScheduledRequest],
    requests: Sequence[Request],
    tap_of: TapOf,
) -> ForwardContext:
    """Of the draft step behind these requests; ids and positions come with the tokens."""
    works = [
        Work(ids=[0], start=s.stop, state=r.state_id, plan=r.plan, logits="none")
        for s, r in zip(scheduled, requests)
    ]
    batch = build(works, rt.config, rt.model.device, decode=True)
    batch = replace(batch, reach=batch.reach + rt.verifier.max_draft)
    return rt.context(batch, tap_of([s.id for s in scheduled]))
