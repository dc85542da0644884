"""The routed experts with the matrices of each row's choice gathered: no shape depends on a value.

For decode on an accelerator, where looking at the ids would wait for the device. The gathered
matrices are copies, t*k of them, so it is chosen for few rows only.
"""

from __future__ import annotations

import torch

from ..numerics import acc_dtype, round_activation
from ..quantised import Quantised
from ..swiglu.reference import swiglu

# Bytes of gathered matrices at most. On a CPU the copies pass through the caches: the bench shows
# them ahead of the loop up to about 10 MiB, and many times slower from 25 MiB up.
BYTES = 1 << 30
BYTES_CPU = 8 << 20


def supports(x, ids, weights, w1, w3, w2, limit, *, act=None) -> str | None:
    size = ids.numel() * x.shape[1] * w1.shape[1] * 3 * x.element_size()
    most = BYTES_CPU if x.device.type == "cpu" else BYTES
    if size > most:
        return f"{ids.numel()} gathered experts take {size >> 20} MiB, more than {most >> 20}"
    return None


def experts(x, ids, weights, w1, w3, w2, limit, *, act=None):
    """As the reference; sums over the slots of a row in their order."""
    wide = acc_dtype(x)
    t, k = ids.shape
    flat = ids.clamp(min=0).flatten()
    mine = round_activation(x, act).repeat_interleave(k, 0).unsqueeze(1)
    gate = (mine @ _matrices(w1, flat, x.dtype).mT).to(wide)
    up = (mine @ _matrices(w3, flat, x.dtype).mT).to(wide)
    hidden = swiglu(gate, up, limit) * weights.to(wide).reshape(-1, 1, 1)
    hidden = round_activation(hidden.to(x.dtype), act)
    y = (hidden @ _matrices(w2, flat, x.dtype).mT).to(wide).view(t, k, x.shape[1])
    return torch.where(ids.unsqueeze(-1) >= 0, y, 0).sum(1).to(x.dtype)


def _matrices(weight: torch.Tensor | Quantised, ids: torch.Tensor, dtype) -> torch.Tensor:
    """weight[ids] "m n k" in dtype."""
    if isinstance(weight, Quantised):
        return weight.select(ids).dequantise(dtype)
    return weight.index_select(0, ids).to(dtype)
