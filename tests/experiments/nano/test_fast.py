"""The batched training path computes what the plain slots compute, values and gradients."""

from dataclasses import replace

import pytest
import torch

from deepinfer import kernels
from deepinfer.checkpoint.tiny_tokenizer import tiny_tokenizer
from deepinfer.slots.attention import CSA2, Dense
from deepinfer.slots.experts import Local
from deepinfer.slots.protocols import EngineInfo, LayerInfo
from experiments.nano.config import small_config
from experiments.nano.train import fast, weights

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


def test_the_limit_of_swiglu_holds_in_every_expert(model, ids):
    """At a limit that a good part of the rows reaches."""
    found = {}
    for limit in (0.5, 1e9):
        config = model.config.replace(swiglu_limit=limit)
        ctx = fast.context(config, ids, dtype=torch.float64)
        with torch.no_grad():
            found[limit] = model(ctx).logits
            torch.testing.assert_close(found[limit], model(plain(ctx)).logits, rtol=0, atol=1e-12)
    assert (found[0.5] - found[1e9]).abs().max() > 1e-2


def test_constants_are_what_no_batch_changes(model, ids):
    """Those of one forward serve another of other ids and another shape, and are not made again."""
    contexts = [fast.context(model.config, x, dtype=torch.float64) for x in (ids, ids[:2, :40] + 1)]
    with torch.no_grad():
        wanted = [model(ctx).logits for ctx in contexts]
    first, second = (fast.constants_of(ctx) for ctx in contexts)
    assert first.keys() == second.keys() and len(first) == 2 + len(model.config.engram_layer_ids)
    for key, value in first.items():
        pairs = zip(value, second[key]) if isinstance(value, tuple) else [(value, second[key])]
        assert all(torch.equal(x, y) for x, y in pairs), key
    again = fast.context(model.config, ids[:2, :40] + 1, dtype=torch.float64, constants=first)
    with torch.no_grad():
        assert torch.equal(model(again).logits, wanted[1])
    assert all(again._shared[key] is value for key, value in first.items())


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


class Watching:
    """Mixed into a plain slot: keeps what index sources were asked and gave, and who used it."""

    def select(self, layer: LayerInfo, index, kv, plan, carried):
        picked = super().select(layer, index, kv, plan, carried)
        self.source = layer.name
        self.given[layer.name] = (index, kv.index_key_rows(plan.reach[layer.ratio]), picked, layer)
        return picked

    def attend(self, layer, q, kv, selected, plan):
        if selected is not None:
            self.users.setdefault(self.source, []).append((q, kv, plan, layer))
        return super().attend(layer, q, kv, selected, plan)


def watched(model, ids, slot=CSA2):
    """The plain slot after a forward: given, users of each index source by its name."""
    own = type("Watched", (Watching, slot), {})()
    own.given, own.users = {}, {}
    ctx = fast.context(model.config, ids, dtype=torch.float64)
    info = EngineInfo(ctx.config, "cpu", torch.float64, B)
    with torch.no_grad():
        model(replace(ctx, attention=own.start(info), experts=Local().start(info)))
    return own


def drawn(source, ratio, k):
    """[rows, random] entries that IndexLoss drew beside k picks (-1: none), from their places."""
    entries = source["place"] % T // ratio
    return entries.masked_fill(source["none"][:, k:], -1)


def naive_index_loss(plain, name, rows, other=None):
    """KL over the picked entries of `rows` and `other` ones [rows, ...] (-1: none), from attention
    weights computed one row at a time."""
    index, keys, picked, source = plain.given[name]
    total, count = 0.0, 0
    for i, row in enumerate(rows):
        picks = sorted(e for e in picked.ids[row].tolist() if e >= 0)
        random = [] if other is None else [e for e in other[i].tolist() if e >= 0]
        if not picks + random:
            continue
        target = torch.zeros(len(picks) + len(random), dtype=torch.float64)
        for q, kv, plan, layer in plain.users[name]:
            window = kv.window.gather(plan.window_ids[row])[plan.window_ids[row] >= 0]
            places = [row // T * T + (e + 1) * source.ratio - 1 for e in picks + random]
            far = (q[row] @ kv.entries.stored[places].T * layer.scale).exp()
            near = (q[row] @ window.T * layer.scale).exp().sum(1, keepdim=True)
            attended = near + far[:, : len(picks)].sum(1, keepdim=True)
            target += (far / (attended + layer.sink[:, None].double().exp())).sum(0)
        target = target / target.sum()
        dots = torch.relu(index.query[row] @ keys[row // T][picks + random].T)
        law = (index.weights[row] @ dots).log_softmax(0)
        total += float((target * (target.log() - law)).sum())
        count += 1
    return total / count


NAMES = ("layers.2.attn", "layers.6.attn")  # an encoder source with reuse, a reindex layer


@pytest.mark.parametrize("every, phase, random", [(1, 0, 0), (4, 3, 12)])
@pytest.mark.parametrize("slot", [CSA2, Dense])
def test_index_loss_is_the_kl_from_attention_to_scores(model, ids, every, phase, random, slot):
    """Against a loop over rows. Random entries weigh what the row's own attention, which has not
    seen them, would have given them; dense attention sees all and draws none."""
    loss = fast.IndexLoss(every=every, random=random, phase=phase)
    plain, dense = watched(model, ids, slot), slot is Dense
    with torch.no_grad():
        model(fast.context(model.config, ids, index_loss=loss, dtype=torch.float64, dense=dense))
    terms, sources = loss.terms(), {s["name"]: s for s in loss.sources}
    assert terms.keys() == {"layers.1.attn", "layers.2.attn", "layers.4.attn", "layers.6.attn"}
    rows = range(phase, B * T, every)
    for name in NAMES:
        assert sources[name]["at"].tolist() == list(rows)
        other = None
        if random and not dense:
            layer = plain.given[name][3]
            other = drawn(sources[name], layer.ratio, layer.top_k)
        wanted = naive_index_loss(plain, name, rows, other)
        torch.testing.assert_close(float(terms[name]), wanted, rtol=1e-8, atol=1e-10)


def test_random_entries_are_all_that_may_be_picked_and_was_not(model, ids):
    """Drawn so often that hardly one is missed: visible, of the candidate blocks where there are
    any, never a pick, each once."""
    loss = fast.IndexLoss(every=3, random=400, phase=2)
    plain = watched(model, ids)
    with torch.no_grad():
        model(fast.context(model.config, ids, index_loss=loss, dtype=torch.float64))
    missed, found, limited = 0, 0, 0
    for source in loss.sources:
        _, _, picked, layer = plain.given[source["name"]]
        for row, other in zip(source["at"].tolist(), drawn(source, layer.ratio, layer.top_k)):
            other = sorted(e for e in other.tolist() if e >= 0)
            allowed = set(range((row % T + 1) // layer.ratio))
            if layer.role == "reindex":
                size, visible = layer.candidate_block_size, len(allowed)
                kept = picked.candidates[row].tolist()
                allowed = {e for e in allowed if e // size in kept}
                limited += len(allowed) < visible
            allowed -= set(picked.ids[row].tolist())
            assert len(set(other)) == len(other), "an entry twice"
            assert set(other) <= allowed
            found, missed = found + len(other), missed + len(allowed) - len(other)
    assert found > 100 * missed and limited > 30


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


@pytest.mark.slow
def test_compiled_functions_compute_the_same(model, ids):
    with torch.no_grad():
        eager, compiled = (
            model(fast.context(model.config, ids, compiled=c, dtype=torch.float64)).logits
            for c in (False, True)
        )
    torch.testing.assert_close(compiled, eager, rtol=0, atol=1e-12)
