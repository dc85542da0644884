"""The meters of two laws, on values computed by hand."""

import math

import pytest
import torch

from deepinfer.measure import bootstrap
from deepinfer.measure.distributions import dist_error

P = torch.tensor([[0.5, 0.25, 0.25], [0.25, 0.25, 0.5]], dtype=torch.float64).log()
Q = torch.tensor([[0.25, 0.5, 0.25], [0.25, 0.25, 0.5]], dtype=torch.float64).log()


def test_hand_computed():
    e = dist_error(P, Q, [0, 2])
    # row 0: 0.5 ln 2 - 0.25 ln 2; row 1: the same law
    assert e.kl.tolist() == pytest.approx([0.25 * math.log(2), 0.0], abs=1e-15)
    assert e.agreement.tolist() == [0, 1]
    assert e.dlogprob.tolist() == pytest.approx([math.log(2), 0.0], abs=1e-15)
    assert e.nats_p.tolist() == pytest.approx([math.log(2), math.log(2)])
    assert e.nats_q.tolist() == pytest.approx([math.log(4), math.log(2)])
    assert e.perplexity_ratio == pytest.approx(math.sqrt(2))
    s = e.summary()
    assert s["kl"] == pytest.approx(0.125 * math.log(2)) and s["agreement"] == 0.5
    assert s["kl_max"] == pytest.approx(0.25 * math.log(2))
    assert s["kl_median"] == pytest.approx(0.125 * math.log(2))
    assert s["kl_p99"] == pytest.approx(0.99 * 0.25 * math.log(2))


def test_direction_and_shift():
    """KL(p||q) is not KL(q||p), and a constant added to logits is nothing."""
    p, q = (torch.tensor([x], dtype=torch.float64) for x in ([0, 0], [0, math.log(9)]))
    want = 0.5 * math.log(0.5 / 0.1) + 0.5 * math.log(0.5 / 0.9)
    assert float(dist_error(p, q + 7, [0]).kl[0]) == pytest.approx(want)
    back = 0.1 * math.log(0.1 / 0.5) + 0.9 * math.log(0.9 / 0.5)
    assert float(dist_error(q, p - 3, [0]).kl[0]) == pytest.approx(back)


def test_a_law_is_at_zero_from_itself_in_any_number_of_rows():
    x = torch.randn(150, 40, generator=torch.Generator().manual_seed(0))
    e = dist_error(x, x.clone(), torch.arange(150) % 40)
    assert not e.kl.any() and not e.dlogprob.any() and e.agreement.all() and e.perplexity_ratio == 1


def test_a_masked_token_counts_nothing():
    p = torch.tensor([[0.0, 0.0, -torch.inf]])
    assert float(dist_error(p, p.clone(), [0]).kl[0]) == 0
    assert float(dist_error(p, torch.zeros(1, 3), [0]).kl[0]) == pytest.approx(math.log(1.5))


@pytest.mark.parametrize(
    "p, q, tokens, words",
    [
        (P, Q[:1], [0, 2], "want"),
        (P, Q, [0], "want"),
        (P[:0], Q[:0], [], "at least one"),
        (P, Q, [0, 3], "vocabulary of 3"),
        (P, Q, [-1, 0], "vocabulary of 3"),
        (P, torch.full_like(P, torch.nan), [0, 2], "row 0 of q"),
        (torch.stack([P[0], P[1] + torch.inf]), Q, [0, 2], "row 1 of p"),
    ],
)
def test_refusals(p, q, tokens, words):
    with pytest.raises(ValueError, match=words):
        dist_error(p, q, tokens)


# ---------------------------------------------------------------------------- intervals over groups


def test_quantiles_and_their_intervals():
    groups = [torch.arange(10 * i, 10 * i + 10) for i in range(10)]
    median = bootstrap.quantile(groups, 0.5)
    assert median.value == 49 and median.low < 49 < median.high
    assert bootstrap.quantile(groups, 0.99).value == 98
    assert bootstrap.quantile(groups[:7], 0.5) == bootstrap.Estimate(34.0)
    assert bootstrap.quantile([], 0.5) == bootstrap.Estimate(None)
    same = bootstrap.quantile([torch.full((3,), 2.0)] * 9, 0.99)
    assert same == bootstrap.Estimate(2.0, 2.0, 2.0)


def test_the_interval_of_a_quantile_is_that_of_resampled_groups():
    """Against the plain way: join the groups that were drawn, take their quantile."""
    generator = torch.Generator().manual_seed(1)
    groups = [torch.randn(5 + i, generator=generator).double() for i in range(9)]
    got = bootstrap.quantile(groups, 0.9)
    drawn = []
    for at in bootstrap.resamples(9):
        x = torch.cat([groups[i] for i in at]).sort().values
        drawn.append(x[math.ceil(0.9 * len(x) - 1e-9) - 1])
    ends = torch.quantile(torch.stack(drawn), torch.tensor([0.025, 0.975]).double())
    assert (got.low, got.high) == pytest.approx(tuple(ends.tolist()), abs=1e-12)


def test_totals_are_summed_before_the_statistic():
    e = bootstrap.over_groups([[1, 1], [0, 9]], lambda x: x[..., 0] / x[..., 1])
    assert e == bootstrap.Estimate(0.1)
    totals = [[float(i), 2.0] for i in range(12)]
    e = bootstrap.over_groups(totals, lambda x: x[..., 0] / x[..., 1])
    assert e.value == pytest.approx(2.75) and e.low < e.value < e.high
