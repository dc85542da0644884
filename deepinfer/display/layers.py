"""A model's layers as a picture: who runs where, whose keys they read, who picks for whom."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import groupby
from typing import TYPE_CHECKING

from deepinfer.display import html
from deepinfer.display.numbers import counted

if TYPE_CHECKING:
    from deepinfer.config import ModelConfig

# role -> (colour into PALETTE, letter in text, what it does)
ROLES: dict[str, tuple[int | None, str, str]] = {
    "window": (None, "w", "sees its sliding window only"),
    "full": (
        0,
        "F",
        "writes block KV and index keys, picks entries for itself and the layers after it",
    ),
    "reuse": (4, "r", "reads the block KV and the picks of the layers named below it"),
    "reindex": (1, "x", "picks anew from the block KV of the layer named below it"),
    "draft": (3, "d", "drafts the next tokens; sees its window only"),
}
PARTS = ("encoder", "decoder", "drafter")
SHOWN_LAYERS = 128  # of one part
CELL = "1.9em"


def layers_text(c: ModelConfig) -> str:
    """One letter a layer, by part: 'encoder wwFrF, decoder Frxrx, drafter ddd'."""
    parts = [
        f"{name} {''.join(ROLES[c.role(layer)][1] for layer in layers)}"
        for name, layers in _parts(c).items()
    ]
    return ", ".join(parts)


def roles_text(c: ModelConfig) -> str:
    """What the letters of `layers_text` stand for."""
    return ", ".join(f"{ROLES[role][1]} {role}" for role in dict.fromkeys(c.roles))


def layers_html(c: ModelConfig) -> html.Html:
    """Encoder, decoder, drafter side by side; below a layer whose block KV and picks it uses."""
    shown = [_part(c, name, layers) for name, layers in _parts(c).items()]
    return html.block(*shown, _legend(c))


def _parts(c: ModelConfig) -> dict[str, range]:
    parts = zip(PARTS, (c.encoder_layers, c.decoder_layers, c.draft_layers), strict=True)
    return {name: layers for name, layers in parts if layers}


def _part(c: ModelConfig, name: str, layers: range) -> html.Html:
    cut = layers[:SHOWN_LAYERS]
    hidden = f", {len(layers) - len(cut)} more hidden" if len(cut) < len(layers) else ""
    grid = [_line("", (_box(c, layer) for layer in cut))]
    if any(c.ratio(layer) for layer in cut):
        grid.append(_line("KV of", _spans(cut, c.kv_source, lambda source: _bar(c, source))))
        grid.append(_line("picks of", _spans(cut, c.index_source, lambda source: _bar(c, source))))
    body = html.tag(
        "table", html.tag("tbody", *grid), style="border-collapse:separate;border-spacing:2px"
    )
    head = f"{name}: {counted(len(layers), 'layer')}{hidden}"
    style = "display:inline-block;vertical-align:top;margin:4px 18px 4px 0"
    return html.block(html.block(html.muted(head)), body, style=style)


def _line(label: str, cells: Iterable[html.Html]) -> html.Html:
    style = "padding:0 4px 0 0;text-align:left;font-size:11px;white-space:nowrap"
    return html.tag("tr", html.tag("td", html.muted(label), style=style), *cells)


def _box(c: ModelConfig, layer: int) -> html.Html:
    role = c.role(layer)
    style = f"{_wash(ROLES[role][0])};{html.MONO};text-align:center;padding:1px 0;border-radius:4px"
    style += f";min-width:{CELL}"
    return html.tag("td", f"{layer}{_marks(c, layer)}", style=style, title=_facts(c, layer))


def _spans(
    layers: range, source: Callable[[int], int | None], shown: Callable[[int], html.Html]
) -> list[html.Html]:
    """One cell a run of layers with the same source, as wide as the run."""
    cells = []
    for found, run in groupby(layers, source):
        n = len(list(run))
        style = "padding:0;text-align:center;font-size:11px;line-height:1.2"
        inside = [] if found is None else [shown(found)]
        cells.append(html.tag("td", *inside, colspan=n, style=style))
    return cells


def _bar(c: ModelConfig, source: int) -> html.Html:
    return html.block(source, style=f"{_wash(ROLES[c.role(source)][0])};border-radius:4px")


def _wash(colour: int | None) -> str:
    return f"background:{html.WASH if colour is None else html.PALETTE[colour] + '59'}"


def _marks(c: ModelConfig, layer: int) -> str:
    engram, feeds = layer in c.engram_layer_ids, layer in c.dspark_target_layer_ids
    return ("*" if engram else "") + ("\u2020" if feeds else "")


def _facts(c: ModelConfig, layer: int) -> str:
    role = c.role(layer)
    facts = [f"layer {layer}", f"{role}: {ROLES[role][2]}"]
    if c.ratio(layer):
        facts.append(
            f"{c.ratio(layer)} tokens an entry" if c.ratio(layer) > 1 else "an entry a token"
        )
    if layer == c.candidate_source_layer_id:
        facts.append("publishes the candidate blocks")
    if c.uses_candidates(layer):
        facts.append(f"picks within the candidate blocks of layer {c.candidate_source_layer_id}")
    if layer in c.engram_layer_ids:
        facts.append("adds the n-gram memory (Engram)")
    if layer in c.dspark_target_layer_ids:
        facts.append("its streams feed the drafter")
    return "\n".join(facts)


def _legend(c: ModelConfig) -> html.Html:
    chips = []
    for role in dict.fromkeys(c.roles):
        style = (
            f"{_wash(ROLES[role][0])};{html.MONO};border-radius:4px;padding:1px 6px;margin:1px 2px"
        )
        chips.append(
            html.tag("span", role, style=style + ";display:inline-block", title=ROLES[role][2])
        )
    marks = []
    if c.engram_layer_ids:
        marks.append("* n-gram memory")
    if c.num_nextn_predict_layers and c.dspark_target_layer_ids:
        marks.append("\u2020 read by the drafter")
    return html.block(*chips, " ", html.muted("  ".join(marks)), style="margin:2px 0 4px")
