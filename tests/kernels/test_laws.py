"""Laws that hold for every implementation of every op, on the op's own cases."""

import pytest
import torch

from deepinfer import kernels
from deepinfer.kernels import Quantised, Records
from support.kernel_laws import (
    DTYPES,
    brute_rows,
    cases,
    close,
    implementations,
    num_rows,
    results,
    take,
)

gpu = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator"),
    ],
)
every = pytest.mark.parametrize(("op", "name"), implementations())


def supported(op, name, dtype, device="cpu"):
    implementation = kernels.get(op).implementations[name]
    for label, arguments in cases(op, dtype, device=device):
        if implementation.why_refused(**arguments) is None:
            yield label, implementation.fn, arguments


@pytest.mark.parametrize("device", ["cpu", gpu])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("op", "name"), implementations(lambda i: i.kind != "reference"))
def test_equals_the_reference(op, name, dtype, device):
    ran = 0
    reference = kernels.get(op).implementations["reference"].fn
    with torch.no_grad():
        for _, fn, arguments in supported(op, name, dtype, device):
            close(op, dtype, fn(**arguments), reference(**arguments))
            ran += 1
    if not ran:
        pytest.skip(f"{op}/{name} supports no {dtype} case on {device}")


@every
def test_runs_on_zero_rows(op, name):
    for label, fn, arguments in supported(op, name, torch.float32):
        full, none = results(fn(**arguments)), results(fn(**take(op, arguments, [])))
        for a, b in zip(full, none, strict=True):
            assert b.shape == (0, *a.shape[1:]), label
            assert b.dtype == a.dtype, label


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@every
def test_a_row_depends_on_itself_only(op, name, dtype):
    """Bit for bit where it is promised, within the op's tolerance elsewhere."""
    exact = kernels.get(op).implementations[name].batch_invariant
    with torch.no_grad():
        for label, fn, arguments in supported(op, name, dtype):
            full = results(fn(**arguments))
            for rows in brute_rows(num_rows(op, arguments)):
                part = results(fn(**take(op, arguments, rows)))
                want = tuple(x[torch.tensor(rows)] for x in full)
                if exact:
                    for a, b in zip(part, want, strict=True):
                        assert torch.equal(bits(a), bits(b)), (label, rows)
                else:
                    close(op, dtype, part, want)


def bits(x):
    return x if not x.is_floating_point() else x.contiguous().view(torch.uint8)


@every
def test_a_nan_stays_in_its_row(op, name):
    for label, fn, arguments in supported(op, name, torch.float32):
        t = num_rows(op, arguments)
        floats = [
            r
            for r in kernels.get(op).rows
            if arguments.get(r) is not None and arguments[r].is_floating_point()
        ]
        if t < 2 or not floats or arguments[floats[0]].numel() == 0:
            continue
        sick = dict(arguments)
        sick[floats[0]] = arguments[floats[0]].clone()
        sick[floats[0]][1] = torch.nan
        others = [i for i in range(t) if i != 1]
        close(
            op,
            torch.float32,
            tuple(x[others] for x in results(fn(**sick))),
            tuple(x[others] for x in results(fn(**arguments))),
        )


@every
def test_inputs_are_left_alone(op, name):
    for label, fn, arguments in supported(op, name, torch.float32):
        tensors = {k: v for k, v in arguments.items() if isinstance(v, torch.Tensor)}
        before = {k: v.clone() for k, v in tensors.items()}
        with torch.no_grad():
            fn(**arguments)
        for k, v in tensors.items():
            torch.testing.assert_close(v, before[k], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("op", [n for n in kernels.names() if kernels.get(n).differentiable])
def test_gradient_of_the_reference_is_the_numeric_one(op):
    if op == "cache_round":
        pytest.skip("its gradient is the identity's on purpose: see test_formats")
    reference = kernels.get(op).implementations["reference"].fn
    checked = 0
    for _, arguments in cases(op, torch.float64):
        kinds = [type(v) for v in arguments.values()]
        if Quantised in kinds or Records in kinds or num_rows(op, arguments) > 12:
            continue
        floats = {
            k: v.double().requires_grad_()
            for k, v in arguments.items()
            if isinstance(v, torch.Tensor) and v.is_floating_point() and v.numel()
        }

        def call(*values, arguments=arguments, floats=floats):
            out = results(reference(**arguments | dict(zip(floats, values, strict=True))))
            return tuple(x for x in out if x.is_floating_point())

        assert torch.autograd.gradcheck(call, tuple(floats.values()), fast_mode=True)
        checked += 1
    assert checked or op == "sparse_attend"  # whose Records have a test of their own


@pytest.mark.parametrize("op", [n for n in kernels.names() if kernels.get(n).differentiable])
def test_the_automatic_choice_keeps_gradients(op):
    """A fast twin that records no gradient must refuse the call that wants one."""
    run = getattr(kernels.bind(), op)
    for label, arguments in cases(op, torch.float32):
        name = kernels.get(op).rows[0]
        x = arguments[name].clone().requires_grad_()
        out = results(run(**arguments | {name: x}))
        graph = [y for y in out if y.is_floating_point() and y.numel()]
        assert not graph or any(y.requires_grad for y in graph), label
