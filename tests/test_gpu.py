"""The same engine on an accelerator: `pytest -m gpu`. The CPU engine is the reference."""

from __future__ import annotations

import pytest
import torch

import deepinfer as di
from deepinfer.engine.engine import Engine

pytestmark = pytest.mark.gpu

PROMPT = [0, *range(3, 143)]
PROMPTS = [PROMPT[:n] for n in (1, 17, 90, 141)]


@pytest.fixture(scope="module")
def cpu() -> Engine:
    return Engine.tiny(device="cpu", dtype="float64")


@pytest.fixture(scope="module")
def gpu() -> Engine:
    return Engine.tiny(device="cuda", dtype="float64")


def test_float64_logits_equal_the_cpu(cpu, gpu):
    chunks = [40, 1, 100]
    far = (gpu.logits(PROMPT, chunks=chunks).cpu() - cpu.logits(PROMPT)).abs().max()
    assert far < 1e-9


def test_packed_and_float_records_read_the_same(gpu):
    packed, floats = gpu.with_(packed_cache=True), gpu.with_(packed_cache=False)
    far = packed.logits(PROMPT, chunks=[60, 81]) - floats.logits(PROMPT, chunks=[60, 81])
    assert far.abs().max() < 1e-12


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_tokens_equal_the_cpu_whatever_is_drafted(cpu, gpu, temperature):
    settings = dict(max_tokens=16, temperature=temperature, seed=11)
    serial = [c.token_ids for c in cpu.generate(PROMPTS, **settings)]
    for drafts in (0, 3, 5):
        drafting = gpu.with_(verifier=di.verifier.Fixed(drafts))
        assert [c.token_ids for c in drafting.generate(PROMPTS, **settings)] == serial


def test_random_numbers_have_the_same_bits():
    from deepinfer import rng

    seeds, places = torch.tensor([0, -1, 2**62, 7]), torch.tensor([0, 1, 1000000, 3])
    here = rng.words(seeds, places, rng.Purpose.DRAW, 8)
    assert torch.equal(rng.words(seeds.cuda(), places.cuda(), rng.Purpose.DRAW, 8).cpu(), here)


def test_bfloat16_is_the_default_and_finite():
    eng = Engine.tiny(device="cuda")
    assert eng.model.dtype == torch.bfloat16
    out = eng.generate(PROMPTS, max_tokens=8, temperature=0.0).raise_for_errors()
    assert all(len(c.token_ids) for c in out)
    assert eng.memory.to_json()
    assert all(r.stored.is_cuda for r in eng.runtime.cache.windows)


def test_expected_numbers_hold_on_the_device(tmp_path):
    """Logits of the independent implementations, in float32 at fidelity 0 (no TF32)."""
    from support import oracle

    folder = oracle.write_checkpoint(tmp_path / "bf16")
    eng = Engine.from_pretrained(str(folder), device="cuda", dtype="float32", fidelity=0)
    for n in (5, 129):
        got = eng.logits(oracle.prompts()[n]).cpu()
        assert (got - oracle.numbers("logits")[f"logits/{n}"]).abs().max() <= 1e-4


def test_batch_invariance_is_not_claimed_where_it_does_not_hold(gpu):
    with pytest.raises(ValueError, match="holds on the CPU only so far"):
        gpu.with_(batch_invariant=True)
