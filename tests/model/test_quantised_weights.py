"""The same weights in the released FP8 and FP4 storage: bytes, values and logits."""

import dataclasses
import hashlib

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from deepinfer.checkpoint import names
from deepinfer.checkpoint.formats import round_storage
from deepinfer.checkpoint.loader import load
from deepinfer.checkpoint.reader import Checkpoint
from deepinfer.checkpoint.writer import write
from deepinfer.config import ModelConfig
from deepinfer.engine.engine import Engine
from deepinfer.kernels import Quantised
from deepinfer.model.stack import Model
from support import oracle

STORED = {"fp8": 111, "table": 2, "fp4": 552}  # weights of each kind


@pytest.fixture(scope="module")
def stored(folder, tmp_path_factory):
    """The checkpoint in FP8 and FP4, written by our writer from the bfloat16 values."""
    path = tmp_path_factory.mktemp("oracle") / "fp8"
    state = {name: x.float() for name, x in load_file(folder / oracle.SHARD).items()}
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return write(path, ModelConfig.from_file(folder), state, tokenizer=tokenizer, quantised=True)


@pytest.fixture(scope="module", params=["float32", "float64"])
def widened(stored, request):
    """Its values as float weights."""
    settings = dict(dtype=request.param, device="cpu", max_model_len=256, max_num_seqs=2)
    return Engine.from_pretrained(str(stored), fidelity=0, **settings)


@pytest.fixture(scope="module")
def kept(stored, widened):
    """Its weights as they are stored."""
    model = Model(widened.config)
    load(model, Checkpoint.open(stored), dtype=widened.model.dtype, keep_quantised=True)
    shared = dataclasses.replace(widened._shared, model=model)
    return Engine(shared, widened.settings, widened.slots)


def test_bytes_are_those_of_another_implementation(stored):
    digest = hashlib.sha256()
    tensors = {k: x for shard in stored.glob("*.safetensors") for k, x in load_file(shard).items()}
    for name, x in sorted(tensors.items()):
        digest.update(name.encode())
        digest.update(x.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    assert digest.hexdigest() == (oracle.HERE / "stored.sha256").read_text().strip()


def test_values_are_the_bfloat16_ones_rounded(stored, folder):
    """What is read as floats is what is kept, and what the format makes of the bfloat16 weight."""
    exact, rounded = Checkpoint.open(folder), Checkpoint.open(stored)
    found = dict.fromkeys(STORED, 0)
    for name, weight in rounded.weights.items():
        source, value = exact.read(name, torch.float32), rounded.read(name, torch.float32)
        as_stored = rounded.read(name)
        if weight.storage in STORED:
            found[weight.storage] += 1
            assert isinstance(as_stored, Quantised)
            assert torch.equal(as_stored.dequantise(torch.float32), value), name
            assert torch.equal(round_storage(source, weight.storage), value), name
            assert not torch.equal(source, value), name
        else:
            assert torch.equal(as_stored.float(), value) and torch.equal(value, source), name
    assert found == STORED


def test_what_is_kept_quantised(kept):
    found = {name: getattr(module, "weight", None) for name, module in kept.model.named_modules()}
    held = {name for name, weight in found.items() if isinstance(weight, Quantised)}
    wanted = set()
    for weight in names.weights(kept.config):
        if weight.storage in STORED:
            stack = names.stacked_name(weight.name) if weight.storage == "fp4" else None
            wanted.add(stack[0] if stack else weight.name.removesuffix(".weight"))
    assert held == wanted


@pytest.mark.parametrize(
    "widened, fidelity",
    [("float32", 0), ("float64", 0), ("float64", 1), ("float64", 2)],
    indirect=["widened"],
)
def test_logits_of_stored_weights_are_those_of_their_values(kept, widened, fidelity):
    """Above fidelity 0 in float64 only: an ulp of float32 may flip a cache rounding, which this
    excited network amplifies."""
    ids, chunks = oracle.prompts()[300][:140], [100, 36, 1, 1, 1, 1]
    engines = [e.with_(fidelity=fidelity) for e in (kept, widened)]
    a, b = (e.logits(ids, prompt=136, chunks=chunks) for e in engines)
    assert torch.isfinite(a).all()
    assert (a - b).abs().max() <= (1e-4 if kept.model.dtype == torch.float32 else 1e-10)


def test_storage_rounding_is_seen(widened, engine):
    """So that the tests above compare rounded weights and not the bfloat16 ones."""
    ids = oracle.prompts()[129]
    assert (widened.logits(ids) - engine.logits(ids)).abs().median() > 0.05


def test_fidelities_are_three_functions(engine):
    ids = oracle.prompts()[129]
    out = [engine.with_(fidelity=f).logits(ids) for f in (0, 1, 2)]
    assert all(torch.isfinite(x).all() for x in out)
    for a, b in ((0, 1), (1, 2), (0, 2)):
        assert (out[a] - out[b]).abs().median() > 1e-3, (a, b)
