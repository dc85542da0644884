"""Loading: everything or nothing, dtypes, kept storage; a small stand-in for the model."""

import pytest
import torch
from torch import nn

from deepinfer.checkpoint import names
from deepinfer.checkpoint.header import CheckpointError
from deepinfer.checkpoint.loader import load, official_state
from deepinfer.checkpoint.memory import MemoryCheckpoint
from deepinfer.checkpoint.reader import Checkpoint
from deepinfer.kernels.quantised import Quantised
from deepinfer.model.stack import Model


class Holder(nn.Module):
    """One weight, with the loading method of the model's own holders."""

    def __init__(self, shape):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape), requires_grad=False)

    def set_weight(self, weight):
        self._parameters.pop("weight", None)
        self.__dict__.pop("weight", None)
        if isinstance(weight, Quantised):
            self.__dict__["weight"] = weight
        else:
            self._parameters["weight"] = nn.Parameter(weight, requires_grad=False)


def stand_in(config, plain_experts=False) -> nn.Module:
    """Modules nested as the official names are, routed experts stacked."""
    model = nn.Module()
    shapes = {}
    for weight in names.weights(config):
        stack = names.stacked_name(weight.name)
        if stack is None:
            shapes[weight.name] = weight.shape
        else:
            name = stack[0] if plain_experts else f"{stack[0]}.weight"
            shapes[name] = (stack[1] + 1, *weight.shape)
    for name, shape in shapes.items():
        owner, *path = model, *name.split(".")
        *path, last = path
        for place, part in enumerate(path):
            if part not in owner._modules:
                leaf = place == len(path) - 1 and last == "weight"
                owner.add_module(part, Holder(shape) if leaf else nn.Module())
            owner = owner._modules[part]
        if last not in owner._parameters:
            owner.register_parameter(last, nn.Parameter(torch.empty(shape), requires_grad=False))
    return model


@pytest.fixture
def checkpoint(micro):
    return Checkpoint.open(micro[3])


@pytest.fixture(params=["stand-in", "plain experts", "model"])
def model(request, micro):
    with torch.device("meta"):
        if request.param == "model":
            return Model(micro[0])
        return stand_in(micro[0], request.param == "plain experts")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_every_weight_arrives_in_its_dtype(model, checkpoint, dtype):
    load(model, checkpoint, dtype=dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    state = official_state(model)
    assert state.keys() == checkpoint.weights.keys()
    for name, weight in checkpoint.weights.items():
        expected = checkpoint.read(name, wide if weight.wide else dtype)
        assert state[name].dtype == expected.dtype, name
        assert torch.equal(state[name], expected), name
    assert not [p for p in model.parameters() if p.requires_grad or p.is_meta]


def test_what_stays_float32_though_it_is_stored_in_bf16(micro, damage):
    for name in ("layers.0.hc_attn_fn", "layers.1.attn.attn_sink", "mtp.0.ffn.gate.bias_vl"):
        damage.tensor(name, lambda x: x.to(torch.bfloat16))
        model = stand_in(micro[0])
        load(model, Checkpoint.open(damage.folder), dtype=torch.bfloat16)
        assert official_state(model)[name].dtype == torch.float32


def test_weights_can_be_kept_as_they_are_stored(micro, checkpoint):
    with torch.device("meta"):
        model = stand_in(micro[0])
    load(model, checkpoint, dtype=torch.float32, keep_quantised=True)
    kept = {
        f"{prefix}.weight": module.weight
        for prefix, module in model.named_modules()
        if isinstance(getattr(module, "weight", None), Quantised)
    }
    stacks = {names.stacked_name(w.name) for w in checkpoint.weights.values() if w.storage == "fp4"}
    expected = {w.name for w in checkpoint.weights.values() if w.storage in ("fp8", "table")}
    assert kept.keys() == expected | {f"{name}.weight" for name, _ in stacks}
    wide = stand_in(micro[0])
    load(wide, checkpoint, dtype=torch.float32)
    values = dict(wide.named_parameters())
    for name, value in kept.items():
        assert torch.equal(value.dequantise(torch.float32), values[name]), name
    with pytest.raises(TypeError, match="kept quantised"):
        official_state(model)
    load(model, checkpoint, dtype=torch.float32)  # and widened again
    assert official_state(model).keys() == checkpoint.weights.keys()


def test_plain_parameters_can_not_be_kept_quantised(micro, checkpoint):
    model = stand_in(micro[0], plain_experts=True)
    with pytest.raises(CheckpointError, match="keep_quantised=False"):
        load(model, checkpoint, dtype=torch.float32, keep_quantised=True)
    assert all(p.is_meta for p in model.parameters())


def test_a_parameter_without_a_weight_is_refused(micro, checkpoint):
    model = stand_in(micro[0])
    model.add_module("extra", Holder((2, 2)))
    with pytest.raises(CheckpointError, match="extra.weight"):
        load(model, checkpoint, dtype=torch.float32)


def test_a_weight_without_a_parameter_is_refused(micro, checkpoint):
    model = stand_in(micro[0])
    del model.mtp
    with pytest.raises(CheckpointError, match="mtp.0"):
        load(model, checkpoint, dtype=torch.float32)


def test_another_shape_or_config_is_refused(micro, checkpoint):
    model = stand_in(micro[0])
    model.norm = Holder((31,))
    with pytest.raises(CheckpointError, match=r"norm.weight has shape \[31\]"):
        load(model, checkpoint, dtype=torch.float32)
    with torch.device("meta"):
        model = Model(micro[0].replace(index_topk=8))
    with pytest.raises(CheckpointError, match="index_topk = 8"):
        load(model, checkpoint, dtype=torch.float32)


def test_after_an_error_nothing_is_left(micro, damage):
    """The last weight read is damaged; all others have been loaded by then."""

    def spoil(x):
        x = x.clone()
        x[0, 0] = torch.nan
        return x

    model = stand_in(micro[0])
    load(model, Checkpoint.open(micro[3]), dtype=torch.float32)
    last = [name for name, _ in model.named_parameters()][-1]
    damage.tensor("mtp.0.confidence_head.proj.weight", spoil)
    assert "confidence_head" in last
    with pytest.raises(CheckpointError, match="confidence_head"):
        load(model, Checkpoint.open(damage.folder), dtype=torch.float32)
    assert all(p.is_meta for p in model.parameters())
    load(model, Checkpoint.open(micro[3]), dtype=torch.float32)
    assert not any(p.is_meta for p in model.parameters())


def test_interrupting_a_load_leaves_nothing(micro, checkpoint, monkeypatch):
    model, read, count = stand_in(micro[0]), checkpoint.read, []

    def interrupted(*args):
        count.append(args)
        if len(count) == 10:
            raise KeyboardInterrupt
        return read(*args)

    monkeypatch.setattr(checkpoint, "read", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load(model, checkpoint, dtype=torch.float32)
    assert all(p.is_meta for p in model.parameters())


def test_a_source_that_fills_half_a_weight_is_found_out(micro):
    """Parameters start as NaN, so what a reader leaves out shows."""
    config, state, tokenizer, _ = micro

    class Half(MemoryCheckpoint):
        def read_experts(self, prefix, matrix, dtype=None, experts=None):
            value = super().read_experts(prefix, matrix, dtype, experts)
            value[-1] = torch.nan
            return value

    model = stand_in(config)
    with pytest.raises(CheckpointError, match="not finite"):
        load(model, Half(config, state, tokenizer), dtype=torch.float32)
    assert all(p.is_meta for p in model.parameters())


def test_weights_are_own_memory(micro, checkpoint):
    """Changing a loaded weight changes neither the file nor what is read next."""
    model = stand_in(micro[0])
    load(model, checkpoint, dtype=torch.bfloat16)
    with torch.no_grad():
        model.norm.weight.zero_()
    assert bool(checkpoint.read("norm.weight").abs().max() > 0)


def test_the_token_map_goes_to_the_model(micro, checkpoint):
    with torch.device("meta"):
        model = Model(micro[0])
    load(model, checkpoint, dtype=torch.float32)
    assert torch.equal(model.token_map, checkpoint.token_map)


def test_in_memory_equals_on_disk(micro, checkpoint):
    config, state, tokenizer, _ = micro
    memory = MemoryCheckpoint(config, state, tokenizer)
    assert memory.weights == checkpoint.weights and memory.nbytes == checkpoint.nbytes
    assert torch.equal(memory.token_map, checkpoint.token_map)
    models = stand_in(config), stand_in(config)
    for model, source in zip(models, (memory, checkpoint)):
        load(model, source, dtype=torch.bfloat16)
    for a, b in zip(*(model.parameters() for model in models)):
        assert torch.equal(a, b)
    for name in checkpoint.weights:
        a, b = memory.read(name), checkpoint.read(name)
        if isinstance(b, Quantised):
            assert torch.equal(a.data, b.data) and torch.equal(a.scale, b.scale)
        else:
            assert a.dtype == b.dtype and torch.equal(a, b)


@pytest.mark.parametrize(
    "change,said",
    [
        (lambda s: s.pop("norm.weight"), "lacks tensor norm.weight"),
        (lambda s: s.update(extra=torch.ones(1)), "has the unknown tensor extra"),
        (lambda s: s.update({"norm.weight": torch.ones(3)}), "norm.weight"),
        (lambda s: s.update({"norm.weight": torch.ones(32, dtype=torch.int64)}), "int64"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(micro, change, said):
    config, state, tokenizer, _ = micro
    state = dict(state)
    change(state)
    with pytest.raises(CheckpointError, match=said):
        MemoryCheckpoint(config, state, tokenizer)


def test_in_memory_the_memory_needs_its_tokenizer(micro):
    config, state, _, _ = micro
    with pytest.raises(CheckpointError, match="tokenizer"):
        MemoryCheckpoint(config, state)
