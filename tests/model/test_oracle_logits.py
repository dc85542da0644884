"""Logits of the whole model against the released reference implementation, at fidelity 0."""

import pytest
import torch

from support import oracle

TOLERANCE = 1e-4  # absolute, on logits of standard deviation 1.3; a flipped top-k shows as > 1e-3
THIN = 4  # of long logits, row i keeps the columns that are i modulo 4


def thin_columns(x):
    columns = torch.arange(x.shape[1]).view(-1, THIN)
    return x.gather(1, columns[:, torch.arange(len(x)) % THIN].T)


def worst(a, b):
    """Largest difference and the row it is in, for a message that says where to look."""
    assert a.shape == b.shape
    error = (a - b).abs().amax(-1)
    return f"{error.max():.1e} in row {int(error.argmax())}", error.max().item()


@pytest.mark.parametrize("n", oracle.LENGTHS)
def test_one_prefill(engine, n):
    expected = oracle.numbers("logits")[f"logits/{n}"]
    got = engine.logits(oracle.prompts()[n])
    assert got.shape == (n, engine.config.vocab_size) and got.dtype == torch.float32
    where, error = worst(thin_columns(got) if n >= 300 else got, expected)
    assert error <= TOLERANCE, where


@pytest.mark.parametrize("n", [129, 300, 700])
def test_prefill_then_single_steps(engine, n):
    expected = oracle.numbers("logits")[f"decode_logits/{n}"]
    got = engine.logits(oracle.prompts()[n], prompt=n - 24, chunks=[n - 24] + [1] * 24)[-25:]
    where, error = worst(got, expected)
    assert error <= TOLERANCE, where


def test_long_expected_logits_cover_every_column():
    for n in (300, 700):
        kept = oracle.numbers("logits")[f"logits/{n}"]
        everywhere = torch.zeros(n, THIN * kept.shape[1])
        everywhere.scatter_(1, thin_columns(torch.arange(THIN * kept.shape[1]).expand(n, -1)), 1.0)
        assert kept.shape == (n, 128) and bool((everywhere.sum(0) > 0).all())
