"""Quantised weights: values, shapes, refusals."""

import pytest
import torch

from deepinfer.kernels import Quantised, formats
from deepinfer.kernels.cases import fp4, fp8

G = torch.Generator().manual_seed(0)


def test_tiles_of_fp8_share_a_scale():
    data = torch.randn(40, 70, generator=G).to(torch.float8_e4m3fn)
    scale = torch.tensor([[120, 125, 127], [130, 140, 127]], dtype=torch.uint8)
    weight = Quantised(data, scale, "fp8")
    assert weight.shape == (40, 70) and weight.nbytes == 40 * 70 + 6
    for i, j in ((0, 0), (31, 31), (31, 32), (39, 69), (32, 0), (39, 40)):
        want = data[i, j].float() * 2.0 ** (int(scale[i // 32, j // 32]) - 127)
        assert weight.dequantise(torch.float32)[i, j] == want


def test_scale_dtypes_are_read_by_their_bytes():
    """A cast from E8M0 to uint8 would turn 2^-7 into 0."""
    scale = torch.tensor([[120]], dtype=torch.uint8)
    data = torch.ones(32, 32).to(torch.float8_e4m3fn)
    a = Quantised(data, scale, "fp8")
    b = Quantised(data.view(torch.uint8), scale.view(torch.float8_e8m0fnu), "fp8")
    for weight in (a, b):
        assert (weight.dequantise(torch.float64) == 2.0**-7).all()


def test_fp4_columns_of_a_byte_and_scales_of_a_row():
    data = torch.tensor([[0x97] + [0] * 31, [0x21] + [0] * 31], dtype=torch.uint8).view(torch.int8)
    scale = torch.tensor([[128, 127], [126, 127]], dtype=torch.uint8)
    weight = Quantised(data, scale, "fp4")
    assert weight.shape == (2, 64)
    assert weight.dequantise(torch.float32)[:, :2].tolist() == [[12, -1], [0.25, 0.5]]


def test_stacks_give_their_matrices():
    weight = fp4(G, 5, 16, 64)
    whole = weight.dequantise(torch.float32)
    assert whole.shape == (5, 16, 64)
    assert torch.equal(weight[3].dequantise(torch.float32), whole[3])
    ids = torch.tensor([4, 0, 4])
    assert torch.equal(weight.select(ids).dequantise(torch.float32), whole[ids])


def test_rows_of_a_table():
    data = torch.randn(100, 64, generator=G).to(torch.float8_e4m3fn)
    table = Quantised(data, torch.randint(120, 130, (100, 2), generator=G).byte(), "fp8")
    ids = torch.tensor([[3, 99], [0, 3]])
    assert torch.equal(table.rows(ids, torch.float32), table.dequantise(torch.float32)[ids])


@pytest.mark.parametrize("rows", [1, 31, 32])
def test_few_rows_have_one_row_of_tiles(rows):
    assert fp8(G, rows, 64).dequantise(torch.float32).shape == (rows, 64)


def test_everything_dequantises_exactly_to_bfloat16():
    for weight in (fp8(G, 64, 64), fp4(G, 64, 64)):
        assert torch.equal(
            weight.dequantise(torch.bfloat16).double(), weight.dequantise(torch.float64)
        )


@pytest.mark.parametrize(
    ("data", "scale", "kind", "error", "match"),
    [
        (torch.zeros(64, 64), (2, 2), "fp8", TypeError, "data has dtype torch.float32"),
        (torch.zeros(64, 64).long(), (64, 4), "fp4", TypeError, "data has dtype torch.int64"),
        (torch.zeros(64, 64).byte(), (2, 3), "fp8", ValueError, r"\(2, 2\) or \(64, 2\).*not"),
        (torch.zeros(128, 128).byte(), (1, 1), "fp8", ValueError, r"\(4, 4\).*not \(1, 1\)"),
        (torch.zeros(64, 32).byte(), (2, 2), "fp4", ValueError, r"\(64, 2\).*not \(2, 2\)"),
        (torch.zeros(64, 32).byte(), (64, 2), "int4", ValueError, "kind='int4'"),
    ],
)
def test_what_does_not_fit_is_refused(data, scale, kind, error, match):
    with pytest.raises(error, match=match):
        Quantised(data, torch.full(scale, 127, dtype=torch.uint8), kind)


def test_a_nan_scale_and_a_float_scale_are_refused():
    data = torch.zeros(32, 32).byte()
    with pytest.raises(ValueError, match="255"):
        Quantised(data, torch.full((1, 1), 255, dtype=torch.uint8), "fp8")
    with pytest.raises(TypeError, match="float32"):
        Quantised(data, torch.ones(1, 1), "fp8")
    with pytest.raises(TypeError, match="no stack"):
        fp8(G, 32, 32)[0]
    with pytest.raises(TypeError, match="no scales per row"):
        fp8(G, 64, 64).rows(torch.tensor([0]), torch.float32)


def test_e2m1_values_are_the_table():
    codes = torch.arange(16, dtype=torch.uint8)
    got = formats.e2m1_values(codes)[0::2]
    assert got.tolist() == [*formats.E2M1, *(-v for v in formats.E2M1)]
    assert torch.equal(formats.e2m1_bytes(formats.e2m1_values(codes)), codes)
