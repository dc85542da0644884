"""Floors: how far other ways to run the same model are from the first, on the same tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from deepinfer.engine.engine import Engine
from deepinfer.measure.provenance import of_engine
from deepinfer.measure.replay.error import check_finite, law_rows, measuring_engine
from deepinfer.measure.replay.passes import Passage
from deepinfer.measure.replay.report import ReplayReport
from deepinfer.measure.replay.texts import Texts
from deepinfer.slots import attention

from experiments.replay_error.passages import Passages

WORDS = {
    "fidelity 0": "caches not rounded (fidelity 0 against 1)",
    "fidelity 2": "activations rounded too (fidelity 2 against 1)",
    "top-k halved": "the index picks half as many entries",
    "chunks": "the prompt in chunks of 100 rows, through the cache",
}
CHUNK = 100


def engines(eng: Engine, names: Sequence[str]) -> dict[str, Engine]:
    makes = {
        "fidelity 0": lambda: eng.with_(fidelity=0),
        "fidelity 2": lambda: eng.with_(fidelity=2),
        "top-k halved": lambda: eng.with_(attention=attention.CSA2(topk=eng.config.index_topk // 2)),
    }
    return {n: makes[n]() for n in names if n in makes}


def floors(
    eng: Engine, texts: Passages, prompt: int, continuation: int, names: Sequence[str]
) -> ReplayReport:
    """The meters of `replay_error` between eng and others: passes over the whole text without a cache, as
    there, but for the chunks."""
    found = Texts.of(eng, texts.ids, prompt, continuation, texts.modules, "floors")
    own = {
        n: measuring_engine(e, prompt + continuation, 0)
        for n, e in {"": eng, **engines(eng, names)}.items()
    }
    passages, tokens = [], []
    with torch.no_grad():
        for i in range(len(found)):
            ids = found.fed(i)
            laws = {n: Passage(e.runtime, ids, prompt, set()).exact.logits for n, e in own.items()}
            if "chunks" in names:
                sizes = [min(CHUNK, prompt - at) for at in range(0, prompt, CHUNK)]
                sizes.append(len(ids) - prompt)
                laws["chunks"] = eng.logits(ids, prompt, chunks=sizes)[prompt - 1 :]
            for name in names:
                check_finite(laws[name], name, i, prompt)
                row, rows = law_rows(found.label(i) | dict(policy=name), laws[""], laws[name], found, i)
                passages.append(row)
                tokens += rows
    for e in own.values():
        e.close()
    facts = of_engine(eng) | found.facts
    facts["policies"] = {n: WORDS[n] for n in names}
    return ReplayReport.of(passages, tokens, [], [], facts)
