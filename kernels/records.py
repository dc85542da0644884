"""Records: what a layer reads keys from, history and the step's own rows as one index space."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from . import formats
from .numerics import taken


@dataclass(frozen=True)
class Layout:
    """How one record of `dim` features is stored.

    format: "float" (the row itself, in the storage's dtype) or a packed format of uint8 bytes.
    token_interleaved: packed records are [data | scales] each; False (planar): per block of `block`
        records the data of all, then the scales of all, as the released index-key cache. A mix-up
        of the two gives plausible numbers, which is why the layout says it.
    """

    format: str
    dim: int
    token_interleaved: bool = True
    block: int = 1

    def __post_init__(self) -> None:
        if self.packed:
            formats.packed_bytes(self.format, self.dim)  # refuses unknown names and bad dims
        elif not self.token_interleaved:
            raise ValueError("a float layout has no scales, so it is always token interleaved")
        if self.block < 1 or (self.token_interleaved and self.block != 1):
            raise ValueError(f"block={self.block}: at least 1, and 1 where token_interleaved")

    @property
    def packed(self) -> bool:
        return self.format != "float"

    @property
    def bytes_per_record(self) -> int:
        """Bytes of a packed record. A float record's depend on the storage's dtype: ask it."""
        if not self.packed:
            raise ValueError("a float record has dim * itemsize bytes of its storage's dtype")
        return formats.packed_bytes(self.format, self.dim)

    @property
    def width(self) -> int:
        """Length of the storage's second axis."""
        return self.block * self.bytes_per_record if self.packed else self.dim

    def empty(self, count: int, dtype: torch.dtype, device=None) -> torch.Tensor:
        """Zeroed storage for at least `count` records; record 0 is reserved and stays zero.
        dtype is that of a float layout."""
        dtype = torch.uint8 if self.packed else dtype
        return torch.zeros(-(-count // self.block), self.width, dtype=dtype, device=device)


@dataclass(frozen=True)
class Records:
    """Keys of one source: ids 0..n-1 are stored records, n..n+t-1 the step's own rows, -1 none.

    stored: "n d" float, "n bytes" uint8 for a packed layout, "n/block block*bytes" for a planar
        one, or None (no history, n = 0). Record 0 is reserved: writes that go nowhere land there,
        and it is kept zero.
    own: "t d" float, already rounded as it is stored; None: the step has none.
    """

    stored: torch.Tensor | None
    own: torch.Tensor | None
    layout: Layout

    def __post_init__(self) -> None:
        stored, own, layout = self.stored, self.own, self.layout
        if stored is not None:
            if stored.ndim != 2 or stored.shape[1] != layout.width or not stored.shape[0]:
                raise ValueError(
                    f"stored has shape {tuple(stored.shape)}; {layout} wants (n, {layout.width}) "
                    "with n >= 1, because record 0 is reserved"
                )
            if layout.packed != (stored.dtype == torch.uint8):
                raise TypeError(f"stored has dtype {stored.dtype}, which does not fit {layout}")
        if own is not None and own.shape[1:] != (layout.dim,):
            raise ValueError(f"own has shape {tuple(own.shape)}; expected (t, {layout.dim})")

    @property
    def count(self) -> int:
        """Number of stored records: own row i has id count + i."""
        return 0 if self.stored is None else self.stored.shape[0] * self.layout.block

    def gather(self, ids: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Rows `ids "..."` -> "... d", zeros where the id is -1, in dtype (default: that of own,
        else of a float storage, else float32)."""
        dtype = dtype or self._dtype()
        count, own = self.count, self.own
        there = (ids >= 0).unsqueeze(-1)
        if own is None or not own.shape[0]:
            if not count:
                return torch.zeros(*ids.shape, self.layout.dim, dtype=dtype, device=ids.device)
            return torch.where(there, self._read(ids.clamp(min=0), dtype), 0)
        mine = taken(own.to(dtype), (ids - count).clamp(min=0))
        if not count:
            return torch.where(there, mine, 0)
        history = self._read(torch.where(ids < count, ids, 0).clamp(min=0), dtype)
        rows = torch.where((ids >= count).unsqueeze(-1), mine, history)
        return torch.where(there, rows, 0)

    def write(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Store rows "m d" as records `ids "m"`, in place and without a gradient; a negative id
        writes nowhere. Two rows must not name the same record."""
        if self.stored is None:
            raise ValueError("these records have no storage, so nothing can be written to them")
        # Without boolean indexing, whose shape depends on values: what goes nowhere is zeroed and
        # all of it lands in record 0.
        there = (ids > 0).unsqueeze(-1)
        places = ids.clamp(min=0)
        if not self.layout.packed:
            self.stored[places] = torch.where(there, rows.detach(), 0).to(self.stored.dtype)
            return
        record = torch.where(there, formats.encode(rows.detach(), self.layout.format), 0)
        if self.layout.token_interleaved:
            self.stored[places] = record
        else:
            self.stored.view(-1)[self._bytes(places)] = record

    def _dtype(self) -> torch.dtype:
        if self.own is not None:
            return self.own.dtype
        if self.stored is None or self.layout.packed:
            return torch.float32
        return self.stored.dtype

    def _read(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        stored = self.stored
        assert stored is not None  # callers have looked at count
        if not self.layout.packed:
            return taken(stored, ids).to(dtype)
        if self.layout.token_interleaved:
            record = stored[ids]
        else:
            record = stored.view(-1)[self._bytes(ids)]
        return formats.decode(record, self.layout.format, self.layout.dim, dtype)

    def _bytes(self, ids: torch.Tensor) -> torch.Tensor:
        """Addresses "... bytes" of planar records: in each block the data of all its records, then
        the scales of all."""
        layout = self.layout
        data = layout.dim * formats.FORMATS[layout.format].bits // 8
        total = layout.bytes_per_record
        byte = torch.arange(total, device=ids.device)
        place = (ids % layout.block).unsqueeze(-1)
        in_data = place * data + byte
        in_scales = layout.block * data + place * (total - data) + (byte - data)
        inside = torch.where(byte < data, in_data, in_scales)
        return (ids // layout.block * layout.width).unsqueeze(-1) + inside
