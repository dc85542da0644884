"""Router and experts: reported faults of other implementations, and a loop."""

import pytest
import torch
import torch.nn.functional as F

from deepinfer import kernels
from deepinfer.kernels.cases import fp4
from support.kernel_laws import implementations


def each(op):
    found = implementations(lambda i: i.op == op)
    run = [pytest.param(kernels.get(op).implementations[name].fn, id=name) for _, name in found]
    return pytest.mark.parametrize("run", run)


def routed(run, logits, k, bias=None, scale=1.5, dtype=torch.float32):
    """Route rows whose logits are given: the weight is the identity."""
    logits = torch.tensor(logits, dtype=dtype)
    e = logits.shape[1]
    bias = torch.zeros(e) if bias is None else torch.tensor(bias, dtype=torch.float32)
    return run(logits, torch.eye(e, dtype=dtype), bias, torch.zeros(e), None, k, scale)


@each("route")
def test_very_negative_logits_keep_their_experts(run):
    """log(1 + exp(x)) in float32 is 0 from x = -17 down; a true softplus is not."""
    ids, weights = routed(run, [[-20.0, -20, -20, -20], [-20, -21, -22, -23]], 2)
    torch.testing.assert_close(weights.sum(1), torch.tensor([1.5, 1.5]))
    assert ids.tolist() == [[0, 1], [0, 1]] and weights[1, 0] > weights[1, 1]
    _, weights = routed(run, [[-200.0, -200, -200, -200]], 2)
    assert weights.tolist() == [[0, 0]]


@each("route")
def test_large_logits_do_not_overflow(run):
    _, weights = routed(run, [[100.0, 64, 0, 0]], 2, scale=1.0)
    torch.testing.assert_close(weights, torch.tensor([[10 / 18, 8 / 18]]))


@each("route")
def test_the_bias_steers_the_selection_only(run):
    ids, weights = routed(run, [[0.0, 1, 2, 3]], 2, bias=[5.0, 0, 0, 0], scale=1.0)
    assert ids.tolist() == [[0, 3]]
    torch.testing.assert_close(weights, torch.tensor([[0.3229, 0.6771]]), atol=1e-4, rtol=0)


@each("route")
def test_ties_go_to_the_lowest_expert(run):
    ids, _ = routed(run, [[1.0] * 40], 6)
    assert ids.tolist() == [[0, 1, 2, 3, 4, 5]]


@each("route")
def test_image_rows_use_their_own_bias(run):
    x, weight = torch.zeros(2, 4), torch.zeros(3, 4)
    bias, bias_image = torch.tensor([1.0, 0, 0]), torch.tensor([0, 0, 1.0])
    ids, _ = run(x, weight, bias, bias_image, torch.tensor([False, True]), 1, 1.0)
    assert ids.tolist() == [[0], [2]]


def test_gradient_survives_an_underflowed_score():
    x = torch.tensor([[-200.0, 1.0]], requires_grad=True)
    zeros = torch.zeros(2)
    _, weights = kernels.bind().route(x, torch.eye(2), zeros, zeros, None, 2, 1.0)
    weights[0, 0].backward()
    assert x.grad.isfinite().all()


def by_hand(x, ids, weights, w1, w3, w2, limit):
    out = torch.zeros_like(x)
    for t in range(len(x)):
        for e, weight in zip(ids[t], weights[t]):
            if e >= 0:
                gate = (w1[e] @ x[t]).clamp(max=limit)
                up = (w3[e] @ x[t]).clamp(-limit, limit)
                out[t] += weight * (w2[e] @ (F.silu(gate) * up))
    return out


def call(t=9, k=3, e=5, d=16, i=32):
    g = torch.Generator().manual_seed(0)
    shapes = [(e, i, d), (e, i, d), (e, d, i)]
    w1, w3, w2 = (torch.randn(s, generator=g).double() * 0.4 for s in shapes)
    ids = torch.randn(t, e, generator=g).argsort(1)[:, :k].clone()
    ids[0] = -1
    ids[1, 0] = -1
    x, weights = torch.randn(t, d, generator=g).double(), torch.rand(t, k, generator=g).double()
    return [x, ids, weights, w1, w3, w2, 0.7]


@each("experts")
def test_experts_are_the_loop(run):
    arguments = call()
    out = run(*arguments)
    torch.testing.assert_close(out, by_hand(*arguments))
    assert not out[0].any()  # a row of no expert
    arguments[1] = torch.full_like(arguments[1], -1)
    assert not run(*arguments).any()


@each("experts")
def test_large_and_small_products_agree(run):
    """Enough rows of one expert to leave the size at which numpy multiplies."""
    arguments = call(t=3000, k=2, e=3)
    torch.testing.assert_close(run(*arguments), by_hand_fast(*arguments))


def by_hand_fast(x, ids, weights, w1, w3, w2, limit):
    gate = torch.einsum("td,eid->tei", x, w1).clamp(max=limit)
    up = torch.einsum("td,eid->tei", x, w3).clamp(-limit, limit)
    y = torch.einsum("tei,edi->ted", F.silu(gate) * up, w2)
    share = torch.zeros(len(x), len(w1) + 1).double()
    share.scatter_(1, torch.where(ids < 0, len(w1), ids), weights)
    return torch.einsum("ted,te->td", y, share[:, :-1])


@each("experts")
def test_quantised_experts_are_their_dequantised_selves(run):
    g = torch.Generator().manual_seed(0)
    x, ids, weights, *_ = call(d=32)
    w1, w3, w2 = fp4(g, 5, 32, 32), fp4(g, 5, 32, 32), fp4(g, 5, 32, 32)
    floats = [w.dequantise(torch.float32) for w in (w1, w3, w2)]
    a = run(x.float(), ids, weights, w1, w3, w2, 10.0)
    torch.testing.assert_close(a, run(x.float(), ids, weights, *floats, 10.0))
    assert floats[0][0].any()  # expert 0 is one like the others


@each("experts")
def test_activations_are_rounded_before_each_product_when_asked(run):
    x, ids, weights, *_ = call(d=32)
    g = torch.Generator().manual_seed(1)
    w = [torch.randn(5, 32, 32, generator=g) * 0.3 for _ in range(3)]
    x = x.float()
    exact, rounded = run(x, ids, weights, *w, 10.0), run(x, ids, weights, *w, 10.0, act="mxfp8")
    error = (exact - rounded).abs().max() / exact.abs().max()
    assert 1e-3 < error < 0.1
    first = kernels.bind().cache_round(x, "mxfp8")
    torch.testing.assert_close(rounded, run(first, ids, weights, *w, 10.0, act="mxfp8"))


def test_an_unknown_activation_rounding_is_refused():
    with pytest.raises(ValueError, match="int8"):
        kernels.bind().linear(torch.ones(1, 32), torch.ones(4, 32), act="int8")
