"""How a ModelConfig and an EngineConfig look: values by group, and what differs from the
release."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

from deepinfer.display import html
from deepinfer.display.layers import layers_html, layers_text, roles_text

if TYPE_CHECKING:
    from deepinfer.config import EngineConfig, ModelConfig

# Group -> its first field; the fields lie in this order in ModelConfig, as in config.json.
GROUPS = {
    "tokens": "bos_token_id",
    "sizes": "vocab_size",
    "positions and windows": "rope_theta",
    "experts": "n_routed_experts",
    "compressed sparse attention": "compress_ratios",
    "hyper-connections (mHC)": "hc_mult",
    "n-gram memory (Engram)": "engram_layer_ids",
    "drafter (DSpark)": "num_nextn_predict_layers",
    "read with a default": "initializer_range",
}
WIDTH = 96  # characters of a line of text


def model_config_text(c: ModelConfig) -> str:
    """A head line, the layers, then the fields by group; `*` marks those that differ from the
    release."""
    differs = _differs(c)
    lines = [f"ModelConfig: {_head(c)}", f"  layers  {layers_text(c)} ({roles_text(c)})"]
    for group, names in _groups(c).items():
        lines.append(f"  {group}")
        line = "   "
        for name in names:
            said = f" {name}={_value(getattr(c, name))}{'*' if name in differs else ''}"
            if len(line) + len(said) > WIDTH and line.strip():
                lines.append(line)
                line = "   "
            line += said
        lines.append(line)
    return "\n".join([*lines, f"  * {_note(differs)}"])


def model_config_html(c: ModelConfig) -> str:
    """The layers as a picture; below it a folded table a group, with the release's values."""
    differs = _differs(c)
    groups = []
    for group, names in _groups(c).items():
        rows = [
            (
                html.code(name),
                html.code(_value(getattr(c, name))),
                html.muted(html.code(_value(differs[name]))) if name in differs else "",
            )
            for name in names
        ]
        changed = sum(name in differs for name in names)
        summary = f"{group}: {len(names)} fields, {changed} differ from the release"
        groups.append(html.folded(summary, html.table(("field", "value", "release"), rows)))
    return html.card("ModelConfig", layers_html(c), *groups, note=_head(c))


def engine_config_text(c: EngineConfig) -> str:
    """The call that makes it: the fields that differ from their defaults."""
    return f"EngineConfig({', '.join(f'{n}={v!r}' for n, v in _changed(c).items())})"


def engine_config_html(c: EngineConfig) -> str:
    """The fields that differ from their defaults, then all of them, folded."""
    changed = _changed(c)
    fields = dataclasses.fields(c)
    rows = [(html.code(f.name), html.code(repr(getattr(c, f.name)))) for f in fields]
    every = html.folded(f"all {len(rows)} settings", html.table(("setting", "value"), rows))
    shown = html.pairs({name: html.code(repr(value)) for name, value in changed.items()})
    note = f"{len(changed)} of {len(rows)} settings differ from the default"
    return html.card("EngineConfig", *([shown] if changed else []), every, note=note)


def _changed(c: EngineConfig) -> dict[str, Any]:
    return {
        f.name: getattr(c, f.name) for f in dataclasses.fields(c) if getattr(c, f.name) != f.default
    }


def _head(c: ModelConfig) -> str:
    draft = f" + {len(c.draft_layers)} draft" if c.draft_layers else ""
    return (
        f"{c.num_layers} layers{draft}, width {c.hidden_size}, {c.n_routed_experts} experts, "
        f"{c.num_experts_per_tok} a token, window {c.sliding_window}"
    )


def _note(differs: dict[str, Any]) -> str:
    if not differs:
        return "no field differs from the released DeepSeek-V4.1-Flash"
    return f"{len(differs)} fields differ from the released DeepSeek-V4.1-Flash (config.diff)"


def _groups(c: ModelConfig) -> dict[str, list[str]]:
    """Group -> its fields; what an image tower or the storage adds is a group of its own."""
    starts = {first: group for group, first in GROUPS.items()}
    out: dict[str, list[str]] = {}
    group = ""
    for f in dataclasses.fields(c):
        group = starts.get(f.name, group)
        if f.name == "extra":
            continue
        place = "image tower and storage" if f.name in ("vision", "quantization") else group
        out.setdefault(place, []).append(f.name)
    return out


@functools.lru_cache(maxsize=1)
def _release() -> ModelConfig:
    from deepinfer.config import ModelConfig

    return ModelConfig.v41_flash()


def _differs(c: ModelConfig) -> dict[str, Any]:
    """Field -> the release's value, of the fields that differ."""
    return {name: there for name, (_, there) in c.diff(_release()).items()}


def _value(value: Any) -> str:
    """A value in one line; runs of a long tuple are counted: '0, 2x3, 128x4'."""
    if isinstance(value, tuple) and len(value) > 8:
        runs: list[list[Any]] = []
        for x in value:
            if runs and runs[-1][0] == x:
                runs[-1][1] += 1
            else:
                runs.append([x, 1])
        if len(runs) <= len(value) // 2:
            inside = ", ".join(f"{x}" if n == 1 else f"{x} x{n}" for x, n in runs)
        elif len(value) > 16:
            inside = f"{', '.join(map(str, value[:12]))}, and {len(value) - 12} more"
        else:
            inside = ", ".join(map(str, value))
        return f"({inside})"
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return f"({', '.join(f'{f.name}: {getattr(value, f.name)}' for f in fields)})"
    return str(value)
