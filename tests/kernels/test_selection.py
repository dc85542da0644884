"""Top-k and candidate blocks: ties, padding, what is never picked."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer import kernels
from support.kernel_laws import implementations

ops = kernels.bind()


def each(op):
    found = implementations(lambda i: i.op == op)
    run = [pytest.param(kernels.get(op).implementations[name].fn, id=name) for _, name in found]
    return pytest.mark.parametrize("run", run)


def picks(row, k):
    """The definition: best first, lowest index among equals, -inf never."""
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))
    chosen = sorted(i for i in order[:k] if row[i] > float("-inf"))
    return chosen + [-1] * (min(k, len(row)) - len(chosen))


few = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.5, float("inf"), float("-inf"), 1e-40, -3e38])


@each("topk")
@settings(max_examples=80, deadline=None)
@given(
    rows=st.integers(0, 12).flatmap(
        lambda n: st.lists(st.lists(few, min_size=n, max_size=n), min_size=1, max_size=3)
    ),
    k=st.integers(1, 14),
)
def test_topk_is_the_definition(run, rows, k):
    ids = run(torch.tensor(rows, dtype=torch.float32), k)
    assert ids.dtype == torch.int64
    assert ids.tolist() == [picks(row, k) for row in rows]


@each("topk")
def test_a_pick_does_not_depend_on_the_width_of_the_row(run):
    """Scores behind what is visible are -inf; with ties at zero a wider row picks the same."""
    g = torch.Generator().manual_seed(0)
    scores = torch.relu(torch.randn(6, 150, generator=g))
    wide = torch.cat([scores, torch.full((6, 90), -torch.inf)], dim=1)
    assert torch.equal(run(scores, 100), run(wide, 100))


@each("topk")
def test_nan_counts_as_inf(run):
    scores = torch.tensor([[1.0, torch.nan, 3.0, torch.inf, -torch.nan]])
    assert run(scores, 2).tolist() == [[1, 3]]


def blocks_of(row, visible, block, k):
    """The definition of candidate blocks, block by block."""
    row, best = row[:visible], []
    for i in range(0, len(row), block):
        best.append(max(row[i : i + block]))
    if visible:
        best[(visible - 1) // block] = float("inf")
    return [b for b in picks(best, k) if b >= 0]


@each("candidate_blocks")
@settings(max_examples=60, deadline=None)
@given(
    scores=st.lists(few.filter(lambda v: v != float("inf")), min_size=1, max_size=20),
    share=st.floats(0, 1),
    block=st.integers(1, 5),
    k=st.integers(1, 6),
)
def test_candidate_blocks_are_the_definition(run, scores, share, block, k):
    visible = int(share * len(scores))
    got = run(torch.tensor([scores]), torch.tensor([visible]), block, k)[0].tolist()
    want = blocks_of(scores, visible, block, k)
    assert len(got) == min(k, -(-len(scores) // block))
    assert got == want + [-1] * (len(got) - len(want))


def test_the_newest_block_is_kept_against_better_ones():
    scores = torch.tensor([[9.0, 9, 8, 8, 7, 7, 0, -1]])
    assert ops.candidate_blocks(scores, torch.tensor([7]), 2, 2).tolist() == [[0, 3]]


@each("index_scores")
@pytest.mark.parametrize("kind", ["none", "segments"])
def test_index_scores_are_the_definition(run, kind):
    g = torch.Generator().manual_seed(0)
    query, weights = torch.randn(9, 3, 8, generator=g), torch.randn(9, 3, generator=g)
    keys = torch.randn(3, 11, 8, generator=g)
    seq = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2])
    want = torch.zeros(9, 11)
    for t in range(9):
        for n in range(11):
            for h in range(3):
                want[t, n] += weights[t, h] * max(0.0, float(query[t, h] @ keys[seq[t], n]))
    segments = [(0, 0, 3), (1, 3, 5), (2, 5, 9)] if kind == "segments" else None
    if kind == "none" and "batched" in run.__module__:
        segments = tuple((int(b), i, i + 1) for i, b in enumerate(seq))
    torch.testing.assert_close(run(query, weights, keys, seq, segments), want)


@each("index_scores")
def test_even_segments_and_rows_of_no_sequence(run):
    g = torch.Generator().manual_seed(0)
    query, weights = torch.randn(6, 3, 8, generator=g), torch.randn(6, 3, generator=g)
    keys = torch.randn(3, 11, 8, generator=g)
    seq = torch.tensor([0, 0, 1, 1, 2, 2])
    even = run(query, weights, keys, seq, ((0, 0, 2), (1, 2, 4), (2, 4, 6)))
    apart = [
        run(query[[t]], weights[[t]], keys, seq[[t]], ((int(seq[t]), 0, 1),)) for t in range(6)
    ]
    torch.testing.assert_close(even, torch.cat(apart))
    seq[[2, 3]] = -1
    gaps = run(query, weights, keys, seq, ((0, 0, 2), (2, 4, 6)))
    torch.testing.assert_close(gaps[[0, 1, 4, 5]], even[[0, 1, 4, 5]])
    assert not gaps[2:4].any()


def test_invariant_scores_do_not_depend_on_longer_companions():
    """Keys are as wide as the longest sequence of the batch."""
    g = torch.Generator().manual_seed(0)
    run = kernels.bind(batch_invariant=True).index_scores
    query, weights = torch.randn(5, 4, 32, generator=g), torch.randn(5, 4, generator=g)
    keys, seq = torch.randn(1, 300, 32, generator=g), torch.zeros(5, dtype=torch.long)
    for n in (1, 17, 64, 65, 200, 300):
        for dtype in (torch.float32, torch.float64):
            a = run(query.to(dtype), weights.to(dtype), keys.to(dtype), seq, ((0, 0, 5),))
            b = run(query.to(dtype), weights.to(dtype), keys[:, :n].to(dtype), seq, None)
            assert torch.equal(a[:, :n], b)
