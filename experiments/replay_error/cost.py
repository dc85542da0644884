"""What a prefill costs: seconds by length beside what rows and FLOPs predict, and where they go."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from deepinfer.engine.engine import Engine
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.measure.replay.cost import layer_adds
from deepinfer.measure.replay.error import plan_of
from deepinfer.model.engram import Engram
from deepinfer.model.stack import Layer
from deepinfer.slots.attention import csa2
from deepinfer.tables.table import Table

# The ops of the formula that a timer of its own sees; the others are one group. The index's FLOPs are those
# of its scores; its top-k, blocks and masks have none.
OWN = {"index": "index scores", "attention": "attention", "experts": "experts", "engram": "engram"}


class Timer:
    """CPU seconds by (side, op). side: encoder or decoder, the layers in front of the first decoder layer and
    the others, and outside. The time of an op inside another counts for the inner one."""

    def __init__(self, decoder: int) -> None:
        self.decoder, self.seconds, self._open = decoder, {}, []

    def around(self, op: str, call: Callable, side: Callable[..., str] | None = None) -> Callable:
        def timed(*args, **kwargs):
            where = side(*args) if side else self._open[-1][0] if self._open else "outside"
            self._open.append([where, op, time.process_time(), 0.0])
            try:
                return call(*args, **kwargs)
            finally:
                where, op_, start, inner = self._open.pop()
                took = time.process_time() - start
                self.seconds[where, op_] = self.seconds.get((where, op_), 0.0) + took - inner
                if self._open:
                    self._open[-1][3] += took

        return timed

    def side(self, layer: Layer, *_: object) -> str:
        if layer.name.startswith("mtp"):
            return "outside"
        return "decoder" if layer.layer >= self.decoder else "encoder"


@contextmanager
def watched(eng: Engine, timer: Timer) -> Iterator[None]:
    """Timers around the layers of every engine and around eng's slots while it lasts."""
    attention, experts = type(eng.slots["attention"]), type(eng.slots["experts"])
    ops = eng.runtime.ops
    places: list[tuple[Any, str, str]] = [
        (Layer, "forward", "projections and streams"),
        (attention, "select", "index masks"),
        (ops, "index_scores", "index scores"),
        (ops, "topk", "index top-k"),
        (ops, "candidate_blocks", "index blocks"),
        (csa2, "outside", "index blocks"),
        (attention, "attend", "attention"),
        (experts, "route", "experts"),
        (experts, "forward", "experts"),
        (Engram, "forward", "engram"),
    ]
    old = [(kind, name, getattr(kind, name)) for kind, name, _ in places]
    try:
        for kind, name, op in places:
            side = timer.side if kind is Layer else None
            setattr(kind, name, timer.around(op, getattr(kind, name), side))
        yield
    finally:
        for kind, name, call in old:
            setattr(kind, name, call)


def where_it_goes(
    eng: Engine,
    ids: Sequence[int],
    policies: Mapping[str, Any],
    lengths: Sequence[int],
    repeats: int,
) -> Table:
    """CPU seconds and FLOPs of a prefill by policy, length, side and op; the least of `repeats` runs of
    each. FLOPs: those of the formula, 0 where it counts none."""
    rows: list[dict[str, object]] = []
    base = eng.with_(
        replay="exact",
        prefix_cache=False,
        num_snapshots=None,
        max_num_seqs=1,
        num_pages=None,
        max_model_len=max(lengths) + 1,
        verifier="off",
    )
    params = SamplingParams(temperature=0.0, max_tokens=1)
    for length in lengths:
        for name, policy in {"exact": "exact", **policies}.items():
            with base.with_(replay=policy) as own:
                runs: list[dict] = []
                for _ in range(repeats):
                    timer = Timer(eng.config.first_decoder_layer)
                    with watched(own, timer):
                        run = timer.around("other", own.generate, lambda *_: "outside")
                        run([list(ids[:length])], params, progress=False).raise_for_errors()
                    runs.append(timer.seconds)
                best = min(runs, key=lambda s: sum(s.values()))
                flops = flops_by(own, name, length)
                rows += [
                    dict(
                        length=length,
                        policy=name,
                        side=side,
                        op=op,
                        seconds=best.get((side, op), 0.0),
                    )
                    | dict(flops=flops.get((side, op), 0))
                    for side, op in sorted(set(best) | set(flops))
                ]
    return Table(rows, title="where the CPU seconds of a prefill go, and its FLOPs")


def flops_by(engine: Engine, name: str, length: int) -> dict[tuple[str, str], int]:
    """FLOPs of a prefill by (side, op as timed)."""
    c, plan = engine.config, plan_of(engine, name, length, 0)
    lowest = [max(plan.start, x) for x in (0, *plan.rows_from)]
    out: dict[tuple[str, str], int] = {("outside", "other"): 2 * c.hidden_size * c.vocab_size}
    for layer in range(c.num_layers):
        side = "decoder" if layer >= c.first_decoder_layer else "encoder"
        adds = layer_adds(
            c, layer, length - lowest[layer], length - lowest[layer + 1], length, plan.floor[layer]
        )
        for op, x in adds.items():
            key = (side, OWN.get(op, "projections and streams"))
            out[key] = out.get(key, 0) + 2 * x
    return out
