"""A small stack's worth of queries and keys, and the walk of an attention variant over its layers.

No projections: queries, window keys, compressed entries and index keys are random numbers of a
sequence and a position, so that a law can change one of them and look at what moves.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from deepinfer import kernels
from deepinfer.cache.addressing import entry_places, ring_places, ring_start
from deepinfer.cache.kv_cache import CacheSize, KVCache
from deepinfer.cache.layer_kv import LayerKV
from deepinfer.config import ModelConfig
from deepinfer.conformance.law import generator
from deepinfer.kernels.records import Layout, Records
from deepinfer.slots.protocols import Batch, IndexQuery, LayerInfo, RowSet, Selected

PARTS = ("q", "window", "entries", "index_keys", "index_query", "index_weights")


@dataclass
class World:
    """All numbers of some sequences. numbers[part]: [layer, b, longest, ...]; lengths: [b]."""

    config: ModelConfig
    lengths: tuple[int, ...]
    dtype: torch.dtype = torch.float64
    numbers: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.numbers:
            return
        c = self.config
        shapes: dict[str, tuple[int, ...]] = {
            "q": (c.num_attention_heads, c.head_dim),
            "window": (c.head_dim,),
            "entries": (c.head_dim,),
            "index_keys": (c.index_head_dim,),
            "index_query": (c.index_n_heads, c.index_head_dim),
            "index_weights": (c.index_n_heads,),
        }
        g, most = generator(3), 16
        for part, shape in shapes.items():
            every = torch.randn(c.num_layers, 3, most, *shape, generator=g, dtype=torch.float64)
            self.numbers[part] = every[:, : len(self.lengths), : max(self.lengths, default=0)].to(
                self.dtype
            )

    def sequences(self, at: list[int]) -> World:
        """The world of some of the sequences, in that order."""
        numbers = {name: x[:, at] for name, x in self.numbers.items()}
        return replace(self, lengths=tuple(self.lengths[i] for i in at), numbers=numbers)

    def changed(
        self, parts: tuple[str, ...], seq: int, start: int, stop: int | None = None
    ) -> World:
        """The same with other numbers at positions start..stop-1 of one sequence."""
        numbers = dict(self.numbers)
        for part in parts:
            numbers[part] = numbers[part].clone()
            here = numbers[part][:, seq, start:stop]
            numbers[part][:, seq, start:stop] = 3.0 - 2.0 * here
        return replace(self, numbers=numbers)

    def rows(self, part: str, layer: int, batch: Batch) -> Tensor:
        """The numbers of a batch's rows, [t, ...]; those of padding rows are ones."""
        at = self.numbers[part][layer]
        if not batch.num_rows:
            return at.new_zeros(0, *at.shape[2:])
        found = at[batch.row_set.owner, batch.positions]
        padding = (batch.seq < 0).view(-1, *[1] * (found.ndim - 1))
        return found.masked_fill(padding, 1.0)


def batch_of(world: World, start: tuple[int, ...], padding: int = 0, pages: int = 8) -> Batch:
    """The rows from start[i] to the end of each sequence, then padding rows."""
    counts = [n - s for n, s in zip(world.lengths, start)]
    offsets = [sum(counts[:i]) for i in range(len(counts))]
    positions = [p for n, s in zip(world.lengths, start) for p in range(s, n)] + [0] * padding
    seq = [i for i, n in enumerate(counts) for _ in range(n)] + [-1] * padding

    def long(x) -> Tensor:
        return torch.tensor(x, dtype=torch.long)

    segments = tuple((i, o, o + n) for i, (o, n) in enumerate(zip(offsets, counts)) if n)
    rows = RowSet(
        long(positions), long(seq), long(offsets), long(start), None if padding else segments
    )
    b = len(world.lengths)
    return Batch(
        ids=torch.zeros_like(rows.positions),
        positions=rows.positions,
        seq=rows.seq,
        rows=long(counts),
        length=rows.start,
        pages=1 + torch.arange(b * pages).view(b, pages),
        state=1 + torch.arange(b),
        lookback=rows.positions.new_full((len(seq), 1), -1),
        logit_rows=long([]),
        row_set=rows,
        reach=max([0, *world.lengths]),
        max_rows=max([0, *counts]),
        has_history=any(start),
    )


def filled_cache(attention: Any, world: World, batch: Batch) -> KVCache:
    """Window rings and pages that hold what lies before the batch's rows, as an engine has them."""
    c = world.config
    specs = [attention.kv_spec(c, layer) for layer in range(len(c.compress_ratios))]
    b, pages = batch.pages.shape
    size = CacheSize(
        num_pages=b * pages, num_states=b, page_size=c.sliding_window, backtracking=c.backtracking
    )
    cache = KVCache(c, specs, size, dtype=world.dtype, device=torch.device("cpu"))
    for i, start in enumerate(batch.length.tolist()):
        held = torch.arange(ring_start(start, cache.ring), start)
        for layer in range(c.num_layers):
            places = ring_places(batch.state[i], held, cache.ring)
            cache.windows[layer].write(places, world.numbers["window"][layer, i, held])
        for layer in c.kv_source_layers:
            r = c.ratio(layer)
            per_page = cache.entries_per_page(r)
            number = torch.arange(start // r)
            places = entry_places(batch.pages[i, None], number[None], per_page)[0]
            for store, part in ((cache.entries, "entries"), (cache.index_keys, "index_keys")):
                store[layer].write(places, world.numbers[part][layer, i, number * r + r - 1])
    return cache


def records(stored: Records | None, own: Tensor) -> Records:
    """History followed by own rows; without history own rows start at place 0."""
    if stored is not None:
        return Records(stored.stored, own, stored.layout)
    rows = own if len(own) else own.new_zeros(1, own.shape[-1])
    return Records(rows, None, Layout(format="float", dim=own.shape[-1]))


def info(world: World, layer: int, ops: Any) -> LayerInfo:
    c = world.config
    sink = torch.linspace(-1, 1, c.num_attention_heads, dtype=world.dtype)
    return LayerInfo(
        name=f"layers.{layer}",
        index=layer,
        role=c.role(layer),
        ratio=c.ratio(layer),
        window=c.sliding_window,
        scale=c.head_dim**-0.5,
        sink=sink,
        top_k=c.index_topk,
        ops=ops,
        candidate_source=layer == c.candidate_source_layer_id,
        candidate_blocks=c.candidate_topk_blocks,
        candidate_block_size=c.candidate_block_size,
    )


def source_kv(world: World, layer: int, batch: Batch, cache: KVCache | None) -> LayerKV:
    """Entries and index keys of a KV source."""
    stored = None if cache is None else cache.entries[layer]
    keys = None if cache is None else cache.index_keys[layer]
    return LayerKV(
        window=None,
        entries=records(stored, world.rows("entries", layer, batch)),
        index_keys=records(keys, world.rows("index_keys", layer, batch)),
        ratio=world.config.ratio(layer),
        keys=batch.row_set,
        own_start=batch.row_set.start,
        pages=batch.pages,
        entries_per_page=1 if cache is None else cache.entries_per_page(world.config.ratio(layer)),
        stored=0 if stored is None else stored.count,
    )


def walk(
    attention: Any,
    world: World,
    start: tuple[int, ...] | None = None,
    padding: int = 0,
    floor: Tensor | None = None,
    watch: Any = None,
    invariant: bool = False,
) -> dict[str, Tensor]:
    """Run every layer. -> 'layers.1.out' [t, h, d], 'layers.1.ids' [t, k], 'positions', 'seq' [t].

    start: first row of each sequence (the rest is history); watch: a context manager around each
    call, given its inputs; invariant: with the kernels of a batch-invariant engine.
    """
    start = start or (0,) * len(world.lengths)
    batch = batch_of(world, start, padding)
    cache = filled_cache(attention, world, batch) if batch.has_history else None
    watch = watch or Unwatched
    rows, ops = batch.row_set, kernels.bind(batch_invariant=invariant)
    with watch(batch=batch, floor=floor):
        plan = attention.plan(batch, rows, rows, floor, cache)
    out = {"positions": rows.positions, "seq": rows.seq}
    kv: LayerKV | None = None
    selected: Selected | None = None
    for layer in range(world.config.num_layers):
        told = info(world, layer, ops)
        if told.role == "full":
            kv = source_kv(world, layer, batch, cache)
        window = records(
            None if cache is None else cache.windows[layer], world.rows("window", layer, batch)
        )
        seen = LayerKV(window) if kv is None else replace(kv, window=window)
        if told.role in ("full", "reindex"):
            query = IndexQuery(
                world.rows("index_query", layer, batch), world.rows("index_weights", layer, batch)
            )
            with watch(index=query, kv=seen, plan=plan, carried=selected):
                picked: Selected = attention.select(told, query, seen, plan, selected)
            wanted(picked, Selected, "select")
            selected = replace(picked, places=seen.places(picked.ids, rows.owner))
            out[f"{told.name}.ids"] = picked.ids
        q = world.rows("q", layer, batch)
        with watch(q=q, kv=seen, selected=selected, plan=plan):
            out[f"{told.name}.out"] = attention.attend(told, q, seen, selected, plan)
        wanted(out[f"{told.name}.out"], Tensor, "attend")
    return out


def wanted(found: Any, kind: type, method: str) -> None:
    """Raise TypeError unless a method gave what its protocol states."""
    if not isinstance(found, kind):
        raise TypeError(
            f"{method} gives a {type(found).__name__}, it should give a {kind.__name__}"
        )


class Unwatched:
    """Watches nothing."""

    def __init__(self, **_: Any) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...
