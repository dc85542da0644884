"""A small model with random weights, and a prompt that runs by a replay plan, for the replay laws.

FP64 without roundings, so that a row too few shows. Whatever a plan does not account for is NaN:
window rows that were never written, block KV behind the hit.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deepinfer.conformance.law import generator
from deepinfer.conformance.small import DRAFTS, small_config
from deepinfer.slots.protocols import Prompt, ReplayPlan

if TYPE_CHECKING:
    from deepinfer.engine.runtime import Runtime

LONGEST = 64
AFTER = 1  # rows decoded behind the prompt


@functools.cache
def runtime() -> Runtime:
    """Of an engine over the small model, made once a process."""
    from deepinfer.checkpoint import names
    from deepinfer.checkpoint.memory import MemoryCheckpoint
    from deepinfer.config import EngineConfig
    from deepinfer.engine import weights
    from deepinfer.engine.engine import Engine
    from deepinfer.slots.verifier import Fixed

    config, g = small_config(), generator(7)

    def draw(name: str, shape: tuple[int, ...]) -> Tensor:
        x = torch.randn(shape, generator=g)
        if name.endswith(("norm.weight", "scale")):
            return 1 + 0.1 * x
        return x if len(shape) == 1 or name.endswith("base") else 1.5 * x / math.sqrt(shape[-1])

    state = {w.name: draw(w.name, w.shape) for w in names.weights(config)}
    loaded = weights.from_checkpoint(
        MemoryCheckpoint(config, state),
        dtype=torch.float64,
        device=torch.device("cpu"),
        source="conformance",
    )
    slots = dict(attention="csa2", experts="local", verifier=Fixed(DRAFTS))
    slots |= dict(replay="exact", sampler="philox", grammar="none")
    settings = EngineConfig(max_model_len=LONGEST + 8, max_num_seqs=2, fidelity=0)
    return Engine(loaded, settings, slots).runtime


def cases() -> list[Prompt]:
    """Prompts shorter and longer than the halo of the small model, their hits with and without
    state KV, and with the encoder's."""
    hits = {9: (0, 4), 24: (9, 15), 40: (0, 30), LONGEST: (0, 48)}
    half = runtime().config.first_decoder_layer
    return [
        *(
            Prompt(length, hit, state)
            for length, found in hits.items()
            for hit in found
            for state in sorted({0, hit})
        ),
        *(Prompt(length, hit, states=((hit, half),)) for length, hit in ((40, 12), (LONGEST, 20))),
    ]


@functools.lru_cache(maxsize=64)
def logits(prompt: Prompt, plan: ReplayPlan) -> Tensor:
    """[1 + DRAFTS + AFTER, v] of the last prompt row, of the drafts behind its token, and of the
    rows behind it."""
    start, every = plan.start, runtime().limits.pages // 2
    if not any((start, plan.write_from, *plan.rows_from, *plan.floor)):
        return full_logits(prompt.length)
    mine, other = list(range(1, 1 + every)), list(range(1 + every, 1 + 2 * every))
    _forget()
    if plan.write_from:
        _run(0, prompt.hit, mine, state=1)  # another request left these pages, not its windows
    if start and (start <= prompt.state_at or prompt.state_for(1, start) == start):
        _run(0, start, other, state=2)  # the windows of a snapshot, without block KV
        for layer, records in enumerate(runtime().cache.windows):
            if start > prompt.state_at and prompt.state_for(layer + 1, start) < start:
                records.stored[1:] = torch.nan  # a snapshot of the layers before it
    return _tail(start, prompt.length, mine, plan)


@functools.cache
def full_logits(length: int) -> Tensor:
    """The same of a prompt all of whose rows run."""
    _forget()
    return _tail(0, length, list(range(1, 1 + runtime().limits.pages // 2)), None)


def _forget() -> None:
    for store in runtime().cache.stores().values():
        store[1:] = torch.nan


def _tail(start: int, length: int, pages: list[int], plan: ReplayPlan | None) -> Tensor:
    rows = [_run(start, length, pages, 2, plan)[-1:], _drafts(length, 2, plan)]
    rows += [_run(p, p + 1, pages, 2, plan) for p in range(length, length + AFTER)]
    return torch.cat(rows)


def _run(
    start: int, stop: int, pages: list[int], state: int, plan: ReplayPlan | None = None
) -> Tensor:
    from deepinfer.engine.step.batch import Work, build

    rt, ids = runtime(), _ids()
    work = Work(ids[start:stop], start, ids[max(start - 3, 0) : start], pages, state, plan)
    with torch.no_grad():
        return rt.model(rt.context(build([work], rt.config))).logits


def _drafts(length: int, state: int, plan: ReplayPlan | None) -> Tensor:
    """[DRAFTS, v] of the drafter's block behind a prompt, before it knows of its own tokens."""
    from deepinfer.engine.step.batch import Work, build

    rt, drafter = runtime(), runtime().model.drafter
    work = Work(_ids()[length : length + 1], length, state=state, plan=plan, logits="none")
    batch = build([work], rt.config, decode=True)
    with torch.no_grad():
        return drafter.states(batch.ids, batch.positions, DRAFTS, rt.context(batch))[1][0]


@functools.cache
def _ids() -> list[int]:
    return torch.randint(4, 30, (LONGEST + AFTER,), generator=generator(5)).tolist()
