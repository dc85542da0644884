"""batch_invariant=True: bits do not depend on company, order, chunking or drafts, in any dtype."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import deepinfer as di
from deepinfer.engine.engine import Engine

IDS = [0, *range(3, 80)]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def eng(request) -> Engine:
    return Engine.tiny(dtype=request.param, batch_invariant=True)


@pytest.fixture(scope="module")
def whole(eng) -> torch.Tensor:
    return eng.logits(IDS)


SLOW = pytest.mark.slow
CHUNKS = {"ones": [1] * 78, "sevens": [7] * 11 + [1], "uneven": [40, 1, 37]}


@pytest.mark.parametrize(
    "chunks, prompt",
    [
        ("ones", 1),
        ("sevens", None),
        ("uneven", 1),
        pytest.param("ones", None, marks=SLOW),
        pytest.param("sevens", 1, marks=SLOW),
        pytest.param("uneven", None, marks=SLOW),
    ],
)
def test_logits_have_the_same_bits_however_chunked(eng, whole, chunks, prompt):
    """prompt=None: every row belongs to the prompt; prompt=1: every row but one is decoded."""
    assert torch.equal(eng.logits(IDS, prompt=prompt, chunks=CHUNKS[chunks]), whole)


@settings(max_examples=4)
@given(
    lengths=st.lists(st.integers(1, 78), min_size=1, max_size=5),
    drafts=st.integers(0, 5),
    temperature=st.sampled_from([0.0, 1.0]),
)
def test_tokens_and_logprobs_in_any_company(eng, lengths, drafts, temperature):
    """Alone without drafts against together with drafts: the same tokens, log-probabilities to the bit."""
    prompts = [IDS[:n] for n in lengths]
    how = dict(max_tokens=12, temperature=temperature, seed=3)
    plain, drafting = eng.with_(), eng.with_(verifier=di.verifier.Fixed(drafts))
    alone = [plain.generate(p, **how)[0] for p in prompts]
    together = drafting.generate(prompts, **how)
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]
    assert [c.logprobs for c in together] == [c.logprobs for c in alone]


def test_only_kernels_that_keep_it_run(eng):
    eng.generate(IDS, max_tokens=2)
    from deepinfer import kernels

    for (op, name), _ in eng.runtime.ops.counts.items():
        assert kernels.get(op).implementation(name).batch_invariant, (op, name)


def test_a_slot_that_does_not_promise_it_is_refused_by_name():
    class Mine(di.attention.CSA2):
        def select(self, layer, index, kv, plan, carried):
            return super().select(layer, index, kv, plan, carried)

    with pytest.raises(ValueError, match="attention=Mine.*does not promise"):
        Engine.tiny(batch_invariant=True, attention=Mine())
