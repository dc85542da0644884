"""Settings that do not fit are refused when the engine is made; those that fit are kept to."""

from __future__ import annotations

import pytest

import deepinfer as di
from deepinfer.engine.engine import Engine


@pytest.fixture(scope="module")
def eng() -> Engine:
    return Engine.tiny()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(page_size=3), "page_size=3 is no multiple of compress ratio 2"),
        (dict(max_model_len=1 << 40), "more than the model's 1048576 positions"),
        (dict(verifier=di.verifier.Fixed(9)), "at most 5 tokens a step"),
        (dict(kernels={"topk": "nope"}), "no implementation 'nope'"),
    ],
)
def test_refused_before_the_first_step(eng, change, words):
    with pytest.raises(ValueError, match=words):
        eng.with_(**change)


@pytest.mark.parametrize("device", ["foo", "", "cpu:x", "cuda:-1", "meta", "mps"])
def test_a_device_that_an_engine_has_not_is_refused_by_name(device):
    with pytest.raises(ValueError, match=f"device={device!r}.*allowed: 'auto', 'cpu', 'cuda'"):
        Engine.tiny(device=device)


def test_no_step_has_more_rows_than_allowed(eng):
    small = eng.with_(
        max_num_batched_tokens=7, max_num_seqs=4, verifier=di.verifier.Fixed(2), max_model_len=64
    )
    for n in (5, 9, 3, 12):
        small.add(list(range(3, 3 + n)), max_tokens=5, temperature=0.0)
    rows, done = [], []
    while small.unfinished:
        before = small.stats.prefill_rows + small.stats.decode_rows
        done += small.step()
        rows.append(small.stats.prefill_rows + small.stats.decode_rows - before)
    assert max(rows) <= 7 and len(done) == 4 and all(len(c.token_ids) == 5 for c in done)


def test_drafts_behind_the_end_are_not_counted_as_accepted(eng):
    drafting = eng.with_(verifier=di.verifier.Fixed(5))
    out = drafting.generate([[0, 5, 9]] * 3, max_tokens=4, temperature=0.0)
    assert sum(drafting.stats.accepted.values()) == sum(c.accepted_drafts for c in out)
