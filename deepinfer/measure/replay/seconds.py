"""Seconds of a prompt's prefill by policy and length, beside what rows and FLOPs predict."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from deepinfer.engine.provenance import of_engine
from deepinfer.measure.replay.cost import Cost, prefill_cost
from deepinfer.measure.replay.error import Keeps, plan_of, policies
from deepinfer.tables.table import Table

if TYPE_CHECKING:
    from deepinfer.engine.engine import Engine, Prompts


def replay_seconds(
    eng: Engine,
    text: Prompts,
    keeps: Keeps,
    lengths: Sequence[int],
    repeats: int = 5,
    clock: Callable[[], float] = time.perf_counter,
) -> Table:
    """Time the prefill of the first `length` tokens of one text, of every length, by exact and by
    each policy, in one chunk or as few as the engine's row limit allows.

    One row a length and policy. seconds: median of `repeats` runs, policies in turn, after one that
    is not counted; fastest: the least; speedup: of medians, over exact; predicted_*: the ratio of
    exact's rows x layers, and FLOPs, to the policy's. The first token is drawn in it, as in a
    request. clock: in seconds; `time.process_time` on a CPU that others use too.

    Raises ValueError for lengths and repeats that are no whole numbers of 1 or more, for several
    texts, for one that is too short and for what `replay_error` refuses.
    """
    from deepinfer.engine.sampling_params import SamplingParams
    from deepinfer.measure.replay.texts import Texts, check_count

    if isinstance(lengths, str) or not isinstance(lengths, Iterable):
        raise ValueError(f"replay_seconds: lengths={lengths!r}: want a list of prompt lengths")
    lengths = list(lengths)
    if not lengths:
        raise ValueError("replay_seconds: no lengths: give at least one")
    for length in lengths:
        check_count("replay_seconds", "length", length)
    check_count("replay_seconds", "repeats", repeats, "a number of runs")
    found = Texts.of(eng, text, max(lengths), 1, None, "replay_seconds")
    if len(found) > 1:
        raise ValueError(f"replay_seconds: {len(found)} texts: one is timed, give one")
    named: dict[str, Any] = {
        n: e.slots["replay"] for n, e in policies(eng, keeps, "replay_seconds").items()
    }
    base = eng.with_(
        replay="exact",
        prefix_cache=False,
        num_snapshots=None,
        max_num_seqs=1,
        num_pages=None,
        max_model_len=max(lengths) + 1,
        verifier="off",
    )
    engines = {"exact": base, **{name: base.with_(replay=p) for name, p in named.items()}}
    params, rows = SamplingParams(temperature=0.0, max_tokens=1), []
    try:
        costs = {length: _costs(engines, length) for length in lengths}  # bad plans before any run
        for length in lengths:
            ids, taken = list(found.ids[0][:length]), {name: [] for name in engines}
            for run in range(repeats + 1):
                for name, engine in engines.items():
                    start = _now(engine, clock)
                    engine.generate([ids], params, progress=False).raise_for_errors()
                    if run:
                        taken[name].append(_now(engine, clock) - start)
            rows += _rows(costs[length], length, taken)
    finally:
        for engine in engines.values():
            engine.close()
    facts = of_engine(eng) | found.facts | dict(repeats=repeats, clock=name_of(clock))
    facts["policies"] = {name: repr(p) for name, p in named.items()}
    return Table(rows, title="seconds of a prompt's prefill", provenance=facts)


def _costs(engines: dict[str, Any], length: int) -> dict[str, Cost]:
    return {
        n: prefill_cost(plan_of(e, n, length, 0, "replay_seconds"), length, e.config)
        for n, e in engines.items()
    }


def _rows(costs: dict[str, Cost], length: int, taken: dict[str, list[float]]) -> list[dict]:
    medians = {name: statistics.median(x) for name, x in taken.items()}
    return [
        dict(
            length=length,
            policy=name,
            seconds=medians[name],
            fastest=min(taken[name]),
            speedup=medians["exact"] / medians[name],
            predicted_rows=costs["exact"].rows_x_layers / costs[name].rows_x_layers,
            predicted_flops=costs["exact"].total / costs[name].total,
            rows_x_layers=costs[name].rows_x_layers,
            flops=costs[name].total,
        )
        for name in costs
    ]


def name_of(clock: Callable[[], float]) -> str:
    return str(getattr(clock, "__name__", None) or type(clock).__name__)


def _now(engine: Any, clock: Callable[[], float]) -> float:
    if engine.model.device.type == "cuda":
        torch.cuda.synchronize(engine.model.device)
    return clock()
