"""Exact: compute what is not available, drop nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfer.slots.protocols import Prompt, ReplayPlan
from deepinfer.slots.registry import registry
from deepinfer.slots.settings import shown

if TYPE_CHECKING:
    from deepinfer.config import ModelConfig


@registry("replay").register("exact")
class Exact:
    """Start where both block KV and state KV are available; every later row runs in every layer.

    Block KV found beyond that place is not adopted: those rows have to run to fill the windows, and
    they write what they compute. All rows run where log-probabilities of the whole prompt are
    asked, and the last row always does: its logits choose the first token.
    """

    exact = True
    batch_invariant = True
    on_device = False

    def __repr__(self) -> str:
        return shown(self)

    def plan(self, prompt: Prompt, config: ModelConfig) -> ReplayPlan:
        start = (
            0
            if prompt.wants_all_logits
            else min(prompt.state_at, prompt.hit, max(prompt.length - 1, 0))
        )
        layers = config.num_layers
        if prompt.wants_all_logits:
            why = "all rows: log-probabilities of the whole prompt are asked"
        elif start:
            why = f"from {start}: block KV and state KV are available below it"
        else:
            why = (
                "all rows: no state KV is available"
                if prompt.hit
                else "all rows: nothing is available"
            )
        return ReplayPlan(
            start=start,
            write_from=start,
            kv_from=(0,) * layers,
            rows_from=(0,) * layers,
            floor=(0,) * layers,
            exact=True,
            why=why,
        )
