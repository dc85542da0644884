"""The gated update in blocks whose bits do not depend on other rows."""

from __future__ import annotations

from ..engram_gate import reference
from ..numerics import in_row_blocks


def engram_gate(streams, key, value, q_weight, k_weight, eps, dead):
    """As the reference."""

    def block(streams, key, value, dead):
        return reference.engram_gate(streams, key, value, q_weight, k_weight, eps, dead)

    return in_row_blocks(block, streams, key, value, dead, width=streams[0:1].numel())
