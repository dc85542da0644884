"""Commit: append what was accepted, check the stops, set lengths back, free what finished.

Rolling back a rejected draft is setting `computed`: every key is stored by position and the next
step overwrites what lies past it.
"""

from __future__ import annotations

from torch import Tensor

from deepinfer.engine.records import StepRecord
from deepinfer.engine.request import Request, TokenStep
from deepinfer.engine.runtime import Runtime
from deepinfer.engine.scheduler import Schedule
from deepinfer.engine.step import StepResult


def commit(rt: Runtime, result: StepResult, record: StepRecord, kind: str) -> None:
    """Write a step's result into its requests and release those that finished."""
    stats, step = rt.stats, record.step
    stats.wait(record)
    stats.turn(record, "post-process")
    stats.ran(record, kind, result.shares, result.drafts, rt.room, rt.scheduler.unfinished)
    for share in result.shares:
        share.request.computed = share.stop
    guarded = [(share.request, prompt_logprobs, (result, i, step)) for i, share in enumerate(result.shares)]
    guarded += [
        (result.shares[i].request, emit, (rt, result, b, record)) for b, i in enumerate(result.emitters)
    ]
    for request, write, arguments in guarded:
        try:
            write(*arguments)
        except Exception as error:  # what one request's result breaks costs that request only
            request.finish("error", error)
    if rt.reuse is not None:  # before what finished gives its pages back
        for share, drafts in zip(result.shares, result.drafts):
            seen = result.snapshots.get(share.request.id, {})
            rt.reuse.learn(share.request, share.stop + len(drafts), seen)
    for share in result.shares:
        if share.request.finished:
            stats.ended(share.request)
            rt.scheduler.release(share.request)


def undo(rt: Runtime, schedule: Schedule) -> None:
    """After a step that failed before or in its commit. A few rows are simply written again, but a
    long chunk has overwritten ring places that held its own history: such a request waits and starts
    over, in no page that others may read."""
    for share in schedule.shares:
        request = share.request
        if request.finished:
            rt.scheduler.release(request)
        if request.state != "running":
            continue
        request.mend()
        if request.output and stops(rt, request):  # its last token was appended, not yet looked at
            rt.room.end(request, request.finish_reason or "stop")
            rt.scheduler.release(request)
            continue
        lost = request.computed == share.start and share.stop - share.start > rt.limits.backtracking
        if lost or request.computed < share.start:
            rt.room.requeue(request)  # `recover` puts it into its queue


def emit(rt: Runtime, result: StepResult, b: int, record: StepRecord) -> None:
    """Append emitter b's accepted tokens one by one, stopping where a stop, an error or the length
    says so."""
    i, target = result.emitters[b], result.target
    request, drafts = result.shares[i].request, result.drafts[i]
    if request.finished:  # by a prompt row
        return
    if request.id in result.errors:
        raise result.errors[request.id]
    count, tokens = int(result.accepted.count[b]), result.accepted.tokens[b].tolist()
    if not 1 <= count <= len(drafts) + 1:
        raise ValueError(
            f"request {request.id}: {rt.verifier!r} accepted {count} tokens of {len(drafts)} drafts; "
            f"1 to {len(drafts) + 1} are possible"
        )
    rows = target.rows[b].tolist()
    before, kept = request.computed, 0
    for j in range(count):
        if not bool(target.dist.finite[rows[j]]):
            place = f"output position {len(request.output)}"
            request.finish("error", non_finite(request, record.step, j, place))
            break
        source = "draft" if j < count - 1 else "target"
        append(rt, request, tokens[j], target.dist.logprobs[rows[j]], TokenStep(record.step, j, source))
        kept += 1
        if request.finished:
            break
    rt.stats.emitted(record, request, kept, min(kept, count - 1), len(drafts))
    request.computed = before + max(kept - 1, 0)


def append(rt: Runtime, request: Request, token: int, logprobs: Tensor, place: TokenStep) -> None:
    """One token with its log-probabilities; ends the request where it is the last. Raises ValueError
    for a token that is none."""
    vocab = rt.config.vocab_size
    if not 0 <= token < vocab:
        raise ValueError(
            f"request {request.id}: {rt.sampler!r} and {rt.verifier!r} emitted token {token}; the ids are "
            f"0..{vocab - 1}"
        )
    request.output.append(token)
    request.logprobs.append(float(logprobs[token]))
    request.steps.append(place)
    if request.params.top_logprobs:
        request.top_logprobs.append(most_likely(logprobs, request.params.top_logprobs))
    if stops(rt, request) and request.finish_reason == "stop" or request.grammar is None:
        return
    if not request.grammar.accept(token):
        raise ValueError(
            f"request {request.id}: its grammar refuses token {token}, which it had allowed; di.check the grammar"
        )
    if request.grammar.done:
        request.finish("stop")


def stops(rt: Runtime, request: Request) -> bool:
    """Finish the request if its last token ends it."""
    p = request.params
    if request.output[-1] == rt.config.eos_token_id and not p.ignore_eos:
        request.finish("stop")
    elif len(request.output) >= p.max_tokens or request.length >= rt.limits.model_len:
        request.finish("length")
    return request.finished


def most_likely(logprobs: Tensor, n: int) -> dict[int, float]:
    """The n most likely of a row's tokens, ties to the lower id."""
    values, ids = logprobs.sort(descending=True, stable=True)
    return dict(zip(ids[:n].tolist(), values[:n].tolist()))


def non_finite(request: Request, step: int, row: int, place: str) -> ArithmeticError:
    return ArithmeticError(
        f"request {request.id}: the logits of step {step}, row {row} ({place}) are not finite or allow "
        "no token; the request ended there. Check the weights, an edit in a trace, or a slot that "
        "returns NaN"
    )


def prompt_logprobs(result: StepResult, i: int, step: int) -> None:
    """Log-probability of each prompt token that this chunk's rows predict; the first token has none."""
    share = result.shares[i]
    request = share.request
    if not request.wants_prompt_logprobs:
        return
    first, last = result.logit_spans[i]
    if not request.prompt_logprobs:
        request.prompt_logprobs.append(None)
    logprobs = result.logits[first:last].log_softmax(-1)
    broken = logprobs.isnan().any(-1).tolist()
    for row, position in enumerate(range(share.start, share.stop)):
        if broken[row]:
            request.finish("error", non_finite(request, step, row, f"prompt position {position}"))
            return
        if position + 1 < len(request.prompt):
            token = request.prompt[position + 1]
            request.prompt_logprobs.append(float(logprobs[row, token]))
