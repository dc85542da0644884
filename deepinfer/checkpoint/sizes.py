"""Where the bytes of a model are: weights by component and by expert-parallel size, and its cache.

Everything follows from the config, so the release can be weighed without its checkpoint. All sizes
are in bytes. Records: V4.1 technical report (window MXFP8, block KV NVFP4, index keys MXFP4).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfer.checkpoint import names
from deepinfer.checkpoint.names import Weight
from deepinfer.config import ModelConfig

if TYPE_CHECKING:
    from deepinfer.tables.table import Table

__all__ = ["EP_SIZES", "cache_sizes", "cache_table", "device_bytes", "memory_table"]

EP_SIZES = (1, 8, 16, 32, 64)


def record_bytes(format: str, dim: int) -> int:
    """Bytes of one cache record of `dim` features: `mxfp8`, `nvfp4` or `mxfp4`.

    >>> record_bytes("mxfp8", 512), record_bytes("nvfp4", 512), record_bytes("mxfp4", 128)
    (528, 288, 68)
    """
    bits, group = {"mxfp8": (8, 32), "nvfp4": (4, 16), "mxfp4": (4, 32)}[format]
    return dim * bits // 8 + dim // group


def cache_sizes(config: ModelConfig) -> dict[str, int | float]:
    """Cache sizes in bytes, by name.

    window_record, entry_record, index_record: one record. block_kv_per_token: compressed entries
    and index keys of all KV sources. encoder_windows, decoder_windows, draft_windows: one
    sequence's rings. compressor_state: open groups of one sequence, gate and value in FP32.
    """
    c = config
    window = record_bytes("mxfp8", c.head_dim)
    entry = record_bytes("nvfp4" if c.use_fp4_sparse_kv else "mxfp8", c.head_dim)
    index = record_bytes("mxfp4", c.index_head_dim)
    ratios = [c.ratio(layer) for layer in c.kv_source_layers]
    ring = c.ring_length * window
    # a group's tokens, and the drafts that may be taken back before the group closes
    open_rows = [ratio + max(0, c.max_draft) for ratio in ratios if ratio > 1]
    block = sum((entry + index) / ratio for ratio in ratios)
    return {
        "window_record": window,
        "entry_record": entry,
        "index_record": index,
        "block_kv_per_token": int(block) if block == int(block) else block,
        "encoder_windows": len(c.encoder_layers) * ring,
        "decoder_windows": len(c.decoder_layers) * ring,
        "draft_windows": len(c.draft_layers) * ring,
        "compressor_state": sum(rows * 2 * c.head_dim * 4 for rows in open_rows),
    }


def device_bytes(
    weights: list[Weight], ep: int, *, itemsize: int | None = None, shard_tables: bool = False
) -> int:
    """Bytes of these weights on one of `ep` expert-parallel ranks.

    Routed experts are divided (the fullest rank counts), all else is on every rank; shard_tables:
    n-gram tables are divided as well. itemsize: bytes per element of weights that are widened
    (FP32 ones keep 4 or more); None: as stored.
    """
    return _Held(weights, itemsize).on(ep, shard_tables)


class _Held:
    """Bytes of a group of weights, summed by how they are placed."""

    def __init__(self, weights: list[Weight], itemsize: int | None = None):
        self.tensors = self.parameters = self.disk = self.replicated = 0
        self.experts: dict[int | None, list[int]] = {}  # layer -> [matrices, their bytes]
        self.tables: list[tuple[int, int]] = []  # (rows, bytes of a row)
        for weight in weights:
            stored = weight.stored()
            on_disk = sum(tensor.nbytes for tensor in stored)
            self.tensors += len(stored)
            self.parameters += weight.parameters
            self.disk += on_disk
            size = on_disk
            if itemsize is not None:
                size = weight.parameters * (max(itemsize, 4) if weight.wide else itemsize)
            if weight.placement == "experts":
                count = self.experts.setdefault(weight.layer, [0, 0])
                count[0] += 1
                count[1] += size
            elif weight.placement == "table":
                self.tables.append((weight.shape[0], size // weight.shape[0]))
            else:
                self.replicated += size

    def on(self, ep: int, shard_tables: bool) -> int:
        if ep < 1:
            raise ValueError(f"ep = {ep}; the number of expert-parallel ranks is 1 or more")
        ranks = ep if shard_tables else 1
        total = self.replicated + sum(-(-rows // ranks) * row for rows, row in self.tables)
        for matrices, size in self.experts.values():
            number = matrices // 3  # w1, w2 and w3 of an expert
            total += size // number * -(-number // ep)
        return total


def memory_table(
    config: ModelConfig,
    ep_sizes: tuple[int, ...] = EP_SIZES,
    *,
    itemsize: int | None = None,
    shard_tables: bool = False,
) -> Table:
    """A Table with one row per component and a total: tensors, parameters, bytes on disk, and bytes
    per device for each expert-parallel size (columns `ep1`, `ep8`, ...); see `device_bytes`."""
    from deepinfer.tables.table import Table

    groups: dict[str, list[Weight]] = {}
    for weight in names.weights(config):
        groups.setdefault(weight.component, []).append(weight)
    rows = []
    for component, group in groups.items():
        held = _Held(group, itemsize)
        row: dict[str, object] = {"component": component, "tensors": held.tensors}
        row |= {"parameters": held.parameters, "disk": held.disk}
        rows.append(row | {f"ep{ep}": held.on(ep, shard_tables) for ep in ep_sizes})
    columns = [name for name in rows[0] if name != "component"]
    total = {name: sum(row[name] for row in rows) for name in columns}
    rows.append({"component": "total"} | total)
    return Table(rows, title="weights: tensors, parameters, bytes on disk and per device")


def cache_table(config: ModelConfig) -> Table:
    """`cache_sizes` as a Table of name and bytes."""
    from deepinfer.tables.table import Table

    rows = [{"cache": name, "bytes": size} for name, size in cache_sizes(config).items()]
    return Table(rows, title="cache: bytes per record, token or sequence")
