"""A checkpoint that was never on disk: float tensors under their official names, read as if stored.

It answers like `reader.Checkpoint`, so the loader needs no second path, and its values are rounded
through the storage of the config: a model loaded from it equals one loaded from the same state
written to disk and read back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from deepinfer.checkpoint import names
from deepinfer.checkpoint.formats import quantise
from deepinfer.checkpoint.header import CheckpointError
from deepinfer.config import ModelConfig
from deepinfer.kernels.quantised import Quantised
from deepinfer.model import engram_hash

__all__ = ["MemoryCheckpoint", "check_state"]


def check_state(config: ModelConfig, state: Mapping[str, Tensor]) -> None:
    """CheckpointError unless the state holds every weight of the config, no other, in its shape."""
    expected = {w.name: w.shape for w in names.weights(config) if not names.is_unread(w.name)}
    given = {name for name in state if not names.is_unread(name)}
    missing, unknown = expected.keys() - given, given - expected.keys()
    for what, found in (("lacks", missing), ("has the unknown", unknown)):
        if found:
            raise CheckpointError(
                f"the state {what} tensor {min(found)} (and {len(found) - 1} more); it must hold "
                "the official names of its config, one tensor per weight"
            )
    for name, shape in expected.items():
        if tuple(state[name].shape) != shape or not state[name].is_floating_point():
            raise CheckpointError(
                f"the state's {name} is {state[name].dtype} {list(state[name].shape)}; expected "
                f"float values of shape {list(shape)}"
            )


class MemoryCheckpoint:
    """`state` {official name: float tensor} of `config`; `tokenizer` a `tokenizers.Tokenizer`.

    Has config, weights, token_map, read and read_experts of `reader.Checkpoint`, plus tokenizer.
    """

    path = None
    tokenizer_path = None

    def __init__(self, config: ModelConfig, state: Mapping[str, Tensor], tokenizer: Any = None):
        check_state(config, state)
        self.config = config
        self.tokenizer = tokenizer
        self.weights = {w.name: w for w in names.weights(config) if not names.is_unread(w.name)}
        self.token_map = None
        if config.engram_layer_ids:
            if tokenizer is None:
                raise CheckpointError("the n-gram memory needs the model's tokenizer; pass it")
            engram_hash.check_rows(config)
            self.token_map = engram_hash.token_map(tokenizer)
            engram_hash.check_map(config, self.token_map)
        self.state = state

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes that the stored tensors would have, by component."""
        total: Counter[str] = Counter()
        for weight in self.weights.values():
            total[weight.component] += sum(stored.nbytes for stored in weight.stored())
        return dict(total)

    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor | Quantised:
        """As `Checkpoint.read`."""
        if name not in self.weights:
            raise KeyError(f"{name}: the state has no weight of this name")
        return self._stored(self.state[name], self.weights[name].storage, dtype)

    def read_experts(
        self,
        prefix: str,
        matrix: str,
        dtype: torch.dtype | None = None,
        experts: Iterable[int] | None = None,
    ) -> Tensor | Quantised:
        """As `Checkpoint.read_experts`."""
        parts = names.expert_names(self.weights, prefix, matrix, experts)
        stacked = torch.stack([self.state[part] for part in parts])
        return self._stored(stacked, self.weights[parts[0]].storage, dtype)

    def _stored(self, value: Tensor, storage: str, dtype: torch.dtype | None):
        value = value.detach()
        if storage in ("bf16", "f32"):
            value = value.to(torch.bfloat16 if storage == "bf16" else torch.float32)
            return value if dtype is None else value.to(dtype)
        quantised = quantise(value, storage)
        return quantised if dtype is None else quantised.dequantise(dtype)
