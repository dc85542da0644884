"""The batched training path computes what the plain slots compute, values and gradients."""

from dataclasses import replace

import pytest
import torch
from deepinfer import kernels
from deepinfer.checkpoint.tiny_tokenizer import tiny_tokenizer
from deepinfer.slots.attention import CSA2, Dense
from deepinfer.slots.experts import Local
from deepinfer.slots.protocols import EngineInfo, LayerInfo

from experiments.nano import fast, weights
from experiments.nano.config import small_config

B, T = 3, 64


@pytest.fixture(scope="module")
def model():
    """Small, in FP64, with weights at which every mechanism moves the logits."""
    tokenizer = tiny_tokenizer()
    config = small_config(tokenizer)
    state = weights.initial(config, 0)
    for name in state:
        if name.endswith(("wo_b.weight", "w2.weight")):
            state[name] *= 10
        if name.endswith("gate.weight"):
            state[name] *= 20
    return weights.model_from(config, state, tokenizer, torch.float64, "cpu")


@pytest.fixture
def ids(seeded):
    return torch.randint(5, 1000, (B, T))


def plain(ctx):
    info = EngineInfo(ctx.config, "cpu", torch.float64, B)
    attention = Dense() if ctx.attention.dense else CSA2()
    return replace(ctx, attention=attention.start(info), experts=Local().start(info))


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("fidelity", [0, 1])
def test_logits_equal_the_plain_slots(model, ids, fidelity, dense):
    ctx = fast.context(model.config, ids, fidelity=fidelity, dtype=torch.float64, dense=dense)
    with torch.no_grad():
        batched, one_by_one = model(ctx).logits, model(plain(ctx)).logits
    assert one_by_one.std() > 0.1
    torch.testing.assert_close(batched, one_by_one, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dense", [False, True])
def test_gradients_equal_the_plain_slots(model, ids, dense):
    found = {}
    held = dict(model.named_parameters())
    for name, p in held.items():
        p.requires_grad_(not name.startswith("mtp.") and "gate.bias" not in name)
    for way in ("batched", "plain"):
        ctx = fast.context(model.config, ids, dtype=torch.float64, dense=dense)
        logits = model(ctx if way == "batched" else plain(ctx)).logits
        logits.logsumexp(1).sum().backward()
        found[way] = {n: p.grad for n, p in held.items() if p.grad is not None}
        for p in held.values():
            p.grad = None
    for p in held.values():
        p.requires_grad_(False)
    names = found["plain"].keys()
    assert names == found["batched"].keys() and len(names) > 150
    assert not any("indexer" in n for n in names), "hard picks pass the indexer no gradient"
    for name in names:
        torch.testing.assert_close(
            found["batched"][name], found["plain"][name], rtol=1e-8, atol=1e-10, msg=name
        )


def test_a_row_sees_nothing_of_later_rows_or_other_sequences(model, ids):
    other = ids.clone()
    other[0, 40:] = 7
    other[2] = 9
    with torch.no_grad():
        first, second = (
            model(fast.context(model.config, x, dtype=torch.float64)).logits.view(B, T, -1)
            for x in (ids, other)
        )
    torch.testing.assert_close(first[0, :40], second[0, :40], rtol=0, atol=1e-12)
    torch.testing.assert_close(first[1], second[1], rtol=0, atol=1e-12)
    assert (first[0, 40:] - second[0, 40:]).abs().max() > 1e-3


def test_sequences_that_are_no_multiple_of_the_window_are_refused(model):
    with pytest.raises(ValueError, match="multiple of the window, 8"):
        fast.context(model.config, torch.zeros(1, 12, dtype=torch.long))


def test_best_gives_ties_to_the_lowest_entry():
    scores = torch.tensor([[0.0, 2.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]], dtype=torch.float64)
    scores = torch.cat([scores, torch.full((2, 3), -torch.inf)], 1)
    assert sorted(fast.best(scores, 2)[0].tolist()) == [0, 1]
    assert sorted(fast.best(scores, 3)[1].tolist()) == [0, 1, 2]
    assert sorted(fast.best(scores, 6)[1].tolist()) == [-1, -1, 0, 1, 2, 3]
    wanted = kernels.get("topk").implementation("reference").fn(scores, 3)
    assert wanted.sort(1).values.equal(fast.best(scores, 3).sort(1).values)


# ------------------------------------------------------------------------------ the indexer's loss


def naive_index_loss(model, ids, name, slot=CSA2):
    """KL over the picked entries of every row, from attention weights computed one row at a time."""
    seen, attended = {}, []

    class Watching(slot):
        def select(self, layer: LayerInfo, index, kv, plan, carried):
            picked = super().select(layer, index, kv, plan, carried)
            self.source = layer.name
            seen[layer.name] = (index, kv.index_key_rows(plan.reach[layer.ratio]), picked.ids, layer.ratio)
            return picked

        def attend(self, layer, q, kv, selected, plan):
            if selected is not None and self.source == name:
                attended.append((q, kv, plan, selected, layer))
            return super().attend(layer, q, kv, selected, plan)

    ctx = fast.context(model.config, ids, dtype=torch.float64)
    info = EngineInfo(ctx.config, "cpu", torch.float64, B)
    model(replace(ctx, attention=Watching().start(info), experts=Local().start(info)))
    index, keys, picks, ratio = seen[name]
    total, rows = 0.0, 0
    for row in range(B * T):
        entries = sorted(i for i in picks[row].tolist() if i >= 0)
        if not entries:
            continue
        target = torch.zeros(len(entries), dtype=torch.float64)
        for q, kv, plan, selected, layer in attended:
            own = row // T * T
            window = kv.window.gather(plan.window_ids[row])[plan.window_ids[row] >= 0]
            places = [own + e * ratio + ratio - 1 for e in entries]
            far = kv.entries.stored[places]
            logits = torch.cat([q[row] @ window.T, q[row] @ far.T], 1) * layer.scale
            logits = torch.cat([logits, layer.sink[:, None].double()], 1)
            target += torch.softmax(logits, 1)[:, len(window) : -1].sum(0)
        target = target / target.sum()
        dots = torch.relu(index.query[row] @ keys[row // T][entries].T)
        law = (index.weights[row] @ dots).log_softmax(0)
        total += float((target * (target.log() - law)).sum())
        rows += 1
    return total / rows


def test_index_loss_is_the_kl_from_attention_to_scores(model, ids):
    """Without random entries, on every query: against a loop over rows."""
    loss = fast.IndexLoss(every=1, random=0)
    with torch.no_grad():
        model(fast.context(model.config, ids, index_loss=loss, dtype=torch.float64))
        terms = loss.terms()
        assert terms.keys() == {"layers.1.attn", "layers.2.attn", "layers.4.attn", "layers.6.attn"}
        for name in ("layers.2.attn", "layers.6.attn"):  # an encoder source with reuse, a reindex layer
            torch.testing.assert_close(
                float(terms[name]), naive_index_loss(model, ids, name), rtol=1e-8, atol=1e-10
            )


def test_dense_index_loss_is_over_all_that_is_visible(model, ids):
    loss = fast.IndexLoss(every=1, random=0)
    with torch.no_grad():
        model(fast.context(model.config, ids, index_loss=loss, dtype=torch.float64, dense=True))
        terms = loss.terms()
        for name in ("layers.2.attn", "layers.6.attn"):
            torch.testing.assert_close(
                float(terms[name]), naive_index_loss(model, ids, name, Dense), rtol=1e-8, atol=1e-10
            )


@pytest.mark.parametrize("dense", [False, True])
def test_index_loss_trains_the_indexer_and_nothing_else(model, ids, dense):
    held = dict(model.named_parameters())
    for p in held.values():
        p.requires_grad_(True)
    loss = fast.IndexLoss(every=2, random=4, phase=1)
    model(fast.context(model.config, ids, index_loss=loss, dtype=torch.float64, dense=dense))
    sum(loss.terms().values()).backward()
    moved = {n for n, p in held.items() if p.grad is not None and p.grad.abs().sum() > 0}
    for p in held.values():
        p.grad = None
        p.requires_grad_(False)
    indexer = {n for n in held if ".indexer." in n}
    assert moved == indexer


def test_random_entries_are_visible_and_not_picked_twice(model, ids):
    loss = fast.IndexLoss(every=1, random=16)
    with torch.no_grad():
        model(fast.context(model.config, ids, index_loss=loss, dtype=torch.float64))
    for source in loss.sources:
        none, mass = source["none"], source["mass"]
        assert (~none).any() and torch.isfinite(mass[~none]).all()
    widest = loss.sources[-1]["none"]
    assert (~widest[:, model.config.index_topk :]).any(), "no random entry was ever drawn"


@pytest.mark.slow
def test_compiled_functions_compute_the_same(model, ids):
    with torch.no_grad():
        eager, compiled = (
            model(fast.context(model.config, ids, compiled=c, dtype=torch.float64)).logits
            for c in (False, True)
        )
    torch.testing.assert_close(compiled, eager, rtol=0, atol=1e-12)
