"""Resolve: the rows of a step as they really are, made on the device.

Of prefill and mixed steps the host knows every row (`known_rows`). Of a decode step behind one that
is still on its way it knows only how many rows there are at most: ids, positions, lengths and who
verifies how many drafts come out of what the step before `Carried`, by tensor operations alone
(`resolve`). A synchronous engine calls the same function, with nothing carried.

Rows that nobody gets, and rows behind the pages that a sequence holds, are padding: they write
nowhere. The latter belong to a request that has its last token and does not know it yet.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deepinfer import rng
from deepinfer.engine.device import put
from deepinfer.engine.request import Request
from deepinfer.engine.runtime import Runtime
from deepinfer.engine.scheduling.output import ScheduledRequest
from deepinfer.engine.step.batch import Work, build
from deepinfer.engine.step.in_flight import Carried, InFlightStep
from deepinfer.engine.step.speculation import pending_draft
from deepinfer.slots.protocols import Batch, Dist, RowKeys, RowParams, RowSet
from deepinfer.slots.results import expect


@dataclass(frozen=True, slots=True)
class SamplingRequests:
    """Who emits in a step, as the host knows it: sampling parameters and seeds, a row each."""

    requests: tuple[Request, ...]
    params: RowParams
    seeds: Tensor

    @staticmethod
    def of(requests: list[Request], device: torch.device) -> SamplingRequests:
        p = [r.params for r in requests]
        params = RowParams(
            put([x.temperature for x in p], device, torch.float64),
            put([x.top_p for x in p], device, torch.float64),
            put([x.top_k for x in p], device),
        )
        seeds = put([rng.signed(r.seed) for r in requests], device)
        return SamplingRequests(tuple(requests), params, seeds)

    def rows(self, at: Tensor) -> tuple[RowParams, Tensor]:
        return self.params.rows(at), self.seeds[at]


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Where they emit. at: [q] rows of the logits that are sampled, None = all; owner, depth: [q]
    the emitter of each and how many drafts are before it; first, rows: [e] the emitter's first one
    and how many; drafts: [e, w] verified (-1 none), with their dists; recent [e, g], length [e], out
    [e]: as in `Carried`, before the step; asked: [e] rows that the verifier wanted."""

    at: Tensor | None
    owner: Tensor
    depth: Tensor
    first: Tensor
    rows: Tensor
    drafts: Tensor
    recent: Tensor
    length: Tensor
    out: Tensor
    dists: tuple[Dist, ...] = ()
    asked: Tensor | None = None

    def target_rows(self) -> Tensor:
        """[e, w+1] sampled row of each emitter by depth, -1 where it has none."""
        depth = torch.arange(self.drafts.shape[1] + 1, device=self.rows.device)
        return torch.where(depth < self.rows[:, None], self.first[:, None] + depth, -1)

    def keys(self, seeds: Tensor) -> RowKeys:
        return RowKeys(seeds[self.owner], self.out[self.owner] + self.depth)


def recent_ids(rt: Runtime, request: Request, stop: int) -> list[int]:
    """The ids before position `stop` that the next rows look back at, -1 in front of the first."""
    size = rt.config.engram_max_ngram_size
    ids = request.token_slice(max(stop - size, 0), stop)
    return [-1] * (size - len(ids)) + ids


# ------------------------------------------------------------------------------ the host knows all


def known_rows(
    rt: Runtime,
    scheduled: list[ScheduledRequest],
    drafts: list[tuple[int, ...]],
    spans: list[tuple[int, int]],
) -> SamplingRows:
    """Of emitting requests whose rows the host knows. drafts: that each verifies; spans: its rows of
    the logits."""
    device, width = rt.model.device, max([0, *map(len, drafts)])
    size = rt.config.engram_max_ngram_size
    at, owner, depth, first = [], [], [], []
    for e, (draft, (_, stop)) in enumerate(zip(drafts, spans)):
        n = len(draft) + 1
        first.append(len(at))
        at += range(stop - n, stop)
        owner += [e] * n
        depth += range(n)
    requests = [s.request for s in scheduled]
    padded = [[*d, *[-1] * (width - len(d))] for d in drafts]
    return SamplingRows(
        put(at, device),
        put(owner, device),
        put(depth, device),
        put(first, device),
        put([len(d) + 1 for d in drafts], device),
        put(padded, device).view(len(scheduled), width),
        put([recent_ids(rt, s.request, s.stop) for s in scheduled], device).view(
            len(scheduled), size
        ),
        put([s.stop for s in scheduled], device),
        put([len(r.output) for r in requests], device),
        pending_dists(rt, requests, width),
    )


def pending_dists(rt: Runtime, requests: list[Request], width: int) -> tuple[Dist, ...]:
    """The dists of the drafts that requests hold, one record a depth; zeros where there is none."""
    if rt.verifier.rule != "rejection":
        return ()
    device = rt.model.device
    empty = torch.zeros(rt.config.vocab_size, dtype=torch.float64, device=device)
    dists = []
    for k in range(width):
        held = [pending_draft(r) for r in requests]
        there = [(empty, empty) if d is None or k >= len(d.dists) else d.dists[k] for d in held]
        dists.append(
            Dist(
                torch.stack([p for p, _ in there]),
                torch.stack([lp.double() for _, lp in there]),
                torch.ones(len(there), dtype=torch.bool, device=device),
            )
        )
    return tuple(dists)


# ---------------------------------------------------------------------------------- a decode step


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """A decode step as the host knows it. origin: [b] number of each sequence among the emitters of
    the step before, -1 where the host knows its state: `fresh`; frame: pages, slots and plans of
    the sequences; capacity: [b] tokens that their pages hold; total: rows of the step; width: most
    drafts of a sequence; budget: what the verifier may hand out."""

    frame: Batch
    fresh: Carried
    origin: Tensor
    remapped: bool
    capacity: Tensor
    total: int
    width: int
    budget: int


def decode_rows(
    rt: Runtime, scheduled: tuple[ScheduledRequest, ...], before: InFlightStep | None
) -> DecodeInputs:
    """The host's part of a decode step: budget from stale survivals, room for the rows."""
    device, n, b = rt.model.device, rt.verifier.max_draft, len(scheduled)
    requests = [s.request for s in scheduled]
    origin = [-1 if before is None else before.place(r) for r in requests]
    held = [pending_draft(r) if o < 0 else None for r, o in zip(requests, origin)]
    drafted = set() if before is None else set(before.drafting)
    most = [n if d is not None or o in drafted else 0 for d, o in zip(held, origin)]
    # What the request holds while its next draft is on its way is the draft before that one.
    stale = [
        (d.stale if d is not None else r.draft.survival if o >= 0 and r.draft is not None else ())
        for r, d, o in zip(requests, held, origin)
    ]
    budget = ask_budget(rt, stale, 0)
    width = min(max(most), budget - b)
    drafts = [() if d is None else d.tokens for d in held]
    survival = [() if d is None else d.survival for d in held]
    fresh = Carried(
        put([recent_ids(rt, r, r.num_tokens) for r in requests], device),
        put([r.num_tokens for r in requests], device),
        put([len(r.output) for r in requests], device),
        put([padded(d, n, -1) for d in drafts], device).view(b, n),
        put([padded(s, n, 0.0) for s in survival], device, torch.float64).view(b, n),
        pending_dists(rt, requests, n),
    )
    works = [
        Work([0], s.start, pages=r.pages, state=r.state_id, plan=r.plan, logits="all")
        for r, s in zip(requests, scheduled)
    ]
    frame = build(works, rt.config, device, decode=True)
    frame = replace(frame, reach=frame.reach + width, max_rows=1 + width)
    capacity = [len(s.request.pages) * rt.limits.page_size for s in scheduled]
    total = min(budget, b + sum(most))
    return DecodeInputs(
        frame,
        fresh,
        put(origin, device),
        any(o >= 0 for o in origin),
        put(capacity, device),
        total,
        width,
        budget,
    )


def padded(values: tuple, n: int, filler: float) -> list:
    return [*values[:n], *[filler] * (n - len(values))]


def ask_budget(rt: Runtime, stale: list[tuple[float, ...]], others: int) -> int:
    """Rows that the verifier gives to these sequences, beside `others` of the same step. stale: the
    survivals of the draft before the one that would be verified, () = 1.0 each."""
    b, n = len(stale), rt.verifier.max_draft
    if n == 0:
        return b
    table = torch.ones(b, n, dtype=torch.float64)
    for i, known in enumerate(stale):
        table[i, : len(known)] = torch.tensor(known[:n], dtype=torch.float64)
    return max(min(rt.verifier.budget(table, rt.cost), rt.limits.rows - others), b)


def carried(d: DecodeInputs, before: Carried | None) -> Carried:
    """The state of every sequence: of the step before where it was in it, else the host's."""
    if not d.remapped:
        return d.fresh
    if before is None:
        raise RuntimeError("the step before this one failed: there is nothing to go on from")
    at, there = d.origin.clamp(min=0), d.origin >= 0

    def pick(new: Tensor, old: Tensor) -> Tensor:
        return torch.where(there[:, None] if new.dim() == 2 else there, new[at], old)

    def pick_dist(new: Dist, old: Dist) -> Dist:
        probs, logprobs = new.probs.double(), new.logprobs.double()
        return Dist(pick(probs, old.probs), pick(logprobs, old.logprobs), old.finite)

    dists = tuple(map(pick_dist, before.dists, d.fresh.dists)) or d.fresh.dists
    return Carried(
        pick(before.recent, d.fresh.recent),
        pick(before.length, d.fresh.length),
        pick(before.out, d.fresh.out),
        pick(before.drafts, d.fresh.drafts),
        pick(before.survival, d.fresh.survival),
        dists,
    )


def resolve(rt: Runtime, d: DecodeInputs, before: Carried | None) -> tuple[Batch, SamplingRows]:
    """The batch of a decode step, and where it emits."""
    now = carried(d, before)
    device, b, n = now.length.device, now.length.shape[0], rt.verifier.max_draft
    asked, rows = None, torch.ones(b, dtype=torch.long, device=device)
    if n:
        asked = rt.verifier.allocate(now.survival, d.budget)
        expect(asked, (b,), f"verifier {rt.verifier!r}.allocate", False)
        asked = asked.to(device)
        there = (now.drafts[:, : d.width] >= 0).long().cumprod(-1).sum(-1)
        rows = torch.minimum(asked.clamp(1, 1 + n), 1 + there)  # commit says if it was outside
    ends = rows.cumsum(0)
    row = torch.arange(d.total, device=device)
    owner = torch.searchsorted(ends, row, right=True)
    padding = owner >= b
    owner = owner.clamp(max=b - 1)
    first, start = ends - rows, now.length - 1
    depth = row - first[owner]
    positions = start[owner] + depth
    padding = padding | (positions >= d.capacity[owner])
    rows = torch.minimum(rows, (d.capacity - start).clamp(min=0))
    positions = positions.masked_fill(padding, 0)
    seq = owner.masked_fill(padding, -1)

    ids = torch.cat([now.recent, now.drafts[:, : d.width]], 1)  # newest known id at place g - 1
    newest = now.recent.shape[1] - 1
    place = (newest + depth).clamp(max=ids.shape[1] - 1)
    behind = torch.arange(1, newest + 1, device=device)  # how far back, nearest first
    row_set = RowSet(positions, seq, first, start)
    batch = replace(
        d.frame,
        ids=ids[owner, place].masked_fill(padding, 0).clamp(min=0),  # never -1 into the embedding
        positions=positions,
        seq=seq,
        rows=rows,
        length=start,
        row_set=row_set,
        logit_rows=row,
        lookback=ids[owner[:, None], place[:, None] - behind].masked_fill(padding[:, None], -1),
    )
    verified = torch.arange(d.width, device=device) < rows[:, None] - 1
    drafts = now.drafts[:, : d.width].masked_fill(~verified, -1)
    sampling_rows = SamplingRows(
        None,
        owner,
        depth,
        first,
        rows,
        drafts,
        now.recent,
        now.length,
        now.out,
        now.dists[: d.width],
        asked,
    )
    return batch, sampling_rows
