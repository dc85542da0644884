"""Decode inputs: the rows of a step as they really are, made on the device.

The host knows every row of a prefill or mixed step (`known_rows`). Of a decode step behind one that
is still in flight it knows only how many rows there are at most: ids, positions, lengths and the
number of drafts that each sequence verifies come out of what the step before `Carried`, by tensor
operations alone (`resolve`). A synchronous engine calls the same function, with nothing carried.

Rows that belong to no sequence, and rows behind the pages that a sequence holds, are padding: they
write nowhere. The latter belong to a request that has its last token and does not know it yet.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from deepinfer.engine.step.speculation import (
    allocate,
    ask_budget,
    draft_batch,
    draft_dists,
    pending_draft,
    stale_survival,
)
from deepinfer.slots.protocols import Batch, Dist, RowKeys, RowParams, RowSet


@dataclass(frozen=True, slots=True)
class SamplingRequests:
    """Sampling parameters and seeds of the e requests that a step samples for."""

    params: RowParams
    seeds: Tensor

    def __len__(self) -> int:
        return self.seeds.shape[0]

    @staticmethod
    def of(requests: Sequence[Request], device: torch.device) -> SamplingRequests:
        p = [r.params for r in requests]
        params = RowParams(
            put([x.temperature for x in p], device, torch.float64),
            put([x.top_p for x in p], device, torch.float64),
            put([x.top_k for x in p], device),
        )
        return SamplingRequests(
            params=params, seeds=put([rng.signed(r.seed) for r in requests], device)
        )

    def rows(self, at: Tensor) -> tuple[RowParams, Tensor]:
        return self.params.rows(at), self.seeds[at]


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """The rows that a step samples. at: [q] rows of the logits, None = all; owner, depth: [q]
    number of the sampling request of each and how many drafts are before it; first, rows: [e] first
    row of each sampling request and how many; drafts: [e, w] verified (-1 none), with their dists;
    recent [e, g], length [e], out [e]: as in `Carried`, before the step; asked: [e] rows that the
    verifier wanted."""

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
        """[e, w+1] sampled row of each sampling request by depth, -1 if it has none."""
        depth = torch.arange(self.drafts.shape[1] + 1, device=self.rows.device)
        return torch.where(depth < self.rows[:, None], self.first[:, None] + depth, -1)

    def keys(self, seeds: Tensor) -> RowKeys:
        return RowKeys(seeds[self.owner], self.out[self.owner] + self.depth)


def recent_ids(rt: Runtime, request: Request, stop: int) -> list[int]:
    """The ids before position `stop` that the next rows look back at, -1 in front of the first."""
    size = rt.config.engram_max_ngram_size
    ids = request.token_slice(max(stop - size, 0), stop)
    return [-1] * (size - len(ids)) + ids


# ------------------------------------------------------------------ every row is known on the host


def known_rows(
    rt: Runtime,
    scheduled: Sequence[ScheduledRequest],
    requests: Sequence[Request],
    drafts: Sequence[tuple[int, ...]],
    spans: Sequence[tuple[int, int]],
) -> SamplingRows:
    """The sampled rows of a prefill or mixed step, of its e sampling requests. drafts: that each
    verifies; spans: its rows of the logits."""
    device, e, width = rt.model.device, len(scheduled), max([0, *map(len, drafts)])
    at, owner, depth, first = [], [], [], []
    for number, (draft, (_, stop)) in enumerate(zip(drafts, spans)):
        n = len(draft) + 1
        first.append(len(at))
        at += range(stop - n, stop)
        owner += [number] * n
        depth += range(n)
    recent = [recent_ids(rt, r, s.stop) for r, s in zip(requests, scheduled)]
    return SamplingRows(
        at=put(at, device),
        owner=put(owner, device),
        depth=put(depth, device),
        first=put(first, device),
        rows=put([len(d) + 1 for d in drafts], device),
        drafts=put([[*d, *[-1] * (width - len(d))] for d in drafts], device).view(e, width),
        recent=put(recent, device).view(e, rt.config.engram_max_ngram_size),
        length=put([s.stop for s in scheduled], device),
        out=put([len(r.output) for r in requests], device),
        dists=draft_dists(rt, [pending_draft(r) for r in requests], width),
    )


# ---------------------------------------------------------------------------------- a decode step


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """A decode step as the host knows it. origin: [b] number of each sequence among the sampling
    requests of the step before, -1 if the host knows its state: `fresh`; remapped: whether any is
    not -1; frame: pages, slots and plans of the sequences; capacity: [b] tokens that their pages
    hold; total: rows of the step; width: most drafts of a sequence; budget: most rows that the
    verifier may hand out."""

    frame: Batch
    fresh: Carried
    origin: Tensor
    remapped: bool
    capacity: Tensor
    total: int
    width: int
    budget: int


def decode_rows(
    rt: Runtime,
    scheduled: Sequence[ScheduledRequest],
    requests: Sequence[Request],
    before: InFlightStep | None,
) -> DecodeInputs:
    """The host's part of a decode step: its budget, and room for its rows."""
    device, n, b = rt.model.device, rt.verifier.max_draft, len(scheduled)
    origin = [-1 if before is None else before.place(r) for r in requests]
    held = [pending_draft(r) if o < 0 else None for r, o in zip(requests, origin)]
    drafted = set() if before is None else set(before.drafting)
    most = [n if d is not None or o in drafted else 0 for d, o in zip(held, origin)]
    budget = ask_budget(rt, [stale_survival(r, o >= 0) for r, o in zip(requests, origin)], 0)
    width = min(max(most), budget - b)
    known, page = [r.num_tokens for r in requests], rt.limits.page_size
    fresh = Carried(
        recent=put([recent_ids(rt, r, k) for r, k in zip(requests, known)], device),
        length=put(known, device),
        out=put([len(r.output) for r in requests], device),
        drafts=draft_batch(rt, held, device),
    )
    works = [
        Work(ids=[0], start=s.start, pages=r.pages, state=r.state_id, plan=r.plan, logits="all")
        for r, s in zip(requests, scheduled)
    ]
    frame = build(works, rt.config, device, decode=True)
    return DecodeInputs(
        frame=replace(frame, reach=frame.reach + width, max_rows=1 + width),
        fresh=fresh,
        origin=put(origin, device),
        remapped=any(o >= 0 for o in origin),
        capacity=put([len(r.pages) * page for r in requests], device),
        total=min(budget, b + sum(most)),
        width=width,
        budget=budget,
    )


def carried(d: DecodeInputs, before: Carried | None) -> Carried:
    """The state of every sequence: that of the step before if it was in it, else the host's."""
    if not d.remapped:
        return d.fresh
    if before is None:
        raise RuntimeError("the step before this one failed: there is nothing to go on from")
    at, there = d.origin.clamp(min=0), d.origin >= 0
    return Carried(
        recent=torch.where(there[:, None], before.recent[at], d.fresh.recent),
        length=torch.where(there, before.length[at], d.fresh.length),
        out=torch.where(there, before.out[at], d.fresh.out),
        drafts=d.fresh.drafts.updated(before.drafts, at, there),
    )


def resolve(rt: Runtime, d: DecodeInputs, before: Carried | None) -> tuple[Batch, SamplingRows]:
    """The batch of a decode step, and the rows that it samples."""
    now = carried(d, before)
    device, b = now.length.device, now.length.shape[0]
    asked, rows = allocate(rt, now.drafts, d.budget, d.width)  # the commit checks what was asked
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

    drafts = now.drafts.tokens[:, : d.width]
    ids = torch.cat([now.recent, drafts], 1)  # newest known id at place g - 1
    newest = now.recent.shape[1] - 1
    place = (newest + depth).clamp(max=ids.shape[1] - 1)
    behind = torch.arange(1, newest + 1, device=device)  # how far back, nearest first
    batch = replace(
        d.frame,
        ids=ids[owner, place].masked_fill(padding, 0).clamp(min=0),  # never -1 into the embedding
        positions=positions,
        seq=seq,
        rows=rows,
        length=start,
        row_set=RowSet(positions, seq, first, start),
        logit_rows=row,
        lookback=ids[owner[:, None], place[:, None] - behind].masked_fill(padding[:, None], -1),
    )
    verified = torch.arange(d.width, device=device) < rows[:, None] - 1
    return batch, SamplingRows(
        at=None,
        owner=owner,
        depth=depth,
        first=first,
        rows=rows,
        drafts=drafts.masked_fill(~verified, -1),
        recent=now.recent,
        length=now.length,
        out=now.out,
        dists=now.drafts.dists[: d.width],
        asked=asked,
    )
