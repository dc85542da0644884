"""Things the text cannot show, because a verified draft never changes it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import deepinfer as di
from deepinfer.cache.addressing import ring_writes
from deepinfer.engine.engine import Engine
from deepinfer.engine.step.batch import Work, build
from support.small import poison

PROMPT = [0, *range(3, 60)]


@pytest.fixture(scope="module")
def eng() -> Engine:
    return Engine.tiny(dtype="float64", max_model_len=512)


def test_drafts_are_drawn_with_the_key_of_the_place_they_predict(eng):
    """The target draws there with the same key, which is what makes drafts match often."""
    seen = []

    class Spy(di.sampler.Philox):
        def draw(self, dist, keys):
            seen.append((keys.seed.tolist(), keys.position.tolist()))
            return super().draw(dist, keys)

        def __deepcopy__(self, memo):
            return self

    e = eng.with_(sampler=Spy(), verifier=di.verifier.Fixed(3))
    number = e.add(PROMPT, max_tokens=12, seed=5)
    e.step()
    assert seen == [([5], [0]), ([5], [1]), ([5], [2]), ([5], [3])]
    while len(e.requests[number].output) < 6:
        before, emitted = len(seen), len(e.requests[number].output)
        e.step()
        after = len(e.requests[number].output)
        assert seen[before][1] == list(range(emitted, emitted + 4))
        assert [p for _, p in seen[before + 1 :]] == [[after], [after + 1], [after + 2]]


def test_the_drafter_sees_no_context_that_its_rows_never_wrote(eng):
    """A plan that drops all but the last 5 rows leaves the drafter 5 positions of context."""

    class Keep5(di.replay.Exact):
        exact = False

        def plan(self, prompt, config):
            cut = max(prompt.length - 5, 0)
            floors = tuple(0 if layer < 5 else cut for layer in range(config.num_layers))
            made = super().plan(prompt, config)
            return replace(made, rows_from=floors, kv_from=floors, floor=floors, exact=False)

    e = eng.with_(replay=Keep5(), verifier=di.verifier.Fixed(4))
    poison(e.runtime.cache)
    with e.trace("mtp.base") as t:
        e.generate(PROMPT, max_tokens=6, temperature=0.0).raise_for_errors()
    assert t["mtp.base"].isfinite().all()
    keys = [ring.stored[ring.stored.isfinite().all(-1)] for ring in e.runtime.cache.windows[-3:]]
    assert all(len(k) < 20 for k in keys)  # most of every drafter ring was never written


@pytest.mark.parametrize("rows", [1, 6, 21, 22, 23, 300])
def test_no_ring_place_is_written_twice_in_a_step(eng, rows):
    """Two rows at one place would leave whichever a device wrote last."""
    ring = 22
    works = [Work(list(range(rows)), start=7, state=1), Work([3] * 30, start=0, state=2)]
    batch = build(works, eng.config)
    places = ring_writes(batch, batch.row_set, ring)
    written = places[places >= 0].tolist()
    assert len(written) == len(set(written)) == min(rows, ring) + 22
    last = torch.arange(max(7, 7 + rows - ring), 7 + rows)
    assert set((ring + last % ring).tolist()) <= set(written)
