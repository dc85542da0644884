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
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deepinfer.config import ModelConfig
from deepinfer.slots.protocols import RowSet

if TYPE_CHECKING:
    from deepinfer.tables.table import Table

PADDING = -2  # the request of a row that belongs to no sequence


@dataclass(frozen=True, slots=True)
class Coordinates:
    """Of the rows of one traced value: name; request, position: [t] long; step: the engine's step
    number. request -1: a teacher-forced pass (one step each, however it is chunked)."""

    name: str
    request: Tensor
    position: Tensor
    step: int


class TracedTensor(Tensor):
    """A traced value over all steps, rows in the order they ran; what is computed from it is a
    plain tensor. request, position, step: [rows] long; accepted: [rows] bool, False for rows of
    rejected drafts, of the drafter's own block, and of a step that failed."""

    # results are plain tensors
    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore

    traced_name: str
    request: Tensor
    position: Tensor
    step: Tensor
    accepted: Tensor

    def __repr__(self, *, tensor_contents=None) -> str:
        shape = ", ".join(map(str, self.shape))
        if not hasattr(self, "position"):  # a copy that copy.copy or pickle made
            return repr(self.as_subclass(Tensor))
        lost = int((~self.accepted).sum())
        return (
            f"{self.traced_name} [{shape}] {str(self.dtype).removeprefix('torch.')}, requests "
            f"{_few(self.request)}, positions {_few(self.position)}, steps {_few(self.step)}, "
            f"{lost} of {len(self)} rows not accepted\n{self.as_subclass(Tensor)!r}"
        )


Edit = Callable[[Tensor, Coordinates], "Tensor | None"]
Keep = Callable[[Coordinates], Tensor]


class Trace:
    """One `with eng.trace(...)` block: `names`, `t[name]`, `t.at(name, position)`, `table()`."""

    def __init__(
        self, engine, patterns: tuple[str, ...], edit: Edit | None, keep: Keep | None
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
        """Names seen so far, in the order of the walk."""
        return [n for n in self._chosen if n in self._rows]

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __bool__(self) -> bool:
        return True  # a trace that has seen nothing yet is one

    def __enter__(self) -> Trace:
        if self in self._engine._traces:
            raise RuntimeError("this trace is already entered: make another with eng.trace(...)")
        self._engine._lock.run(self._engine._traces.append, self)  # between two steps
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._engine._lock.run(self._engine._traces.remove, self)
        finally:
            if self in self._engine._traces:  # interrupted while it waited
                self._engine._traces.remove(self)

    # ------------------------------------------------------------------- what the engine calls

    @torch.no_grad()
    @torch.inference_mode(False)  # what is kept or edited is an ordinary tensor
    def see(self, name: str, x: Tensor, rows: RowSet, requests: Tensor, step: int) -> Tensor:
        """Called for every value of a step. requests: [b] request of each sequence. Returns x, or
        what the edit put in its place. Raises ValueError and TypeError for an edit of another shape
        or kind."""
        if name not in self._chosen:
            return x
        request = requests[rows.owner].masked_fill(rows.seq < 0, PADDING)
        where = Coordinates(name, request, rows.positions, step)
        if self._edit is not None:
            copy = x.clone()
            before = copy._version
            changed = self._edit(copy, where)
            if changed is None and copy._version != before:
                raise ValueError(
                    f"edit of {name} changed its copy in place and returned None: return it"
                )
            x = x if changed is None else edited(name, changed, x)
        kept = x.detach()
        if self._keep is not None:
            at = torch.as_tensor(self._keep(where), dtype=torch.bool, device=x.device)
            if at.shape != request.shape:
                raise ValueError(
                    f"keep gave shape {tuple(at.shape)} for the {len(request)} rows of {name}: "
                    "return one boolean a row"
                )
            kept = kept[at]
            where = Coordinates(name, request[at], rows.positions[at], step)
        self._rows[name].append((kept.clone(), where))
        return x

    def settle(self, step: int, computed: dict[int, int]) -> None:
        """After commit: a row of `step` stands where its position is below its request's entry in
        `computed`. Rows of an earlier step that never came here belong to a step that failed."""
        for name, seen in self._rows.items():
            for _, at in seen[len(self._accepted[name]) :]:
                known = computed if at.step == step else {}
                limit = torch.tensor(
                    [known.get(r, 0) for r in at.request.tolist()], dtype=torch.long
                )
                self._accepted[name].append(at.position.cpu() < limit)

    # --------------------------------------------------------------------------------- reading

    def __getitem__(self, name: str) -> TracedTensor:
        """All rows of a value. Raises KeyError with the nearest names."""
        seen = self._seen(name)
        out = stack_rows([x for x, _ in seen]).as_subclass(TracedTensor)
        out.traced_name = name
        out.request = torch.cat([at.request for _, at in seen])
        out.position = torch.cat([at.position for _, at in seen])
        out.step = torch.cat([torch.full_like(at.position, at.step) for _, at in seen])
        out.accepted = torch.cat(self._flags(name)).to(out.position.device)
        return out

    def at(self, name: str, position: int, request: int | None = None) -> Tensor:
        """The row that stands at `position` of a sequence: never one of a rejected draft.

        request: needed where several have that position. Of several teacher-forced passes the last
        counts. Raises KeyError where no row, or the row of more than one request, is meant.
        """
        x = self[name]
        match = (x.position == position) & x.accepted
        if request is not None:
            match = match & (x.request == request)
        hits = match.nonzero().flatten()
        if not len(hits):
            where = "" if request is None else f" of request {request}"
            raise KeyError(
                f"{name} has no accepted row at position {position}{where}: "
                f"it has positions {_few(x.position[x.accepted])} of requests {_few(x.request)}"
            )
        owners = sorted(set(x.request[hits].tolist()))
        if len(owners) > 1:
            raise KeyError(
                f"{name} has position {position} of requests {owners}: say which with request="
            )
        return x.as_subclass(Tensor)[hits[-1]]

    def table(self) -> Table:
        """What was seen, one row a name: steps, rows, accepted rows, shape of a row, dtype."""
        from deepinfer.tables.table import Table

        columns = ("name", "steps", "rows", "accepted", "shape", "dtype")
        rows = []
        for name in self.names:
            parts = [x for x, _ in self._rows[name]]
            shape = stack_rows([p[:0] for p in parts]).shape[1:]
            rows.append(
                dict(
                    name=name,
                    steps=len({at.step for _, at in self._rows[name]}),
                    rows=sum(map(len, parts)),
                    accepted=sum(int(flag.sum()) for flag in self._flags(name)),
                    shape=" ".join(map(str, shape)),
                    dtype=str(parts[0].dtype).removeprefix("torch."),
                )
            )
        title = f"trace: {len(rows)} of {len(self._chosen)} chosen names seen"
        return Table(rows, columns, title=title + (", edited" if self.edits else ""))

    def __repr__(self) -> str:
        return repr(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()

    def _seen(self, name: str) -> list[tuple[Tensor, Coordinates]]:
        if name in self._rows:
            return self._rows[name]
        if name in self._chosen:
            raise KeyError(
                f"{name} was not computed while this trace was open (candidates, for example, only "
                "where there are more entries than candidate blocks hold)"
            )
        raise KeyError(_missing(name, self._chosen, "this trace chose"))

    def _flags(self, name: str) -> list[Tensor]:
        settled = self._accepted[name]
        late = self._rows[name][len(settled) :]
        return [*settled, *(torch.zeros(len(x), dtype=torch.bool) for x, _ in late)]


def edited(name: str, changed: object, x: Tensor) -> Tensor:
    """What an edit returned, in x's dtype and place."""
    if not isinstance(changed, Tensor):
        raise TypeError(
            f"edit of {name} returned {type(changed).__name__}: return a tensor of shape "
            f"{tuple(x.shape)}, or None to leave it"
        )
    if changed.shape != x.shape:
        raise ValueError(
            f"edit of {name} returned shape {tuple(changed.shape)} for {tuple(x.shape)}: "
            "return a tensor of the same shape, or None to leave it"
        )
    return changed.to(x)


def stack_rows(parts: list[Tensor]) -> Tensor:
    """Concatenate rows whose last axis may differ between steps (picked ids): -1 or NaN fills."""
    if len({p.shape[1:] for p in parts}) <= 1:
        return torch.cat(parts)
    width = max(p.shape[-1] for p in parts)
    fill = float("nan") if parts[0].is_floating_point() else -1
    return torch.cat(
        [torch.nn.functional.pad(p, (0, width - p.shape[-1]), value=fill) for p in parts]
    )


def chosen_names(patterns: tuple[str, ...], names: list[str]) -> dict[str, None]:
    """Names that match any shell pattern, in the order of `names`. KeyError for a pattern that
    matches none."""
    chosen: set[str] = set()
    for pattern in patterns:
        hits = fnmatch.filter(names, pattern)
        if not hits:
            raise KeyError(_missing(pattern, names, "eng.trace_names() has"))
        chosen.update(hits)
    return {name: None for name in names if name in chosen}


def _missing(name: str, known: Iterable[str], where: str) -> str:
    known = list(known)
    close = difflib.get_close_matches(name, known, 3, 0.4)
    found = ", ".join(close) if close else f"{len(known)} names"
    drafts = name.startswith("mtp") and not any(n.startswith("mtp") for n in known)
    hint = "; mtp.* are there only with a verifier that drafts" if drafts else ""
    return f"no traced value is named {name!r}: {where} {found}{hint}"


def _few(x: Tensor) -> str:
    """The values of a long tensor in few words: '0, 2' or '0..14'."""
    values = sorted(set(x.tolist()))
    if len(values) <= 3:
        return ", ".join(map(str, values)) or "none"
    return f"{values[0]}..{values[-1]}"


# ---------------------------------------------------------------------------------------- names


class TraceNames(list[str]):
    """The names that a trace can show, in the order of the walk; displayed as a tree with shapes."""

    def __repr__(self) -> str:
        from deepinfer.display.names import names_text

        return names_text(self)

    def _repr_html_(self) -> str:
        from deepinfer.display.names import names_html

        return names_html(self)


def trace_names(config: ModelConfig, drafter: bool) -> TraceNames:
    """Every name a forward can show, in the order of the walk. mtp.*: only with a drafter.

    Of t rows, m streams of width d:
        .in, .engram.streams        [t, m, d] the residual streams, as they come and behind Engram
        .engram.rows, .value        rows of the n-gram table; [t, d] what they add to the streams,
                                    each stream's gate times it
        .attn.in, .ffn.in           [t, d] what a sub-layer reads: the streams, collapsed and normed
        .attn.out, .ffn.out         [t, d] what it gives; .attn.comb, .ffn.comb [t, m, m] the matrix
                                    that mixes the streams behind it
        .attn.window_keys, .entries, .index_keys, .selected, .candidates    keys, and ids of entries
        .ffn.experts, .ffn.weights  [t, k] the routed experts and their weights
        features, final, logits     what the drafter reads; [t, d] the streams behind the last layer,
                                    collapsed; [t, vocabulary]
    So a mechanism is taken away by zeros in .attn.out, .ffn.out or .engram.value; zeros in the
    streams are zeros in everything that came before.
    """
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
    return TraceNames(out)


def _layer_names(c: ModelConfig, name: str, layer: int, engram: bool) -> list[str]:
    parts = [
        "in",
        *(["engram.rows", "engram.value", "engram.streams"] if engram else []),
        "attn.in",
        "attn.window_keys",
    ]
    if layer in c.kv_source_layer_ids:
        parts += ["attn.entries", "attn.index_keys"]
    if layer in c.index_source_layer_ids:
        parts += ["attn.selected"]
        if c.candidate_source_layer_id is not None and layer >= c.candidate_source_layer_id:
            parts += ["attn.candidates"]
    parts += [
        "attn.out",
        "attn.comb",
        "ffn.in",
        "ffn.experts",
        "ffn.weights",
        "ffn.out",
        "ffn.comb",
    ]
    return [f"{name}.{p}" for p in parts]
