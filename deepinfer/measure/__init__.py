"""Measuring: tables with provenance, comparisons, traces. Nothing here is needed to run a model.

The public names are imported when they are first used; `__init__.pyi` lists them.
"""

import importlib

# Public name -> "module:attribute".
_WHERE = {
    "ReplayReport": "deepinfer.measure.replay.report:ReplayReport",
    "Table": "deepinfer.tables.table:Table",
    "dist_error": "deepinfer.measure.distributions:dist_error",
    "logits_error": "deepinfer.measure.replay.error:logits_error",
    "prefill_cost": "deepinfer.measure.replay.cost:prefill_cost",
    "replay_divergence": "deepinfer.measure.replay.divergence:replay_divergence",
    "replay_error": "deepinfer.measure.replay.error:replay_error",
    "replay_seconds": "deepinfer.measure.replay.seconds:replay_seconds",
}

__all__ = sorted(_WHERE)


def __getattr__(name: str):
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}: {', '.join(__all__)}")
    module, _, attribute = _WHERE[name].partition(":")
    value = getattr(importlib.import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *globals()})
