"""KVCache: the storage behind every layer of one engine, sized from the attention slot's KVSpec.

    block KV   per KV-source layer: compressed entries and index keys, in pages of `page_size` tokens
    state KV   per layer, drafter layers too: a ring of window + backtracking key records a sequence;
               per source of ratio > 1: the values and gates of the last tokens (the open group)
Records are addressed by position (`cache.addressing`), so setting a sequence back to its accepted
length is all that a rollback does. Sizes of the release: 528 B a window record, 288 + 68 B an
entry, 890 B of block KV a token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.config import ModelConfig
from deepinfer.kernels.records import Layout, Records
from deepinfer.slots.protocols import KVSpec


@dataclass(frozen=True, slots=True)
class CacheSize:
    """num_pages, num_states: without the spare ones; page_size: in tokens; backtracking: tokens that
    a verification may step back; packed: store records as the official bytes."""

    num_pages: int
    num_states: int
    page_size: int
    backtracking: int
    packed: bool = False


class KVCache:
    """Storage for `size.num_pages` pages and `size.num_states` sequences; number 0 of each is spare.
    ring: records of a window ring; group_ring: tokens of an open-group ring."""

    def __init__(
        self,
        config: ModelConfig,
        specs: list[KVSpec],
        size: CacheSize,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.config = config
        self.size = size
        self.specs = specs
        self.ring = max(s.window for s in specs) + size.backtracking
        self.group_ring = max(config.compress_ratios) + max(size.backtracking - 1, 0)
        self.dtype = dtype
        self.device = device
        acc = torch.promote_types(dtype, torch.float32)
        states = size.num_states + 1
        self.windows = [
            self._records(states * self.ring, s.window_format, config.head_dim) for s in specs
        ]
        self.entries: dict[int, Records] = {}
        self.index_keys: dict[int, Records] = {}
        self.groups: dict[int, Records] = {}
        for layer in config.kv_source_layer_ids:
            spec = specs[layer]
            per_page = self.entries_per_page(spec.ratio)
            count = (size.num_pages + 1) * per_page
            self.entries[layer] = self._records(count, spec.entry_format, config.head_dim, per_page)
            self.index_keys[layer] = self._records(
                count, spec.index_format, config.index_head_dim, per_page, interleaved=False
            )
            if spec.ratio > 1:
                width = 2 * config.head_dim
                layout = Layout(format="float", dim=width)
                store = layout.empty(states * self.group_ring, acc, device)
                self.groups[layer] = Records(store, None, layout)

    def entries_per_page(self, ratio: int) -> int:
        """Compressed entries of a page, for a source of this ratio."""
        return self.size.page_size // ratio

    def _records(
        self, count: int, fmt: str, dim: int, per_block: int = 1, interleaved: bool = True
    ) -> Records:
        """Zeroed storage of `count` records: floats in the engine's dtype, or the official bytes."""
        layout = Layout(format="float", dim=dim)
        if self.size.packed and fmt != "float":
            block = 1 if interleaved else per_block
            layout = Layout(format=fmt, dim=dim, token_interleaved=interleaved, block=block)
        return Records(layout.empty(count, self.dtype, self.device), None, layout)

    def stores(self) -> dict[str, Tensor]:
        """Every storage tensor by name, for accounting and for the serial-is-the-oracle tests."""
        out = {f"window.{i}": r.stored for i, r in enumerate(self.windows)}
        for name, group in (
            ("entries", self.entries),
            ("index_keys", self.index_keys),
            ("groups", self.groups),
        ):
            out.update({f"{name}.{layer}": r.stored for layer, r in group.items()})
        return out

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes by component: 'block KV' and 'state KV'."""
        total = {"block KV": 0, "state KV": 0}
        for name, store in self.stores().items():
            block = name.startswith(("entries", "index_keys"))
            total["block KV" if block else "state KV"] += store.numel() * store.element_size()
        return total
