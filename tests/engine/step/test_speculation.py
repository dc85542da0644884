"""Drafts between two steps: survivals, the rows they get, and the record of what became of them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import deepinfer as di
from deepinfer.engine.request import Request
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.engine.step import speculation
from deepinfer.engine.step.speculation import DraftBatch, PendingDraft
from deepinfer.slots.protocols import Draft

torch.set_num_threads(1)


def request(draft=None) -> Request:
    return Request(0, [5] * 4, SamplingParams(max_tokens=8), seed=0, draft=draft)


def pending(at=4, confidence=(0.5, 0.5), stale=(0.9,), tokens=(7, 8)) -> PendingDraft:
    return PendingDraft(at=at, tokens=tokens, confidence=confidence, stale=stale)


def runtime(rows, n=2):
    verifier = SimpleNamespace(max_draft=n, rule="match", allocate=lambda fresh, budget: rows)
    return SimpleNamespace(verifier=verifier)


def test_a_draft_of_an_earlier_place_is_not_pending():
    assert speculation.pending_draft(request()) is None
    assert speculation.pending_draft(request(pending(at=3))) is None
    assert speculation.pending_draft(request(pending(at=4))).tokens == (7, 8)


def test_the_survival_of_host_and_device_is_one_number():
    confidence = (0.9, 0.7, 0.3)
    batch = DraftBatch(torch.tensor([[1, 2, 3]]), torch.tensor([confidence], dtype=torch.float64))
    assert batch.survival[0].tolist() == list(pending(confidence=confidence).survival)
    assert pending(tokens=(7, -1, 8)).whole == (7,)


def test_what_is_stale_is_the_draft_before_the_verified_one():
    held = request(pending())
    assert speculation.stale_survival(held, in_flight=False) == (0.9,)
    assert speculation.stale_survival(held, in_flight=True) == (0.5, 0.25)
    assert speculation.stale_survival(request(), True) == ()
    new = DraftBatch(torch.tensor([[3, 4]]), torch.tensor([[0.5, 1.0]], dtype=torch.float64))
    speculation.hold({0: held}, new)
    assert (held.draft.tokens, held.draft.survival) == ((3, 4), (0.5, 0.5))
    assert held.draft.stale == (0.5, 0.25)


def test_rows_are_a_prefix_of_what_is_there():
    tokens = torch.tensor([[7, 8], [7, -1], [-1, -1], [7, 8]])
    drafts = DraftBatch(tokens, torch.zeros(4, 2, dtype=torch.float64))
    asked, rows = speculation.allocate(runtime(torch.tensor([3, 3, 3, 1])), drafts, 12)
    assert (asked.tolist(), rows.tolist()) == ([3, 3, 3, 1], [3, 2, 1, 1])
    _, rows = speculation.allocate(runtime(torch.tensor([3, 3, 3, 1])), drafts, 12, width=1)
    assert rows.tolist() == [2, 2, 1, 1]
    with pytest.raises(ValueError, match=r"allocate returned shape \[3\]: want \[4\]"):
        speculation.allocate(runtime(torch.tensor([3, 3, 3])), drafts, 12)


@pytest.mark.parametrize(
    "asked, words", [([0, 1], "1 to 3 rows"), ([4, 1], "1 to 3 rows"), ([3, 3], "the budget is 5")]
)
def test_impossible_rows_are_refused(asked, words):
    speculation.require_rows(runtime(None), [3, 2], 5)
    with pytest.raises(ValueError, match=words):
        speculation.require_rows(runtime(None), asked, 5)


def test_drafts_of_some_sequences_are_spread_over_all():
    draft = Draft(torch.tensor([[7, 8]]), torch.tensor([[0.5, 0.5]]), torch.zeros(1, 2))
    out = speculation.proposed(draft, torch.tensor([1]), torch.tensor([4, 5]), 2)
    assert out.tokens.tolist() == [[-1, -1], [7, 8]]
    assert out.survival.tolist() == [[0.0, 0.0], [0.5, 0.25]]
    old = DraftBatch(torch.tensor([[1, 2], [3, 4]]), torch.ones(2, 2, dtype=torch.float64))
    now = old.updated(out, torch.tensor([1, 0]), torch.tensor([True, False]))
    assert now.tokens.tolist() == [[7, 8], [3, 4]]


@pytest.mark.parametrize("scheduler", ["fcfs", "mixed"])
def test_the_records_add_up_to_the_counters(scheduler):
    eng = di.Engine.tiny(dtype="float64", verifier=di.verifier.Fixed(2), scheduler=scheduler)
    eng.generate([[1, 2, 3], [4, 5]], max_tokens=5, temperature=0.0, ignore_eos=True)
    log = list(eng.stats.draft_records)
    assert sum(r.rows for r in log) == eng.stats.decode_rows
    assert sum(r.accepted for r in log) == sum(eng.stats.accepted.values())
    assert all(r.rows - 1 <= len(r.survival) and r.rows <= r.budget for r in log)
    assert [r.stale for r in log if r.request == 0][0] == ()
    of_0 = [r for r in log if r.request == 0 and r.survival]
    assert all(b.stale == a.survival for a, b in zip(of_0, of_0[1:]))
