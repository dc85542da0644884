"""Tokens a second through the engine against the bare loop on the same batch."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from deepinfer.engine.engine import Engine
from deepinfer.engine.stats.records import PHASES
from deepinfer.tables.table import Table
from experiments.serving.bare import BareLoop
from experiments.serving.setup import (
    CLOCKS,
    CONTEXT,
    SAMPLING,
    begin,
    end,
    in_turn,
    prompts,
    spread,
)

HOST = tuple(p for p in PHASES if p != "wait")  # on a CPU, `wait` is the forward itself


@dataclass
class Rounds:
    """Seconds a step of `batch` sequences, a value a round. host: by phase, of the engine."""

    batch: int
    bare: list[float] = field(default_factory=list)
    engine: list[float] = field(default_factory=list)
    overlapped: list[float] = field(default_factory=list)
    host: list[dict[str, float]] = field(default_factory=list)

    @property
    def shares(self) -> list[float]:
        """What part of an engine's step is not the bare loop's, of each round."""
        return [1 - bare / engine for bare, engine in zip(self.bare, self.engine)]

    def speed(self) -> dict[str, object]:
        """A row of the table of speeds. Rates: of the median step."""
        share, host = spread(self.shares), [sum(h[p] for p in HOST) for h in self.host]
        step = statistics.median(self.engine)
        return {
            "batch": self.batch,
            "bare tokens/s": self.batch / statistics.median(self.bare),
            "engine tokens/s": self.batch / step,
            "overlapped tokens/s": self.batch / statistics.median(self.overlapped),
            "bare ms": 1e3 * statistics.median(self.bare),
            "engine ms": 1e3 * step,
            "engine share %": 100 * share["median"],
            "least %": 100 * share["least"],
            "most %": 100 * share["most"],
            "host phases %": 100 * statistics.median(host) / step,
        }

    def phases(self) -> dict[str, object]:
        """A row of the table of host phases: milliseconds a step, medians over rounds."""
        ms = {p: 1e3 * statistics.median(h[p] for h in self.host) for p in PHASES}
        return {"batch": self.batch, **{f"{p} ms": v for p, v in ms.items()}}


def measure(eng: Engine, batch: int, rounds: int, steps: int, clock: str = "wall") -> Rounds:
    """Rounds on the same prompts. The engine and the bare loop take turns step by step, so that what
    else the machine does meets both; the overlapped engine, whose device goes on between two steps,
    runs behind them, by the wall's clock: it has two threads."""
    each = prompts(eng, batch, CONTEXT)
    plain, other, bare = eng.with_(), eng.with_(overlap=True), eng.with_()
    out = Rounds(batch)
    for n in range(rounds + 1):
        ids = begin(plain, each, steps)
        plain.stats.reset()
        loop = BareLoop(bare, each, steps, temperature=SAMPLING["temperature"], seeds=range(batch))
        engine, alone = in_turn((plain.step, loop.step), steps, CLOCKS[clock])
        host = {p: plain.stats.host_seconds.get(p, 0.0) / steps for p in PHASES}
        end(plain, ids)
        loop.close()

        ids = begin(other, each, steps)
        (overlapped,) = in_turn((other.step,), steps)
        end(other, ids)
        if n:  # the first round warms up
            out.engine.append(statistics.median(engine))
            out.host.append(host)
            out.bare.append(statistics.median(alone))
            out.overlapped.append(statistics.median(overlapped))
    for e in (plain, other, bare):
        e.close()
    return out


def tables(
    eng: Engine, batches: Sequence[int], rounds: int, steps: int, clock: str = "wall"
) -> Iterator[tuple[str, str, Table]]:
    """(name, what it says, table) of speeds and of host phases."""
    found = [measure(eng, b, rounds, steps, clock) for b in batches]
    yield (
        "speed",
        "Decoding: tokens a second of the bare loop and of the engine, synchronous and with overlap. "
        "engine share: what part of an engine's step the bare loop does not have, the median of "
        f"{rounds} rounds with the least and the most; host phases: schedule, launch and "
        "post-process by the engine's own clock, as a part of its step.",
        Table([f.speed() for f in found]),
    )
    yield (
        "host phases",
        "Where the host's time of a step goes. wait is the forward: on a CPU the device is the host.",
        Table([f.phases() for f in found]),
    )
