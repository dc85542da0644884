"""The Triton kernels of the norm and of the rotary embedding: on a GPU, or interpreted on a CPU.

pytest -m gpu tests/kernels/test_norm_rope_gpu.py  on a GPU: compiled, every dtype
pytest tests/kernels/test_norm_rope_gpu.py         without one: interpreted, float32
"""

import pytest
import torch

from deepinfer import kernels
from deepinfer.kernels.rms_norm import fused_gpu as norm
from deepinfer.kernels.rope import fused_gpu as rotary
from support.kernel_laws import cases, take
from support.triton_rig import CUDA, INTERPRETED, everywhere

BOUND = 1e-6 if INTERPRETED else 5e-6  # of float32; a GPU's square root is a unit less exact
HALF_BOUNDS = {torch.float32: BOUND, torch.float16: 1e-3, torch.bfloat16: 5e-3}
OPS = {"rms_norm": norm, "rope": rotary}
LEAVES = {"rms_norm": ("x", "weight"), "rope": ("x",)}

each = pytest.mark.parametrize("op", OPS)


def inputs(op, shape, dtype, device, r=None, weight_dtype=torch.float32):
    """Arguments of an op, freshly drawn. r: features that rope rotates, half of them by default."""
    g = torch.Generator().manual_seed(sum(shape))
    x = (torch.randn(shape, generator=g) * 3).to(device, dtype)
    if op == "rms_norm":
        weight = torch.randn(shape[-1], generator=g).to(device, weight_dtype)
        return dict(x=x, weight=weight, eps=1e-20)
    half = shape[-1] // 4 if r is None else r // 2
    angle = torch.randn(shape[0], half, generator=g) * 10
    return dict(x=x, cos=angle.cos().to(device), sin=angle.sin().to(device))


def call(op, arguments):
    return getattr(OPS[op], op)(**arguments)


def result_and_gradients(run, arguments, grad, leaves):
    """The result of a call, and the gradients of the sum of the result times grad, by name."""
    tensors = {k: arguments[k].detach().clone().requires_grad_() for k in leaves}
    out = run(**arguments | tensors)
    out.backward(grad.to(out.dtype))
    return dict(result=out.detach()) | {f"gradient of {k}": v.grad for k, v in tensors.items()}


def compare(op, arguments, bound, leaves=None):
    """The kernel against the reference in float64: result, and the gradients of the leaves.

    The norm of the error against the norm of the float64 numbers."""
    if leaves is None:
        leaves = [k for k in LEAVES[op] if arguments[k] is not None]
    x = arguments["x"]
    g = torch.Generator().manual_seed(1)
    grad = torch.randn(x.shape, generator=g).to(x.device).bfloat16()  # exact in every dtype
    exact = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
    reference = kernels.get(op).implementations["reference"].fn
    got = result_and_gradients(getattr(OPS[op], op), arguments, grad, leaves)
    want = result_and_gradients(reference, exact, grad, leaves)
    assert got["result"].dtype == x.dtype
    for k in leaves:
        assert got[f"gradient of {k}"].dtype == arguments[k].dtype
    for name, y in want.items():
        assert got[name].shape == y.shape, name
        assert not got[name].isnan().any(), name
        error = (got[name].double() - y).norm() / y.norm().clamp(min=1e-300)
        assert error <= bound, f"{name}: {error:.1e}"


@everywhere
@each
@pytest.mark.parametrize("shape", [(1, 32), (7, 64), (33, 224), (9, 3, 40), (2, 5120)], ids=str)
def test_results_and_gradients_are_the_reference_s(op, shape, device):
    compare(op, inputs(op, shape, torch.float32, device), BOUND)


@everywhere
@pytest.mark.parametrize("shape", [(64,), (5, 7), (2, 3, 1, 33), (3, 8192)], ids=str)
def test_norms_of_other_shapes(shape, device):
    compare("rms_norm", inputs("rms_norm", shape, torch.float32, device), BOUND)


@everywhere
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("r", [0, 2, 32, 64])
@pytest.mark.parametrize("shape", [(5, 64), (5, 3, 64), (5, 2, 2, 64), (2, 1500)], ids=str)
def test_rotations_of_some_or_all_features(shape, r, inverse, device):
    arguments = inputs("rope", shape, torch.float32, device, r=r) | dict(inverse=inverse)
    compare("rope", arguments, BOUND)
    rest = shape[-1] - r
    got = call("rope", arguments)
    assert torch.equal(got[..., :rest], arguments["x"][..., :rest])


@everywhere
@pytest.mark.parametrize("leaves", [["x"], ["weight"], ["x", "weight"]], ids=str)
def test_norms_where_only_some_inputs_want_a_gradient(leaves, device):
    compare("rms_norm", inputs("rms_norm", (7, 64), torch.float32, device), BOUND, leaves)


@everywhere
def test_a_norm_without_weight(device):
    arguments = inputs("rms_norm", (7, 3, 96), torch.float32, device) | dict(weight=None, eps=1e-6)
    compare("rms_norm", arguments, BOUND)


@everywhere
def test_partial_sums_of_several_tiles(monkeypatch, device):
    """As training has them: each program adds up more than one tile, the last ones fewer."""
    monkeypatch.setattr(norm, "PROGRAMS", 2)
    for t in (15, 16, 17, 47):  # tiles of 4 rows
        compare("rms_norm", inputs("rms_norm", (t, 224), torch.float32, device), BOUND)


@everywhere
@pytest.mark.parametrize("eps", [0, 1, 1e-20, 0.5])
def test_every_eps(eps, device):
    """eps = 0, too: rows that a tile has beyond t must not make the sums nan."""
    arguments = inputs("rms_norm", (5, 64), torch.float32, device) | dict(eps=eps)
    compare("rms_norm", arguments, BOUND)


@everywhere
def test_a_row_of_zeros(device):
    arguments = inputs("rms_norm", (3, 64), torch.float32, device)
    arguments["x"][1] = 0
    compare("rms_norm", arguments, BOUND)


@everywhere
@each
def test_views_are_read_as_they_are(op, device):
    """Rows, weights, angles and gradients that are not contiguous: slices, expanded tensors."""
    arguments = inputs(op, (6, 3, 32), torch.float32, device)
    views = {
        k: torch.stack([v, v + 1], -1)[..., 0]
        for k, v in arguments.items()
        if isinstance(v, torch.Tensor)
    }
    assert not views["x"].is_contiguous()
    views = arguments | views
    compare(op, views, BOUND)
    grads = []
    for y in (arguments, views):
        x = y["x"].detach().requires_grad_()
        call(op, y | dict(x=x)).sum().backward()  # an expanded gradient
        grads.append(x.grad)
    assert torch.equal(*grads)


@everywhere
@each
def test_no_gradient_is_kept_where_none_is_wanted(op, device):
    arguments = inputs(op, (3, 32), torch.float32, device)
    leaf = arguments["x"].clone().requires_grad_()
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            got = call(op, arguments | dict(x=leaf))
        assert not got.requires_grad
    wanted = call(op, arguments | dict(x=leaf))
    assert wanted.requires_grad
    assert torch.equal(got, wanted.detach())
    assert not call(op, arguments).requires_grad


@everywhere
@each
def test_the_bits_of_a_row_do_not_depend_on_other_rows(op, device, monkeypatch):
    """As registered: for the gradient of x, too, however many tiles a program adds up."""
    monkeypatch.setattr(norm, "PROGRAMS", 2)
    assert kernels.get(op).implementations["triton"].batch_invariant
    t, rows = 37, [36, 3, 3, 20, 0]
    arguments = inputs(op, (t, 3, 224), torch.float32, device)
    g = torch.randn(t, 3, 224, device=device)
    run = getattr(OPS[op], op)
    full = result_and_gradients(run, arguments, g, LEAVES[op])
    part = result_and_gradients(run, take(op, arguments, rows), g[rows], LEAVES[op])
    for name in ("result", "gradient of x"):
        assert torch.equal(part[name], full[name][rows]), name


@everywhere
@each
def test_zero_rows(op, device):
    for shape in ((0, 32), (0, 3, 32), (3, 0, 32)):
        compare(op, inputs(op, shape, torch.float32, device), 0)


@everywhere
@each
def test_a_row_that_is_not_finite_stays_alone(op, device):
    arguments = inputs(op, (5, 32), torch.float32, device)
    sick = dict(arguments, x=arguments["x"].clone())
    sick["x"][1, -1] = torch.nan
    a, b, others = call(op, sick), call(op, arguments), [0, 2, 3, 4]
    assert a[1].isnan().any()
    assert torch.equal(a[others], b[others])


@everywhere
def test_features_at_rest_are_copied_whatever_they_hold(device):
    arguments = inputs("rope", (3, 64), torch.float32, device, r=32)
    held = torch.tensor([torch.inf, -0.0, -0.0, -torch.inf], device=device)
    arguments["x"][:, :32] = held.repeat(8)
    got = call("rope", arguments)
    for x in (got, 1 / got):  # the sign of a zero, too
        y = arguments["x"] if x is got else 1 / arguments["x"]
        assert torch.equal(x[:, :32], y[:, :32])
    assert got[:, 32:].isfinite().all()


@each
def test_a_cpu_call_is_refused_by_name_and_runs_something_else(op):
    arguments = inputs(op, (3, 32), torch.float32, "cpu")
    assert "runs on CUDA only" in OPS[op].supports(**arguments)
    ops = kernels.bind()
    getattr(ops, op)(**arguments)
    assert (op, "triton") not in ops.counts
    if not CUDA:
        with pytest.raises(ValueError, match=f"{op}/triton.*no CUDA device"):
            kernels.bind({op: "triton"})


def test_shapes_that_are_not_covered_are_refused_with_their_reason():
    refused, arguments = norm.supports, inputs("rms_norm", (3, 32), torch.float32, "cpu")
    assert "(32,), not (1,)" in refused(**arguments | dict(weight=torch.ones(1)))
    assert "8192 channels" in refused(torch.ones(2, 8193), None, 0.0)
    refused, arguments = rotary.supports, inputs("rope", (3, 32), torch.float32, "cpu")
    assert "even number" in refused(**arguments | dict(x=torch.ones(3, 31)))
    assert "(3, r/2)" in refused(**arguments | dict(cos=torch.ones(1, 8)))
    assert "(3, r/2)" in refused(**arguments | dict(sin=torch.ones(3, 4)))
    assert "16 features to rotate in 8" in refused(**arguments | dict(x=torch.ones(3, 8)))
    for name in ("cos", "sin"):
        wanted = {name: arguments[name].clone().requires_grad_()}
        assert f"gradient of {name}" in refused(**arguments | wanted)
        with torch.no_grad():
            assert "CUDA only" in refused(**arguments | wanted)


@pytest.mark.gpu
@each
def test_what_is_not_covered_on_a_gpu_is_refused_with_its_reason(op):
    refused, name = OPS[op].supports, {"rms_norm": "weight", "rope": "sin"}[op]
    arguments = inputs(op, (3, 32), torch.float32, "cuda")
    assert refused(**arguments) is None
    assert "x has to be" in refused(**arguments | dict(x=arguments["x"].double()))
    assert f"{name} has to be" in refused(**arguments | {name: arguments[name].double()})
    assert f"{name} is on cpu" in refused(**arguments | {name: arguments[name].cpu()})


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF_BOUNDS, ids=str)
@pytest.mark.parametrize(
    "shape", [(5, 20), (3, 5120), (5000, 224), (32768, 64), (999, 8, 64), (301, 1000)], ids=str
)
@each
def test_results_and_gradients_on_a_gpu(op, shape, dtype):
    for weight_dtype in (torch.float32, torch.bfloat16):
        arguments = inputs(op, shape, dtype, "cuda", weight_dtype=weight_dtype)
        compare(op, arguments, max(HALF_BOUNDS[dtype], HALF_BOUNDS[weight_dtype]))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@each
def test_every_case_of_the_op_is_chosen_and_right(op, dtype):
    for label, arguments in cases(op, dtype, device="cuda"):
        ops = kernels.bind()
        getattr(ops, op)(**arguments)
        assert ops.counts == {(op, "triton"): 1}, label
        compare(op, arguments, HALF_BOUNDS[dtype])


@pytest.mark.gpu
@each
def test_a_training_step_is_captured_without_a_sync(op):
    """A CUDA graph refuses every call that waits for the device."""
    arguments = inputs(op, (64, 224), torch.bfloat16, "cuda")
    leaves = [arguments[k].requires_grad_() for k in LEAVES[op]]

    def step():
        out = call(op, arguments)
        return torch.autograd.grad(out, leaves, torch.ones_like(out))

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
