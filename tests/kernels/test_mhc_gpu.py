"""The Triton kernels of the hyper-connections: on a GPU, or in Triton's interpreter on a CPU.

pytest -m gpu tests/kernels/test_mhc_gpu.py        on a GPU: compiled, every dtype
pytest tests/kernels/test_mhc_gpu.py               without one: interpreted, float32
"""

import pytest
import torch

from deepinfer import kernels
from deepinfer.kernels.mhc_collapse import fused_gpu as collapse
from deepinfer.kernels.mhc_expand import fused_gpu as expand
from deepinfer.kernels.mhc_mix import fused_gpu as mix
from support.kernel_laws import cases, results, take
from support.triton_rig import CUDA, INTERPRETED, everywhere

BOUND = 2e-6 if INTERPRETED else 2e-5  # a GPU's division and exp are a few units less exact
OPS = {"mhc_collapse": collapse, "mhc_expand": expand, "mhc_mix": mix}

each = pytest.mark.parametrize("op", OPS)


def inputs(op, t, d, dtype, device, m=4):
    """Arguments of an op, freshly drawn."""
    g = torch.Generator().manual_seed(t + d)

    def normal(*shape, dtype=torch.float32, std=1.0):
        return (torch.randn(shape, generator=g) * std).to(device, dtype)

    streams, n = normal(t, m, d, dtype=dtype, std=3.0), m * (2 + m)
    if op == "mhc_collapse":
        return dict(streams=streams, pre=normal(t, m))
    if op == "mhc_expand":
        return dict(
            streams=streams,
            y=normal(t, d, dtype=dtype),
            post=normal(t, m),
            comb=normal(t, m, m),
        )
    return dict(
        streams=streams,
        fn=normal(n, m * d, std=0.05),
        base=normal(n),
        scale=normal(3),
        iters=20,
        norm_eps=1e-20,
        hc_eps=1e-6,
    )


def outputs_and_gradients(run, arguments, weights):
    """Results of a call, and the gradients of the sum of results times weights, by name."""
    leaves = {
        k: v.detach().clone().requires_grad_()
        for k, v in arguments.items()
        if isinstance(v, torch.Tensor)
    }
    out = results(run(**arguments | leaves))
    torch.autograd.backward(out, [w.to(x.dtype) for x, w in zip(out, weights, strict=True)])
    named = {f"result {i}": x.detach() for i, x in enumerate(out)}
    return named | {f"gradient of {k}": v.grad for k, v in leaves.items()}


def assert_near(got, want, bound):
    """Norm of the error against the norm of the float64 numbers."""
    for name, x in got.items():
        y = want[name]
        assert x.shape == y.shape, name
        assert not x.isnan().any(), name
        error = (x.double() - y).norm() / y.norm().clamp(min=1e-300)
        assert error <= bound, f"{name}: {error:.1e}"


def compare(op, arguments, bound):
    """The kernels against the reference in float64: results and every gradient."""
    reference = kernels.get(op).implementations["reference"].fn
    exact = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
    with torch.no_grad():
        shapes = [x.shape for x in results(reference(**exact))]
    g = torch.Generator().manual_seed(1)
    device = arguments["streams"].device
    weights = [torch.randn(s, generator=g).to(device).bfloat16() for s in shapes]  # exact in all
    got = outputs_and_gradients(getattr(OPS[op], op), arguments, weights)
    assert_near(got, outputs_and_gradients(reference, exact, weights), bound)
    for k, v in arguments.items():
        if isinstance(v, torch.Tensor):
            assert got[f"gradient of {k}"].dtype == v.dtype


@everywhere
@each
@pytest.mark.parametrize("d", [32, 224])
@pytest.mark.parametrize("t", [1, 7, 33])
def test_results_and_gradients_are_the_reference_s(op, t, d, device):
    compare(op, inputs(op, t, d, torch.float32, device), BOUND)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("t", "d"), [(5, 20), (3, 5120), (5000, 224), (301, 1000)])
@each
def test_results_and_gradients_on_a_gpu(op, t, d, dtype):
    bound = {torch.float32: BOUND, torch.float16: 1e-3, torch.bfloat16: 5e-3}[dtype]
    compare(op, inputs(op, t, d, dtype, "cuda"), bound)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@each
def test_every_case_of_the_op_is_chosen_and_right(op, dtype):
    """Cases of another number of streams are refused with the reason."""
    ran = 0
    for label, arguments in cases(op, dtype, device="cuda"):
        why = OPS[op].supports(**arguments)
        if why is not None:
            assert "streams" in why, label
            continue
        ops = kernels.bind()
        getattr(ops, op)(**arguments)
        assert ops.counts == {(op, "triton"): 1}, label
        compare(op, arguments, BOUND if dtype == torch.float32 else 5e-3)
        ran += 1
    assert ran >= 2


@everywhere
@pytest.mark.parametrize(("op", "m"), [("mhc_collapse", 2), ("mhc_collapse", 3), ("mhc_mix", 2)])
def test_other_numbers_of_streams(op, m, device):
    compare(op, inputs(op, 6, 32, torch.float32, device, m=m), BOUND)


@everywhere
@pytest.mark.parametrize("iters", [0, 1, 2])
def test_few_sinkhorn_rounds(iters, device):
    compare("mhc_mix", inputs("mhc_mix", 6, 32, torch.float32, device) | dict(iters=iters), BOUND)


@everywhere
@each
def test_views_are_read_as_they_are(op, device):
    """Streams and gradients that are not contiguous, as slices and expanded tensors are."""
    arguments = inputs(op, 6, 32, torch.float32, device)
    rows = {k: torch.stack([v, v + 1], 1) for k, v in arguments.items() if k in ("streams", "y")}
    views = {k: v[:, 0] for k, v in rows.items()}
    assert not views["streams"].is_contiguous()
    compare(op, arguments | views, BOUND)
    x = arguments["streams"].clone().requires_grad_()
    sum(y.sum() for y in results(getattr(OPS[op], op)(**arguments | dict(streams=x)))).backward()
    assert x.grad.isfinite().all()


@everywhere
@each
def test_no_gradient_is_kept_where_none_is_wanted(op, device):
    run, arguments = getattr(OPS[op], op), inputs(op, 3, 32, torch.float32, device)
    leaf = arguments["streams"].clone().requires_grad_()
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            got = results(run(**arguments | dict(streams=leaf)))
        assert not any(x.requires_grad for x in got)
    for a, b in zip(got, results(run(**arguments | dict(streams=leaf))), strict=True):
        assert torch.equal(a, b.detach())
        assert b.requires_grad


@everywhere
@pytest.mark.parametrize("op", ["mhc_collapse", "mhc_expand"])
def test_the_bits_of_a_row_do_not_depend_on_other_rows(op, device):
    """As registered: for the gradients, too."""
    assert kernels.get(op).implementations["triton"].batch_invariant
    t = 37
    arguments = inputs(op, t, 224, torch.float32, device)
    run, rows = getattr(OPS[op], op), [36, 3, 3, 20, 0]
    some = take(op, arguments, rows)
    shape = results(run(**arguments))[0].shape
    g = torch.randn(shape, device=device)
    full = outputs_and_gradients(run, arguments, [g])
    part = outputs_and_gradients(run, some, [g[rows]])
    for name, x in part.items():
        assert torch.equal(x, full[name][rows]), name


@everywhere
@each
def test_zero_rows(op, device):
    compare(op, inputs(op, 0, 32, torch.float32, device), 0)


@everywhere
@each
def test_a_row_that_is_not_finite_stays_alone(op, device):
    run, arguments = getattr(OPS[op], op), inputs(op, 5, 32, torch.float32, device)
    sick = dict(arguments, streams=arguments["streams"].clone())
    sick["streams"][1] = torch.nan
    others = [0, 2, 3, 4]
    for a, b in zip(results(run(**sick)), results(run(**arguments)), strict=True):
        assert a[1].isnan().any()
        assert torch.equal(a[others], b[others])


@each
def test_a_cpu_call_is_refused_by_name_and_runs_something_else(op):
    arguments = inputs(op, 3, 32, torch.float32, "cpu")
    assert "runs on CUDA only" in OPS[op].supports(**arguments)
    ops = kernels.bind()
    getattr(ops, op)(**arguments)
    assert (op, "triton") not in ops.counts
    if not CUDA:
        with pytest.raises(ValueError, match=f"{op}/triton.*no CUDA device"):
            kernels.bind({op: "triton"})


@pytest.mark.gpu
@each
def test_what_is_not_covered_is_refused_with_its_reason(op):
    refused = OPS[op].supports
    assert "float64" in refused(**inputs(op, 3, 32, torch.float64, "cuda"))
    arguments = inputs(op, 3, 32, torch.float32, "cuda")
    name = list(arguments)[-1] if op != "mhc_mix" else "fn"
    assert "float16" in refused(**arguments | {name: arguments[name].half()})
    assert f"{name} is on cpu" in refused(**arguments | {name: arguments[name].cpu()})
    if op == "mhc_expand":
        assert "4 streams" in refused(**inputs(op, 3, 32, torch.float32, "cuda", m=2))


@pytest.mark.gpu
@each
def test_a_training_step_is_captured_without_a_sync(op):
    """A CUDA graph refuses every call that waits for the device."""
    arguments = inputs(op, 64, 224, torch.bfloat16, "cuda")
    leaves = {k: v.requires_grad_() for k, v in arguments.items() if isinstance(v, torch.Tensor)}

    def step():
        out = results(getattr(OPS[op], op)(**arguments))
        return torch.autograd.grad(out, tuple(leaves.values()), [torch.ones_like(x) for x in out])

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
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)
