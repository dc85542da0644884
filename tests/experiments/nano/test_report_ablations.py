"""The nano report's ablations: each takes away what it says, and puts it back."""

import pytest
import torch
from torch import Tensor

from deepinfer.kernels.records import Layout, Records
from experiments.nano.report import ablations, drafts

BOS = 0


def test_every_removal_acts_and_is_put_back(eng, docs):
    ids = [BOS, *docs[1].ids[:100]]
    before = eng.logits(ids)
    for removal in ablations.removals(eng):
        with removal.open(eng) as without:
            changed = without.logits(ids)
        assert changed.isfinite().all()
        assert float((changed - before).abs().max()) > 1e-6, removal.what
        assert torch.allclose(eng.logits(ids), before, atol=1e-11), removal.what
    assert eng._traces == []


def opened(eng, what):
    return next(r for r in ablations.removals(eng) if r.what == what).open(eng)


def test_without_engram_the_streams_pass_by(eng, docs):
    ids = [BOS, *docs[0].ids]
    with opened(eng, "Engram") as e, e.trace("layers.*.in", "layers.*.engram.streams") as t:
        e.logits(ids)
    for i in eng.config.engram_layer_ids:
        before, after = t[f"layers.{i}.in"], t[f"layers.{i}.engram.streams"]
        assert torch.equal(before.as_subclass(Tensor), after.as_subclass(Tensor))


def test_candidates_lifted_is_a_model_with_enough_blocks(eng, docs):
    ids = [BOS, *docs[1].ids[:100]]
    wide = eng.config.replace(candidate_topk_blocks=64)
    model, config = eng.model, eng.model.config
    with opened(eng, "candidate limit") as without:
        got = without.logits(ids)
    try:
        model.config = wide
        want = eng.with_().logits(ids)
    finally:
        model.config = config
    assert torch.equal(got, want) and not torch.equal(got, eng.logits(ids))


def test_newest_blocks_are_the_newest_visible(eng, docs):
    ids, c = [BOS, *docs[1].ids[:100]], eng.config
    with opened(eng, "candidate choice") as e:
        with e.trace("layers.*.attn.candidates") as t:
            e.logits(ids)
    seen = t[f"layers.{c.candidate_source_layer_id}.attn.candidates"]
    for row, p in zip(seen.as_subclass(Tensor).tolist(), seen.position.tolist()):
        newest = p // c.candidate_block_size  # ratio 1: p + 1 entries are visible
        want = [b for b in range(newest, newest - c.candidate_topk_blocks, -1) if b >= 0]
        assert [b for b in row if b >= 0] == want


def test_random_picks_are_visible_different_and_the_same_in_any_chunks(eng, docs):
    ids, c = [BOS, *docs[1].ids[:90]], eng.config
    with opened(eng, "indexer") as e:
        with e.trace("layers.*.attn.selected") as t:
            whole = e.logits(ids)
        serial = e.logits(ids, chunks=[1] * len(ids))
    assert torch.allclose(whole, serial)
    for layer in c.index_source_layer_ids:
        seen, ratio = t[f"layers.{layer}.attn.selected"], c.compress_ratios[layer]
        for row, p in zip(seen.as_subclass(Tensor).tolist(), seen.position.tolist()):
            picked, visible = [j for j in row if j >= 0], (p + 1) // ratio
            assert len(set(picked)) == len(picked) == min(c.index_topk, visible)
            assert all(0 <= j < visible for j in picked)


def test_random_scores_are_even_and_differ_by_layer_and_row():
    x = ablations.random_scores(4, torch.arange(300), 200)
    assert torch.equal(x[7:8], ablations.random_scores(4, torch.tensor([7]), 200))
    assert float(x.mean()) == pytest.approx(0.5, abs=0.01)
    assert float(x.var()) == pytest.approx(1 / 12, abs=0.003)
    for axis in (0, 1):  # neighbours say nothing about each other
        a, b = x.narrow(axis, 0, 199).flatten(), x.narrow(axis, 1, 199).flatten()
        assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) < 0.03
    other = ablations.random_scores(5, torch.arange(300), 200)
    assert abs(float(torch.corrcoef(torch.stack([x.flatten(), other.flatten()]))[0, 1])) < 0.03


def test_no_compressed_entry_is_read(eng, docs):
    """Tokens beyond all windows cannot matter."""
    a = [BOS, *docs[1].ids[:100]]
    reach = eng.config.num_hidden_layers * (eng.config.sliding_window - 1) + 3  # and Engram's
    b = [BOS, 9, *a[2:]]
    with eng.with_(attention=ablations.NoEntries(), max_model_len=2048) as e:
        long = a + a[1:] * 2
        x, y = e.logits(long)[-1], e.logits([*b, *long[len(b) :]])[-1]
        assert len(long) > reach and torch.equal(x, y)
    with eng.with_(max_model_len=2048) as e:
        assert not torch.equal(e.logits(long)[-1], e.logits([*b, *long[len(b) :]])[-1])


def test_sinks_off_means_shares_add_up_to_one(eng):
    q, keys = torch.randn(1, 2, 64).double(), torch.randn(3, 64).double()
    window, ids = Records(keys, None, Layout("float", 64)), torch.tensor([[0, 1, 2]])
    want = (q[0] @ keys.T * 0.125).softmax(-1) @ keys
    with opened(eng, "sinks") as e:
        for layer in e.model.layers:
            sink = layer.attn.attn_sink[:2]
            got = e.runtime.ops.sparse_attend(q, window, ids, None, None, sink, 0.125)
            assert torch.allclose(got[0], want)


def test_mhc_base_only_is_a_model_without_its_projection(eng, docs):
    ids = [BOS, *docs[0].ids]
    sites = [
        f"layers.{i}.hc_{s}_fn"
        for i in range(eng.config.num_hidden_layers)
        for s in ("attn", "ffn")
    ]
    with opened(eng, "mHC input dependence") as e:
        got = e.logits(ids)
    with ablations.weights_set(eng, dict.fromkeys(sites, 0.0)) as e:
        assert torch.allclose(e.logits(ids), got, atol=1e-9)


def test_mixing_is_the_identity(eng, docs):
    with opened(eng, "mHC mixing") as e, e.trace("layers.0.attn.comb", "layers.3.ffn.comb") as t:
        e.logits([BOS, *docs[0].ids])
    for name in t.names:
        x = t[name].as_subclass(Tensor)
        assert torch.equal(x, torch.eye(4).to(x).expand_as(x))


def test_the_markov_head_decides_drafts_and_not_the_text(eng, docs):
    prompts = drafts.contexts(docs, 4, 40)
    with drafts.drafting(eng) as drafter:
        whole = drafts.write(drafter, prompts, 24, 0.0)
    with ablations.markov(eng) as e, drafts.drafting(e) as drafter:
        without = drafts.write(drafter, prompts, 24, 0.0)
    for a, b in zip(whole, without):
        least = min(len(a.tokens), len(b.tokens))
        assert a.tokens[:least] == b.tokens[:least]
    assert drafts.accepted(whole, False).value > drafts.accepted(without, False).value
