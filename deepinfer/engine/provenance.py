"""What a measurement with an engine depends on: weights, slots and settings, as plain facts."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from deepinfer.config import EngineConfig, ModelConfig
from deepinfer.tables.provenance import Facts

if TYPE_CHECKING:
    from deepinfer.engine.inspection import EngineInspection


def of_engine(eng: EngineInspection) -> dict[str, object]:
    """What a measurement with `eng` depends on, for `Table(provenance=...)`.

    weights: the engine's fingerprint (weights, tokenizer, `+edited` after a change in place).
    tokenizer: what it adds to the released layout, None if nothing. config: a hash of the model's config. slots: their reprs.
    settings: the other fields of EngineConfig, the scheduler's by its repr where it is no name.
    """
    return facts_of(eng)()


def facts_of(eng: EngineInspection) -> Facts:
    """What makes the facts of an engine when they are asked for, without holding its weights."""
    dtype = str(eng.model.dtype).removeprefix("torch.")
    return functools.partial(
        _facts,
        eng._shared.edits.reader(),
        eng._shared.tokenizer_note,
        eng.config,
        eng.slots,
        eng.settings,
        str(eng.model.device),
        dtype,
    )


def _facts(
    weights: Callable[[], str],
    tokenizer: str,
    config: ModelConfig,
    slots: Mapping[str, object],
    chosen: EngineConfig,
    device: str,
    dtype: str,
) -> dict[str, object]:
    settings = {f.name: getattr(chosen, f.name) for f in dataclasses.fields(chosen)}
    if not isinstance(chosen.scheduler, str):
        settings["scheduler"] = repr(chosen.scheduler)
    text = json.dumps(config.to_dict(), sort_keys=True)
    return {
        "weights": weights(),
        "tokenizer": tokenizer or None,
        "config": hashlib.sha256(text.encode()).hexdigest()[:16],
        "slots": {name: repr(value) for name, value in slots.items()},
        "device": device,
        "dtype": dtype,
        "seed": settings.pop("seed"),
        "settings": {k: v for k, v in settings.items() if k not in ("device", "dtype")},
    }
