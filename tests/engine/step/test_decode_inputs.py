"""Decode inputs: what a step carries over, and the rows that the device makes of it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import deepinfer as di
from deepinfer.engine.step import decode_inputs
from deepinfer.engine.step.decode_inputs import DecodeInputs
from deepinfer.engine.step.in_flight import Carried
from deepinfer.engine.step.speculation import DraftBatch

torch.set_num_threads(1)


def state(first: int) -> Carried:
    """Two requests; every number says whose it is."""
    at = torch.tensor([first, first + 1])
    drafts = DraftBatch(at[:, None].expand(2, 2), torch.ones(2, 2, dtype=torch.float64))
    return Carried(recent=at[:, None].expand(2, 3), length=at, out=at, drafts=drafts)


def inputs(origin: list[int]) -> DecodeInputs:
    return DecodeInputs(
        frame=None,
        fresh=state(100),
        origin=torch.tensor(origin),
        remapped=any(o >= 0 for o in origin),
        capacity=torch.tensor([99, 99]),
        total=2,
        width=0,
        budget=2,
    )


@pytest.mark.parametrize(
    "origin, want", [([-1, -1], [100, 101]), ([1, -1], [11, 101]), ([1, 0], [11, 10])]
)
def test_a_sequence_goes_on_from_the_step_that_it_was_in(origin, want):
    now = decode_inputs.carried(inputs(origin), state(10))
    assert now.length.tolist() == now.out.tolist() == now.recent[:, 0].tolist() == want
    assert now.drafts.tokens[:, 0].tolist() == want


def test_nothing_goes_on_from_a_step_that_failed():
    assert decode_inputs.carried(inputs([-1, -1]), None).length.tolist() == [100, 101]
    with pytest.raises(RuntimeError, match="the step before this one failed"):
        decode_inputs.carried(inputs([0, -1]), None)


def test_the_device_makes_the_rows_that_the_host_would():
    """Behind a prefill, without a draft: one row a sequence, at its last token."""
    eng = di.Engine.tiny(dtype="float64", overlap=False)
    for ids in ([1, 2, 3], [4, 5]):
        eng.add(ids, max_tokens=4, temperature=0.0, ignore_eos=True)
    eng.step()
    rt, requests = eng.runtime, tuple(eng.requests.values())
    schedule = rt.scheduler.schedule()
    assert schedule.kind == "decode"
    d = decode_inputs.decode_rows(rt, schedule.scheduled, requests, None)
    batch, rows = decode_inputs.resolve(rt, d, None)
    assert batch.ids.tolist() == [r.output[-1] for r in requests]
    assert batch.positions.tolist() == [r.num_tokens - 1 for r in requests]
    assert batch.seq.tolist() == rows.owner.tolist() == [0, 1]
    known = decode_inputs.known_rows(rt, schedule.scheduled, requests, [(), ()], [(0, 1), (1, 2)])
    for name in ("owner", "depth", "first", "rows", "recent", "length", "out"):
        assert torch.equal(getattr(known, name), getattr(rows, name)), name


def test_rows_behind_the_pages_are_padding():
    eng = di.Engine.tiny(dtype="float64", overlap=False)
    eng.add([1, 2, 3], max_tokens=4, temperature=0.0, ignore_eos=True)
    eng.step()
    rt, requests = eng.runtime, tuple(eng.requests.values())
    d = decode_inputs.decode_rows(rt, rt.scheduler.schedule().scheduled, requests, None)
    full = SimpleNamespace(**{n: getattr(d, n) for n in DecodeInputs.__slots__})
    full.capacity = torch.tensor([requests[0].num_tokens - 1])  # no room for its last token
    batch, rows = decode_inputs.resolve(rt, full, None)
    assert (batch.seq.tolist(), batch.positions.tolist(), rows.rows.tolist()) == ([-1], [0], [0])
