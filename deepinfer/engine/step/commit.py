"""Commit: append what was accepted, check the stops, set lengths back, free what finished.

Rolling back a rejected draft is setting `stored`: every key is stored by position and the next
step overwrites what lies past it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from deepinfer.engine.completion import TokenStep
from deepinfer.engine.request import Request
from deepinfer.engine.runtime import Runtime
from deepinfer.engine.scheduling.output import ScheduledRequest
from deepinfer.engine.stats.records import StepRecord
from deepinfer.engine.step.in_flight import InFlightStep, StepOutput
from deepinfer.engine.step.launch import require_rows
from deepinfer.engine.step.non_finite import NONE
from deepinfer.engine.step.speculation import PendingDraft


def commit(rt: Runtime, step_in_flight: InFlightStep, result: StepOutput) -> None:
    """Write what a step gave into its requests and release those that finished. A request that has
    finished or been preempted since the launch gets nothing."""
    stats, record = rt.stats, step_in_flight.record
    stats.turn(record, "post-process")
    if result.asked is not None:
        require_rows(rt, result.asked.tolist(), step_in_flight.budget)
    values = HostOutput.of(result)
    landing = [
        i for i, s in enumerate(step_in_flight.scheduled) if s.request.awaits(step_in_flight.step)
    ]
    scheduled = [settled(s) if i in landing else s for i, s in enumerate(step_in_flight.scheduled)]
    drafts = dict(zip(step_in_flight.sampling_requests, (range(n - 1) for n in values.rows)))
    verified = [drafts.get(i, range(0)) for i in range(len(scheduled))]
    stats.ran(record, step_in_flight.kind, scheduled, verified, rt.resources.max_rows)
    written = {i: max(a.written for a in scheduled[i].request.in_flight) for i in landing}
    for i in landing:
        request = scheduled[i].request
        request.num_computed, request.in_flight = scheduled[i].stop, request.in_flight[1:]
    for i in landing:
        contain_errors(
            scheduled[i].request, partial(prompt_logprobs, scheduled[i], result, i, record.step)
        )
    for i, position in broken_chunks(scheduled, result):
        if i in written:
            contain_errors(
                scheduled[i].request, partial(end_broken, scheduled[i], position, record.step)
            )
    for e, i in enumerate(step_in_flight.sampling_requests):
        if i in written:
            contain_errors(
                scheduled[i].request, partial(emit, rt, scheduled[i].request, values, e, record)
            )
    set_pending_drafts(step_in_flight, values, landing)
    if rt.prefix_cache is not None:  # before what finished gives its pages back
        seen = {} if step_in_flight.capture is None else step_in_flight.capture.snapshots()
        for i in landing:
            id = scheduled[i].request.id
            leave = partial(rt.prefix_cache.register, scheduled[i].request, written[i])
            contain_errors(scheduled[i].request, partial(leave, seen.get(id, {})))
    for i in landing:
        if scheduled[i].request.finished:
            rt.scheduler.release(scheduled[i].request)
            rt.resources.finish(scheduled[i].request)
        else:
            rt.resources.trim(scheduled[i].request)


def contain_errors(request: Request, write: Callable[[], None]) -> None:
    """Write a part of a result down; what it breaks costs that request only."""
    try:
        write()
    except Exception as error:
        request.finish("error", error)


def settled(item: ScheduledRequest) -> ScheduledRequest:
    """A scheduled request whose place the host only knew the bounds of, where it really was."""
    known = item.request.num_tokens
    return replace(item, start=known - 1, stop=known) if item.decode else item


def undo(rt: Runtime, in_flight: list[InFlightStep]) -> None:
    """After a step that failed: none of these comes to an end; can be broken off and done again. A
    few rows are simply written again, but more than the rings can step back have overwritten places
    that held their own history: such a request waits and starts over, in no page that others may
    read."""
    began = {
        s.request.id: s.start for f in reversed(in_flight) for s in f.scheduled if not s.decode
    }
    for request in {s.request.id: s.request for f in in_flight for s in f.scheduled}.values():
        if request.status != "running":
            continue
        whole = request.repair()
        contain_errors(request, partial(retell, rt, request))
        if request.finished or request.output and stops(rt, request):
            continue  # what it holds goes back, and it is counted, with all that has finished
        written = max([0, *(a.written for a in request.in_flight)])
        lost = written - request.num_computed > rt.limits.backtracking
        if lost or not whole or request.num_computed < began.get(request.id, 0):
            rt.resources.requeue(request)  # `recover` puts it into its queue
        request.in_flight = ()


def retell(rt: Runtime, request: Request) -> None:
    """Its grammar knows the tokens that were emitted, and no other: where a commit or a question was
    broken off, nobody can say what it was told."""
    if request.grammar is None:
        return
    state, told = request.compiled.start(), list(request.output)
    if told and at_eos(rt, request):
        told.pop()
    for token in told:
        if not state.accept(token):
            raise ValueError(
                f"request {request.id}: its grammar refuses token {token}, which it had accepted; "
                "di.check the grammar"
            )
    request.grammar = state


@dataclass(frozen=True, slots=True)
class HostOutput:
    """An `StepOutput` as plain lists, one entry an emitter."""

    rows: list[int]
    count: list[int]
    tokens: list[list[int]]
    logprobs: list[list[float]]
    finite: list[list[bool]]
    top: tuple[list, list] | None
    errors: dict[int, Exception]
    drafts: list[list[int]]
    confidence: list[list[float]]
    survival: list[list[float]]

    @staticmethod
    def of(o: StepOutput) -> HostOutput:
        top = None if o.top is None else (o.top[0].tolist(), o.top[1].tolist())
        return HostOutput(
            o.rows.tolist(),
            o.count.tolist(),
            o.tokens.tolist(),
            o.logprobs.tolist(),
            o.finite.tolist(),
            top,
            o.errors,
            o.drafts.tolist(),
            o.confidence.tolist(),
            o.survival.tolist(),
        )


def emit(rt: Runtime, request: Request, v: HostOutput, e: int, record: StepRecord) -> None:
    """Append emitter e's accepted tokens one by one, stopping where a stop, an error or the length
    says so."""
    if request.finished:  # by a prompt row
        return
    if request.id in v.errors:
        raise v.errors[request.id]
    count, drafts = v.count[e], v.rows[e] - 1
    if not 1 <= count <= drafts + 1:
        raise ValueError(
            f"request {request.id}: {rt.verifier!r} accepted {count} tokens of {drafts} drafts; "
            f"1 to {drafts + 1} are possible"
        )
    before, kept = request.num_computed, 0
    for j in range(count):
        if not v.finite[e][j]:
            place = f"output position {len(request.output)}"
            request.finish("error", non_finite(request, record.step, j, place))
            break
        source = "draft" if j < count - 1 else "target"
        top = None if v.top is None else (v.top[0][e][j], v.top[1][e][j])
        append(
            rt, request, v.tokens[e][j], v.logprobs[e][j], top, TokenStep(record.step, j, source)
        )
        kept += 1
        if request.finished:
            break
    rt.stats.emitted(record, request, kept, min(kept, count - 1), drafts)
    request.num_computed = before + max(kept - 1, 0)


def set_pending_drafts(step_in_flight: InFlightStep, v: HostOutput, landing: list[int]) -> None:
    """Every request that goes on holds its next draft."""
    dists = step_in_flight.carried.dists if step_in_flight.carried is not None else ()
    for e in step_in_flight.drafting:
        request = step_in_flight.scheduled[step_in_flight.sampling_requests[e]].request
        if request.finished or step_in_flight.sampling_requests[e] not in landing:
            continue
        stale = request.draft.survival if request.draft is not None else ()
        request.draft = PendingDraft(
            request.num_tokens,
            tuple(v.drafts[e]),
            tuple(v.confidence[e]),
            tuple(v.survival[e]),
            stale,
            tuple((d.probs[e], d.logprobs[e]) for d in dists),
        )


def append(
    rt: Runtime,
    request: Request,
    token: int,
    logprob: float,
    top: tuple[list, list] | None,
    place: TokenStep,
) -> None:
    """One token with its log-probability and the most likely ones (values, ids) of its row; ends the request where it is the last. Raises ValueError
    for a token that is none."""
    vocab = rt.config.vocab_size
    if not 0 <= token < vocab:
        raise ValueError(
            f"request {request.id}: {rt.sampler!r} and {rt.verifier!r} emitted token {token}; the ids are "
            f"0..{vocab - 1}"
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
            f"request {request.id}: its grammar refuses token {token}, which it had allowed; di.check the grammar"
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


def broken_chunks(scheduled: list[ScheduledRequest], result: StepOutput) -> list[tuple[int, int]]:
    """(number of the scheduled request, position of its first row that is not finite) of prefill chunks. Decode
    rows are looked at where they emit: rows of drafts that are not accepted mean nothing."""
    if result.broken is None:
        return []
    lowest = result.broken.tolist()
    return [(i, p) for i, p in enumerate(lowest) if p != NONE and not scheduled[i].decode]


def end_broken(item: ScheduledRequest, position: int, step: int) -> None:
    """End a request with a row of a chunk that is not finite, whether it has logits or none."""
    request, kind = item.request, "prompt " if position < len(item.request.prompt) else ""
    if not request.finished:
        place, row = f"{kind}position {position}", position - item.start
        request.finish("error", non_finite(request, step, row, place, logits=False))


def prompt_logprobs(item: ScheduledRequest, result: StepOutput, i: int, step: int) -> None:
    """Log-probability of each prompt token that this chunk's rows predict; the first token has none."""
    request = item.request
    if i not in result.prompt or not request.wants_prompt_logprobs:
        return
    values, broken = (x.tolist() for x in result.prompt[i])
    if not request.prompt_logprobs:
        request.prompt_logprobs.append(None)
    for row, position in enumerate(range(item.start, item.stop)):
        if broken[row]:
            request.finish("error", non_finite(request, step, row, f"prompt position {position}"))
            return
        if row < len(values):
            request.prompt_logprobs.append(values[row])
