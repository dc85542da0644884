"""How an engine looks: its model as a row of layers, its slots, its memory, what ran."""

from __future__ import annotations

import dataclasses
import functools
import re
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from deepinfer.display import html
from deepinfer.display.layers import layers_html, layers_text, roles_text
from deepinfer.display.numbers import counted, fmt, size

if TYPE_CHECKING:
    from deepinfer.config import ModelConfig
    from deepinfer.engine.inspection import EngineInspection

ELSEWHERE = ("device", "dtype", "fidelity")  # shown in a line of their own


def engine_text(eng: EngineInspection) -> str:
    """A head line that says whether the engine is exact, then a line a fact."""
    layers = f"{layers_text(eng.config)} ({roles_text(eng.config)})"
    facts = {"model": _model(eng.config), "layers": layers, **_facts(eng)}
    lines = [f"Engine of {_source(eng)}: {_state(eng)}"]
    return "\n".join([*lines, *(f"  {name:<9} {value}" for name, value in facts.items())])


def engine_html(eng: EngineInspection) -> str:
    """The layers with their roles, the slots, and where the bytes are."""
    approximate = set(eng.approximate_slots)
    facts: dict[str, object] = dict(_facts(eng))
    for name, text in slot_texts(eng).items():
        facts[name] = html.join([html.code(text), " ", *_approximate(name in approximate)])
    folded = [html.folded("memory by component", _bars(eng))]
    if len(kernels := eng.kernels):
        folded.append(html.folded(f"kernels that ran: {_kinds(eng)}", _ran(kernels.rows)))
    state = _state(eng)
    return html.card(
        html.join([f"Engine of {_source(eng)} ", html.chip(state, None if eng.exact else 5)]),
        html.block(_model(eng.config), style="margin:4px 0"),
        layers_html(eng.config),
        html.pairs(facts),
        *folded,
    )


def slot_text(obj: Any) -> str:
    """A slot object as its class and settings. Its own repr, unless that would show an address."""
    said = repr(obj)
    if not re.search(r"\bat 0x[0-9a-fA-F]+", said):
        return said
    values = {k: v for k, v in getattr(obj, "__dict__", {}).items() if not k.startswith("_")}
    plain = {k: v for k, v in values.items() if isinstance(v, (str, int, float, bool, type(None)))}
    return f"{type(obj).__name__}({', '.join(f'{k}={v!r}' for k, v in plain.items())})"


def slot_texts(eng: EngineInspection) -> dict[str, str]:
    return {name: slot_text(value) for name, value in eng.slots.items()}


def changes(a: EngineInspection, b: EngineInspection) -> str:
    """In which weights, slots and settings b differs from a: 'attention=Dense(), fidelity=0'."""
    out = [] if a.fingerprint == b.fingerprint else [f"weights={_source(b)} ({b.fingerprint})"]
    slots = slot_texts(a)
    out += [f"{name}={text}" for name, text in slot_texts(b).items() if text != slots[name]]
    if a.model.dtype != b.model.dtype:
        out.append(f"dtype={_dtype(b)}")
    if a.model.device != b.model.device:
        out.append(f"device={b.model.device}")
    settings = a.settings.diff(b.settings)
    out += [
        f"{name}={pair[1]!r}" for name, pair in settings.items() if name not in ("device", "dtype")
    ]
    return ", ".join(out)


def _facts(eng: EngineInspection) -> dict[str, str]:
    weights = f"{_count(_parameters(eng.config))} parameters, fingerprint {eng.fingerprint}"
    facts = {"weights": weights, "runs": _runs(eng)}
    if changed := _changed(eng):
        facts["settings"] = changed
    facts |= slot_texts(eng)
    facts["memory"] = _memory(eng)
    if ran := _steps(eng):
        facts["ran"] = ran
    return facts


def _source(eng: EngineInspection) -> str:
    """The name of what was loaded, without the folders that it was found in."""
    source = eng._shared.source
    return PurePath(source).name if PurePath(source).is_absolute() else source


def _state(eng: EngineInspection) -> str:
    """'exact', or 'approximate: attention (Dense)'."""
    named = (f"{n} ({type(eng.slots[n]).__name__})" for n in eng.approximate_slots)
    state = "exact" if eng.exact else f"approximate: {', '.join(named)}"
    return state + (", closed" if eng._closed else "")


def _approximate(is_so: bool) -> list[html.Html]:
    return [html.chip("approximate", 5)] if is_so else []


def _model(c: ModelConfig) -> str:
    draft = f" + {len(c.draft_layers)} draft" if c.draft_layers else ""
    return (
        f"{counted(c.num_layers, 'layer')} ({len(c.encoder_layers)} encoder, "
        f"{len(c.decoder_layers)} decoder){draft}, width {c.hidden_size}, "
        f"{counted(c.n_routed_experts, 'expert')}, {c.num_experts_per_tok} a token, "
        f"vocabulary {c.vocab_size}"
    )


@functools.lru_cache(maxsize=16)
def _parameters(c: ModelConfig) -> int:
    """Parameters that the text model reads, drafter included, scales not counted."""
    from deepinfer.checkpoint import names

    return sum(w.parameters for w in names.weights(c) if not names.is_unread(w.name))


def _count(n: int) -> str:
    for unit, letter in ((10**9, " B"), (10**6, " M"), (10**3, " k")):
        if n >= unit:
            return fmt(n / unit) + letter
    return str(n)


def _dtype(eng: EngineInspection) -> str:
    return str(eng.model.dtype).removeprefix("torch.")


def _runs(eng: EngineInspection) -> str:
    return f"{eng.model.device}, {_dtype(eng)}, fidelity {eng.settings.fidelity}"


def _changed(eng: EngineInspection) -> str:
    """The settings that are not the default."""
    changed = [
        f"{f.name}={getattr(eng.settings, f.name)!r}"
        for f in dataclasses.fields(eng.settings)
        if f.name not in ELSEWHERE and getattr(eng.settings, f.name) != f.default
    ]
    return ", ".join(changed)


def _memory(eng: EngineInspection) -> str:
    rows: list[dict[str, Any]] = eng.memory.rows
    total = {"weights": 0, "cache": 0}
    for row in rows:
        total[row["part"]] = total.get(row["part"], 0) + row["bytes"]
    cache = size(total["cache"]) if total["cache"] else "not made yet"
    return f"weights {size(total['weights'])} (shared), cache {cache}"


def _steps(eng: EngineInspection) -> str:
    """What was computed so far; '' before the first step of a request."""
    s = eng.stats
    if not s.steps:
        return ""
    said = (
        f"{counted(s.steps, 'step')} ({s.prefill_steps} prefill, {s.decode_steps} decode), "
        f"{counted(s.tokens, 'token')}"
    )
    if s.acceptance is not None:
        drafts = sum(s.drafted.values())
        said += f", {sum(s.accepted.values())} of {counted(drafts, 'verified draft')} accepted"
    return said


def _kinds(eng: EngineInspection) -> str:
    """How many ops ran which kind of implementation: '14 own, 3 reference'."""
    from deepinfer import kernels

    kinds: dict[str, set[str]] = {}
    rows: list[dict[str, Any]] = eng.kernels.rows
    for row in rows:
        kind = kernels.get(row["op"]).implementations[row["implementation"]].kind
        kinds.setdefault(kind, set()).add(row["op"])
    return ", ".join(f"{len(ops)} {kind}" for kind, ops in sorted(kinds.items()))


def _ran(rows: list[dict[str, Any]]) -> html.Html:
    cells = [(r["op"], r["implementation"], r["calls"]) for r in rows]
    return html.table(("op", "implementation", "calls"), cells, numeric=("calls",))


def _bars(eng: EngineInspection) -> html.Html:
    rows: list[dict[str, Any]] = eng.memory.rows
    most = max((row["bytes"] for row in rows), default=0) or 1
    cells = [
        (row["part"], row["component"], html.bar(row["bytes"] / most), size(row["bytes"]))
        for row in rows
    ]
    return html.table(("part", "component", "", "bytes"), cells, numeric=("bytes",))
