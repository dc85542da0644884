"""What a checkpoint holds and what a device needs: the report of `deepinfer inspect`."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepinfer.config import ModelConfig

if TYPE_CHECKING:
    from deepinfer.tables.table import Table

__all__ = ["Inspection", "inspect"]

_EP_SIZES = (8, 16, 32, 64)  # 1 would repeat the bytes on disk


@dataclass(frozen=True)
class Inspection:
    """source: where the config came from; checked: what was compared with it; weights, cache:
    Tables of bytes (see `sizes`)."""

    source: str
    checked: str
    config: ModelConfig
    weights: Table
    cache: Table

    @property
    def layers(self) -> str:
        """The layers in one line, runs of equal roles counted."""
        runs: list[list[Any]] = []
        for role in self.config.roles:
            if runs and runs[-1][0] == role:
                runs[-1][1] += 1
            else:
                runs.append([role, 1])
        return ", ".join(role if count == 1 else f"{count} {role}" for role, count in runs)

    def to_dict(self) -> dict[str, Any]:
        """Plain values: the text of `to_json`."""
        return {
            "source": self.source,
            "checked": self.checked,
            "config": self.config.to_dict(),
            "weights": self.weights.rows,
            "cache": self.cache.rows,
        }

    def to_json(self) -> str:
        """The report as one JSON object."""
        return json.dumps(self.to_dict(), indent=1)

    def __repr__(self) -> str:
        c = self.config
        from deepinfer.display.numbers import counted

        stored = "BF16" if c.quantization is None else "FP8 and FP4"
        lines = [
            f"{self.source}: {self.checked}",
            f"{counted(c.num_layers, 'layer')} ({c.first_decoder_layer} encoder, "
            f"{len(c.decoder_layers)} decoder) and {len(c.draft_layers)} draft; "
            f"hidden {c.hidden_size}; {counted(c.n_routed_experts, 'expert')}, "
            f"{c.num_experts_per_tok} per token; vocabulary {c.vocab_size}; stored as {stored}",
            f"roles: {self.layers}",
        ]
        weights, cache = _bytes_grid(self.weights, "disk"), _bytes_grid(self.cache, "bytes")
        parts = ["\n".join(lines), weights, *self._divided_tables(), cache]
        return "\n\n".join(parts)

    def _divided_tables(self) -> list[str]:
        """The totals when n-gram tables are divided over the ranks too, where there are any."""
        from deepinfer.checkpoint.sizes import memory_table
        from deepinfer.display.numbers import size

        if not self.config.engram_layer_ids:
            return []
        total = memory_table(self.config, _EP_SIZES, shard_tables=True).rows[-1]
        sizes = ", ".join(f"ep{ep} {size(total[f'ep{ep}'])}" for ep in _EP_SIZES)
        return [f"total with n-gram tables divided over the devices as well: {sizes}"]


def _bytes_grid(table: Table, sized: str) -> str:
    """The table as text, every digit and separators, the column `sized` also in decimal units.

    Bytes per device (`ep8`, ...) have a unit only: all their digits would be wider than a screen.
    """
    from deepinfer.display.numbers import size
    from deepinfer.display.text import grid

    def cells(name: str, value: Any) -> list[str]:
        if name.startswith("ep"):
            return [size(value)]
        text = value if isinstance(value, str) else f"{value:,}"
        return [text, size(value)] if name == sized else [text]

    columns = [part for name in table.columns for part in [name, "size"][: 1 + (name == sized)]]
    rows = [[text for name in row for text in cells(name, row[name])] for row in table]
    return grid(columns, rows, columns[1:], title=table.title)


def inspect(path: str | os.PathLike | None = None) -> Inspection:
    """A report on a checkpoint folder (headers are checked when it holds weights), on a
    config.json, or, with None, on the released model.

    CheckpointError or ValueError when the files do not fit each other; FileNotFoundError when there
    is no config.
    """
    from deepinfer.checkpoint.reader import Checkpoint
    from deepinfer.checkpoint.sizes import cache_table, memory_table

    if path is None:
        source, checked, config = "DeepSeek-V4.1-Flash", "from its config", ModelConfig.v41_flash()
    elif Path(path).is_dir() and any(Path(path).glob("*.safetensors*")):
        checkpoint = Checkpoint.open(path)
        config = checkpoint.config
        count, size = len(checkpoint.entries), sum(checkpoint.nbytes.values())
        source = str(path)
        checked = f"{count:,} tensors, {size:,} bytes: names, types and shapes fit the config"
    else:
        source, checked, config = str(path), "from its config", ModelConfig.from_file(path)
    return Inspection(source, checked, config, memory_table(config, _EP_SIZES), cache_table(config))
