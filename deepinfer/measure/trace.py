"""Trace: see, and change, any named value of a running engine, with the coordinates of every row.

    with eng.trace("layers.*.attn.out") as t:
        eng.generate("...")
    t["layers.3.attn.out"]            # [rows, d], with .request .position .step .accepted
    t.at("layers.3.attn.out", 7)      # the row that position 7 was finally computed by

Gone on exit, also after an error; traces nest, the innermost edits last.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections import defaultdict
from dataclasses import dataclass
from typing import Callable

import torch
from torch import Tensor

from deepinfer.config import ModelConfig
from deepinfer.slots.protocols import RowSet


@dataclass(frozen=True, slots=True)
class Coordinates:
    """Of the rows of one traced value: name; request, position, step: [t] long tensors (request -1 in
    teacher-forced passes)."""

    name: str
    request: Tensor
    position: Tensor
    step: int


class TracedTensor(Tensor):
    """A traced value over all steps, rows in the order they ran. request, position, step: [rows] long;
    accepted: [rows] bool, False for rows of drafts that were rejected (and of the drafter's own block)."""

    request: Tensor
    position: Tensor
    step: Tensor
    accepted: Tensor


Edit = Callable[[Tensor, Coordinates], "Tensor | None"]


class Trace:
    """One `with eng.trace(...)` block. Read `names`, `t[name]`, `t.at(name, position)`."""

    def __init__(
        self, engine, patterns: tuple[str, ...], edit: Edit | None, keep: Callable[[Coordinates], Tensor] | None
    ) -> None:
        self._engine = engine
        self._chosen = chosen_names(patterns, engine.trace_names())
        self._edit, self._keep = edit, keep
        self._rows: dict[str, list[tuple[Tensor, Coordinates]]] = defaultdict(list)
        self._accepted: dict[str, list[Tensor]] = defaultdict(list)

    @property
    def edits(self) -> bool:
        return self._edit is not None

    @property
    def names(self) -> list[str]:
        """Names seen so far."""
        return list(self._rows)

    def __enter__(self) -> Trace:
        self._engine._traces.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._engine._traces.remove(self)

    def see(self, name: str, x: Tensor, rows: RowSet, requests: Tensor, step: int) -> Tensor:
        """Called by the engine for every value of a step."""
        if name not in self._chosen:
            return x
        request = requests[rows.owner].masked_fill(rows.seq < 0, -1)
        where = Coordinates(name, request, rows.positions, step)
        if self._edit is not None:
            changed = self._edit(x, where)
            if changed is not None:
                if changed.shape != x.shape:
                    raise ValueError(
                        f"edit of {name} returned shape {tuple(changed.shape)} for {tuple(x.shape)}: "
                        "return a tensor of the same shape, or None to leave it"
                    )
                x = changed.to(x.dtype)
        kept = x.detach()
        if self._keep is not None:
            at = torch.as_tensor(self._keep(where), dtype=torch.bool)
            kept = kept[at]
            where = Coordinates(name, request[at], rows.positions[at], step)
        self._rows[name].append((kept.clone(), where))
        return x

    def settle(self, step: int, computed: dict[int, int]) -> None:
        """After commit: which of the step's rows stand (position below the request's length)."""
        for name, seen in self._rows.items():
            for _, at in seen[len(self._accepted[name]) :]:
                limit = torch.tensor(
                    [computed.get(r, 1 << 62) for r in at.request.tolist()], dtype=torch.long
                )
                self._accepted[name].append(at.position.cpu() < limit)

    def __getitem__(self, name: str) -> TracedTensor:
        if name not in self._rows:
            raise KeyError(_missing(name, self._rows, "this trace has seen"))
        seen = self._rows[name]
        out = stack_rows([x for x, _ in seen]).as_subclass(TracedTensor)
        out.request = torch.cat([at.request for _, at in seen])
        out.position = torch.cat([at.position for _, at in seen])
        out.step = torch.cat([torch.full_like(at.position, at.step) for _, at in seen])
        settled = self._accepted[name]
        open_rows = [torch.zeros(len(x), dtype=torch.bool) for x, _ in seen[len(settled) :]]
        out.accepted = torch.cat([*settled, *open_rows]).to(out.position.device)
        return out

    def at(self, name: str, position: int, request: int | None = None) -> Tensor:
        """The value of the row that stands at `position` (the last accepted one). KeyError if none."""
        x = self[name]
        match = (x.position == position) & x.accepted
        if request is not None:
            match = match & (x.request == request)
        hits = match.nonzero().flatten()
        if not len(hits):
            raise KeyError(f"{name} has no accepted row at position {position}")
        return x.as_subclass(Tensor)[hits[-1]]

    def __repr__(self) -> str:
        if not self._rows:
            return f"Trace of {len(self._chosen)} names, nothing seen yet"
        lines = [f"Trace, {len(self._rows)} of {len(self._chosen)} names seen"]
        shown = list(self._rows.items())[:12]
        lines += [f"  {n}: {len(s)} steps, {sum(len(x) for x, _ in s)} rows" for n, s in shown]
        if len(self._rows) > 12:
            lines.append(f"  ... {len(self._rows) - 12} more")
        return "\n".join(lines)


def stack_rows(parts: list[Tensor]) -> Tensor:
    """Concatenate rows whose last axis may differ between steps (picked ids): -1 or NaN fills."""
    if len({p.shape[1:] for p in parts}) <= 1:
        return torch.cat(parts)
    width = max(p.shape[-1] for p in parts)
    fill = float("nan") if parts[0].is_floating_point() else -1
    return torch.cat([torch.nn.functional.pad(p, (0, width - p.shape[-1]), value=fill) for p in parts])


def chosen_names(patterns: tuple[str, ...], names: list[str]) -> set[str]:
    """Names that match shell patterns. KeyError for a pattern that matches none."""
    chosen: set[str] = set()
    for pattern in patterns:
        hits = fnmatch.filter(names, pattern)
        if not hits:
            raise KeyError(_missing(pattern, names, "eng.trace_names() has"))
        chosen.update(hits)
    return chosen


def _missing(name: str, known, where: str) -> str:
    close = difflib.get_close_matches(name, list(known), 3, 0.4)
    return f"no traced value is named {name!r}: {where} {', '.join(close) if close else f'{len(list(known))} names'}"


def trace_names(config: ModelConfig, drafter: bool) -> list[str]:
    """Every name a forward shows, in the order of the walk. mtp.*: only where drafts are made."""
    out: list[str] = []
    for layer in range(config.num_hidden_layers):
        out += _layer_names(config, f"layers.{layer}", layer, layer in config.engram_layer_ids)
    if drafter:
        out.append("features")
    out += ["final", "logits"]
    if drafter:
        for i in range(config.num_nextn_predict_layers):
            out += _layer_names(config, f"mtp.{i}", config.num_hidden_layers + i, False)
        out.append("mtp.base")
    return out


def _layer_names(c: ModelConfig, name: str, layer: int, engram: bool) -> list[str]:
    parts = ["in", *(["engram.rows", "engram.out"] if engram else []), "attn.in", "attn.window_keys"]
    if layer in c.kv_source_layer_ids:
        parts += ["attn.entries", "attn.index_keys"]
    if layer in c.index_source_layer_ids:
        parts += ["attn.selected"]
        if c.candidate_source_layer_id is not None and layer >= c.candidate_source_layer_id:
            parts += ["attn.candidates"]
    parts += ["attn.out", "attn.comb", "ffn.in", "ffn.experts", "ffn.weights", "ffn.out", "ffn.comb"]
    return [f"{name}.{p}" for p in parts]
