"""NonFiniteRows: the rows of prefill chunks that are not finite, found on the device.

Where a row has logits they are looked at when they are sampled. Most rows of a prompt have none,
and a NaN in one reaches the last row only if a later row has it in its window or selects it. So
every row is looked at where it ends: its residual streams behind the last layer, or, where a replay
plan drops it, the layer input that its last keys are projected from. Whatever a layer, a slot or an
edit gives goes into the stream and stays there: NaN plus anything is NaN.

The answer is a position a sequence. It goes to the host with the other results of the step, so that
no launch waits for it. Decode rows have logits, and a decode step is not looked at.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.slots.protocols import RowSet

NONE = torch.iinfo(torch.long).max  # no row is broken


class NonFiniteRows:
    """Called by the model with rows where they end (`ForwardContext.row_check`). lowest: [b]
    position of the first row of each sequence that is not finite, NONE where all are."""

    def __init__(self, seqs: int, device: torch.device) -> None:
        self.lowest = torch.full((seqs,), NONE, device=device)

    def __call__(self, x: Tensor, rows: RowSet) -> None:
        """x: [t, ...] values of these rows."""
        finite = x.flatten(1).abs().amax(1).isfinite()  # the largest is NaN where any is
        at = rows.positions.masked_fill(finite | (rows.seq < 0), NONE)
        self.lowest = self.lowest.scatter_reduce(0, rows.owner, at, "amin")
