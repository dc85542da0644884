"""Cache formats: ties, ends of the range, bytes, non-finite groups."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer import kernels
from deepinfer.kernels import formats
from support.kernel_laws import implementations

FORMATS = ("mxfp8", "mxfp4", "nvfp4")
each = pytest.mark.parametrize(  # those for an accelerator: test_round_gate_gpu.py
    "round_to",
    [
        pytest.param(kernels.get(op).implementations[name].fn, id=name)
        for op, name in implementations(lambda i: i.op == "cache_round" and i.available is None)
    ],
)
ops = kernels.bind()


def e4m3_by_search():
    """All finite E4M3 magnitudes, from the definition."""
    low = [m * 2.0**-9 for m in range(8)]
    high = [(1 + m / 8) * 2.0**e for e in range(-6, 9) for m in range(8)]
    return [v for v in low + high if v <= 448]


VALUES = {"mxfp8": e4m3_by_search(), "mxfp4": list(formats.E2M1), "nvfp4": list(formats.E2M1)}


def nearest(x, values):
    """Nearest magnitude, ties to the even code; in exact arithmetic on floats of few bits."""
    size = min(abs(x), values[-1])
    best = min(range(len(values)), key=lambda i: (abs(values[i] - size), i % 2))
    return math.copysign(values[best], x)


def slow_round(row, format):
    """The definition, value by value, in float64."""
    f, out = formats.FORMATS[format], []
    for i in range(0, len(row), f.group):
        group = row[i : i + f.group]
        target = max(max(map(abs, group)), f.floor) / f.largest
        if format == "nvfp4":
            scale = nearest(min(target, 448), VALUES["mxfp8"])
        else:
            scale = 2.0 ** math.ceil(math.log2(target))
            scale = scale / 2 if scale / 2 >= target else scale
        out += [nearest(x / scale, VALUES[format]) * scale for x in group]
    return out


@each
@pytest.mark.parametrize("format", FORMATS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_rounding_is_the_definition(round_to, format, data):
    number = st.one_of(
        st.floats(-(2.0**20), 2.0**20, width=32),
        st.sampled_from([0.0, -0.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 448.0, 464.0]),
        st.floats(-(2.0**-17), 2.0**-17, width=32),
    )
    row = data.draw(st.lists(number, min_size=32, max_size=32))
    x = torch.tensor([row], dtype=torch.float64)
    assert round_to(x, format)[0].tolist() == slow_round(row, format)


@each
@pytest.mark.parametrize("format", FORMATS)
def test_float32_rounds_as_float64_does(round_to, format):
    """The scale and the ties are decided on exact quotients in both; only nvfp4's quotients by a
    scale that is no power of two may be rounded to a tie first."""
    x = torch.randn(400, 64, generator=torch.Generator().manual_seed(1)) * 3
    ours, exact = round_to(x, format).double(), round_to(x.double(), format)
    assert (ours != exact).double().mean() <= (1e-4 if format == "nvfp4" else 0)


@each
def test_ties_of_e2m1_go_to_the_even_code(round_to):
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]
    x = torch.tensor([ties * 4])
    assert round_to(x, "mxfp4")[0, :8].tolist() == [0, 1, 1, 2, 2, 4, 4, 6]
    assert round_to(-x, "nvfp4")[0, :8].tolist() == [-0.0, -1, -1, -2, -2, -4, -4, -6]


@each
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_bytes_hold_exactly_the_rounded_row(round_to, format, dtype):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(50, 64, generator=g) * 10.0 ** torch.randint(-9, 9, (50, 1), generator=g)
    x[7] = 0
    x[8, 3] = torch.nan
    x[9, 40] = torch.inf
    x = x.to(dtype)
    rounded = round_to(x, format)
    record = ops.pack(x, format)
    assert record.shape[-1] == formats.packed_bytes(format, 64)
    read = ops.unpack(record, format, 64, dtype)
    assert torch.equal(read.nan_to_num(7), rounded.nan_to_num(7))
    # A non-finite number takes its whole group along, in any format, and no other group.
    group = formats.FORMATS[format].group
    assert rounded[8, :group].isnan().all() and rounded[8, group:].isfinite().all()
    assert rounded[9].isfinite().sum() == 64 - group


@pytest.mark.parametrize(
    ("format", "dim", "size"), [("mxfp8", 512, 528), ("nvfp4", 512, 288), ("mxfp4", 128, 68)]
)
def test_record_sizes_of_the_release(format, dim, size):
    assert formats.packed_bytes(format, dim) == size
    assert ops.pack(torch.ones(3, dim), format).shape == (3, size)


def test_layout_of_a_record():
    """[data | scales]; of two E2M1 in a byte the even feature is the low nibble; E8M0 2^(b-127)."""
    x = torch.zeros(1, 32)
    x[0, :4] = torch.tensor([6.0, -0.5, 1.5, 4.0])
    assert ops.pack(x, "mxfp4")[0].tolist() == [0x97, 0x63, *[0] * 14, 127]
    x[0, :2] = torch.tensor([448.0, -1.0])
    assert ops.pack(x, "mxfp8")[0, [0, 1, -1]].tolist() == [0x7E, 0xB8, 127]


def test_gradient_is_straight_through():
    x = torch.randn(3, 32, requires_grad=True)
    grad = torch.randn(3, 32)
    ops.cache_round(x, "mxfp4").backward(grad)
    assert torch.equal(x.grad, grad)


def test_unknown_formats_and_widths_are_refused():
    with pytest.raises(ValueError, match="fp8.*mxfp8"):
        ops.cache_round(torch.ones(1, 32), "fp8")
    with pytest.raises(ValueError, match="groups of 32, not 48"):
        ops.cache_round(torch.ones(1, 48), "mxfp4")
    with pytest.raises(ValueError, match="has 34 uint8 bytes"):
        ops.unpack(torch.zeros(1, 33, dtype=torch.uint8), "mxfp4", 64, torch.float32)


def test_e8m0_bytes_are_exponents():
    values = formats.e8m0_values(torch.tensor([120, 125, 127, 130, 140, 0, 254], dtype=torch.uint8))
    assert values.tolist() == [0.0078125, 0.25, 1, 8, 8192, 2.0**-127, 2.0**127]
    assert formats.e8m0_bytes(values[:5]).tolist() == [120, 125, 127, 130, 140]
