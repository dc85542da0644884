"""The golden: 200 small requests give what they gave when it was recorded. See `golden`."""

from __future__ import annotations

import pytest
import torch
from properties import golden

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def base():
    return golden.engine()


@pytest.fixture(scope="module")
def stored():
    return golden.load()


def compare(found, expected) -> None:
    lines = golden.differences(found, expected)
    assert not lines, (
        f"{len(lines)} values are not the golden ones. The first:\n"
        + "\n".join(lines[:12])
        + "\nA move or a rename must not change any. If the change is meant, record the golden "
        "anew as the docstring of tests/properties/golden.py says."
    )


@pytest.mark.parametrize("name", golden.QUICK)
def test_a_few_requests_give_the_golden_results(base, stored, name):
    compare(golden.result(base, name, golden.FEW), stored["quick"][name])


@pytest.mark.slow
@pytest.mark.parametrize("name", golden.ALL)
def test_all_requests_give_the_golden_results(base, stored, name):
    compare(golden.result(base, name, golden.REQUESTS), stored["full"][name])


def test_a_difference_is_seen(stored):
    """A token, a place, a counter or a log-probability that changed is named; rounding is not."""
    name = golden.QUICK[0]
    one, other = (golden.load()["quick"][name] for _ in range(2))
    request = other["requests"]["3"]
    request["logprobs"] += golden.TOLERANCE / 3
    assert golden.differences(one, other) == []
    request["tokens"][0] += 1
    request["steps"][0][1] += 1
    request["logprobs"] += golden.TOLERANCE
    other["counters"]["preemptions"] += 1
    told = [line.split(": found")[0] for line in golden.differences(one, other)]
    assert told == ["preemptions", "request 3: logprobs", "request 3: steps", "request 3: tokens"]
    del other["requests"]["3"]
    assert any(line.startswith("request 3: finish") for line in golden.differences(one, other))
