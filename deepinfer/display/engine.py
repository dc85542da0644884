"""How an engine looks: its model as a row of layers, its slots, its memory."""

from __future__ import annotations

import dataclasses
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from deepinfer.display import html
from deepinfer.display.numbers import size

if TYPE_CHECKING:
    from deepinfer.config import ModelConfig
    from deepinfer.engine.engine import Engine

SHOWN_LAYERS = 128
ROLES: dict[str, int | None] = {"window": None, "full": 0, "reuse": 4, "reindex": 1, "draft": 3}
ELSEWHERE = ("device", "dtype", "fidelity")  # shown in a line of their own


def engine_text(eng: Engine) -> str:
    """A head line that says whether the engine is exact, then a line a fact."""
    facts = {"model": _model(eng.config), "runs": _runs(eng), **_slots(eng), "memory": _memory(eng)}
    if changed := _changed(eng):
        facts["settings"] = changed
    lines = [f"Engine of {_source(eng)}: {_state(eng)}"]
    return "\n".join([*lines, *(f"  {name:<9} {value}" for name, value in facts.items())])


def engine_html(eng: Engine) -> str:
    """The layers with their roles, the slots, and where the bytes are."""
    approximate = set(eng.approximate_slots)
    slots = {
        name: html.join([html.code(text), " ", *_approximate(name in approximate)])
        for name, text in _slots(eng).items()
    }
    facts = {"model": _model(eng.config), "runs": _runs(eng)}
    if changed := _changed(eng):
        facts["settings"] = changed
    return html.card(
        f"Engine of {_source(eng)}",
        _layers(eng.config),
        html.pairs(facts | slots | {"memory": _memory(eng)}),
        html.folded("memory by component", _bars(eng)),
        note=_state(eng),
    )


def _source(eng: Engine) -> str:
    """The name of what was loaded, without the folders that it was found in."""
    source = eng._shared.source
    return PurePath(source).name if PurePath(source).is_absolute() else source


def _state(eng: Engine) -> str:
    state = "exact" if eng.exact else f"approximate ({', '.join(eng.approximate_slots)})"
    return state + (", closed" if eng._closed else "")


def _approximate(is_so: bool) -> list[html.Html]:
    return [html.chip("approximate", 5)] if is_so else []


def _model(c: ModelConfig) -> str:
    return (
        f"{c.num_layers} layers ({len(c.encoder_layers)} encoder, {len(c.decoder_layers)} decoder), "
        f"{len(c.draft_layers)} draft; hidden {c.hidden_size}; {c.n_routed_experts} experts, "
        f"{c.num_experts_per_tok} a token; vocabulary {c.vocab_size}"
    )


def _runs(eng: Engine) -> str:
    dtype = str(eng.model.dtype).removeprefix("torch.")
    return f"{eng.model.device}, {dtype}, fidelity {eng.settings.fidelity}"


def _slots(eng: Engine) -> dict[str, str]:
    return {name: repr(value) for name, value in eng.slots.items()}


def _changed(eng: Engine) -> str:
    """The settings that are not the default."""
    changed = [
        f"{f.name}={getattr(eng.settings, f.name)!r}"
        for f in dataclasses.fields(eng.settings)
        if f.name not in ELSEWHERE and getattr(eng.settings, f.name) != f.default
    ]
    return ", ".join(changed)


def _memory(eng: Engine) -> str:
    total = {"weights": 0, "cache": 0}
    for row in eng.memory:
        total[row["part"]] = total.get(row["part"], 0) + row["bytes"]
    cache = size(total["cache"]) if total["cache"] else "not made yet"
    return f"weights {size(total['weights'])}, cache {cache}"


def _bars(eng: Engine) -> html.Html:
    rows: list[dict[str, Any]] = eng.memory.rows
    most = max((row["bytes"] for row in rows), default=0) or 1
    cells = [
        (row["part"], row["component"], html.bar(row["bytes"] / most), size(row["bytes"]))
        for row in rows
    ]
    return html.table(("part", "component", "", "bytes"), cells, numeric=("bytes",))


def _layers(c: ModelConfig) -> html.Html:
    """One box a layer, coloured by role, with the encoder, the decoder and the drafter apart."""
    groups = [
        ("encoder", c.encoder_layers),
        ("decoder", c.decoder_layers),
        ("drafter", c.draft_layers),
    ]
    shown = []
    for name, layers in groups:
        boxes = [_layer(c, layer) for layer in list(layers)[:SHOWN_LAYERS]]
        hidden = len(layers) - len(boxes)
        more = [html.muted(f" {hidden} more layers")] if hidden else []
        line = html.block(*boxes, *more, style="line-height:1.2")
        shown.append(
            html.block(html.muted(name), line, style="display:inline-block;margin:4px 14px 4px 0")
        )
    roles = {role: ROLES[role] for role in dict.fromkeys(c.roles)}
    memory = {"* n-gram memory": None} if c.engram_layer_ids else {}
    return html.block(*shown, html.legend(roles | memory))


def _layer(c: ModelConfig, layer: int) -> html.Html:
    role = c.roles[layer]
    facts = [f"layer {layer}", role]
    if (source := c.kv_source(layer)) is not None:
        facts += [f"ratio {c.ratio(layer)}", f"block KV of layer {source}"]
    engram = layer in c.engram_layer_ids
    if engram:
        facts.append("n-gram memory")
    return html.chip(f"{layer}{'*' if engram else ''}", ROLES[role], title=", ".join(facts))
