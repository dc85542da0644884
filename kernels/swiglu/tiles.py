"""The clamped gated activation in blocks whose bits do not depend on other rows."""

from __future__ import annotations

from ..numerics import in_row_blocks
from ..swiglu import reference


def swiglu(gate, up, limit):
    """As the reference."""
    shape = gate.shape
    gate, up = (x.reshape(shape[:-1].numel(), shape[-1]) for x in (gate, up))
    blocks = in_row_blocks(lambda g, u: reference.swiglu(g, u, limit), gate, up, width=shape[-1])
    return blocks.view(shape)
