"""Dropping prompt rows at the decoder: mask mode, compact mode, and how long a replay must be to be
exact. Float64; the policies here are the tests' own."""

import pytest
import torch

from deepinfer.engine.engine import Engine
from deepinfer.slots.protocols import ReplayPlan
from support import oracle

LENGTH = 240
ROUNDING = 1e-12  # what two orders of the same float64 sums differ by, after ten layers


class Keep:
    """The last k prompt rows run in the decoder, and see window keys of each other only. compact:
    the others leave the stack; otherwise they run on with an empty window."""

    version = 1
    exact = False
    batch_invariant = True
    on_device = False

    def __init__(self, k, compact=True):
        self.k, self.compact = k, compact

    def plan(self, prompt, config):
        low = max(prompt.length - self.k, 0)
        decoder = range(config.first_decoder_layer, config.num_layers)
        cut = tuple(low if layer in decoder else 0 for layer in range(config.num_layers))
        rows = cut if self.compact else (0,) * config.num_layers
        return ReplayPlan(0, 0, kv_from=cut, rows_from=rows, floor=cut, exact=False, why="test")


def ids(n=LENGTH, seed=1):
    return torch.randint(8, 900, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="module")
def tiny():
    """Window 16, five encoder and five decoder layers."""
    return Engine.tiny(dtype="float64", device="cpu", fidelity=0, max_model_len=512, max_num_seqs=2)


@pytest.fixture(scope="module")
def exact(tiny):
    return tiny.logits(ids())


@pytest.mark.parametrize("k", [1, 16, 22, 100])
def test_mask_mode_is_compact_mode_on_the_kept_rows(tiny, exact, k):
    mask = tiny.with_(replay=Keep(k, compact=False)).logits(ids())
    compact = tiny.with_(replay=Keep(k)).logits(ids())
    assert torch.isfinite(mask).all() and torch.isnan(compact[:-k]).all()
    assert (mask[-k:] - compact[-k:]).abs().max() <= ROUNDING
    assert (compact[-k:] - exact[-k:]).abs().max() > 1e-6  # and neither is the exact run


@pytest.mark.parametrize("fidelity", [0, 1])
@pytest.mark.parametrize("k", [LENGTH, LENGTH + 60])
def test_keeping_the_whole_prompt_is_exact_bit_for_bit(tiny, k, fidelity):
    engine = tiny.with_(fidelity=fidelity)
    assert torch.equal(engine.with_(replay=Keep(k)).logits(ids()), engine.logits(ids()))


@pytest.mark.parametrize("chunks", [[40] * 6, [218, 1, 1, 20], [239, 1]])
def test_chunks_do_not_change_what_is_kept(tiny, chunks):
    """Chunks wholly in front of the cut, across it and behind it."""
    engine = tiny.with_(replay=Keep(22))
    whole, chunked = engine.logits(ids()), engine.logits(ids(), chunks=chunks)
    assert torch.equal(whole.isnan(), chunked.isnan())
    assert (whole[-22:] - chunked[-22:]).abs().max() <= ROUNDING


def test_decoding_after_a_cut_sees_the_kept_rows_only(tiny):
    """One position after another: the same in both modes, while the window crosses the cut and when
    it has left it behind. k=6 keeps fewer rows than a window has."""
    n, total = 100, 118
    engines = [tiny.with_(replay=Keep(6, compact)) for compact in (True, False)]
    a, b = (e.logits(ids(total), prompt=n, chunks=[n] + [1] * (total - n))[n:] for e in engines)
    assert torch.isfinite(a).all()
    assert (a - b).abs().max() <= ROUNDING
    assert (a - tiny.logits(ids(total))[n:]).abs().max() > 1e-6


def last_window(engine, chosen=16):
    """[w, d] window keys that the last layer holds when the prompt is done."""
    name = f"layers.{engine.config.num_layers - 1}.attn.window_keys"
    with engine.trace(name) as trace:
        engine.logits(ids())
    return trace[name].as_subclass(torch.Tensor)[-chosen:]


@pytest.mark.parametrize("k, is_exact", [(40, False), (75, False), (76, True), (77, True)])
def test_exact_length_of_a_replay(tiny, k, is_exact):
    """The last window of the last of n layers needs w + (w-1)(n-1) rows: 16 + 15 * 4 = 76."""
    c = tiny.config
    assert c.sliding_window + (c.sliding_window - 1) * (len(c.decoder_layers) - 1) == 76
    error = (last_window(tiny.with_(replay=Keep(k))) - last_window(tiny)).abs().max()
    assert error <= ROUNDING if is_exact else error > 1e-9


def test_error_falls_with_the_rows_kept(tiny, exact):
    last = [tiny.with_(replay=Keep(k)).logits(ids())[-1] for k in (16, 40, 60, 70, 76)]
    errors = [(x - exact[-1]).abs().max() for x in last]
    assert all(a > 3 * b for a, b in zip(errors, errors[1:])) and errors[-1] <= ROUNDING


def test_block_kv_is_complete_and_exact_after_a_cut(tiny):
    """The first decoder layer projects entries for every row before its cut."""
    source = tiny.config.first_decoder_layer
    names = [f"layers.{source}.attn.entries", f"layers.{source}.attn.index_keys"]
    found = []
    for engine in (tiny, tiny.with_(replay=Keep(22))):
        with engine.trace(*names) as trace:
            engine.logits(ids(), chunks=[100, 100, 40])
        found.append([trace[name].as_subclass(torch.Tensor) for name in names])
    for a, b in zip(*found):
        assert len(a) == LENGTH and torch.equal(a, b)


def test_rows_below_the_cut_write_no_window_keys(tiny):
    """Mask mode runs every row through the decoder; only the kept ones may end up in its rings."""
    engine = tiny.with_(replay=Keep(6, compact=False))
    engine.logits(ids(100), chunks=[50, 50])
    cache, ring = engine.runtime.cache, engine.runtime.cache.ring
    written = [int((w.stored.abs().sum(-1) > 0).sum()) for w in cache.windows]
    first = engine.config.first_decoder_layer
    assert written[:first] == [ring] * first
    assert written[first : engine.config.num_layers] == [6] * len(engine.config.decoder_layers)


def test_the_window_of_128(engine64):
    """The same at another size: the checkpoint of the expected numbers, 4 decoder layers."""
    prompt = oracle.prompts()[300]
    mask = engine64.with_(replay=Keep(134, compact=False)).logits(prompt)
    compact = engine64.with_(replay=Keep(134)).logits(prompt)
    assert (mask[-134:] - compact[-134:]).abs().max() <= ROUNDING
    assert torch.equal(engine64.with_(replay=Keep(300)).logits(prompt), engine64.logits(prompt))
