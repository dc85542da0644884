"""The Triton kernels of cache rounding and the n-gram gate: on a GPU, or in Triton's interpreter.

    pytest -m gpu tests/kernels/test_round_gate_gpu.py     on a GPU: compiled, every dtype
    pytest tests/kernels/test_round_gate_gpu.py            without one: interpreted, float32
"""

import importlib.util
import os
import sys

import pytest
import torch
from kernel_laws import cases, take

from deepinfer import kernels
from deepinfer.kernels.cache_round import fused_gpu as rounding
from deepinfer.kernels.cache_round.reference import cache_round
from deepinfer.kernels.formats import FORMATS

CUDA = torch.cuda.is_available()
TRITON = importlib.util.find_spec("triton") is not None
if TRITON and not CUDA and "triton" not in sys.modules:
    os.environ["TRITON_INTERPRET"] = "1"  # read once, when Triton is imported

INTERPRETED = not CUDA and os.environ.get("TRITON_INTERPRET") == "1"

interpreter = pytest.param(
    "cpu",
    id="interpreter",
    marks=[
        pytest.mark.skipif(
            not (TRITON and INTERPRETED),
            reason="triton is not installed" if not TRITON else "Triton compiles here: see -m gpu",
        ),
        # The interpreter computes in numpy, which warns where a kernel divides by zero.
        pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    ],
)
gpu = pytest.param("cuda", id="gpu", marks=pytest.mark.gpu)
everywhere = pytest.mark.parametrize("device", [interpreter, gpu])
each_format = pytest.mark.parametrize("format", FORMATS)


def assert_same_bits(got, want):
    """Equal bits, apart from which NaN a NaN is."""
    integers = {4: torch.int32, 2: torch.int16}[want.element_size()]
    assert got.dtype == want.dtype and got.shape == want.shape
    nan = want.isnan()
    assert torch.equal(got.isnan(), nan)
    assert torch.equal(got.view(integers)[~nan], want.view(integers)[~nan])


def hard_numbers(kind):
    """Rows "128 64" on which rounding can go wrong."""
    g = torch.Generator().manual_seed(len(kind))
    normal = torch.randn(128, 64, generator=g)

    def power(low, high):
        return 2.0 ** torch.randint(low, high, (128, 1), generator=g)

    if kind == "any bits":
        bits = torch.randint(-(2**31), 2**31, (128, 64), generator=g)
        return bits.to(torch.int32).view(torch.float32)
    if kind == "any scale":
        return normal * power(-149, 126)
    if kind == "subnormal":
        return normal * 1e-40
    if kind == "ties":  # halfway values and scales, and their neighbours
        x = torch.randint(-32, 33, (128, 64), generator=g) / 16 * 6 * power(-12, 8)
        near = torch.randint(-1, 2, x.shape, generator=g).to(torch.int32)
        return (x.view(torch.int32) + near).view(torch.float32)
    normal[3], normal[7] = 0, -0.0
    normal[5, 3], normal[6, 40], normal[8, 0] = torch.nan, torch.inf, -torch.inf
    return normal


KINDS = ("any bits", "any scale", "subnormal", "ties", "zeros and infinities")


@everywhere
@each_format
@pytest.mark.parametrize("kind", KINDS)
def test_rounding_has_the_reference_s_bits(format, kind, device):
    """Compared on the CPU: torch on a GPU multiplies by 1/6 where the format divides by 6."""
    x = hard_numbers(kind)
    assert_same_bits(rounding.cache_round(x.to(device), format).cpu(), cache_round(x, format))


@everywhere
@each_format
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounding_of_short_floats(format, dtype, device):
    """Without subnormals in the interpreter, which takes them for zero."""
    for kind in KINDS:
        x = hard_numbers(kind).to(dtype)
        if device == "cpu":
            x[x.abs() < 2.0**-100] = 0
        assert_same_bits(rounding.cache_round(x.to(device), format).cpu(), cache_round(x, format))


@pytest.mark.gpu
@each_format
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(32768, 64), (4096, 8, 32), (5, 7, 512), (1, 96)], ids=str)
def test_rounding_equals_the_reference_on_the_gpu(shape, format, dtype):
    x = torch.randn(shape, device="cuda", dtype=dtype)
    assert_same_bits(rounding.cache_round(x, format), cache_round(x, format))


@everywhere
@each_format
def test_the_gradient_of_rounding_is_the_identity_s(format, device):
    x = torch.randn(3, 2, 32, device=device).requires_grad_()
    g = torch.randn(3, 2, 32, device=device)
    out = rounding.cache_round(x, format)
    out.backward(g)
    assert torch.equal(x.grad, g)
    with torch.no_grad():
        same = rounding.cache_round(x, format)
    assert not same.requires_grad and torch.equal(same, out)
    assert not rounding.cache_round(x.detach(), format).requires_grad


@everywhere
@each_format
def test_rounding_of_views_and_of_no_rows(format, device):
    x = torch.randn(6, 4, 2, 32, device=device)[:, 1].transpose(0, 1)
    assert not x.is_contiguous()
    assert_same_bits(rounding.cache_round(x, format).cpu(), cache_round(x.cpu(), format))
    assert rounding.cache_round(x[:, :0], format).shape == (2, 0, 32)


def test_rounding_that_is_not_covered_is_refused():
    x = torch.zeros(2, 48)
    assert "runs on CUDA only" in rounding.supports(x, "nvfp4")
    for format in ("mxfp8", "float", "fp3"):
        assert "format" in rounding.supports(x, format)
    ops = kernels.bind()
    ops.cache_round(x, "nvfp4")
    assert ("cache_round", "triton") not in ops.counts


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_every_rounding_case_is_chosen_and_right(dtype):
    assert "float64" in rounding.supports(torch.zeros(2, 64, device="cuda").double(), "mxfp8")
    for label, arguments in cases("cache_round", dtype, device="cuda"):
        ops = kernels.bind()
        got = ops.cache_round(**arguments)
        triton = ops.counts == {("cache_round", "triton"): 1}
        assert triton == (arguments["format"] != "float"), label
        assert_same_bits(got, cache_round(**arguments))


@everywhere
@each_format
def test_the_bits_of_a_rounded_row_do_not_depend_on_other_rows(format, device):
    x = torch.randn(37, 64, device=device)
    rows = [36, 3, 3, 20]
    some = take("cache_round", dict(x=x, format=format), rows)
    full = rounding.cache_round(x, format)
    assert torch.equal(rounding.cache_round(**some), full[rows])


def replayed(step):
    """Results of a step run eagerly, and replayed from a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        want = step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    graph.replay()
    torch.cuda.synchronize()
    return got, want


@pytest.mark.gpu
@each_format
def test_rounding_is_captured_without_a_sync(format):
    x = torch.randn(64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def step():
        out = rounding.cache_round(x, format)
        return out.detach(), *torch.autograd.grad(out, x, torch.ones_like(out))

    for got, want in zip(*replayed(step), strict=True):
        assert torch.equal(got, want)
