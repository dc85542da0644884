"""Commit: append what was accepted, check the stops, set lengths back, free what finished.

Rolling back a rejected draft is setting `computed`: every key is stored by position and the next
step overwrites what lies past it.
"""

from __future__ import annotations

from torch import Tensor

from deepinfer.engine.request import Request, TokenStep
from deepinfer.engine.runtime import Runtime
from deepinfer.engine.step import StepResult


def commit(rt: Runtime, result: StepResult, step: int, kind: str) -> None:
    """Write a step's result into its requests and release those that finished."""
    stats = rt.stats
    stats.steps += 1
    rows = sum(s.stop - s.start + len(d) for s, d in zip(result.shares, result.drafts))
    if kind == "prefill":
        stats.prefill_steps, stats.prefill_rows = stats.prefill_steps + 1, stats.prefill_rows + rows
    else:
        stats.decode_steps, stats.decode_rows = stats.decode_steps + 1, stats.decode_rows + rows
    for i, share in enumerate(result.shares):
        share.request.computed = share.stop
        if share.request.params.prompt_logprobs and share.start < len(share.request.prompt):
            prompt_logprobs(result, i, step)
    if result.emitters:
        emit(rt, result, step)
    for share in result.shares:
        if share.request.finished:
            stats.finished[share.request.finish_reason] += 1
            rt.scheduler.release(share.request)


def emit(rt: Runtime, result: StepResult, step: int) -> None:
    """Append accepted tokens one by one, stopping where a stop, an error or the length says so."""
    accepted, target = result.accepted, result.target
    tokens, counts = accepted.tokens.tolist(), accepted.count.tolist()
    rows = target.rows.tolist()
    logprob = target.dist.logprobs
    finite = target.dist.finite.tolist()
    for b, i in enumerate(result.emitters):
        request, drafts = result.shares[i].request, result.drafts[i]
        if request.finished:  # by a prompt row
            continue
        before = request.computed
        kept = 0
        for j in range(counts[b]):
            if not finite[rows[b][j]]:
                request.finish("error", non_finite(request, step, j, f"output position {len(request.output)}"))
                break
            token = tokens[b][j]
            request.output.append(token)
            request.logprobs.append(float(logprob[rows[b][j], token]))
            source = "draft" if j < counts[b] - 1 else "target"
            request.steps.append(TokenStep(step, j, source))
            top = request.params.top_logprobs
            if top:
                request.top_logprobs.append(most_likely(logprob[rows[b][j]], top))
            kept += 1
            if stops(rt, request):
                break
        rt.stats.tokens += kept
        for depth in range(len(drafts)):
            rt.stats.drafted[depth] += 1
            rt.stats.accepted[depth] += depth < min(kept, counts[b] - 1)
        request.computed = before + max(kept - 1, 0)


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
