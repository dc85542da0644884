"""The forward without a cache can be trained: gradients of all weights against differences."""

import copy
import re
import zlib

import pytest
import torch

from deepinfer.checkpoint import names
from deepinfer.checkpoint.loader import load
from deepinfer.checkpoint.memory import MemoryCheckpoint
from deepinfer.checkpoint.tiny import tiny_config
from deepinfer.checkpoint.tiny_tokenizer import tiny_tokenizer
from deepinfer.engine.step.batch import Work
from deepinfer.model.engram_hash import table_rows
from deepinfer.model.stack import Model
from support.model_rig import context

# more ids than the window (16), the top-k (8) and the candidate blocks (4 of 4) hold
IDS = torch.randint(8, 900, (26,), generator=torch.Generator().manual_seed(5)).tolist()
STEP = 1e-6
# what only chooses has no gradient: index side, selection biases
CHOICE = re.compile(r"\.attn\.indexer\.|\.gate\.bias")


def small_config():
    """Five layers with every role, one draft layer."""
    config = tiny_config(quantised=False).replace(
        hidden_size=64,
        num_hidden_layers=5,
        num_attention_heads=4,
        head_dim=32,
        q_lora_rank=32,
        o_lora_rank=16,
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        compress_ratios=(0, 2, 1, 1, 1, 0),
        kv_source_layer_ids=(1, 2),
        index_source_layer_ids=(1, 2, 4),
        index_topk=8,
        candidate_source_layer_id=2,
        candidate_topk_blocks=4,
        candidate_block_size=4,
        engram_layer_ids=(1,),
        engram_num_embeddings=(1,),
        engram_vocab_size=300,
        num_nextn_predict_layers=1,
        dspark_target_layer_ids=(2, 4),
        dspark_n_routed_experts=4,
    )
    return config.replace(engram_num_embeddings=tuple(table_rows(config).values()))


def draw(name, shape):
    """Random values of a weight, of a size at which every mechanism matters."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
    if name.endswith(("norm.weight", "scale")):
        return 1 + 0.2 * x
    if len(shape) == 1:
        return x
    return 2 * x if name.endswith("embed.weight") else 1.5 * x * shape[-1] ** -0.5


@pytest.fixture(scope="module")
def model():
    """Random weights in float64 that want gradients."""
    config = small_config()
    read = [w for w in names.weights(config) if not names.is_unread(w.name)]
    state = {w.name: draw(w.name, w.shape) for w in read}
    own = Model(config)
    load(own, MemoryCheckpoint(config, state, tiny_tokenizer()), dtype=torch.float64)
    return own.requires_grad_(True)


def loss(model, fidelity=0, ids=IDS):
    """Mean negative log-likelihood of the next token."""
    works = [Work(ids, logits="all"), Work(ids[3:12], logits="all")]
    logits = model(context(model, works, fidelity=fidelity)).logits
    target = torch.tensor([*ids[1:], 9, *ids[4:12], 10])
    return torch.nn.functional.cross_entropy(logits, target)


def kind(name):
    """Parameters of the same kind in different layers have the same form."""
    return re.sub(r"^layers\.\d+\.", "layers.*.", name)


def backbone(model):
    return {name: p for name, p in model.named_parameters() if not name.startswith("mtp.")}


def there(gradient):
    return gradient is not None and bool(gradient.any())


def gradients(model, fidelity=0):
    model.zero_grad()
    loss(model, fidelity).backward()
    return {name: p.grad for name, p in backbone(model).items()}


@pytest.fixture(scope="module")
def exact(model):
    return {name: None if g is None else g.clone() for name, g in gradients(model).items()}


def test_the_right_weights_have_a_gradient(model, exact):
    for name, p in backbone(model).items():
        if CHOICE.search(name):
            assert not there(exact[name]), name
        else:
            assert exact[name] is not None and torch.isfinite(exact[name]).all(), name
            assert exact[name].any(), name
    assert {kind(n) for n in exact} >= {
        "embed.weight",
        "head.weight",
        "norm.weight",
        "layers.*.attn.attn_sink",
        "layers.*.hc_attn_fn",
        "layers.*.attn.compressor.wgate.weight",
        "layers.*.engram.embed.weight",
        "layers.*.ffn.gate.weight",
        "layers.*.ffn.experts.w2.weight",
        "layers.*.ffn.shared_experts.w3.weight",
    }


def test_gradients_are_the_differences(model, exact):
    """Of every kind of weight, the entry with the largest gradient and one in the middle, in the
    first and the last layer that has it."""
    places: dict[str, list[str]] = {}
    for name, g in exact.items():
        if there(g):
            places.setdefault(kind(name), []).append(name)
    checked = 0
    for found in places.values():
        for name in {found[0], found[-1]}:
            flat, g = backbone(model)[name].data.view(-1), exact[name].view(-1)
            order = g.abs().argsort(descending=True)
            for at in {int(order[0]), int(order[int((g != 0).sum()) // 2])}:
                wanted = pytest.approx(g[at].item(), rel=1e-4, abs=1e-8)
                assert difference(model, flat, at) == wanted, name
                checked += 1
    assert checked >= 2 * len(places) >= 60


@torch.no_grad()
def difference(model, flat, at):
    """Central difference of the loss along one entry."""
    kept, sides = flat[at].item(), []
    for sign in (1, -1):
        flat[at] = kept + sign * STEP
        sides.append(loss(model).item())
    flat[at] = kept
    return (sides[0] - sides[1]) / (2 * STEP)


@pytest.mark.parametrize("fidelity", [1, 2])
def test_roundings_pass_gradients_straight_through(model, exact, fidelity):
    """Same weights reached, same size and mostly the same direction; without the pass-through every
    gradient behind a rounded key would be zero."""
    rounded = gradients(model, fidelity)
    for name, g in exact.items():
        if not there(g):
            continue
        other = rounded[name]
        assert torch.isfinite(other).all() and other.any(), name
        if name.endswith(("attn.wkv.weight", "compressor.wkv.weight", "kv_norm.weight")):
            alike = torch.nn.functional.cosine_similarity(g.flatten(), other.flatten(), 0)
            assert alike > 0.3, (name, alike)


def test_frozen_weights_get_none_and_training_lowers_the_loss(model):
    """Weights take a gradient where they are asked to, and only there."""
    model.zero_grad()
    model.requires_grad_(False)
    try:
        chosen = [model.layers[2].attn.wkv.weight, model.layers[3].ffn.experts.w1.weight]
        for p in chosen:
            p.requires_grad_(True)
        before = loss(model)
        before.backward()
        got = [name for name, p in model.named_parameters() if p.grad is not None]
        assert got == ["layers.2.attn.wkv.weight", "layers.3.ffn.experts.w1.weight"]
        grads = [p.grad.clone() for p in chosen]
        with torch.no_grad():
            for p, g in zip(chosen, grads):
                p -= 1e-3 * g
            after = loss(model)
            for p, g in zip(chosen, grads):
                p += 1e-3 * g
        assert after < before
    finally:
        model.requires_grad_(True)


def test_gradients_in_float32(model, exact):
    """Other kernels may run there; they keep the gradients."""
    for name, g in gradients(copy.deepcopy(model).to(torch.float32)).items():
        assert there(g) == there(exact[name]), name
        if there(g):
            pair = g.double().flatten(), exact[name].flatten()
            alike = torch.nn.functional.cosine_similarity(*pair, 0)
            assert alike > 0.9999, (name, alike)


def test_gradients_in_bfloat16(model, exact):
    """Finite, and there for the same weights."""
    for name, g in gradients(copy.deepcopy(model).to(torch.bfloat16)).items():
        assert there(g) == there(exact[name]), name
        assert g is None or torch.isfinite(g).all(), name
