"""Choosing implementations: order, names, refusals, explanations, counts."""

import subprocess
import sys

import pytest
import torch

from deepinfer import kernels
from deepinfer.kernels import registry


@pytest.fixture
def op():
    """An op of its own, so that nothing leaks into the real ones."""
    made = registry.register(
        registry.Op("test_op", "test_op(x) -> x", ("x",), lambda g, d: iter(()), {})
    )
    made.implement("reference", kind="reference", batch_invariant=True)(lambda x: ("reference", x))
    yield made
    del registry._OPS["test_op"]


def test_vendor_comes_before_own_before_reference_before_late(op):
    for name, kind in (("late", "own"), ("own", "own"), ("vendor", "vendor")):
        op.implement(name, kind=kind, batch_invariant=False, late=name == "late")(
            lambda x, name=name: (name, x)
        )
    assert [i.name for i in op.ordered()] == ["vendor", "own", "reference", "late"]
    assert kernels.bind().test_op(1) == ("vendor", 1)
    assert kernels.bind(batch_invariant=True).test_op(1) == ("reference", 1)


def test_the_first_that_supports_the_call_runs(op):
    refuse = lambda x: "x is odd" if x % 2 else None  # noqa: E731
    op.implement("even", batch_invariant=True, supports=refuse)(lambda x: ("even", x))
    op.implement("absent", kind="vendor", batch_invariant=True, available=lambda: "no card")(None)
    ops = kernels.bind()
    assert [ops.test_op(x)[0] for x in (2, 3, 4)] == ["even", "reference", "even"]
    assert ops.counts == {("test_op", "even"): 2, ("test_op", "reference"): 1}
    table = kernels.explain("test_op", 3)
    assert [(r["implementation"], r["chosen"], r["reason"]) for r in table.rows] == [
        ("absent", "", "no card"),
        ("even", "", "x is odd"),
        ("reference", "yes", ""),
    ]
    lines = repr(table).splitlines()
    assert lines[0].split()[0] == "implementation" and len(lines) == 4


def test_a_named_implementation_raises_its_reason_and_nothing_replaces_it(op):
    op.implement("even", batch_invariant=False, supports=lambda x: "x is odd" if x % 2 else None)(
        lambda x: ("even", x)
    )
    op.implement("absent", batch_invariant=True, available=lambda: "no card")(lambda x: x)
    ops = kernels.bind({"test_op": "even"})
    assert ops.test_op(2) == ("even", 2)
    with pytest.raises(ValueError, match="test_op/even.*x is odd"):
        ops.test_op(3)
    with pytest.raises(ValueError, match="test_op/absent.*no card"):
        kernels.bind({"test_op": "absent"})
    with pytest.raises(ValueError, match="test_op/even.*not batch invariant"):
        kernels.bind({"test_op": "even"}, batch_invariant=True)


def test_no_implementation_supports_the_call(op):
    op.implementations.clear()
    op.implement("only", batch_invariant=False, supports=lambda x: "never")(lambda x: x)
    with pytest.raises(ValueError, match="never"):
        kernels.bind().test_op(1)
    with pytest.raises(ValueError, match="no batch-invariant implementation of test_op"):
        kernels.bind(batch_invariant=True)


def test_use_comes_before_the_mapping_nests_and_is_left_behind(op):
    op.implement("a", batch_invariant=True)(lambda x: "a")
    op.implement("b", batch_invariant=True)(lambda x: "b")
    outer = kernels.bind({"test_op": "b"})
    with kernels.use(test_op="reference"):
        inner = kernels.bind({"test_op": "b"})
        with kernels.use(test_op="a"):
            assert kernels.bind().test_op(1) == "a"
        with kernels.use(test_op="auto"):
            assert kernels.bind({"test_op": "b"}).test_op(1) == "a"
        assert outer.current().test_op(1) == ("reference", 1)
    assert inner.test_op(1) == ("reference", 1)  # the choice was made when the ops were bound
    assert outer.current() is outer and outer.test_op(1) == "b"
    assert outer.counts == {("test_op", "reference"): 1, ("test_op", "b"): 1}


def test_use_is_left_behind_after_an_error(op):
    with pytest.raises(RuntimeError), kernels.use(test_op="reference"):
        raise RuntimeError
    assert registry._USED.get() == ()


@pytest.mark.parametrize(
    ("ask", "suggestion"),
    [
        (lambda: kernels.get("top_k"), "did you mean 'topk'"),
        (lambda: kernels.use(sparse_atend="reference"), "did you mean 'sparse_attend'"),
        (lambda: kernels.use(topk="refrence"), "did you mean 'reference'"),
        (lambda: kernels.bind({"experts": "gather"}), "did you mean 'gathered'"),
        (lambda: kernels.explain("swigly"), "did you mean 'swiglu'"),
    ],
)
def test_unknown_names_are_refused_with_a_suggestion(ask, suggestion):
    with pytest.raises(ValueError, match=suggestion):
        ask()


def test_bad_registrations_are_refused(op):
    with pytest.raises(ValueError, match="kind="):
        op.implement("x", kind="fast", batch_invariant=True)
    with pytest.raises(ValueError, match="auto"):
        op.implement("auto", batch_invariant=True)


def test_every_op_has_a_reference_a_contract_and_a_batch_invariant_implementation():
    for name in kernels.names():
        op = kernels.get(name)
        assert op.implementations["reference"].kind == "reference"
        assert op.implementations["reference"].supports is None
        assert op.signature.startswith(f"{name}(") and "->" in op.signature
        assert set(op.tolerance) == {"float64", "float32", "bfloat16"}
        assert op.implementations["reference"].fn.__doc__
    kernels.bind(batch_invariant=True)


def test_importing_the_package_imports_no_torch():
    code = "import sys, deepinfer.kernels; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_explain_says_what_runs():
    x = torch.ones(2, 8)
    ops = kernels.bind()
    ops.swiglu(x, x, 1.0)
    chosen = [r for r in kernels.explain("swiglu", x, x, 1.0).rows if r["chosen"]]
    assert [("swiglu", r["implementation"]) for r in chosen] == list(ops.counts)
