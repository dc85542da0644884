"""Commit: append what was accepted, check the stops, set lengths back, free what finished.

Rolling back a rejected draft is setting `num_computed`: every key is stored by position and the next
step overwrites what lies past it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from deepinfer.engine.completion import TokenStep
from deepinfer.engine.request import Request
from deepinfer.engine.runtime import Runtime
from deepinfer.engine.scheduling.output import ScheduledRequest
from deepinfer.engine.step.in_flight import InFlightStep, StepOutput
from deepinfer.engine.step.non_finite import NONE
from deepinfer.engine.step.speculation import draft_record, hold, pending_draft, require_rows


def commit(rt: Runtime, step: InFlightStep, output: StepOutput) -> None:
    """Write what a step gave into its requests and release those that finished. A request that has
    finished or was preempted since the launch gets nothing."""
    stats, record, requests = rt.stats, step.record, step.requests
    stats.turn(record, "post-process")
    if output.asked is not None:
        require_rows(rt, output.asked.tolist(), step.budget)
    values = HostOutput.of(output)
    landing = {i: r for i, r in enumerate(requests) if r.awaits(step.step)}
    scheduled = [
        settled(s, landing[i]) if i in landing else s for i, s in enumerate(step.scheduled)
    ]
    verified: list[range] = [range(0)] * len(scheduled)
    for i, rows in zip(step.sampling_requests, values.rows):
        verified[i] = range(rows - 1)
    stats.ran(record, step.kind, scheduled, verified, rt.resources.max_rows)
    written = {i: max(a.written for a in r.in_flight) for i, r in landing.items()}
    for i, request in landing.items():
        request.num_computed, request.in_flight = scheduled[i].stop, request.in_flight[1:]
    for i in output.prompt:
        if i in landing:
            contain_errors(
                landing[i], prompt_logprobs, landing[i], scheduled[i], output, i, record.step
            )
    for i, position in broken_chunks(scheduled, output):
        if i in landing:
            contain_errors(landing[i], end_broken, landing[i], scheduled[i], position, record.step)
    for e, i in enumerate(step.sampling_requests):
        if i in landing:
            contain_errors(landing[i], emit, rt, step, landing[i], scheduled[i], values, e)
    drafting = ((e, landing.get(step.sampling_requests[e])) for e in step.drafting)
    hold({e: r for e, r in drafting if r is not None and not r.finished}, output.drafts)
    if rt.prefix_cache is not None:  # before finished requests give their pages back
        seen = {} if step.capture is None else step.capture.snapshots()
        for i, request in landing.items():
            snapshots = seen.get(request.id, {})
            contain_errors(request, rt.prefix_cache.register, request, written[i], snapshots)
    for request in landing.values():
        if request.finished:
            rt.scheduler.release(request)
            rt.resources.finish(request)
        else:
            rt.resources.trim(request)


def contain_errors(request: Request, write: Callable[..., None], *args: object) -> None:
    """Write a part of a result down; an error in it ends this request only."""
    try:
        write(*args)
    except Exception as error:
        request.finish("error", error)


def settled(s: ScheduledRequest, request: Request) -> ScheduledRequest:
    """A scheduled request with its true rows: of a decode request the host only knew the bounds."""
    known = request.num_tokens
    return replace(s, start=known - 1, stop=known) if s.decode and s.stop != known else s


@dataclass(frozen=True, slots=True)
class HostOutput:
    """A `StepOutput` as plain lists, one entry a sampling request. Its drafts: see
    `speculation.hold`."""

    rows: list[int]
    count: list[int]
    tokens: list[list[int]]
    logprobs: list[list[float]]
    finite: list[list[bool]]
    top: tuple[list, list] | None

    @staticmethod
    def of(o: StepOutput) -> HostOutput:
        return HostOutput(
            rows=o.rows.tolist(),
            count=o.count.tolist(),
            tokens=o.tokens.tolist(),
            logprobs=o.logprobs.tolist(),
            finite=o.finite.tolist(),
            top=None if o.top is None else (o.top[0].tolist(), o.top[1].tolist()),
        )


def emit(
    rt: Runtime,
    step: InFlightStep,
    request: Request,
    s: ScheduledRequest,
    v: HostOutput,
    e: int,
) -> None:
    """Append the accepted tokens of sampling request e one by one, up to a stop, an error or the
    maximum length."""
    if request.finished:  # by a prompt row
        return
    if request.id in step.grammar_errors:
        raise step.grammar_errors[request.id]
    record, count, drafts = step.record, v.count[e], v.rows[e] - 1
    if not 1 <= count <= drafts + 1:
        raise ValueError(
            f"request {request.id}: {rt.verifier!r} accepted {count} tokens of {drafts} drafts; "
            f"1 to {drafts + 1} are possible"
        )
    before, kept = request.num_computed, 0
    draft = pending_draft(request) if s.decode and rt.verifier.max_draft else None
    for j in range(count):
        if not v.finite[e][j]:
            place = f"output position {len(request.output)}"
            request.finish("error", non_finite(request, record.step, j, place))
            break
        top = None if v.top is None else (v.top[0][e][j], v.top[1][e][j])
        place = TokenStep(record.step, j, "draft" if j < count - 1 else "target")
        append(rt, request, v.tokens[e][j], v.logprobs[e][j], top, place)
        kept += 1
        if request.finished:
            break
    rt.stats.emitted(record, request, kept)
    if s.decode and rt.verifier.max_draft:
        accepted = min(kept, count - 1)
        rt.stats.verified(
            record, draft_record(draft, record.step, request.id, step.budget, drafts + 1, accepted)
        )
    request.num_computed = before + max(kept - 1, 0)


def append(
    rt: Runtime,
    request: Request,
    token: int,
    logprob: float,
    top: tuple[list, list] | None,
    place: TokenStep,
) -> None:
    """Append one token with its log-probability and the most likely ones (values, ids) of its row;
    finish the request if it is the last. Raises ValueError for a token outside the vocabulary."""
    vocab = rt.config.vocab_size
    if not 0 <= token < vocab:
        raise ValueError(
            f"request {request.id}: {rt.sampler!r} and {rt.verifier!r} emitted token {token}; the ids "
            f"are 0..{vocab - 1}"
        )
    request.output.append(token)
    request.logprobs.append(logprob)
    request.steps.append(place)
    if top is not None and (n := request.params.top_logprobs):
        values, ids = top
        request.top_logprobs.append(dict(zip(ids[:n], values[:n])))
    told = request.grammar is not None and not at_eos(rt, request)
    if told and not request.grammar.accept(token):
        raise ValueError(
            f"request {request.id}: its grammar refuses token {token}, which it had allowed; "
            "di.check the grammar"
        )
    stops(rt, request)


def at_eos(rt: Runtime, request: Request) -> bool:
    """Whether its last token is the end-of-sequence token and ends it. A grammar is not told."""
    return request.output[-1] == rt.config.eos_token_id and not request.params.ignore_eos


def stops(rt: Runtime, request: Request) -> bool:
    """Finish the request if its last token ends it."""
    p = request.params
    if at_eos(rt, request) or request.grammar is not None and request.grammar.done:
        request.finish("stop")
    elif len(request.output) >= p.max_tokens or request.num_tokens >= rt.limits.model_len:
        request.finish("length")
    return request.finished


def non_finite(
    request: Request, step: int, row: int, place: str, logits: bool = True
) -> ArithmeticError:
    """The error of a row with a NaN or an infinite value, in its logits or in the layers."""
    where = f"step {step}, row {row} ({place})"
    what = (
        f"the logits of {where} are not finite or allow no token"
        if logits
        else f"{where} is not finite, what the layers gave there is NaN or infinite"
    )
    return ArithmeticError(
        f"request {request.id}: {what}; the request ended there. Check the weights, an edit in a "
        "trace, or a slot that returns NaN"
    )


def broken_chunks(scheduled: list[ScheduledRequest], output: StepOutput) -> list[tuple[int, int]]:
    """(number of the scheduled request, position of its first row that is not finite) of prefill
    chunks. Decode rows are checked when they emit: rows of drafts that are not accepted may hold
    anything."""
    if output.broken is None:
        return []
    lowest = output.broken.tolist()
    return [(i, p) for i, p in enumerate(lowest) if p != NONE and not scheduled[i].decode]


def end_broken(request: Request, s: ScheduledRequest, position: int, step: int) -> None:
    """End a request with a row of a chunk that is not finite, with or without logits."""
    if not request.finished:
        kind = "prompt " if position < len(request.prompt) else ""
        place, row = f"{kind}position {position}", position - s.start
        request.finish("error", non_finite(request, step, row, place, logits=False))


def prompt_logprobs(
    request: Request, s: ScheduledRequest, output: StepOutput, i: int, step: int
) -> None:
    """Log-probability of each prompt token that this chunk's rows predict; None for the first."""
    if not request.wants_prompt_logprobs:
        return
    values, broken = (x.tolist() for x in output.prompt[i])
    if not request.prompt_logprobs:
        request.prompt_logprobs.append(None)
    for row, position in enumerate(range(s.start, s.stop)):
        if broken[row]:
            request.finish("error", non_finite(request, step, row, f"prompt position {position}"))
            return
        if row < len(values):
            request.prompt_logprobs.append(values[row])
