"""In the tiny model everything matters: taking any mechanism away moves the logits far more than
rounding does, and drafts are accepted sometimes and rejected sometimes."""

import copy
import random
from collections import Counter

import pytest
import torch

import deepinfer as di
from deepinfer import kernels
from deepinfer.checkpoint.loader import load
from deepinfer.checkpoint.tiny import tiny_checkpoint
from deepinfer.engine.step.batch import Work, build
from deepinfer.model.context import ForwardContext
from deepinfer.model.stack import Model
from deepinfer.slots.attention import CSA2
from deepinfer.slots.experts import Local
from deepinfer.slots.protocols import EngineInfo

IDS = [0, *random.Random(1).choices(range(3, 1000), k=199)]


@pytest.fixture(scope="module")
def model():
    source = tiny_checkpoint()
    with torch.device("meta"):
        model = Model(source.config)
    load(model, source, dtype=torch.float64)
    return model


def logits(model, fidelity=1, **changes):
    """[t, v] of one pass over IDS in float64; changes: config keys of the run."""
    config = model.config.replace(**changes)
    info = EngineInfo(config, "cpu", torch.float64, 1)
    context = ForwardContext(
        config=config,
        batch=build([Work(list(IDS), logits="all")], config),
        ops=kernels.bind(),
        attention=CSA2().start(info),
        experts=Local().start(info),
        fidelity=fidelity,
    )
    with torch.no_grad():
        return model(context).logits


@pytest.fixture(scope="module")
def base(model):
    return logits(model)


def effect(a, b):
    """Median over the last hundred rows of the largest change of a logit."""
    return (a - b).abs().amax(-1)[-100:].median().item()


def test_logits_are_alive(base):
    """Spread as a language model's are, and the first token leads clearly."""
    assert 2 < base.std().item() < 6
    top = base.topk(2).values
    assert (top[:, 0] - top[:, 1]).median().item() > 0.3
    assert len(set(base.argmax(-1).tolist())) > 100


@pytest.mark.parametrize(
    "changes",
    [
        {"index_topk": 15},
        {"candidate_topk_blocks": 7},
        {"swiglu_limit": 1e9},
        {"sliding_window": 15},
        {"rope_scaling": None},
        {"routed_scaling_factor": 1.6},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_changed_key_shows(model, base, changes):
    assert effect(logits(model, **changes), base) > 0.1


def test_cache_rounding_shows(model, base):
    assert effect(logits(model, fidelity=0), base) > 0.1


WITHOUT = {
    "sinks": lambda m: [layer.attn.attn_sink.fill_(-1e9) for layer in m.layers],
    "router bias": lambda m: [layer.ffn.gate.bias.zero_() for layer in m.layers],
    "n-gram memory": lambda m: [m.layers[i].engram.embed.weight.zero_() for i in (1, 3)],
    "token classes": lambda m: m.token_map.copy_(torch.arange(1024) % 896),
    "compressed entries": lambda m: m.layers[2].attn.compressor.norm.weight.zero_(),
    "compressor gate": lambda m: m.layers[2].attn.compressor.wgate.weight.zero_(),
    "stream mixing": lambda m: [layer.hc_ffn_fn.zero_() for layer in m.layers],
    "shared experts": lambda m: [layer.ffn.shared_experts.w2.weight.zero_() for layer in m.layers],
}


@pytest.mark.parametrize("what", WITHOUT)
def test_a_missing_mechanism_shows(model, base, what):
    without = copy.deepcopy(model)
    with torch.no_grad():
        WITHOUT[what](without)
    assert effect(logits(without), base) > 0.1


def test_drafts_are_accepted_sometimes():
    """Several tokens in some steps, one in others; a drafter that knows nothing is right once in a
    thousand times."""
    engine = di.Engine.tiny(seed=0).with_(verifier="fixed")
    out = engine.generate("The walk of a token", max_tokens=40, temperature=0.0)[0]
    per_step = Counter(Counter(token.step for token in out.steps).values())
    assert per_step[1] > 2 and sum(n for size, n in per_step.items() if size > 1) > 2
