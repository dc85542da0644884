"""One engine step: rows -> logits -> legal tokens -> law and draw -> accepted prefix -> next drafts.

Pure with respect to requests: it reads them and returns what happened; commit.py writes it down.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from deepinfer import rng
from deepinfer.cache.snapshots import Snapshot
from deepinfer.engine.batch import Work, build
from deepinfer.engine.legal import legal_mask
from deepinfer.engine.records import StepRecord
from deepinfer.engine.request import Request
from deepinfer.engine.runtime import Runtime
from deepinfer.engine.scheduler import Schedule, Share
from deepinfer.model.context import Tap
from deepinfer.slots.protocols import Accepted, Draft, RowKeys, RowParams, Target
from deepinfer.slots.results import expect


@dataclass(frozen=True, slots=True)
class StepResult:
    """shares: what ran, each with its drafts as they were verified; emitters: indices of the shares
    that emit, in the order of the rest: accepted tokens and laws; logit_spans: flat logit rows of each
    share; errors: by request id, of grammars that failed; snapshots: window rows at page ends, by
    request id and position."""

    shares: tuple[Share, ...]
    emitters: tuple[int, ...]
    drafts: tuple[tuple[int, ...], ...]
    accepted: Accepted | None
    target: Target | None
    logits: Tensor
    logit_spans: tuple[tuple[int, int], ...]
    errors: dict[int, Exception]
    snapshots: dict[int, dict[int, Snapshot]] = field(default_factory=dict)


def run(
    rt: Runtime, schedule: Schedule, record: StepRecord, tap: Tap | None = None
) -> StepResult:
    """Forward and sample the scheduled rows. record: where the times go."""
    rt.stats.turn(record, "launch")
    drafts = verified_drafts(rt, schedule.shares)
    works = [work(rt, s, d) for s, d in zip(schedule.shares, drafts)]
    batch = build(works, rt.config, rt.model.device, schedule.kind == "decode")
    rt.stats.turn(record, rt.stats.clock.host_phase)
    rt.stats.device_begin(record)
    sink = None if rt.reuse is None else rt.reuse.crossings(schedule.shares)
    logits = rt.model(rt.context(batch, tap, sink)).logits
    spans, at = [], 0
    for w in works:
        rows = {"all": len(w.ids), "last": 1, "none": 0}[w.logits]
        if w.logits == "all" and w.plan is not None:
            rows -= max(0, min(w.plan.rows_from[-1] - w.start, len(w.ids)))
        spans.append((at, at + rows))
        at += rows
    emitters = tuple(i for i, s in enumerate(schedule.shares) if s.emits)
    accepted, target, errors = None, None, {}
    if emitters:
        accepted, target, errors = sample(rt, schedule.shares, emitters, drafts, logits, spans)
    rt.stats.device_end(record)
    return StepResult(
        schedule.shares, emitters, tuple(drafts), accepted, target, logits, tuple(spans), errors,
        {} if sink is None else sink.snapshots(),
    )  # fmt: skip


def work(rt: Runtime, share: Share, drafts: tuple[int, ...]) -> Work:
    """The rows of a share: its tokens, then its drafts."""
    r, back = share.request, rt.config.engram_max_ngram_size - 1
    logits = "all" if share.decode or r.wants_prompt_logprobs else "last" if share.emits else "none"
    return Work(
        ids=[*r.token_slice(share.start, share.stop), *drafts],
        start=share.start,
        before=r.token_slice(max(share.start - back, 0), share.start),
        pages=r.pages,
        state=r.slot,
        plan=r.plan,
        logits=logits,
    )


def verified_drafts(rt: Runtime, shares: tuple[Share, ...]) -> list[tuple[int, ...]]:
    """The draft prefix each sequence verifies, none where it is not a decode share: budget from stale
    survivals, depth from fresh ones."""
    n, every = rt.verifier.max_draft, shares
    shares = tuple(s for s in shares if s.decode)
    if n == 0 or not shares:
        return [()] * len(every)
    others = sum(s.stop - s.start for s in every if not s.decode)
    survival = torch.zeros(len(shares), n, dtype=torch.float64)
    stale = torch.ones(len(shares), n, dtype=torch.float64)
    for i, s in enumerate(shares):
        d = held_draft(s.request)
        if d is not None:
            survival[i, : len(d.tokens)] = torch.tensor(d.survival, dtype=torch.float64)
            stale[i, : len(d.stale)] = torch.tensor(d.stale, dtype=torch.float64)
    budget = max(min(rt.verifier.budget(stale, rt.cost), rt.limits.rows - others), len(shares))
    who = f"verifier {rt.verifier!r}.allocate"
    allocated = rt.verifier.allocate(survival, budget)
    expect(allocated, (len(shares),), who, False)
    rows = allocated.tolist()
    if any(not 1 <= r <= 1 + n for r in rows):
        raise ValueError(f"{who} returned {rows}: each sequence runs 1 to {1 + n} rows")
    held = {s.request.id: held_draft(s.request) for s in shares}
    verified = {id: d.tokens[: n - 1] for (id, d), n in zip(held.items(), rows) if d is not None}
    return [verified.get(s.request.id, ()) for s in every]


def row_params(requests: list[Request], device) -> RowParams:
    """Sampling parameters, one row a request."""
    p = [r.params for r in requests]
    return RowParams(
        torch.tensor([x.temperature for x in p], dtype=torch.float64, device=device),
        torch.tensor([x.top_p for x in p], dtype=torch.float64, device=device),
        torch.tensor([x.top_k for x in p], dtype=torch.long, device=device),
    )


def row_keys(requests: list[Request], positions: list[int], device) -> RowKeys:
    """Random keys at output positions, one row a request."""
    seeds = [rng.signed(r.seed) for r in requests]
    return RowKeys(
        torch.tensor(seeds, dtype=torch.long, device=device),
        torch.tensor(positions, dtype=torch.long, device=device),
    )


def sample(
    rt: Runtime, shares, emitters: tuple[int, ...], drafts, logits: Tensor, spans
) -> tuple[Accepted, Target, dict[int, Exception]]:
    """The target's law and draw at every emitting row, the accepted prefix of each draft, and the
    errors of grammars by request id."""
    device, width = logits.device, max(len(drafts[i]) for i in emitters)
    flat, owners, positions, rows = [], [], [], []
    for i in emitters:
        request, n = shares[i].request, len(drafts[i])
        first = spans[i][1] - n - 1
        rows.append([*range(len(flat), len(flat) + n + 1), *[-1] * (width - n)])
        flat += range(first, first + n + 1)
        owners += [request] * (n + 1)
        positions += range(len(request.output), len(request.output) + n + 1)
    chosen = logits if len(flat) == logits.shape[0] else logits[torch.tensor(flat, device=device)]
    keys = row_keys(owners, positions, device)
    requests = [shares[i].request for i in emitters]
    mask, errors = legal_mask(requests, [drafts[i] for i in emitters], rt.config.vocab_size, device)
    dist = rt.sampler.distribution(chosen, row_params(owners, device), mask)
    sampled = rt.sampler.draw(dist, keys)
    expect(dist.probs, tuple(chosen.shape), f"sampler {rt.sampler!r}.distribution (probs)", True)
    expect(dist.logprobs, tuple(chosen.shape), f"sampler {rt.sampler!r}.distribution (logprobs)", True)
    expect(dist.finite, (len(flat),), f"sampler {rt.sampler!r}.distribution (finite)")
    expect(sampled.tokens, (len(flat),), f"sampler {rt.sampler!r}.draw (tokens)", False)
    target = Target(dist, sampled, torch.tensor(rows, device=device), keys)
    draft = stacked_drafts(rt, shares, emitters, drafts, width, device)
    accepted = rt.verifier.accept(draft, target)
    expect(accepted.tokens, (len(emitters), width + 1), f"verifier {rt.verifier!r}.accept (tokens)", False)
    expect(accepted.count, (len(emitters),), f"verifier {rt.verifier!r}.accept (count)", False)
    return accepted, target, errors


def stacked_drafts(rt: Runtime, shares, emitters, drafts, width: int, device) -> Draft:
    """The verified drafts as one record, [b, width], -1 where a sequence verifies fewer."""
    tokens = torch.full((len(emitters), width), -1, dtype=torch.long, device=device)
    for row, i in enumerate(emitters):
        if drafts[i]:
            tokens[row, : len(drafts[i])] = torch.tensor(drafts[i], device=device)
    zeros = torch.zeros(tokens.shape, dtype=torch.float32, device=device)
    dists = ()
    if rt.verifier.rule == "rejection" and width:
        dists = tuple(stack_dists(rt, shares, emitters, k, device) for k in range(width))
    return Draft(tokens, zeros, zeros, dists)


def stack_dists(rt: Runtime, shares, emitters, k: int, device):
    """The laws of draft k of every sequence; a sequence without one gets a law of zeros."""
    from deepinfer.slots.protocols import Dist

    v = rt.config.vocab_size
    empty = torch.zeros(v, dtype=torch.float64, device=device)
    probs, logprobs = [], []
    for i in emitters:
        held = shares[i].request.draft
        law = (empty, empty) if held is None or k >= len(held.laws) else held.laws[k]
        probs.append(law[0])
        logprobs.append(law[1].double())
    finite = torch.ones(len(emitters), dtype=torch.bool, device=device)
    return Dist(torch.stack(probs), torch.stack(logprobs), finite)


@dataclass(frozen=True, slots=True)
class HeldDraft:
    """A request's next draft on the host. at: length of the request that it continues; survival:
    running product of confidences; stale: the survival of the draft before it (what a budget may look
    at); laws: kept for rule 'rejection'."""

    at: int
    tokens: tuple[int, ...]
    confidence: tuple[float, ...]
    survival: tuple[float, ...]
    stale: tuple[float, ...]
    laws: tuple = ()


def held_draft(request: Request) -> HeldDraft | None:
    """The draft of what comes next; None also where only that of an earlier place is there, because
    drafting failed after a step was committed."""
    d = request.draft
    return d if d is not None and d.at == request.length else None


def propose(
    rt: Runtime, requests: list[Request], record: StepRecord, tap: Tap | None = None
) -> None:
    """Draft the next block of every request (all prefilled, none finished) and hold it there."""
    n = rt.verifier.max_draft
    if n == 0 or not requests:
        return
    rt.stats.turn(record, "launch")
    works = [
        Work([r.output[-1]], r.length - 1, state=r.slot, plan=r.plan, logits="none") for r in requests
    ]
    device = rt.model.device
    batch = build(works, rt.config, device, decode=True)
    keep = rt.verifier.rule == "rejection"
    rt.stats.turn(record, rt.stats.clock.host_phase)
    rt.stats.device_begin(record, "draft")
    draft = rt.model.drafter.propose(
        batch.ids, batch.positions, n, rt.context(batch, tap), rt.sampler,
        row_params(requests, device), row_keys(requests, [len(r.output) for r in requests], device), keep,
    )
    rt.stats.device_end(record)
    rt.stats.wait(record)
    tokens, confidence = draft.tokens.tolist(), draft.confidence.double()
    survival = confidence.cumprod(-1).tolist()
    rt.stats.turn(record, "post-process")
    for i, r in enumerate(requests):
        laws = tuple((d.probs[i], d.logprobs[i]) for d in draft.dists)
        stale = r.draft.survival if r.draft is not None else ()
        r.draft = HeldDraft(
            r.length, tuple(tokens[i]), tuple(confidence[i].tolist()), tuple(survival[i]), stale, laws
        )
