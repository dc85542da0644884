"""Launch: the host's part of a step, from a schedule to work that is queued on the device.

What the host knows of the rows goes into a `Plan`; each request is ahead by what the step may bring
it (`mark_in_flight`); the rest is `execute.execute`, which knows the step before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from deepinfer.engine.device import put
from deepinfer.engine.runtime import Runtime
from deepinfer.engine.scheduling.output import ScheduledRequest, SchedulerOutput
from deepinfer.engine.step import execute
from deepinfer.engine.step.batch import Work, build
from deepinfer.engine.step.decode_inputs import (
    SamplingRequests,
    ask_budget,
    decode_rows,
    known_rows,
)
from deepinfer.engine.step.execute import StepInputs
from deepinfer.engine.step.in_flight import InFlightStep, mark_in_flight, surely_last
from deepinfer.engine.step.non_finite import NonFiniteRows
from deepinfer.engine.step.speculation import pending_draft
from deepinfer.model.context import ForwardContext, Tap
from deepinfer.slots.results import expect

# request ids, one a sequence -> what shows the values of their rows
TapOf = Callable[[list[int]], "Tap | None"]


def launch(
    rt: Runtime,
    schedule: SchedulerOutput,
    step_in_flight: InFlightStep,
    before: InFlightStep | None,
    tap_of: TapOf,
) -> None:
    """Fill the flight in, take its requests off and queue its work. before: the step on its way."""
    stats, record = rt.stats, step_in_flight.record
    stats.load(record, rt.resources, rt.scheduler.unfinished)
    stats.turn(record, "launch")
    plan, most = prepare(rt, schedule, step_in_flight, before, tap_of)
    for item, drafts in zip(step_in_flight.scheduled, most):
        mark_in_flight(item, drafts, step_in_flight.step)
    stats.turn(record, rt.device.host_phase)
    step_in_flight.job = rt.device.launch(
        partial(execute.execute, rt, plan, step_in_flight, before)
    )


def prepare(
    rt: Runtime,
    schedule: SchedulerOutput,
    step_in_flight: InFlightStep,
    before: InFlightStep | None,
    tap_of: TapOf,
) -> tuple[StepInputs, list[int]]:
    """(what the device is handed, most drafts that each request verifies)."""
    scheduled, device = step_in_flight.scheduled, rt.model.device
    tap = tap_of([s.request.id for s in scheduled])
    step_in_flight.sampling_requests = tuple(i for i, s in enumerate(scheduled) if s.emits)
    sampling_rows = [scheduled[i] for i in step_in_flight.sampling_requests]
    sampling_requests, broken = (
        SamplingRequests.of([s.request for s in sampling_rows], device),
        None,
    )
    if schedule.kind == "decode":
        rows, known, wanted = decode_rows(rt, scheduled, before), None, []
        step_in_flight.budget = rows.budget
        most = [rows.width] * len(scheduled)
        context = rt.context(rows.frame, tap)
    else:
        rows, drafts = None, verified_drafts(rt, scheduled)
        most = [len(d) for d in drafts]
        works = [work(rt, s, d) for s, d in zip(scheduled, drafts)]
        step_in_flight.capture = (
            None if rt.prefix_cache is None else rt.prefix_cache.capture(scheduled)
        )
        broken = None if all(s.decode for s in scheduled) else NonFiniteRows(len(scheduled), device)
        context = rt.context(build(works, rt.config, device), tap, step_in_flight.capture, broken)
        spans = logit_spans(works)
        known = known_rows(
            rt,
            sampling_rows,
            [drafts[i] for i in step_in_flight.sampling_requests],
            [spans[i] for i in step_in_flight.sampling_requests],
        )
        wanted = [
            (i, spans[i], put(s.request.prompt[s.start + 1 : s.stop + 1], device))
            for i, s in enumerate(scheduled)
            if s.request.wants_prompt_logprobs and not s.decode
        ]
    step_in_flight.drafting, draft = (), None
    if rt.verifier.max_draft:
        step_in_flight.drafting = tuple(
            e for e, s in enumerate(sampling_rows) if not surely_last(s.request)
        )
    if step_in_flight.drafting:
        draft = draft_context(rt, [sampling_rows[e] for e in step_in_flight.drafting], tap_of)
    top = max([0, *(r.params.top_logprobs for r in sampling_requests.requests)])
    return StepInputs(
        context,
        rows,
        sampling_requests,
        known,
        tuple(wanted),
        broken,
        draft,
        put(step_in_flight.drafting, device),
        top,
    ), most


def work(rt: Runtime, item: ScheduledRequest, drafts: tuple[int, ...]) -> Work:
    """The rows of a scheduled request: its tokens, then its drafts."""
    r, back = item.request, rt.config.engram_max_ngram_size - 1
    logits = "all" if item.decode or r.wants_prompt_logprobs else "last" if item.emits else "none"
    return Work(
        ids=[*r.token_slice(item.start, item.stop), *drafts],
        start=item.start,
        before=r.token_slice(max(item.start - back, 0), item.start),
        pages=r.pages,
        state=r.state_id,
        plan=r.plan,
        logits=logits,
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


def verified_drafts(rt: Runtime, scheduled: tuple[ScheduledRequest, ...]) -> list[tuple[int, ...]]:
    """The draft prefix that each sequence of a mixed step verifies, none where it prefills."""
    n, every = rt.verifier.max_draft, scheduled
    scheduled = tuple(s for s in scheduled if s.decode)
    if n == 0 or not scheduled:
        return [()] * len(every)
    held = {s.request.id: pending_draft(s.request) for s in scheduled}
    others = sum(s.stop - s.start for s in every if not s.decode)
    budget = ask_budget(rt, [() if d is None else d.stale for d in held.values()], others)
    survival = torch.zeros(len(scheduled), n, dtype=torch.float64)
    for i, d in enumerate(held.values()):
        if d is not None:
            survival[i, : len(d.tokens)] = torch.tensor(d.survival, dtype=torch.float64)
    who = f"verifier {rt.verifier!r}.allocate"
    allocated = rt.verifier.allocate(survival, budget)
    expect(allocated, (len(scheduled),), who, False)
    rows = require_rows(rt, allocated.tolist(), budget)
    verified = {id: d.tokens[: n - 1] for (id, d), n in zip(held.items(), rows) if d is not None}
    return [verified.get(s.request.id, ()) if s.decode else () for s in every]


def require_rows(rt: Runtime, rows: list[int], budget: int) -> list[int]:
    """The rows that a verifier has handed out. Raises ValueError where they are impossible."""
    who, n = f"verifier {rt.verifier!r}.allocate", rt.verifier.max_draft
    if any(not 1 <= r <= 1 + n for r in rows):
        raise ValueError(f"{who} returned {rows}: each sequence runs 1 to {1 + n} rows")
    if sum(rows) > budget:
        raise ValueError(f"{who} returned {rows}, {sum(rows)} rows: the budget is {budget}")
    return rows


def draft_context(rt: Runtime, scheduled: list[ScheduledRequest], tap_of: TapOf) -> ForwardContext:
    """Of the draft step behind these requests; ids and positions come with the tokens."""
    works = [
        Work([0], s.stop, state=s.request.state_id, plan=s.request.plan, logits="none")
        for s in scheduled
    ]
    batch = build(works, rt.config, rt.model.device, decode=True)
    batch = replace(batch, reach=batch.reach + rt.verifier.max_draft)
    return rt.context(batch, tap_of([s.request.id for s in scheduled]))
