"""Documents on several processes: the same results as on one, in order."""

import pytest
import torch

from experiments.nano.report import acceptance, drafts, routing, texts
from experiments.nano.report.parallel import each

BOS = 0


def test_results_are_in_order_and_closures_work():
    torch.set_num_threads(1)
    by = torch.tensor(3)
    assert each(lambda x: int(x * by), list(range(7)), 2) == [0, 3, 6, 9, 12, 15, 18]


def test_an_error_comes_back():
    torch.set_num_threads(1)
    with pytest.raises(ZeroDivisionError):
        each(lambda x: 1 // x, [1, 0, 2], 2)


def test_threads_are_refused():
    torch.set_num_threads(2)
    try:
        with pytest.raises(ValueError, match="one thread"):
            each(abs, [1, 2], 2)
    finally:
        torch.set_num_threads(1)


def test_every_measurement_is_the_same_on_two_processes(eng, docs):
    torch.set_num_threads(1)
    one, two = (texts.score(eng.logits, BOS, docs, 64, jobs) for jobs in (1, 2))
    for a, b in zip(one, two):
        assert torch.allclose(a.nats, b.nats) and a.module == b.module
    one, two = (routing.scored_and_routed(eng, BOS, docs, 64, jobs)[1] for jobs in (1, 2))
    assert all(torch.equal(a.ids, b.ids) for a, b in zip(one, two))
    prompts = drafts.contexts(docs, 6, 40)  # a batch and a half
    with drafts.drafting(eng, "rejection") as drafter:
        one, two = (drafts.write(drafter, prompts, 12, 1.0, jobs) for jobs in (1, 2))
        assert [w.tokens for w in one] == [w.tokens for w in two] and len(one) == 6
        one, two = (acceptance.measure(drafter, BOS, docs, 64, 16, jobs) for jobs in (1, 2))
    assert all(torch.allclose(a.accept, b.accept) for a, b in zip(one, two))
