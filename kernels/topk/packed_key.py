"""The k best entries by one integer key that orders scores, then indices."""

from __future__ import annotations

import torch

from ..topk.reference import ascending


def supports(scores, k) -> str | None:
    if scores.dtype == torch.float64:
        return "a float64 score and an index do not fit one 64-bit key"
    if scores.shape[1] >= 2**31:
        return f"{scores.shape[1]} entries a row do not fit 31 bits"
    return None


def topk(scores: torch.Tensor, k: int) -> torch.Tensor:
    """As the reference, with no sort of whole rows."""
    n = scores.shape[1]
    k = min(k, n)
    # + 0.0 makes -0.0 the zero it is equal to.
    s = torch.where(torch.isnan(scores), torch.inf, scores.to(torch.float32)) + 0.0
    bits = s.view(torch.int32)
    # Of negative numbers the larger ones have the smaller bits: flip all but the sign.
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64)
    last = n - 1 - torch.arange(n, device=scores.device)
    keys = torch.topk((ordered << 32) | last, k, dim=1, sorted=False).values
    ids = n - 1 - (keys & 0xFFFFFFFF)
    return ascending(ids, s.gather(1, ids) > -torch.inf, n)
