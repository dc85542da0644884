"""What the measurements share: prompts, steps, medians."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

from deepinfer import data
from deepinfer.engine.engine import Engine

CONTEXT = 64  # prompt tokens in front of the decode steps
SAMPLING = dict(temperature=1.0, ignore_eos=True)
Clock = Callable[[], float]
# cpu: seconds in which this thread had a core. A synchronous engine on a CPU does all its work in the
# thread that calls it and never waits, so on an idle machine both say the same
CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "cpu": time.thread_time}


def prompts(eng: Engine, count: int, length: int, skip: int = 0) -> list[list[int]]:
    """`count` prompts of `length` tokens of Python that nano was not trained on, no two the same.
    skip: tokens of the texts to begin behind. Raises ValueError where the texts are too short."""
    stream = [i for text in data.dev(None) for i in eng.encode(text, bos=False)][skip:]
    body, bos = length - 1, eng.config.bos_token_id
    if count * body > len(stream):
        raise ValueError(f"{count} prompts of {length} tokens: the texts have {len(stream)} left")
    return [[bos, *stream[i * body : (i + 1) * body]] for i in range(count)]


def begin(eng: Engine, each: Sequence[Sequence[int]], steps: int) -> list[int]:
    """Requests that decode: the first token of every one is there, and at least `steps` are to come."""
    ids = [eng.add(p, max_tokens=steps + 4, seed=i, **SAMPLING) for i, p in enumerate(each)]
    while not all(eng.requests[i].output for i in ids):
        eng.step()
    return ids


def end(eng: Engine, ids: Sequence[int]) -> None:
    for i in ids:
        eng.abort(i)


def in_turn(
    calls: Sequence[Callable[[], object]], count: int, clock: Clock = time.perf_counter
) -> list[list[float]]:
    """Seconds of each of `count` rounds of these calls, one after another; a list a call."""
    out: list[list[float]] = [[] for _ in calls]
    for _ in range(count):
        for call, took in zip(calls, out):
            start = clock()
            call()
            took.append(clock() - start)
    return out


def spread(values: Sequence[float]) -> dict[str, float]:
    """median, least and most."""
    return dict(median=statistics.median(values), least=min(values), most=max(values))
