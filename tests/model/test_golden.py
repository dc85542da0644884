"""Published and derivable numbers: YaRN range, record and cache sizes, Sinkhorn sums."""

import math

import pytest
import torch

from deepinfer.cache.kv_cache import CacheSize, KVCache
from deepinfer.config import ModelConfig
from deepinfer.kernels import Layout
from deepinfer.model.rope import frequencies, yarn_range
from deepinfer.slots.attention import CSA2
from support import oracle

RELEASE = ModelConfig.v41_flash()
ENCODER = range(20)


@pytest.fixture(scope="module")
def cache():
    """The released cache in the official bytes: 3 pages and 2 sequences, no memory behind it."""
    specs = [CSA2().kv_spec(RELEASE, layer) for layer in range(len(RELEASE.compress_ratios))]
    size = CacheSize(num_pages=3, num_states=2, page_size=128, backtracking=6, packed=True)
    return KVCache(RELEASE, specs, size, dtype=torch.bfloat16, device=torch.device("meta"))


def nbytes(x):
    return x.numel() * x.element_size()


def test_yarn_range_of_the_release():
    c = RELEASE
    s = c.rope_scaling
    turns = (s.original_max_position_embeddings, s.beta_fast, s.beta_slow)
    assert yarn_range(c.compress_rope_theta, c.qk_rope_head_dim, *turns) == (15, 25)


def test_yarn_frequencies_of_the_release():
    """Below 15 as they are, above 25 divided by 16, in between a straight ramp of both."""
    c = RELEASE
    plain = frequencies(c.compress_rope_theta, 64, None, torch.float64)
    scaled = frequencies(c.compress_rope_theta, 64, c.rope_scaling, torch.float64)
    assert plain.shape == (32,) and plain[0] == 1 and math.isclose(plain[1], 160000 ** (-2 / 64))
    share = (scaled / plain - 1 / 16) / (15 / 16)  # 1: unchanged, 0: divided
    ramp = 1 - ((torch.arange(32, dtype=torch.float64) - 15) / 10).clamp(0, 1)
    assert torch.allclose(share, ramp, atol=1e-12)


def test_record_bytes_of_the_release():
    spec = CSA2().kv_spec(RELEASE, 2)
    sizes = [
        Layout(format=f, dim=d).bytes_per_record
        for f, d in ((spec.window_format, 512), (spec.entry_format, 512), (spec.index_format, 128))
    ]
    assert sizes == [528, 288, 68]


def test_block_kv_of_a_token_is_890_bytes(cache):
    specs = [CSA2().kv_spec(RELEASE, layer) for layer in range(40)]
    per_layer = {layer: s.bytes_per_token for layer, s in enumerate(specs) if s.bytes_per_token}
    assert per_layer == {2: 178, 8: 178, 14: 178, 20: 356} and sum(per_layer.values()) == 890
    pages = 3 + 1  # page 0 is reserved
    assert cache.nbytes["block KV"] == pages * 128 * 890


def test_windows_of_a_sequence(cache):
    """Rings of 134 records: 1,415,040 bytes for the 20 encoder layers, 3,042,336 for all 43."""
    sequences = 2 + 1  # slot 0 is reserved
    assert cache.ring == 134
    rings = [nbytes(w.stored) // sequences for w in cache.windows]
    assert sum(rings[layer] for layer in ENCODER) == 1_415_040
    assert sum(rings) == 3_042_336


def test_open_groups_of_a_sequence(cache):
    """Values and gates of 7 tokens in FP32, per source of ratio 2."""
    assert sorted(cache.groups) == [2, 8, 14]
    assert sum(nbytes(g.stored) for g in cache.groups.values()) // 3 == 86_016


def test_sinkhorn_sums(engine):
    """The last step divides by column sums, so that columns are exact and rows are not quite."""
    with engine.trace("layers.*.attn.comb", "layers.*.ffn.comb") as trace:
        engine.logits(oracle.prompts()[129])
    combs = torch.cat([trace[name].as_subclass(torch.Tensor) for name in trace.names])
    assert len(combs) == 129 * 20 and (combs > 0).all()
    columns, rows = (combs.sum(-2) - 1).abs().max(), (combs.sum(-1) - 1).abs().max()
    assert columns < 1e-5 < rows < 2e-2
