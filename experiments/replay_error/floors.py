"""Floors: how far other ways to run the same model are from the first, on the same tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from deepinfer.engine.engine import Engine
from deepinfer.engine.provenance import of_engine
from deepinfer.measure.replay.error import (
    check_finite,
    law_rows,
    measuring_engine,
    plan_of,
    policies,
    shape_of,
)
from deepinfer.measure.replay.passes import Passage, first_layer
from deepinfer.measure.replay.report import ReplayReport
from deepinfer.measure.replay.texts import Texts
from deepinfer.measure.replay.windows import window_errors
from deepinfer.slots import attention
from deepinfer.slots.protocols import Prompt, ReplayPlan
from deepinfer.slots.replay import Bounded
from experiments.replay_error.passages import Passages

WORDS = {
    "fidelity 0": "caches not rounded (fidelity 0 against 1)",
    "fidelity 2": "activations rounded too (fidelity 2 against 1)",
    "top-k halved": "the index picks half as many entries",
    "chunks": "the prompt in chunks of 100 rows, through the cache",
}
CHUNK = 100


def engines(eng: Engine, names: Sequence[str]) -> dict[str, Engine]:
    """The floors that are engines: all but the chunks."""
    makes = {
        "fidelity 0": lambda: eng.with_(fidelity=0),
        "fidelity 2": lambda: eng.with_(fidelity=2),
        "top-k halved": lambda: eng.with_(
            attention=attention.CSA2(topk=eng.config.index_topk // 2)
        ),
    }
    return {n: makes[n]() for n in names if n in makes}


def in_chunks(eng: Engine, ids: list[int], prompt: int) -> torch.Tensor:
    """[t, v] logits of all rows, the prompt's in chunks through the cache, the others in one."""
    sizes = [min(CHUNK, prompt - at) for at in range(0, prompt, CHUNK)]
    sizes += [len(ids) - prompt] if len(ids) > prompt else []
    return eng.logits(ids, prompt, chunks=sizes)


@torch.no_grad()
def floors(
    eng: Engine,
    texts: Passages,
    prompt: int,
    continuation: int,
    names: Sequence[str],
    also: Mapping[str, Any] | None = None,
) -> ReplayReport:
    """The meters of `replay_error` between eng and others: passes over the whole text without a
    cache, as there, but for the chunks. Window keys are compared at the places where Bounded()
    leaves some (those of the chunks are not): next to a policy's they are in the same bins.

    also: replay policies by name, measured from the same exact pass: what `replay_error` finds,
    without window keys, drafts and costs.
    """
    found = Texts.of(eng, texts.ids, prompt, continuation, texts.modules, "floors")
    own = {
        n: measuring_engine(e, prompt + continuation, 0)
        for n, e in {"": eng, **engines(eng, names)}.items()
    }
    plans = {
        n: plan_of(e, n, prompt, 0, "floors")
        for n, e in (policies(eng, also, "floors") if also else {}).items()
    }
    layers = {at for p in plans.values() if (at := first_layer(p)) is not None}
    none = dict(ran=0, alone=0)  # rows x layers are not counted
    shapes = [dict(policy=n, **shape_of(p, prompt, eng.config)) | none for n, p in plans.items()]
    default = Bounded().plan(Prompt(prompt), eng.config)
    passages, tokens, windows = [], [], []
    for i in range(len(found)):
        ids = found.fed(i)
        whole = {n: Passage(e.runtime, ids, prompt, set() if n else layers) for n, e in own.items()}
        laws = {n: p.exact.logits for n, p in whole.items() if n}
        if "chunks" in names:
            laws["chunks"] = in_chunks(eng, ids, prompt)[prompt - 1 :]
        laws |= {n: whole[""].by(p).logits for n, p in plans.items()}
        for name in (*plans, *names):
            check_finite(laws[name], name, i, prompt)
            mine = found.label(i) | dict(policy=name)
            row, rows = law_rows(mine, whole[""].exact.logits, laws[name], found, i)
            passages.append(row)
            tokens += rows
        for name in whole:
            mine = found.label(i) | dict(policy=name) | shape_of(default, prompt, eng.config)
            windows += [mine | x for x in _keys(whole[""], whole[name], default)] if name else []
    for e in own.values():
        e.close()
    facts = of_engine(eng) | found.facts
    facts["policies"] = {n: repr(p) for n, p in (also or {}).items()} | {n: WORDS[n] for n in names}
    return ReplayReport.of(passages, tokens, windows, shapes, facts)


def _keys(first: Passage, other: Passage, plan: ReplayPlan) -> Iterator[dict[str, object]]:
    """Errors of window keys at the places that a plan leaves, by layer and distance."""
    c = first.rt.config
    return window_errors(first.exact, other.exact, plan, c.first_decoder_layer, len(first.ids), c)
