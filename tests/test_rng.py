"""Philox4x32-10: the published answers, the key layout, independence of company."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer import rng

# Random123's known answers (kat_vectors) for philox4x32, 10 rounds: counter, key, result.
KNOWN = [
    (
        "00000000 00000000 00000000 00000000",
        "00000000 00000000",
        "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    ),
    (
        "ffffffff ffffffff ffffffff ffffffff",
        "ffffffff ffffffff",
        "408f276d 41c83b0e a20bc7c6 6d5451fd",
    ),
    (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


def hexes(text):
    return [int(w, 16) for w in text.split()]


def philox_in_words(counter, key):
    """The paper's definition on Python integers, written apart from the tensor version."""
    c, k = list(counter), list(key)
    for _ in range(10):
        a, b = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(b >> 32) ^ c[1] ^ k[0], b & rng.WORD, (a >> 32) ^ c[3] ^ k[1], a & rng.WORD]
        k = [(k[0] + 0x9E3779B9) & rng.WORD, (k[1] + 0xBB67AE85) & rng.WORD]
    return c


@pytest.mark.parametrize("counter, key, result", KNOWN)
def test_published_answers(counter, key, result):
    got = rng.philox(torch.tensor(hexes(key)), torch.tensor(hexes(counter)))
    assert got.tolist() == hexes(result) == philox_in_words(hexes(counter), hexes(key))


@settings(max_examples=50, deadline=None)
@given(
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**40),
    st.sampled_from(rng.Purpose),
    st.integers(1, 11),
)
def test_key_and_counter_layout(seed, position, purpose, count):
    sequence = 3 * position + purpose
    want = []
    for block in range(-(-count // 4)):
        counter = (block, 0, sequence & rng.WORD, sequence >> 32)
        want += philox_in_words(counter, (seed & rng.WORD, seed >> 32))
    got = rng.words(torch.tensor([rng.signed(seed)]), torch.tensor([position]), purpose, count)
    assert got.tolist() == [want[:count]]


def test_a_row_does_not_depend_on_its_company():
    seed = torch.tensor([1111, 2222, 3333, 4444, 1111])
    position = torch.tensor([5, 0, 7, 7, 5])
    together = rng.words(seed, position, rng.Purpose.DRAW, 8)
    for i in range(5):
        assert torch.equal(rng.words(seed[i : i + 1], position[i : i + 1], 0, 8)[0], together[i])
    order = torch.tensor([3, 1, 4, 0, 2])
    assert torch.equal(rng.words(seed[order], position[order], 0, 8), together[order])
    assert torch.equal(together[0], together[4]) and len(set(together[:4, 0].tolist())) == 4


def test_no_rows():
    none = torch.zeros(0, dtype=torch.long)
    assert rng.words(none, none, 0, 6).shape == (0, 6) and rng.uniform(none, none, 0).shape == (0,)


def test_uniform_is_uniform_and_purposes_are_apart():
    seed = torch.full((20000,), 7)
    position = torch.arange(20000)
    streams = [rng.uniform(seed, position, p) for p in rng.Purpose]
    streams.append(rng.uniform(rng.draft_seed(seed), position, 0))
    for u in streams:
        assert 0 < u.min() and u.max() < 1
        counts = torch.histc(u, 64, 0, 1)
        chi2 = ((counts - 20000 / 64) ** 2 / (20000 / 64)).sum()
        assert chi2 < 103.4  # 63 degrees of freedom, 0.999
    corr = torch.corrcoef(torch.stack(streams)) - torch.eye(4, dtype=torch.float64)
    assert corr.abs().max() < 0.03


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1, 2**63, 2**64 - 1])
def test_signed_keeps_the_bits(seed):
    assert rng.signed(seed) & (2**64 - 1) == seed and -(2**63) <= rng.signed(seed) < 2**63
