"""Stairs: as many rows x layers as a box of `Bounded`, more of them in the lower decoder layers."""

from __future__ import annotations

from deepinfer.config import ModelConfig
from deepinfer.slots.protocols import Prompt, ReplayPlan


class Stairs:
    """Decoder layers run ever fewer of a prompt's last rows, as in the exact rebuild but flatter.

    keep: their mean. The last layer runs window + backtracking rows, the least that an engine
    takes, each layer below it more by the same step, to a row: rows x layers are exactly those of
    Bounded(keep=keep). A layer keeps the window keys of all rows that enter it, so the first
    decoder layer is exact, as with whole_window.
    """

    version, exact, batch_invariant, on_device = 1, False, True, False

    def __init__(self, keep: int) -> None:
        self.keep = keep

    def __repr__(self) -> str:
        return f"Stairs({self.keep})"

    def keeps(self, config: ModelConfig) -> list[int]:
        """Rows of each decoder layer, from the first one. ValueError for a keep below the least."""
        n = config.num_layers - config.first_decoder_layer
        least = config.ring_length
        more = n * (self.keep - least)
        if more < 0:
            raise ValueError(f"{self!r}: want a keep of {least} or more")
        weights, parts = n * (n - 1) // 2, [0]
        for k in range(n):  # what is due up to step k, rounded down: the sum is `more`
            parts.append(more * k * (k + 1) // 2 // weights if weights else more)
        return sorted((least + b - a for a, b in zip(parts, parts[1:])), reverse=True)

    def plan(self, prompt: Prompt, config: ModelConfig) -> ReplayPlan:
        cuts = [max(prompt.length - k, 0) for k in self.keeps(config)]
        if prompt.wants_all_logits:
            cuts = [0] * len(cuts)
        rows_from = (*[0] * config.first_decoder_layer, *cuts)
        floor = (0, *rows_from[:-1])
        why = f"the last {', '.join(map(str, self.keeps(config)))} rows run in the decoder layers"
        return ReplayPlan(0, 0, floor, rows_from, floor, exact=not cuts[-1], why=why)
