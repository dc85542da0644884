"""The statistics of the nano report, against loops that do the same by hand."""

import math
import random
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.measure.bootstrap import RESAMPLES, resamples
from experiments.nano.report import calibration, drafts, intervals, quality, routing, texts
from experiments.nano.report.acceptance import expected_length
from experiments.nano.report.calibration import Observed
from experiments.nano.report.drafts import Step, Written

# ------------------------------------------------------------------------------------- intervals


def test_interval_is_of_summed_totals_and_modules_are_drawn_together():
    totals = torch.rand(9, 4, dtype=torch.float64) + torch.tensor([5.0, 1, 6, 1])
    e = intervals.over_modules(totals, intervals.change)
    values = []
    for drawn in resamples(9).tolist():
        before = sum(float(totals[m, 0]) for m in drawn)
        after = sum(float(totals[m, 2]) for m in drawn)
        values.append(100 * (after / before - 1))
    values.sort()
    assert len(values) == RESAMPLES
    assert e.value == pytest.approx(100 * (totals[:, 2].sum() / totals[:, 0].sum() - 1).item())
    low, high = values[int(0.025 * RESAMPLES)], values[int(0.975 * RESAMPLES)]
    assert e.low == pytest.approx(low, abs=0.2) and e.high == pytest.approx(high, abs=0.2)
    mean_of_ratios = (100 * (totals[:, 2] / totals[:, 0] - 1)).mean().item()
    assert abs(e.value - mean_of_ratios) > 1e-3  # another number, so the first line can fail


def test_pairing_makes_a_constant_change_certain():
    nats = torch.rand(12, dtype=torch.float64) * 100 + 1
    one = torch.ones(12, dtype=torch.float64)
    e = intervals.over_modules(torch.stack([nats, one, 1.03 * nats, one], 1), intervals.change)
    assert [e.value, e.low, e.high] == pytest.approx([3, 3, 3])
    assert intervals.verdict(e) == "worse"


def test_few_modules_have_no_interval_and_a_null_is_called_one():
    assert intervals.over_modules(torch.rand(7, 2), intervals.ratio).low is None
    e = intervals.over_modules(torch.tensor([[1.0, 1], [-1, 1]] * 8), intervals.ratio)
    assert intervals.verdict(e) == "null: 0 is inside"


def test_modules_must_be_the_same():
    with pytest.raises(ValueError, match="shelve"):
        intervals.aligned({"ast": [1.0]}, {"ast": [1.0], "shelve": [2.0]})
    rows = intervals.aligned({"b": [1.0], "a": [2.0]}, {"a": [4.0], "b": [3.0]})
    assert rows.tolist() == [[2, 4], [1, 3]]


# ----------------------------------------------------------------------------------------- texts


@given(st.integers(0, 40), st.integers(1, 9))
def test_pieces_hold_every_token_once(count, size):
    found = [i for a, b in texts.pieces(count, size) for i in range(a, b)]
    assert found == list(range(count))
    assert all(b - a <= size for a, b in texts.pieces(count, size))


def test_xz_shares_add_up_to_xz_of_all_files():
    docs = [texts.Document(m, (), (m * 50).encode()) for m in ("abc", "xyz", "abc")]
    whole = texts.xz_bytes(b"".join(d.data for d in docs))
    assert sum(texts.xz_shares(docs).values()) == pytest.approx(whole)
    assert whole < sum(texts.xz_bytes(d.data) for d in docs)


@given(st.integers(1, 9000))
def test_buckets_part_the_positions(longest):
    cuts = quality.buckets(longest)
    assert [i for a, b in cuts for i in range(a, b)] == list(range(longest))


# ------------------------------------------------------------------------------------ repetition


def naive_cut(tokens, n):
    for end in range(n, len(tokens) + 1):
        gram = tokens[end - n : end]
        if any(tokens[i : i + n] == gram for i in range(end - n)):
            return end - n
    return len(tokens)


@given(st.lists(st.integers(0, 2), max_size=30), st.integers(1, 4))
def test_text_is_cut_where_an_n_gram_comes_the_second_time(tokens, n):
    assert drafts.repeat_cut(tokens, n) == naive_cut(tokens, n)


@given(st.lists(st.integers(0, 2), max_size=30), st.integers(1, 4))
def test_distinct_share_counts_different_n_grams(tokens, n):
    grams = [tokens[i : i + n] for i in range(len(tokens) - n + 1)]
    different = [g for i, g in enumerate(grams) if g not in grams[:i]]
    assert drafts.distinct_share(tokens, n) == (len(different) / len(grams) if grams else 1)


@given(
    st.lists(st.integers(0, 2), max_size=12),
    st.lists(st.integers(0, 2), max_size=20),
    st.integers(1, 4),
)
def test_what_a_text_takes_from_its_prompt(prompt, tokens, n):
    inside = [
        any(prompt[j : j + n] == tokens[i : i + n] for j in range(len(prompt) - n + 1))
        for i in range(len(tokens) - n + 1)
    ]
    share = sum(inside) / len(inside) if inside else 0
    assert drafts.prompt_share(prompt, tokens, n) == share
    cut = inside.index(True) if any(inside) else len(tokens)
    assert drafts.prompt_cut(prompt, tokens, n) == cut


def lengths(greedy, contexts=2):
    sizes = SimpleNamespace(contexts=contexts, prompt=64, written=16)
    study = SimpleNamespace(
        sizes=sizes,
        stored=SimpleNamespace(config=SimpleNamespace(max_draft=5)),
        table=lambda rows, title: rows,
    )
    return drafts.lengths(study, drafts.Runs(greedy, greedy))


def test_the_table_says_how_much_is_copied_from_the_prompt():
    text = written([4, 4, 1, 1, 1, 4])  # 16 tokens, of which 6..13 stand in its prompt
    copied = Written("m", text.tokens, text.steps, (90, *range(6, 14), 91))
    own = Written("m", text.tokens, text.steps, tuple(range(90, 120)))
    rows = {row["text"]: row for row in lengths([copied, own]).table}
    first = rows["temperature 0, until it repeats itself"]
    assert first["in_prompt"] == pytest.approx((1 / 9 + 0) / 2)
    both = rows["temperature 0, until it repeats itself or its prompt"]
    assert both["in_prompt"] == 0 and both["tokens"] == 5 + 15 and first["tokens"] == 30
    assert both["accepted"] == pytest.approx(20 / (1 + 1 / 4 + 6))
    assert rows["temperature 0, whole text"]["in_prompt"] == first["in_prompt"]


def test_the_table_says_where_there_are_fewer_contexts():
    texts_ = [written([1, 2]), written([2])]
    assert "over 2 held-out contexts of" in lengths(texts_).says
    assert "over 2 held-out contexts (8 were asked for; " in lengths(texts_, 8).says


# ------------------------------------------------------------------------------ accepted a step


def written(lengths, module="m", n=5):
    """A text whose first token has no step and whose steps emit `lengths` tokens."""
    steps, at = [], 1
    for emitted in lengths:
        steps.append(Step(at, emitted, (0.5,) * n))
        at += emitted
    return Written(module, tuple(range(at)), tuple(steps))


@given(st.lists(st.integers(1, 6), min_size=1, max_size=12), st.integers(2, 40))
def test_mean_accepted_is_tokens_over_steps_before_the_stop(lengths, stop):
    text = written(lengths)
    tokens, steps = 0, 0.0
    for s in text.steps:
        for position in range(s.start, s.start + s.emitted):
            if position < stop:
                tokens, steps = tokens + 1, steps + 1 / s.emitted
    found = drafts.tokens_and_steps([text], [stop])["m"]
    assert found == pytest.approx([tokens, steps])


def test_mean_accepted_adds_texts_up():
    texts_ = [written([6]), written([1, 1, 1, 1])]  # a mean of means would be 3.5
    assert drafts.accepted(texts_, cut=False).value == pytest.approx(10 / 5)


def test_repeating_text_does_not_count():
    plain = [1, 4, 6]  # steps of the text before it repeats itself
    text = written([*plain, 6, 6, 6])
    tokens = (*range(12), *range(3, 12), *range(3, 12))
    text = Written("m", tokens, text.steps)
    assert drafts.repeat_cut(tokens) == 12
    assert drafts.accepted([text]).value == pytest.approx(11 / 3)
    assert drafts.accepted([text], cut=False).value == pytest.approx(29 / 6)


def test_conditional_acceptance_against_counting():
    text = written([1, 3, 6, 2, 3, 1])
    kept = [s.emitted - 1 for s in text.steps]
    found = drafts.conditional([text], [len(text.tokens)], 5)
    for k, p in enumerate(found):
        reached = [x for x in kept if x >= k]
        assert p == pytest.approx(sum(x > k for x in reached) / len(reached))


def test_conditional_acceptance_of_what_was_never_reached_is_none():
    assert drafts.conditional([written([1, 1])], [3], 3) == [0.0, None, None]


def test_outcomes_are_prefixes():
    confidence, kept = drafts.outcomes([written([1, 3, 6])])
    assert confidence.shape == kept.shape == (3, 5)
    assert kept.long().tolist() == [[0] * 5, [1, 1, 0, 0, 0], [1] * 5]


def test_contexts_are_spread_over_modules_and_inside_files():
    docs = [
        texts.Document("a", tuple(range(300)), b""),
        texts.Document("b", tuple(range(1000, 1020)), b""),
        texts.Document("b", tuple(range(2000, 2500)), b""),
    ]
    found = drafts.contexts(docs, 7, 64)
    assert [m for m, _ in found] == ["a"] * 4 + ["b"] * 3
    for module, ids in found:
        assert 1 <= len(ids) <= 64
        assert ids == list(range(ids[0], ids[0] + len(ids)))  # one run of one file
    assert len({tuple(ids) for _, ids in found}) == 7


def test_contexts_are_as_many_as_asked_for_where_the_texts_have_them():
    """Modules without a usable file leave their share to others; nothing comes twice."""
    docs = [texts.Document(m, tuple(range(300)), b"") for m in "abc"]
    empty = [texts.Document(m, (7,), b"") for m in "defgh"]
    assert [m for m, _ in drafts.contexts([*empty, *docs], 8, 64)] == list("aaabbbcc")
    short = [texts.Document("z", (1, 2, 3), b"")]
    assert drafts.contexts(short, 8, 64) == [("z", [1, 2])]
    assert drafts.contexts(empty, 8, 64) == []


@given(st.lists(st.lists(st.floats(0, 1), min_size=3, max_size=3), min_size=1, max_size=5))
def test_expected_length_is_that_of_the_distribution(accept):
    """Sum over lengths of length x probability, the last draft kept or the first refused."""
    for row in accept:
        whole, alive = 0.0, 1.0
        for k, a in enumerate(row):
            whole += alive * (1 - a) * (k + 1)
            alive *= a
        whole += alive * (len(row) + 1)
        got = expected_length(torch.tensor([row], dtype=torch.float64))
        assert float(got) == pytest.approx(whole)


# ----------------------------------------------------------------------------------- calibration


def naive_ece(confidence, outcome, bins):
    pairs = [(c, o) for c, o in zip(confidence, outcome) if not math.isnan(o)]
    total = 0.0
    for b in range(bins):
        inside = [(c, o) for c, o in pairs if min(int(c * bins), bins - 1) == b]
        if inside:
            gap = sum(c for c, _ in inside) / len(inside) - sum(o for _, o in inside) / len(inside)
            total += len(inside) / len(pairs) * abs(gap)
    return total


OUTCOMES = st.sampled_from([0.0, 1.0, 0.3, math.nan])


@given(st.lists(st.tuples(st.floats(0, 1), OUTCOMES), min_size=1, max_size=40), st.integers(1, 12))
def test_ece_against_a_loop_over_bins(pairs, bins):
    confidence, outcome = (torch.tensor(x, dtype=torch.float64) for x in zip(*pairs))
    got = calibration.ece(confidence, outcome, bins)
    if outcome.isnan().all():
        assert math.isnan(got)
    else:
        assert got == pytest.approx(naive_ece(confidence.tolist(), outcome.tolist(), bins))


def test_ece_by_chance_shrinks_with_outcomes_and_is_nothing_for_probabilities():
    c = torch.rand(4000, dtype=torch.float64)
    hard = (torch.rand(4000, dtype=torch.float64) < c).double()
    few = calibration.ece_by_chance(c[:40], hard[:40], 15)
    many = calibration.ece_by_chance(c, hard, 15)
    assert few > 3 * many > 0
    assert calibration.ece(c, hard, 15) == pytest.approx(many, abs=0.01)
    assert calibration.ece_by_chance(c, c, 15) == 0


def overconfident(n=3, temperature=2.0, blocks=400):
    """Blocks whose confidences are too sure by `temperature`, with true survival."""
    accept = torch.rand(blocks, n, dtype=torch.float64) * 0.9 + 0.05
    sure = (accept.logit() * temperature).sigmoid()
    return Observed(sure, accept.cumprod(-1), accept)


def test_sequential_temperatures_find_the_ones_that_were_put_in():
    found = calibration.sequential_temperatures(overconfident(), 15)
    assert found == pytest.approx([2.0, 2.0, 2.0])
    true = overconfident(temperature=1.0)
    assert calibration.sequential_temperatures(true, 15) == [1.0, 1.0, 1.0]
    after = calibration.errors(overconfident(), 15, [2.0] * 3)
    assert all(row["ece"] < 1e-9 and row["ece_product"] < 1e-9 for row in after)
    assert all(row["ece"] > 0.05 for row in calibration.errors(overconfident(), 15))


def test_sequential_temperatures_against_a_loop():
    random.seed(1)
    s, n, bins, grid = 60, 3, 8, (0.5, 1.0, 1.5, 3.0)
    c = [[random.random() for _ in range(n)] for _ in range(s)]
    kept = [random.randint(0, n) for _ in range(s)]
    chosen = []
    for k in range(n):

        def error(t, k=k):
            products = []
            for row in c:
                product = 1.0
                for j in range(k + 1):
                    T = t if j == k else chosen[j]
                    product *= 1 / (1 + math.exp(-math.log(row[j] / (1 - row[j])) / T))
                products.append(product)
            return naive_ece(products, [float(x > k) for x in kept], bins)

        chosen.append(min(grid, key=lambda t: (error(t), abs(math.log(t)))))
    survival = torch.tensor([[float(x > k) for k in range(n)] for x in kept])
    seen = Observed(torch.tensor(c, dtype=torch.float64), survival.double(), survival.double())
    assert calibration.sequential_temperatures(seen, bins, grid) == chosen


def test_a_draft_behind_a_rejected_one_has_no_outcome():
    seen = Observed.of_steps([written([1, 3, 6])])
    assert seen.accept[0].isnan().tolist() == [False, True, True, True, True]
    assert seen.accept[1][:3].tolist() == [1, 1, 0] and bool(seen.accept[1][3:].isnan().all())
    assert seen.survival[1].tolist() == [1, 1, 0, 0, 0]
    assert calibration.errors(seen, 15)[1]["observed"] == 2


# --------------------------------------------------------------------------------------- routing


@given(st.lists(st.lists(st.integers(-1, 4), min_size=2, max_size=2), min_size=1, max_size=20))
def test_load_counts_picks_and_no_pads(ids):
    counts = routing.load(torch.tensor(ids), 5)
    flat = [e for row in ids for e in row]
    assert counts.tolist() == [flat.count(e) for e in range(5)]


def test_pads_do_not_change_the_skew():
    ids = torch.tensor([[0, 1], [0, 2], [0, 3]])
    padded = torch.cat([ids, torch.full((50, 2), -1)])
    assert float(routing.skew(routing.load(padded, 4))) == 3 / (6 / 4)
    assert float(routing.skew(routing.load(ids, 4))) == 3 / (6 / 4)


def test_decode_batches_take_a_token_from_each_place():
    ids = torch.arange(3 * 14 * 2).view(3, 14, 2)  # 3 layers, 14 tokens of two documents
    routed = [routing.Routed("a", ids[:, :9]), routing.Routed("b", ids[:, 9:])]
    found = routing.decode_batches(routed, 4)
    assert found.shape == (3, 3, 4, 2)
    for batch in range(3):
        for row in range(4):
            assert torch.equal(found[:, batch, row], ids[:, row * 3 + batch])


def test_chance_is_even_for_many_tokens_and_not_for_few():
    assert 1 < routing.chance(4096, 2, 8) < 1.1 < routing.chance(8, 2, 8)
