"""Acceptance follows the target's law under both rules; allocation gives prefixes."""

import copy
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer import rng
from deepinfer.slots.protocols import Dist, Draft, RowKeys, Sampled, Target
from deepinfer.slots.sampler import Philox
from deepinfer.slots.verifier import BaseVerifier, CostCurve, Fixed, Off
from support.slot_laws import chi_square_fits, keys

S = Philox()


def dist(probs):
    probs = torch.as_tensor(probs, dtype=torch.float64).reshape(len(probs), -1 if len(probs) else 3)
    return Dist(probs, probs.log(), torch.ones(len(probs), dtype=torch.bool))


def case(p, q, b, n=1, positions=None):
    """b sequences, n drafts each from law q, targets of law p, all verified."""
    seed = torch.arange(b)
    dists = tuple(dist([q] * b) for _ in range(n))
    tokens = [
        S.draw(d, RowKeys(rng.draft_seed(seed), torch.full((b,), i))).tokens
        for i, d in enumerate(dists)
    ]
    k = RowKeys(seed.repeat_interleave(n + 1), torch.arange(n + 1).repeat(b))
    target = dist([p] * (b * (n + 1)))
    rows = torch.arange(b * (n + 1)).view(b, n + 1)
    draft = Draft(
        torch.stack(tokens, 1) if n else torch.zeros(b, 0, dtype=torch.long),
        torch.ones(b, n),
        torch.zeros(b, n),
        dists,
    )
    return draft, Target(target, S.draw(target, k), rows, k)


P, Q = (0.5, 0.3, 0.2), (0.2, 0.3, 0.5)


@pytest.mark.parametrize("rule, rate", [("match", 0.29), ("rejection", 0.70)])
def test_the_first_token_has_the_targets_law(rule, rate):
    out = Fixed(1, rule=rule).accept(*case(P, Q, 20000))
    assert chi_square_fits(out.tokens[:, 0].bincount(minlength=3), torch.tensor(P))
    assert (out.count == 2).double().mean() == pytest.approx(rate, abs=0.02)
    both = out.tokens[out.count == 2]
    assert chi_square_fits(both[:, 1].bincount(minlength=3), torch.tensor(P))


@pytest.mark.parametrize("rule", ["match", "rejection"])
@pytest.mark.parametrize(
    "p, q", [((0.9, 0.1, 0.0), (0.0, 0.1, 0.9)), ((1.0, 0.0, 0.0), (0.3, 0.3, 0.4)), (P, P)]
)
def test_pairs_of_tokens_have_the_product_law(rule, p, q):
    """Position by position over several steps: what is emitted is i.i.d. from p."""
    out = Fixed(3, rule=rule).accept(*case(p, q, 6000, n=3))
    for i in range(4):
        there = out.tokens[out.count > i, i]
        if len(there) > 200:
            assert chi_square_fits(there.bincount(minlength=3), torch.tensor(p))
    if rule == "rejection" and p == q:
        assert (out.count == 4).all()


def test_argmax_acceptance_would_fail_this_test():
    draft, target = case(P, Q, 20000)
    greedy = Target(
        target.dist,
        Sampled(target.dist.probs.argmax(-1), target.sampled.logprobs),
        target.rows,
        target.keys,
    )
    out = Fixed(1).accept(draft, greedy)
    assert not chi_square_fits(out.tokens[:, 0].bincount(minlength=3), torch.tensor(P))


def test_match_gives_the_targets_draws_whatever_was_drafted():
    draft, target = case(P, Q, 300, n=4)
    own = target.sampled.tokens[target.rows]
    out = Fixed(4).accept(draft, target)
    place = torch.arange(5)
    assert torch.equal(out.tokens, torch.where(place < out.count[:, None], own, -1))
    assert set(out.count.tolist()) >= {1, 2, 3}


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(["match", "rejection"]), st.integers(0, 5), st.integers(0, 4), st.data())
def test_rows_that_did_not_run(rule, n, b, data):
    """-1 rows and drafts: only what was verified is kept; without an anchor nothing is emitted."""
    depth = [data.draw(st.integers(-1, n)) for _ in range(b)]
    have = [data.draw(st.integers(0, n)) for _ in range(b)]
    draft, target = case(P, P, b, n)
    rows, flat = torch.full((b, n + 1), -1), 0
    for i, d in enumerate(depth):
        rows[i, : d + 1] = torch.arange(flat, flat + d + 1)
        flat += d + 1
    tokens = draft.tokens.clone() if n else torch.zeros(b, 0, dtype=torch.long)
    for i, h in enumerate(have):
        tokens[i, h:] = -1
    forced = torch.full((flat,), 0)
    for i, d in enumerate(depth):
        for j in range(d + 1):
            forced[rows[i, j]] = tokens[i, j] if j < n and tokens[i, j] >= 0 else 2
    distribution = dist(torch.tensor([P] * flat).reshape(flat, 3))
    k = keys(torch.arange(flat))
    out = Fixed(n, rule=rule).accept(
        Draft(tokens, torch.ones(b, n), torch.zeros(b, n), draft.dists),
        Target(distribution, Sampled(forced, distribution.probs[:, 0]), rows, k),
    )
    assert out.tokens.shape == (b, n + 1)
    for i in range(b):
        want = 0 if depth[i] < 0 else min(depth[i], have[i]) + 1
        assert out.count[i] == want
        assert out.tokens[i, want:].tolist() == [-1] * (n + 1 - want)
        if want:
            assert out.tokens[i, : want - 1].tolist() == tokens[i, : want - 1].tolist()


@pytest.mark.parametrize("rule", ["match", "rejection"])
def test_a_broken_row_is_the_last_one_emitted(rule):
    draft, target = case((1.0, 0.0), (1.0, 0.0), 2, n=3)
    finite = torch.ones(8, dtype=torch.bool)
    finite[5] = False  # sequence 1, row 1
    broken = Target(
        Dist(target.dist.probs, target.dist.logprobs, finite),
        target.sampled,
        target.rows,
        target.keys,
    )
    assert Fixed(3, rule=rule).accept(draft, broken).count.tolist() == [4, 2]


def test_rejection_does_not_depend_on_company_and_leaves_inputs_alone():
    draft, target = case(P, Q, 40, n=3)
    before = copy.deepcopy((draft, target))
    together = Fixed(3, rule="rejection").accept(draft, target)
    for i in range(40):
        at = slice(i, i + 1)
        dists = tuple(Dist(d.probs[at], d.logprobs[at], d.finite[at]) for d in draft.dists)
        one = Draft(draft.tokens[at], draft.confidence[at], draft.logprobs[at], dists)
        alone = Fixed(3, rule="rejection").accept(
            one, Target(target.dist, target.sampled, target.rows[i : i + 1], target.keys)
        )
        assert (
            torch.equal(alone.tokens[0], together.tokens[i]) and alone.count[0] == together.count[i]
        )
    assert torch.equal(before[0].tokens, draft.tokens) and torch.equal(
        before[1].dist.probs, target.dist.probs
    )


def test_rejection_without_laws_is_refused():
    draft, target = case(P, Q, 2)
    with pytest.raises(ValueError, match="1 drafts, 0 distributions"):
        Fixed(1, rule="rejection").accept(
            Draft(draft.tokens, draft.confidence, draft.logprobs), target
        )


# -------------------------------------------------------------------------------- how many rows


class Whole(BaseVerifier):
    max_draft = 5


survivals = st.integers(0, 5).flatmap(
    lambda n: st.lists(
        st.lists(st.floats(0, 1, width=32), min_size=n, max_size=n), min_size=0, max_size=5
    ).map(lambda rows: torch.tensor(rows, dtype=torch.float32).reshape(len(rows), n).cumprod(-1))
)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from([Whole(), Fixed(3), Fixed(5), Off()]), survivals, st.integers(0, 12), st.data()
)
def test_allocation(v, fresh, extra, data):
    b, n = fresh.shape
    rows = v.allocate(fresh, b + extra)
    assert rows.shape == (b,) and (rows >= 1).all() and rows.sum() <= b + extra
    depth = (fresh > 0).long().cumprod(-1).sum(-1) if n else torch.zeros(b, dtype=torch.long)
    assert (rows - 1 <= depth).all() and (rows - 1 <= v.max_draft).all()
    spare = (rows - 1 < depth.clamp(max=v.max_draft)).any()
    assert not (spare and rows.sum() < b + extra)  # nothing that fits is left out
    if b and n:  # the depth of a sequence up to j does not move when survivals behind j do
        i, j = data.draw(st.integers(0, b - 1)), data.draw(st.integers(0, n - 1))
        later = fresh.clone()
        later[i, j + 1 :] *= data.draw(st.floats(0, 1))
        assert v.allocate(later, b + extra)[i].clamp(max=j + 2) == rows[i].clamp(max=j + 2)


def test_the_likeliest_drafts_are_taken():
    fresh = torch.tensor([[0.9, 0.8, 0.1], [0.5, 0.4, 0.3], [0.95, 0.0, 0.0]])
    assert [Whole().allocate(fresh, 3 + k).tolist() for k in range(5)] == [
        [1, 1, 1],
        [1, 1, 2],
        [2, 1, 2],
        [3, 1, 2],
        [3, 2, 2],
    ]
    assert Fixed(2).allocate(fresh, 6).tolist() == [2, 2, 2]
    assert Fixed(2).allocate(torch.ones(3, 3), 7).tolist() == [3, 2, 2]
    assert (
        Fixed(3).budget(torch.ones(4, 5), None) == 16 and Off().budget(torch.ones(4, 5), None) == 4
    )


def test_fixed_settings():
    info = SimpleNamespace(config=SimpleNamespace(max_draft=4))
    whole = Fixed()
    assert (
        whole.start(info).max_draft == 4 and whole.max_draft == 5 and whole.start(info) is not whole
    )
    assert Fixed(3, rule="rejection").start(info).rule == "rejection"
    with pytest.raises(ValueError, match=r"at most 4 tokens a step; use Fixed\(4\)"):
        Fixed(5).start(info)
    for bad in (-1, 1.5, True, "3"):
        with pytest.raises(ValueError, match="n must be"):
            Fixed(bad)
    with pytest.raises(ValueError, match="match, rejection"):
        Fixed(2, rule="argmax")
    assert (
        repr(Fixed(3)) == "Fixed(3)"
        and repr(Fixed(rule="rejection")) == "Fixed(None, rule='rejection')"
    )


def test_cost_curve_is_a_staircase():
    c = CostCurve((3, 6), (10, 16))
    assert [c.at(r) for r in (0, 1, 3, 4, 6, 12)] == [0, 10, 10, 16, 16, 32]
    survival = (0.9, 0.8, 0.6, 0.55, 0.5)
    gain = [(1 + sum(survival[: r - 1])) / c.at(r) for r in range(1, 7)]
    assert max(range(6), key=gain.__getitem__) == 5 and gain[3] < gain[2]
    default = CostCurve()
    assert default.at(1) < default.at(9) == default.at(16) < default.at(1000)
    for rows, cost in [
        ((), ()),
        ((1, 2), (1,)),
        ((2, 1), (1, 1)),
        ((0,), (1,)),
        ((1,), (0,)),
        ((1,), (float("nan"),)),
    ]:
        with pytest.raises(ValueError, match="CostCurve"):
            CostCurve(rows, cost)
