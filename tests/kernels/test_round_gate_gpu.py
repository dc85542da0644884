"""The Triton kernels of cache rounding and the n-gram gate: on a GPU, or in Triton's interpreter.

pytest -m gpu tests/kernels/test_round_gate_gpu.py     on a GPU: compiled, every dtype
pytest tests/kernels/test_round_gate_gpu.py            without one: interpreted, float32
"""

import pytest
import torch

from deepinfer import kernels
from deepinfer.kernels.cache_round import fused_gpu as rounding
from deepinfer.kernels.cache_round.reference import cache_round
from deepinfer.kernels.engram_gate import fused_gpu as gating
from deepinfer.kernels.engram_gate.reference import engram_gate
from deepinfer.kernels.formats import FORMATS
from support.kernel_laws import cases, take
from support.triton_rig import INTERPRETED, everywhere

BOUND = 2e-6 if INTERPRETED else 2e-5  # a GPU's division and exp are a few units less exact

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
        top = torch.randint(16, 33, (128, 1), generator=g)
        x = torch.randint(-32, 33, (128, 64), generator=g).clamp(-top, top) / 16 * 6 * power(-12, 8)
        near = torch.randint(-1, 2, (128, 1), generator=g) * (x != 0)
        return (x.view(torch.int32) + near.to(torch.int32)).view(torch.float32)
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


def gate_inputs(t, d, dtype, device, m=4, dead=True):
    """Keys like the streams or their opposite, so that dot is not a small difference of large
    sums; the gate is clamped in row 2 by a short product and in row 3 by a zero."""
    g = torch.Generator().manual_seed(t + d)

    def normal(*shape):
        return torch.randn(shape, generator=g)

    streams = normal(t, m, d) * 3
    key = streams * normal(t, m, 1).sign() + normal(t, m, d)
    key[2:4], streams[2:3, :, 0] = 0, 1e-6
    key[2:3, :, 0] = 1
    value, weights = normal(t, d), [(1 + normal(m, d) / 4).to(device) for _ in range(2)]
    streams, key, value = (x.to(device, dtype) for x in (streams, key, value))
    rows = (torch.arange(t, device=device) % 5 == 1) if dead else None
    named = dict(streams=streams, key=key, value=value, q_weight=weights[0], k_weight=weights[1])
    return named | dict(eps=1e-20, dead=rows)


def floats(arguments):
    """Names of the arguments that have gradients."""
    return [
        k for k, v in arguments.items() if isinstance(v, torch.Tensor) and v.is_floating_point()
    ]


def gated(run, arguments, grad):
    """The result, and the gradients, of the sum of results times grad, by name."""
    leaves = {k: arguments[k].detach().clone().requires_grad_() for k in floats(arguments)}
    out = run(**arguments | leaves)
    out.backward(grad.to(out.dtype))
    return {"result": out.detach()} | {k: v.grad for k, v in leaves.items()}


def compare_gate(arguments, bound):
    """The kernels against the reference in float64: the result and every gradient. The gradient
    given is like the value, so that that of a gate is not a small difference of large sums."""
    g = torch.Generator().manual_seed(1)
    noise = torch.randn(arguments["streams"].shape, generator=g).to(arguments["streams"])
    grad = (arguments["value"].unsqueeze(1) + noise).bfloat16()  # exact in all
    exact = arguments | {k: arguments[k].double() for k in floats(arguments)}
    got, want = gated(gating.engram_gate, arguments, grad), gated(engram_gate, exact, grad)
    for name, y in want.items():
        x = got[name]
        assert x.dtype == arguments.get(name, arguments["streams"]).dtype
        assert x.shape == y.shape and not x.isnan().any(), name
        error = (x.double() - y).norm() / y.norm().clamp(min=1e-300)
        assert error <= bound, f"{name}: {error:.1e}"


@everywhere
@pytest.mark.parametrize("dead", [True, False])
@pytest.mark.parametrize("d", [20, 224])
@pytest.mark.parametrize("t", [0, 1, 7, 33])
def test_gate_and_gradients_are_the_reference_s(t, d, dead, device):
    compare_gate(gate_inputs(t, d, torch.float32, device, dead=dead), BOUND)


@everywhere
@pytest.mark.parametrize("m", [1, 2, 3])
def test_gates_of_other_numbers_of_streams(m, device):
    compare_gate(gate_inputs(6, 32, torch.float32, device, m=m), BOUND)


@everywhere
def test_gates_of_several_rows_per_program(device, monkeypatch):
    monkeypatch.setattr(gating, "PROGRAMS", 3)
    compare_gate(gate_inputs(11, 32, torch.float32, device), BOUND)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("t", "d"), [(5, 20), (5000, 224), (301, 1000), (9, 4096)])
def test_gate_and_gradients_on_a_gpu(t, d, dtype):
    # gradients of wide keys are so small that float16 holds them as subnormals
    bound = {torch.float32: BOUND, torch.float16: 1e-2, torch.bfloat16: 5e-3}[dtype]
    compare_gate(gate_inputs(t, d, dtype, "cuda"), bound)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_every_gate_case_is_chosen_and_right(dtype):
    for label, arguments in cases("engram_gate", dtype, device="cuda"):
        ops = kernels.bind()
        ops.engram_gate(**arguments)
        assert ops.counts == {("engram_gate", "triton"): 1}, label
        compare_gate(arguments, 2e-4 if dtype == torch.float32 else 1e-2)  # small dots, too


@everywhere
def test_keys_and_values_are_read_where_they_are(device):
    """Halves of the same rows, and streams and gradients that are not contiguous."""
    arguments = gate_inputs(6, 32, torch.float32, device)
    want = gating.engram_gate(**arguments)
    both = torch.cat([arguments["key"].flatten(1), arguments["value"]], 1)
    halves = dict(key=both[:, :128].reshape(6, 4, 32), value=both[:, 128:])
    assert not halves["key"].is_contiguous()
    assert all(gating._whole_rows(x) is x for x in halves.values())
    streams = torch.stack([arguments["streams"]] * 2, 2)[:, :, 0]
    mixed = torch.stack([arguments["key"]] * 2, 3)[..., 0]
    assert torch.equal(gating.engram_gate(**arguments | halves | dict(streams=streams)), want)
    assert torch.equal(gating.engram_gate(**arguments | dict(key=mixed)), want)
    leaf = both.clone().requires_grad_()
    halves = dict(key=leaf[:, :128].reshape(6, 4, 32), value=leaf[:, 128:])
    gating.engram_gate(**arguments | halves).sum().backward()  # an expanded gradient
    full = gated(gating.engram_gate, arguments, torch.ones_like(want))
    assert torch.equal(leaf.grad, torch.cat([full["key"].flatten(1), full["value"]], 1))


@everywhere
def test_gradients_of_some_inputs_only(device):
    arguments = gate_inputs(6, 32, torch.float32, device)
    full = gated(gating.engram_gate, arguments, torch.ones_like(arguments["streams"]))
    for name in floats(arguments):
        leaf = arguments[name].clone().requires_grad_()
        gating.engram_gate(**arguments | {name: leaf}).sum().backward()
        assert torch.equal(leaf.grad, full[name]), name
    with torch.no_grad():
        out = gating.engram_gate(**arguments | dict(value=leaf))
    assert not out.requires_grad


@everywhere
def test_the_bits_of_a_gated_row_do_not_depend_on_other_rows(device, monkeypatch):
    """As registered: for the gradients, too."""
    assert kernels.get("engram_gate").implementations["triton"].batch_invariant
    arguments, rows = gate_inputs(37, 224, torch.float32, device), [36, 3, 3, 20, 0]
    g = torch.randn(37, 4, 224, device=device)
    part = gated(gating.engram_gate, take("engram_gate", arguments, rows), g[rows])
    monkeypatch.setattr(gating, "PROGRAMS", 5)
    full = gated(gating.engram_gate, arguments, g)
    for name in ("result", "streams", "key", "value"):
        assert torch.equal(part[name], full[name][rows]), name


@everywhere
def test_a_dead_row_passes_on_what_is_not_finite_nowhere(device):
    arguments = gate_inputs(6, 32, torch.float32, device)
    sick = arguments | dict(key=arguments["key"].clone())
    sick["key"][1] = torch.nan  # dead
    g = torch.randn(6, 4, 32, device=device)
    want = gated(gating.engram_gate, arguments, g)
    for name, x in gated(gating.engram_gate, sick, g).items():
        assert torch.equal(x, want[name]), name
    sick["key"][4] = torch.nan
    out = gating.engram_gate(**sick)
    assert out[4].isnan().all() and not out[[0, 1, 2, 3, 5]].isnan().any()


def test_a_gate_that_is_not_covered_is_refused():
    arguments = gate_inputs(6, 32, torch.float32, "cpu")
    assert "runs on CUDA only" in gating.supports(**arguments)
    assert "too wide" in gating.supports(**gate_inputs(1, 5000, torch.float32, "cpu"))
    ops = kernels.bind()
    ops.engram_gate(**arguments)
    assert ("engram_gate", "triton") not in ops.counts


@pytest.mark.gpu
def test_gate_inputs_that_are_not_covered_are_refused():
    assert "float64" in gating.supports(**gate_inputs(6, 32, torch.float64, "cuda"))
    arguments = gate_inputs(6, 32, torch.float32, "cuda")
    assert gating.supports(**arguments) is None
    assert "dead is on cpu" in gating.supports(**arguments | dict(dead=arguments["dead"].cpu()))
    assert "bool" in gating.supports(**arguments | dict(dead=arguments["dead"].int()))


@pytest.mark.gpu
def test_a_step_of_the_gate_is_captured_without_a_sync():
    """A CUDA graph refuses every call that waits for the device."""
    arguments = gate_inputs(64, 224, torch.bfloat16, "cuda")
    leaves = [arguments[k].requires_grad_() for k in floats(arguments)]

    def step():
        out = gating.engram_gate(**arguments)
        return out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))

    for got, want in zip(*replayed(step), strict=True):
        assert torch.equal(got, want)
