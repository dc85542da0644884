"""Records: what a layer reads keys from, history and the step's own rows as one index space."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepinfer.kernels import formats


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How one record of `dim` features is stored.

    format: "float" (the row itself, in the storage's dtype) or a packed format of uint8 bytes.
    token_interleaved: packed records are [data | scales] each; False: per block of `block` records
        the data of all, then the scales of all (index keys in the released cache). A mix-up of the
        two gives plausible numbers, which is why the layout says it.
    """

    format: str
    dim: int
    token_interleaved: bool = True
    block: int = 1

    def __post_init__(self) -> None:
        if self.format != "float":
            formats.packed_bytes(self.format, self.dim)  # refuses unknown names and bad dims
        elif not self.token_interleaved:
            raise ValueError("a float layout has no scales, so it is always token interleaved")
        if self.block < 1:
            raise ValueError(f"block={self.block} records a block; it must be at least 1")

    @property
    def packed(self) -> bool:
        return self.format != "float"

    @property
    def bytes_per_record(self) -> int:
        """Bytes of a packed record. A float record's depend on the storage's dtype: ask it."""
        if not self.packed:
            raise ValueError("a float record has dim * itemsize bytes of its storage's dtype")
        return formats.packed_bytes(self.format, self.dim)

    def empty(self, count: int, dtype: torch.dtype, device=None) -> torch.Tensor:
        """Zeroed storage for `count` records; record 0 is reserved and stays zero."""
        if self.packed:
            return torch.zeros(count, self.bytes_per_record, dtype=torch.uint8, device=device)
        return torch.zeros(count, self.dim, dtype=dtype, device=device)


@dataclass(frozen=True)
class Records:
    """Keys of one source: ids 0..n-1 are stored records, n..n+t-1 the step's own rows, -1 none.

    stored: "n d" float, or "n bytes" uint8 for a packed layout. Record 0 is reserved: it takes the
        writes that go nowhere and is kept zero.
    own: "t d" float, already rounded as they are stored; None: the step has none.
    """

    stored: torch.Tensor
    own: torch.Tensor | None
    layout: Layout

    def __post_init__(self) -> None:
        width = self.layout.bytes_per_record if self.layout.packed else self.layout.dim
        if self.stored.ndim != 2 or self.stored.shape[1] != width or not len(self.stored):
            raise ValueError(
                f"stored has shape {tuple(self.stored.shape)}; {self.layout} wants (n, {width}) "
                "with n >= 1 (record 0 is reserved)"
            )
        if self.layout.packed != (self.stored.dtype == torch.uint8):
            raise TypeError(f"stored has dtype {self.stored.dtype}, which {self.layout} is not")
        if self.own is not None and self.own.shape[1:] != (self.layout.dim,):
            raise ValueError(
                f"own rows have shape {tuple(self.own.shape)}; expected (t, {self.layout.dim})"
            )

    @property
    def count(self) -> int:
        """Number of stored records: own row i has id count + i."""
        return self.stored.shape[0]

    def gather(self, ids: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Rows `ids "..."` -> "... d", zeros where the id is -1, in dtype (default: that of own,
        else of a float storage, else float32)."""
        dtype = dtype or self._dtype()
        there = ids >= 0
        rows = self._read(torch.where(ids < self.count, ids, 0).clamp(min=0), dtype)
        if self.own is not None and len(self.own):
            mine = ids >= self.count
            own = self.own.to(dtype)[torch.where(mine, ids - self.count, 0)]
            rows = torch.where(mine.unsqueeze(-1), own, rows)
        return torch.where(there.unsqueeze(-1), rows, 0)

    def write(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Store rows "m d" as records `ids "m"`, in place; a negative id writes nowhere."""
        rows = torch.where((ids >= 0).unsqueeze(-1), rows.detach(), 0)
        ids = ids.clamp(min=0)
        if not self.layout.packed:
            self.stored[ids] = rows.to(self.stored.dtype)
            return
        record = formats.encode(rows, self.layout.format)
        # Negative ids all meet in record 0, whose bytes are zero in every layout.
        record = torch.where((ids > 0).unsqueeze(-1), record, 0)
        if self.layout.token_interleaved:
            self.stored[ids] = record
        else:
            self.stored.view(-1)[self._places(ids)] = record

    def _dtype(self) -> torch.dtype:
        if self.own is not None:
            return self.own.dtype
        return torch.float32 if self.layout.packed else self.stored.dtype

    def _read(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if not self.layout.packed:
            return self.stored[ids].to(dtype)
        if self.layout.token_interleaved:
            record = self.stored[ids]
        else:
            record = self.stored.view(-1)[self._places(ids)]
        return formats.decode(record, self.layout.format, self.layout.dim, dtype)

    def _places(self, ids: torch.Tensor) -> torch.Tensor:
        """Byte addresses "... bytes" of planar records: in each block the data of all its records,
        then the scales of all. The last block may be short."""
        f, dim, block = formats.FORMATS[self.layout.format], self.layout.dim, self.layout.block
        data, total = dim * f.bits // 8, self.layout.bytes_per_record
        first = ids // block * block
        held = (self.count - first).clamp(max=block).unsqueeze(-1)
        place = (ids - first).unsqueeze(-1)
        byte = torch.arange(total, device=ids.device)
        in_data = place * data + byte
        in_scales = held * data + place * (total - data) + (byte - data)
        return first.unsqueeze(-1) * total + torch.where(byte < data, in_data, in_scales)
