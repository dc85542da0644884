"""The law of a row and the draw from it."""

import importlib
import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from deepinfer import rng
from deepinfer.slots.protocols import Dist, RowKeys
from deepinfer.slots.sampler import Greedy, Philox, draw_by_weight
from support.slot_laws import chi_square_fits, keys, params, plain_distribution

law_module = importlib.import_module("deepinfer.slots.sampler.distribution")
S = Philox()
OFF = (1.0, 1.0, -1)

row_params = st.tuples(
    st.sampled_from([0.0, 9e-6, 1e-5, 0.3, 1.0, 2.5]),
    st.sampled_from([1e-9, 0.1, 0.5, 0.83, 0.999, 1.0]),
    st.sampled_from([-1, 1, 2, 5, 97, 100000]),
)


@st.composite
def rows_of_logits(draw, t=4):
    """Rows with ties and masked entries among them. Every row has a legal token."""
    v = draw(st.integers(1, 20))
    value = st.one_of(st.sampled_from([-1.0, 0.0, 0.5, -math.inf]), st.floats(-6, 6, width=32))
    rows = draw(st.lists(st.lists(value, min_size=v, max_size=v), min_size=1, max_size=t))
    for r in rows:
        if all(x == -math.inf for x in r):
            r[draw(st.integers(0, v - 1))] = 0.0
    return torch.tensor(rows, dtype=torch.float64)


@settings(max_examples=150, deadline=None)
@given(rows_of_logits(), st.data())
def test_law_is_the_definition(logits, data):
    rows = [data.draw(row_params) for _ in logits]
    dist = S.distribution(logits, params(rows))
    for x, p, got in zip(logits.tolist(), rows, dist.probs):
        want = plain_distribution(x, *p)
        assume(want is not None)
        assert [g > 0 for g in got.tolist()] == [w > 0 for w in want]
        assert torch.allclose(got, torch.tensor(want).double(), atol=1e-12)
    assert torch.equal(dist.logprobs, logits.log_softmax(-1)) and dist.finite.all()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.data())
def test_a_row_never_depends_on_its_neighbours(seed, data):
    g = torch.Generator().manual_seed(seed)
    t, v = data.draw(st.sampled_from([(2, 3), (5, 97), (7, 600), (3, 9000)]))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
    logits = (torch.randn(t, v, generator=g) * 3).to(dtype)
    rows = [data.draw(row_params) for _ in range(t)]
    k = keys(torch.randint(0, 2**40, (t,), generator=g), torch.randint(0, 99, (t,), generator=g))
    if data.draw(st.booleans()):
        logits[data.draw(st.integers(0, t - 1)), 0] = math.nan
    dist, order = S.distribution(logits, params(rows)), torch.randperm(t, generator=g)
    drawn = S.draw(dist, k)
    for at in [order, *[torch.tensor([i]) for i in range(t)]]:
        alone = S.distribution(logits[at], params([rows[i] for i in at]))
        for name in ("probs", "logprobs", "finite"):
            assert torch.equal(
                getattr(alone, name).nan_to_num(7.0), getattr(dist, name)[at].nan_to_num(7.0)
            ), name
        assert torch.equal(S.draw(alone, k.rows(at)).tokens, drawn.tokens[at])


@pytest.mark.parametrize("where", [0, 7, 15])
@pytest.mark.parametrize("bad", [math.nan, math.inf, "masked", "-inf"])
@pytest.mark.parametrize("row", [OFF, (0.0, 1.0, -1), (0.7, 0.8, 5)])
def test_a_broken_row_is_flagged_and_spares_the_others(bad, where, row):
    clean = torch.randn(3, 16, generator=torch.Generator().manual_seed(1))
    want = S.distribution(clean, params([row] * 3))
    logits, mask = clean.clone(), torch.ones(3, 16, dtype=torch.bool)
    if bad == "masked":
        mask[1] = False
    elif bad == "-inf":
        logits[1] = -math.inf
    else:
        logits[1, where] = bad
    dist = S.distribution(logits, params([row] * 3), mask)
    assert dist.finite.tolist() == [True, False, True]
    assert torch.equal(dist.probs[::2], want.probs[::2]) and (dist.probs[1] == 0).all()
    out = S.draw(dist, keys([1, 2, 3]))
    assert out.logprobs.isnan().tolist() == [False, True, False]
    assert (0 <= out.tokens).all() and (out.tokens < 16).all()


def test_edges_of_the_filters():
    logits = torch.randn(1, 97, generator=torch.Generator().manual_seed(0))
    free = S.distribution(logits, params([OFF])).probs
    for k in (97, 100000):
        assert torch.equal(S.distribution(logits, params([(1.0, 1.0, k)])).probs, free)
    best = S.distribution(logits, params([(1.0, 1e-9, -1)])).probs
    assert best.argmax() == logits.argmax() and best.sum() == 1 and (best > 0).sum() == 1
    tied = torch.zeros(1, 97)
    for p in [(0.0, 1.0, -1), (1.0, 1.0, 1), (1.0, 1e-9, 1)]:
        assert S.distribution(tied, params([p])).probs[0, 0] == 1
    half = torch.full((1, 4), 0.0)  # four tokens of mass 1/4: before the third lies exactly 1/2
    assert (S.distribution(half, params([(1.0, 0.5, -1)])).probs > 0).sum() == 3


@pytest.mark.parametrize("top", [3e38, 1e30, -3e38])
@pytest.mark.parametrize("temperature", [1e-5, 1.0, 1e30])
def test_extreme_numbers_stay_finite(top, temperature):
    logits = torch.tensor([[top, 0.0, -3e38, -math.inf]])
    dist = S.distribution(logits, params([(temperature, 0.9, 3)]))
    assert dist.finite.all() and dist.probs.sum() == pytest.approx(1) and dist.probs[0, 3] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [1e38, 3e38, 1e39, 1e300])
def test_a_temperature_beyond_the_range_is_uniform_over_what_is_legal(dtype, temperature):
    logits = torch.tensor([[5.0, -math.inf, -2.0, 1e4, -3e30]], dtype=dtype)
    mask = torch.tensor([[True, True, True, False, True]])
    dist = S.distribution(logits, params([(temperature, 1.0, -1)]), mask)
    third = 1 / 3
    assert dist.probs[0].tolist() == pytest.approx([third, 0, third, 0, third], rel=1e-6)
    assert dist.probs[0, 1] == dist.probs[0, 3] == 0 and dist.finite.all()
    drawn = S.draw(
        S.distribution(
            logits.expand(300, 5), params([(temperature, 1.0, -1)] * 300), mask.expand(300, 5)
        ),
        keys(range(300)),
    )
    assert set(drawn.tokens.tolist()) == {0, 2, 4}
    two = S.distribution(logits, params([(temperature, 1.0, 2)]), mask)
    assert two.probs[0].tolist() == pytest.approx([0.5, 0, 0.5, 0, 0])


def test_logits_whose_difference_overflows_keep_their_law():
    logits = torch.tensor([[1.7e308, -1.7e308, -math.inf]], dtype=torch.float64)
    hot = S.distribution(logits, params([(1.7e308, 1.0, -1)])).probs[0].tolist()
    assert hot == pytest.approx([1 / (1 + math.exp(-2)), 1 / (1 + math.exp(2)), 0.0])
    cold = S.distribution(logits, params([(1.0, 1.0, -1)])).probs
    assert cold.tolist() == [[1.0, 0.0, 0.0]]


def test_inputs_are_left_alone_and_no_rows_are_legal():
    logits, mask = torch.randn(2, 8), torch.rand(2, 8) > 0.5
    mask[:, 0] = True
    p = params([(0.5, 0.5, 2), (0.0, 1.0, -1)])
    before = [x.clone() for x in (logits, mask, p.temperature, p.top_p, p.top_k)]
    dist = S.distribution(logits, p, mask)
    S.draw(dist, keys([1, 2]))
    assert all(
        torch.equal(a, b) for a, b in zip(before, (logits, mask, p.temperature, p.top_p, p.top_k))
    )
    assert (dist.probs[~mask] == 0).all() and (dist.logprobs[~mask] == -math.inf).all()
    none = S.draw(S.distribution(torch.zeros(0, 8), params([])), keys([]))
    assert none.tokens.shape == none.logprobs.shape == (0,)


@pytest.mark.parametrize(
    "logits, p, mask, words",
    [
        (torch.zeros(3), params([OFF] * 3), None, r"\[t, v\]"),
        (torch.zeros(2, 3, dtype=torch.long), params([OFF] * 2), None, "float tensor"),
        (torch.zeros(2, 3), params([OFF] * 3), None, "2 rows, params.temperature"),
        (
            torch.zeros(2, 3),
            params([OFF] * 2),
            torch.ones(2, 4, dtype=torch.bool),
            r"shape \(2, 3\)",
        ),
        (torch.zeros(2, 3), params([OFF] * 2), torch.ones(2, 3), "bool"),
    ],
)
def test_shapes_are_checked(logits, p, mask, words):
    with pytest.raises(ValueError, match=words):
        S.distribution(logits, p, mask)


def test_the_shortcuts_of_a_cpu_change_no_bit():
    """A device runs the filters on every row and computes all words; a CPU only where needed."""
    x = torch.randn(4, 50, generator=torch.Generator().manual_seed(2))
    p = params([OFF, (0.7, 0.8, -1), (0.0, 0.5, 3), (1.3, 1.0, 4)])
    greedy = p.temperature < 1e-5
    scaled = law_module._scale(x, p, greedy)
    everywhere = scaled.masked_fill(~law_module._survivors(x, scaled, p), -math.inf)
    assert torch.equal(law_module._filter(x, scaled, p, greedy)[~greedy], everywhere[~greedy])
    k = keys([1, 2, 3])
    assert torch.equal(
        rng.words(k.seed, k.position, 0, 4), rng.words(k.seed, k.position, 0, 32)[:, :4]
    )


# -------------------------------------------------------------------------------------- the draw


def plain_draw(probs, seed, position, purpose):
    """The integer draw by its definition, one row, Python integers, any number of redraws."""
    v = len(probs)
    lanes = 2048 if v >= 8192 else 1 << (v - 1).bit_length()
    weights = [math.floor(p * 2**31) for p in probs]
    total = sum(weights)
    limit = 2**32 // total * total
    words = rng.words(torch.tensor([seed]), torch.tensor([position]), purpose, 64)[0].tolist()
    r = next(w for w in words if w < limit) % total
    for lane in range(lanes):
        for token in range(lane, v, lanes):
            if r < weights[token]:
                return token
            r -= weights[token]


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([1, 2, 3, 8, 97, 8191, 8192, 9000]), st.integers(0, 2**32), st.integers(0, 500)
)
def test_draw_is_the_kernels(v, seed, position):
    g = torch.Generator().manual_seed(seed + position)
    probs = (torch.randn(1, v, generator=g) * 2).softmax(-1)
    purpose = rng.Purpose(position % 3)
    got = draw_by_weight(probs, keys([seed], [position]), purpose)
    assert got.item() == plain_draw(probs[0].tolist(), seed, position, purpose)


def test_redraws_happen_and_are_the_kernels():
    """A total far below 2^31 that no power of two is near refuses some words."""
    probs = torch.tensor([[0.5, 0.2, 0.05]], dtype=torch.float64)
    total = sum(math.floor(p * 2**31) for p in probs[0].tolist())
    for seed in range(60):
        assert draw_by_weight(probs, keys([seed]), 0).item() == plain_draw(
            probs[0].tolist(), seed, 0, 0
        )
    first = rng.words(torch.arange(60), torch.zeros(60, dtype=torch.long), 0, 1)
    assert (first >= 2**32 // total * total).any()


def test_the_least_noise_of_the_logits_rarely_moves_a_draw():
    """Two ways to compute the same float32 logits differ by 1e-6: a draw may only move with a tie.

    Probabilities in float32 sum to one side or the other of 1; a draw that redraws by the total's
    side changed 86 of 10,000 rows here.
    """
    g = torch.Generator().manual_seed(5)
    logits = torch.randn(4000, 97, generator=g) * 3
    noise = (torch.rand(4000, 97, generator=g) - 0.5) * 4e-6
    k = RowKeys(torch.arange(4000), torch.zeros(4000, dtype=torch.long))
    p = params([(1.0, 1.0, -1)] * 4000)
    a, b = (S.draw(S.distribution(x, p), k).tokens for x in (logits, logits + noise))
    assert (a != b).sum() <= 2


@pytest.mark.parametrize("v", [2, 8, 16, 1024, 129280])
def test_draws_follow_the_law(v):
    g = torch.Generator().manual_seed(v)
    n = 20000 if v <= 1024 else 1500
    probs = (torch.randn(1, v, generator=g) * (2 if v <= 1024 else 4)).softmax(-1)
    probs = torch.where(torch.rand(1, v, generator=g) < 0.3, 0.0, probs)
    probs[0, 0] = 0.25
    probs = probs / probs.sum()
    rows = 100 if v > 1024 else n
    counts = torch.zeros(v)
    for at in range(0, n, rows):
        k = keys(torch.full((rows,), 11), torch.arange(at, at + rows))
        counts += draw_by_weight(probs.expand(rows, v), k, 0).bincount(minlength=v)
    assert chi_square_fits(counts, probs[0])
    wrong = probs[0].clone()
    wrong[0] += 0.2
    assert not chi_square_fits(counts, wrong / wrong.sum())


def test_seeds_in_a_batch_are_seeds_alone():
    """Every row has its own stream; two same seeds agree, others differ within 16 positions."""
    dist = S.distribution(torch.zeros(5, 50), params([OFF] * 5))
    seeds = [1111, 2222, 3333, 4444, 1111]
    text = torch.stack([S.draw(dist, keys(seeds, [i] * 5)).tokens for i in range(16)], 1)
    alone = S.distribution(torch.zeros(1, 50), params([OFF]))
    for row, seed in zip(text, seeds):
        assert row.tolist() == [S.draw(alone, keys([seed], [i])).tokens.item() for i in range(16)]
    assert torch.equal(text[0], text[4]) and len({tuple(r) for r in text[:4].tolist()}) == 4


@pytest.mark.parametrize("row", [(1.0, 1.0, -1), (0.5, 1.0, 2), (0.7, 0.6, -1)])
def test_draws_come_from_the_recorded_law(row):
    logits = torch.tensor([[1.0, 0.5, 0.4, -1.0]]).bfloat16()
    dist = S.distribution(logits.expand(10000, 4), params([row] * 10000))
    tokens = S.draw(dist, keys(torch.arange(10000))).tokens
    assert (dist.probs.gather(1, tokens[:, None]) > 0).all()
    assert chi_square_fits(tokens.bincount(minlength=4), dist.probs[0])


def test_no_weight_gives_token_0_not_an_index_error():
    out = draw_by_weight(torch.zeros(2, 9000), keys([1, 2]), 0)
    assert out.tolist() == [0, 0]


def test_greedy_ignores_the_temperature():
    logits = torch.tensor([[0.0, 2.0, 2.0], [3.0, 2.0, 1.0]])
    dist = Greedy().distribution(logits, params([(5.0, 1.0, -1)] * 2))
    assert isinstance(dist, Dist) and dist.probs.tolist() == [[0, 1, 0], [1, 0, 0]]
    assert Greedy().draw(dist, keys([1, 2])).tokens.tolist() == [1, 0]
