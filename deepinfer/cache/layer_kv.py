"""LayerKV: what the running layer can read, stored records and this step's rows in one numbering.

A row sees keys that are stored (in a ring or a page) and keys that this step has just computed.
Both have a place in one numbering (`cache.addressing`): stored records first, then this step's
rows. So a chunk may be longer than the ring, a forward without a cache is differentiable, and no
row is read back from bytes that this step wrote.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.cache.addressing import entry_places, own_entry_places
from deepinfer.kernels.records import Records
from deepinfer.slots.protocols import RowSet


@dataclass(frozen=True, slots=True)
class LayerKV:
    """The keys of one layer in this step. window: every layer has one. entries, index_keys: those of
    the KV source that the layer reads; None in window-only layers.

    Entry j covers the tokens r*j .. r*j+r-1. If its last token is at or above `own_start` [b], this
    step computed it; otherwise it is in a page of `pages` [b, p]. keys: the rows whose entries this
    step computes. stored: number of stored records, 0 in a step without history.
    """

    window: Records
    entries: Records | None = None
    index_keys: Records | None = None
    ratio: int = 0
    keys: RowSet | None = None
    own_start: Tensor | None = None
    pages: Tensor | None = None
    entries_per_page: int = 0
    stored: int = 0

    def places(self, ids: Tensor, owner: Tensor) -> Tensor:
        """[t, k] places of the entries `ids` [t, k] of the sequences `owner` [t]; -1 stays -1."""
        last, places = own_entry_places(self.keys, ids, owner, self.ratio, self.stored)
        if self.stored:
            history = entry_places(self.pages[owner], ids, self.entries_per_page)
            places = torch.where(last >= self.own_start[owner][:, None], places, history)
        return places.masked_fill(ids < 0, -1)

    def index_key_rows(self, n: int) -> Tensor:
        """[b, n, d] index keys of the entries 0..n-1 of every sequence. Rows past the end of a
        sequence are finite and otherwise arbitrary: visibility masks them."""
        seqs = self.keys.first.shape[0]
        ids = torch.arange(n, device=self.keys.first.device).expand(seqs, n)
        places = self.places(ids, torch.arange(seqs, device=ids.device))
        total = self.stored + self.keys.count
        return self.index_keys.gather(places.masked_fill((places < 0) | (places >= total), -1))
