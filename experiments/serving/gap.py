"""How long the device idles between steps, with a device that takes 20 ms a step."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from deepinfer.engine.device import SimulatedDevice
from deepinfer.engine.engine import Engine
from deepinfer.engine.stats.timeline import NOTHING, Timeline
from deepinfer.tables.table import Table
from experiments.serving.setup import CONTEXT, SAMPLING, begin, end, prompts, spread


@dataclass(frozen=True)
class Lane:
    """Seconds of a device between the beginning of its first and the end of its last step. What is
    before and behind is cut off: the steps that ran there are in no record. idle: by what the host
    did meanwhile."""

    busy: float
    idle: dict[str, float]
    steps: int

    @staticmethod
    def of(t: Timeline) -> Lane:
        if not t.device:
            raise ValueError("a timeline without a step on the device has no gaps")
        first, last = t.device[0].start, t.device[-1].stop
        idle: dict[str, float] = {}
        for g in t.gaps:
            if first <= g.start and g.stop <= last and g.what != NOTHING:
                idle[g.what] = idle.get(g.what, 0.0) + g.seconds
        return Lane(t.busy, idle, len({s.step for s in t.device}))

    @property
    def share(self) -> float:
        """Idle part of the time with work to do."""
        idle = sum(self.idle.values())
        return idle / (self.busy + idle)


class Measured(SimulatedDevice):
    """Also notes what a step computed before it slept. computing: seconds of each step."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.computing: list[float] = []

    def finish(self) -> None:
        self.computing.append(time.perf_counter() - self._began)
        super().finish()


def steady(eng: Engine, each: Sequence[Sequence[int]], steps: int) -> Lane:
    """Decode steps of the same sequences."""
    ids = begin(eng, each, steps + 3)
    eng.stats.reset()
    while eng.stats.steps < steps:
        eng.step()
    found = Lane.of(eng.stats.timeline(steps - 1))  # the first was on its way at the reset
    end(eng, ids)
    return found


def changing(eng: Engine, each: Sequence[Sequence[int]], steps: int, most: int = 12) -> Lane:
    """As many requests at a time, each of another length; a new one comes for each that ends."""
    turn = 0

    def come() -> None:
        nonlocal turn
        eng.add(each[turn % len(each)], max_tokens=3 + 5 * turn % most, seed=turn, **SAMPLING)
        turn += 1

    for _ in each:
        come()
    eng.stats.reset()
    while eng.stats.steps < steps:
        for _ in eng.step():
            come()
    found = Lane.of(eng.stats.timeline(steps - 1))
    end(eng, list(eng.requests))
    return found


LOADS = {"steady decode": steady, "requests come and go": changing}


def measure(
    eng: Engine, load: str, overlap: bool, batch: int, seconds: float, rounds: int, steps: int
) -> dict[str, object]:
    """A row: the device's idle share, medians over rounds, and what the host did meanwhile."""
    own = eng.with_(overlap=overlap)
    device = own.runtime.device = Measured(seconds)
    each = prompts(eng, batch, CONTEXT)
    LOADS[load](own, each, 6)  # warms up
    device.computing.clear()
    lanes = [LOADS[load](own, each, steps) for _ in range(rounds)]
    own.close()
    return row(load, overlap, batch, lanes, device.computing, seconds)


def row(
    load: str,
    overlap: bool,
    batch: int,
    lanes: Sequence[Lane],
    computing: Sequence[float],
    seconds: float,
) -> dict[str, object]:
    """Of the rounds of one case. computing: seconds of each step; seconds: of the simulated device.
    'at 20 ms': the gaps beside steps that take just these, however long the model computed."""
    gap = statistics.median(sum(lane.idle.values()) / lane.steps for lane in lanes)
    share = spread([lane.share for lane in lanes])
    causes: dict[str, float] = {}
    for lane in lanes:
        for cause, spent in lane.idle.items():
            causes[cause] = causes.get(cause, 0.0) + spent
    return {
        "load": load,
        "engine": "overlapped" if overlap else "synchronous",
        "batch": batch,
        "idle %": 100 * share["median"],
        "least %": 100 * share["least"],
        "most %": 100 * share["most"],
        "idle ms a step": 1e3 * gap,
        "at 20 ms, %": 100 * gap / (seconds + gap),
        "most of it during": max(causes, key=causes.__getitem__) if causes else None,
        "computing ms": 1e3 * statistics.median(computing),
    }


def tables(
    eng: Engine, batches: Sequence[int], seconds: float, rounds: int, steps: int
) -> Iterator[tuple[str, str, Table]]:
    """(name, what it says, table) of idle shares."""
    yield (
        "idle gap",
        f"A simulated device that takes {1e3 * seconds:.0f} ms a step (the model really runs on it; "
        "'computing' is that part, the rest of the step it sleeps). idle: the part of the time with "
        f"work to do in which the device did nothing, the median of {rounds} rounds of {steps} steps "
        "with the least and the most; at 20 ms: the same gaps beside steps of just that length, also "
        "where the model computed longer.",
        Table(
            [
                measure(eng, load, overlap, b, seconds, rounds, steps)
                for load in LOADS
                for b in batches
                for overlap in (False, True)
            ]
        ),
    )
