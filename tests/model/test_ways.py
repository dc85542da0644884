"""One function, many ways to run it: at once, in chunks, token by token; narrowed and not."""

import dataclasses

import pytest
import torch

from deepinfer.engine.step.batch import Work
from support import oracle
from support.model_rig import Seen, context

N = 150  # past the window (128) and past what all candidate blocks hold (128)


@pytest.mark.parametrize("fidelity, packed", [(0, False), (1, False), (1, True)])
def test_at_once_and_in_chunks(engine64, fidelity, packed):
    engine = engine64.with_(fidelity=fidelity, packed_cache=packed)
    ids = oracle.prompts()[300][:N]
    whole = engine.logits(ids)
    assert whole.dtype == torch.float64 and torch.isfinite(whole).all()
    for prompt, chunks in ((N, [1, 2, 60, 67, 20]), (N, [145, 5]), (120, [120] + [5] * 6)):
        got = engine.logits(ids, prompt=prompt, chunks=chunks)
        assert (got - whole).abs().max() < 1e-11, chunks


@pytest.mark.parametrize("fidelity", [0, 1])
def test_at_once_and_token_by_token(engine64, fidelity):
    engine, n = engine64.with_(fidelity=fidelity), 137
    ids = oracle.prompts()[300][:n]
    serial = engine.logits(ids, prompt=1, chunks=[1] * n)
    assert (serial - engine.logits(ids)).abs().max() < 1e-11


@pytest.mark.parametrize("fidelity", [0, 1])
def test_a_cache_changes_nothing(engine64, fidelity):
    """The forward that training uses stores and reads nothing."""
    ids, model = oracle.prompts()[300][:N], engine64.model
    with torch.no_grad():
        bare = model(context(model, [Work(ids, logits="all")], fidelity=fidelity)).logits
    assert (engine64.with_(fidelity=fidelity).logits(ids) - bare).abs().max() < 1e-11


def run(engine, n, **changes):
    """(logits [n, v], selections of layer 8 [n, k]) with some config keys changed."""
    ids, seen = oracle.prompts()[300][:n], Seen()
    config = dataclasses.replace(engine.config, **changes)
    ctx = context(engine.model, [Work(ids, logits="all")], tap=seen, config=config)
    with torch.no_grad():
        return engine.model(ctx).logits, seen.values["layers.8.attn.selected"]


def test_candidates_that_hold_everything_restrict_nothing(engine64):
    """16 blocks of 8: rows below 128 pick as if there were no candidates, though the rows behind
    them in the same step are restricted; 19 blocks just hold all 150 entries, 18 do not."""
    free, picks = run(engine64, N, candidate_topk_blocks=10_000)
    held, held_picks = run(engine64, N)
    assert torch.equal(held_picks[:128], picks[:128])
    assert (held[:128] - free[:128]).abs().max() < 1e-11
    assert not torch.equal(held_picks[136:], picks[136:])
    assert (held[136:] - free[136:]).abs().max() > 1e-3
    for blocks in (19, 20):  # 152 and 160 entries
        enough, enough_picks = run(engine64, N, candidate_topk_blocks=blocks)
        assert torch.equal(enough_picks, picks) and torch.equal(enough, free)
    fewer, _ = run(engine64, N, candidate_topk_blocks=18)
    assert not torch.equal(fewer, free)


def test_without_a_candidate_source_nothing_is_restricted(engine64):
    free, picks = run(engine64, N, candidate_topk_blocks=10_000)
    none, none_picks = run(engine64, N, candidate_source_layer_id=None)
    assert torch.equal(none, free) and torch.equal(none_picks, picks)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 160_000.0},
        {"compress_rope_theta": 10_000.0},
        {"rope_theta": 160_000.0, "compress_rope_theta": 10_000.0},
        {"rope_scaling": None},
    ],
    ids=str,
)
def test_two_rotary_bases(engine64, changes):
    """Window-only layers turn by one base, compressed layers by the other with YaRN."""
    right, _ = run(engine64, 129)
    wrong, _ = run(engine64, 129, **changes)
    assert (right[0] - wrong[0]).abs().max() < 1e-11  # position 0 is not turned
    assert (right - wrong).abs().max() > 1e-3


def test_widths_of_stored_floats(folder, tmp_path):
    """hc_* stored as bfloat16 load to exactly those values in float32, in a bfloat16 model too."""
    from safetensors.torch import load_file, save_file

    from deepinfer.engine.engine import Engine

    source = load_file(folder / oracle.SHARD)
    narrow = {k: x.bfloat16() if ".hc_" in k else x for k, x in source.items()}
    assert sum(".hc_" in k for k in source) == 13 * 6
    oracle.write_checkpoint(tmp_path)
    save_file(narrow, tmp_path / oracle.SHARD)
    for dtype in ("float32", "bfloat16"):
        engine = Engine.from_pretrained(str(tmp_path), dtype=dtype, device="cpu")
        for name, x in engine.model.named_parameters():
            if ".hc_" in name:
                assert x.dtype == torch.float32
                assert torch.equal(x.detach(), source[name].bfloat16().float()), name
                if not name.endswith("_scale"):
                    assert not torch.equal(x.detach(), source[name]), name
