"""The golden: 200 small requests give what they gave when it was recorded. See `golden`."""

from __future__ import annotations

import pytest
import torch

from support import golden

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
        "anew as the docstring of tests/support/golden.py says."
    )


@pytest.mark.parametrize("name", golden.QUICK)
def test_a_few_requests_give_the_golden_results(base, stored, name):
    compare(golden.result(base, name, golden.FEW), stored["quick"][name])


@pytest.mark.slow
@pytest.mark.parametrize("name", golden.ALL)
def test_all_requests_give_the_golden_results(base, stored, name):
    compare(golden.result(base, name, golden.REQUESTS), stored["full"][name])


def test_the_golden_covers_what_it_is_for(stored):
    """Of each kind of event there is one in the file, so that a change of it would be seen."""
    for group, names in (("quick", golden.QUICK), ("full", golden.ALL)):
        assert stored[group].keys() == set(names)
    full = stored["full"]
    for name, one in full.items():
        counted, requests = one["counters"], one["requests"].values()
        assert counted["finished stop"] and counted["finished length"] and counted["finished abort"]
        assert counted["preemptions"] and counted["peak_waiting"] > 8
        assert any(i.endswith("f") for i in one["requests"])
        assert any("top" in r for r in requests)
        assert bool(counted["cached_tokens"]) == (" cache " in name)
        assert bool(counted.get("accepted 0")) == (not name.endswith(" off"))
        assert ("prompt_logprobs" in str(requests)) or "bounded" in name
    for scheduler in golden.SCHEDULERS:
        mixed = [o["counters"]["mixed_steps"] for n, o in full.items() if n.startswith(scheduler)]
        assert all(mixed) if scheduler == "mixed" else not any(mixed)


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
