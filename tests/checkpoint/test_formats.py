"""Storage formats: exact bytes, rounding laws, and the refusals around E8M0."""

import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.checkpoint import names
from deepinfer.checkpoint.formats import e8m0_to_float, quantise, round_storage
from deepinfer.config import ModelConfig
from deepinfer.kernels.quantised import Quantised
from support import oracle

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
STORAGES = ("fp8", "table", "fp4")


def test_e8m0_bytes_are_exponents():
    """The bytes of a public fault report, in both dtypes that they are held in."""
    data = torch.tensor([120, 125, 127, 130, 140], dtype=torch.uint8)
    expected = [0.0078125, 0.25, 1.0, 8.0, 8192.0]
    assert e8m0_to_float(data).tolist() == expected
    assert e8m0_to_float(data.view(torch.float8_e8m0fnu)).tolist() == expected
    every = torch.arange(255, dtype=torch.uint8)
    assert torch.equal(e8m0_to_float(every).double(), 2.0 ** (every.double() - 127))


def test_e8m0_refuses_nan_and_other_dtypes():
    with pytest.raises(ValueError, match="255"):
        e8m0_to_float(torch.tensor([1, 255], dtype=torch.uint8))
    with pytest.raises(TypeError, match="float32"):
        e8m0_to_float(torch.ones(2))


def test_every_byte_of_a_checkpoint_that_others_made():
    """Its unquantised weights, quantised here, have the published bytes."""
    state = oracle.weights()
    source = ModelConfig.from_file(oracle.HERE).to_dict()
    source["quantization_config"] = ModelConfig.v41_flash().to_dict()["quantization_config"]
    stored = {}
    for weight in names.weights(ModelConfig.from_dict(source)):
        value = state[weight.name]
        if weight.storage in STORAGES:
            found = quantise(value, weight.storage)
            stored[weight.name], stored[names.scale_name(weight.name)] = found.data, found.scale
        else:
            stored[weight.name] = value
    digest = hashlib.sha256()
    for name, value in sorted(stored.items()):
        digest.update(name.encode())
        digest.update(value.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    assert digest.hexdigest() == (oracle.HERE / "stored.sha256").read_text().strip()


def test_fp4_packing_and_codes():
    row = torch.cat([E2M1, -E2M1, torch.zeros(16)])[None]
    found = quantise(row, "fp4")
    assert found.scale.tolist() == [[127]]
    low, high = found.data[0] & 15, found.data[0] >> 4
    codes = torch.stack([low, high], 1).flatten().tolist()
    assert codes[:16] == list(range(8)) + [8, *range(9, 16)]
    assert torch.equal(found.dequantise(torch.float32), row)


def test_fp4_ties_go_to_the_even_code():
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    row = torch.zeros(1, 32)
    row[0, :7], row[0, 7:14], row[0, 31] = ties, -ties, 6.0
    even = [0, 1, 1, 2, 2, 4, 4]
    found = round_storage(row, "fp4")[0]
    assert found[:7].tolist() == even and found[7:14].tolist() == [-x for x in even]


def test_tiles_share_a_scale_and_rows_do_not():
    weight = torch.zeros(40, 40)
    weight[0, 0], weight[39, 39] = 448.0, 448.0 * 2.0**-10
    tiles = quantise(weight, "fp8")
    rows = quantise(torch.nn.functional.pad(weight, (0, 24)), "table")
    assert tiles.scale.tolist() == [[127, 127], [127, 117]]
    assert rows.scale.shape == (40, 2)
    assert rows.scale[0].tolist() == [127, 127] and rows.scale[39].tolist() == [127, 117]


def test_zeros_and_extremes_are_kept_exactly():
    for storage in STORAGES:
        largest = 6.0 if storage == "fp4" else 448.0
        weight = torch.zeros(32, 64)
        weight[:, 32] = largest * 2.0**100
        weight[:, 5] = 2.0**-120
        assert torch.equal(round_storage(weight, storage)[:, 32:], weight[:, 32:])
        assert torch.equal(round_storage(torch.zeros(3, 32), storage), torch.zeros(3, 32))
        huge = torch.full((2, 32), 2.0**127)
        assert torch.equal(round_storage(huge, storage), huge)


@st.composite
def matrices(draw):
    rows = draw(st.integers(1, 70))
    columns = 32 * draw(st.integers(1, 3))
    seed = draw(st.integers(0, 2**31))
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((rows, columns)) * 2.0 ** rng.integers(-40, 40, (rows, columns))
    values[rng.random((rows, columns)) < 0.1] = 0.0
    return torch.from_numpy(values.astype(np.float32))


@given(matrices(), st.sampled_from(STORAGES))
@settings(max_examples=40, deadline=None)
def test_quantising_is_idempotent_and_near(weight, storage):
    found = quantise(weight, storage)
    again = quantise(found.dequantise(torch.float32), storage)
    value = found.dequantise(torch.float64)
    assert torch.equal(again.dequantise(torch.float64), value)
    scale = Quantised(torch.full_like(found.data, _one(storage)), found.scale, found.kind)
    scale = scale.dequantise(torch.float64)
    # half a step: values have 1 (E2M1) or 3 (E4M3) fraction bits, and a smallest exponent
    bits, lowest = (1, 0) if storage == "fp4" else (3, -6)
    exponent = torch.frexp(weight.double() / scale)[1] - 1
    step = torch.ldexp(scale, exponent.clamp(min=lowest) - bits)
    assert bool(((value - weight.double()).abs() <= step / 2).all())
    assert bool((torch.signbit(value) == torch.signbit(weight.double())).all())


@given(matrices(), st.sampled_from(STORAGES))
@settings(max_examples=40, deadline=None)
def test_a_scale_is_the_smallest_that_holds_its_block(weight, storage):
    found = quantise(weight, storage)
    largest = 6.0 if storage == "fp4" else 448.0
    for i in range(found.scale.shape[0]):
        rows = weight[32 * i : 32 * i + 32] if storage == "fp8" else weight[i : i + 1]
        for j in range(found.scale.shape[1]):
            block = rows[:, 32 * j : 32 * j + 32].abs().max().item()
            scale = 2.0 ** (int(found.scale[i, j]) - 127)
            assert block <= largest * scale
            assert block == 0 or block > largest * scale / 2


@given(st.sampled_from(STORAGES), st.integers(0, 2**31))
@settings(max_examples=20, deadline=None)
def test_a_stack_is_quantised_as_its_matrices(storage, seed):
    stack = torch.randn(3, 40, 64, generator=torch.Generator().manual_seed(seed))
    whole = quantise(stack, storage)
    for i, matrix in enumerate(stack):
        one = quantise(matrix, storage)
        assert torch.equal(whole.data[i], one.data) and torch.equal(whole.scale[i], one.scale)


def _one(storage: str) -> int:
    """A data byte whose values are 1."""
    return 0x22 if storage == "fp4" else 0x38


@pytest.mark.parametrize(
    "weight,storage,said",
    [
        (torch.ones(2, 32), "fp6", "fp6"),
        (torch.ones(2, 33), "fp4", "columns by 32"),
        (torch.ones(2, 33), "table", "columns by 32"),
        (torch.ones(32), "fp8", "two axes"),
        (torch.full((2, 32), torch.nan), "fp8", "NaN"),
        (torch.full((2, 32), torch.inf), "fp4", "infinity"),
    ],
)
def test_refusals(weight, storage, said):
    with pytest.raises(ValueError, match=said):
        quantise(weight, storage)


@pytest.mark.parametrize("storage", ["fp8", "table", "fp4"])
def test_rounding_is_what_reading_back_gives(storage):
    """Random weights of all sizes, every midpoint of E2M1, zeros of both signs."""
    middle = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 0.0, -0.0])
    weight = torch.randn(64, 64) * torch.logspace(-30, 30, 64)[:, None]
    weight[:32, :10] = torch.where(torch.rand(32, 10) < 0.5, -middle, middle)
    weight[:32, 10:32] = 0
    stored = quantise(weight, storage).dequantise(torch.float32)
    rounded = round_storage(weight, storage)
    assert torch.equal(rounded, stored) and torch.equal(rounded.signbit(), stored.signbit())
    weight[40, 3] = torch.nan
    assert round_storage(weight, storage)[40, 3].isnan()
