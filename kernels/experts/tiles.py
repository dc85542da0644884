"""The routed experts with products in tiles of a fixed number of rows; see `linear`."""

from __future__ import annotations

import torch

from ..numerics import acc_dtype, round_activation, tiled_linear
from ..quantised import dense
from ..swiglu.tiles import swiglu


def experts(x, ids, weights, w1, w3, w2, limit, *, act=None):
    """As the reference. A row sums over its experts in ascending order, whatever the batch."""
    wide = acc_dtype(x)
    out = torch.zeros(x.shape, dtype=wide, device=x.device)
    rounded = round_activation(x, act)
    for e in ids.unique().tolist():
        if e < 0:
            continue
        row, slot = torch.where(ids == e)
        gate = tiled_linear(rounded[row], dense(w1[e], x.dtype)).to(wide)
        up = tiled_linear(rounded[row], dense(w3[e], x.dtype)).to(wide)
        hidden = swiglu(gate, up, limit) * weights[row, slot].to(wide).unsqueeze(1)
        hidden = round_activation(hidden.to(x.dtype), act)
        out = out.index_add(0, row, tiled_linear(hidden, dense(w2[e], x.dtype)).to(wide))
    return out.to(x.dtype)
