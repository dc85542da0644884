"""Attention over gathered window keys and compressed entries, in plain torch."""

from __future__ import annotations

import torch

from ..numerics import acc_dtype
from ..records import Records


def sparse_attend(
    q: torch.Tensor,
    window: Records,
    window_ids: torch.Tensor,
    entries: Records | None,
    entry_ids: torch.Tensor | None,
    sink: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Attention of each row to the keys it lists; a key is also its value, for all heads.

    q "t h d", window_ids "t w" and entry_ids "t k" (ids of `window` and `entries`, -1 none),
    sink "h" -> "t h d" in q's dtype. Both sources count, also when they hold the same token.
    The sink is a logit per head that enters only the softmax's denominator. A row without keys
    gives zeros. Logits are scaled by `scale`; the softmax is in the accumulation dtype.
    """
    wide = acc_dtype(q)
    keys, ids = window.gather(window_ids, q.dtype), window_ids
    if entries is not None and entry_ids is not None:
        keys = torch.cat([keys, entries.gather(entry_ids, q.dtype)], dim=1)
        ids = torch.cat([ids, entry_ids], dim=1)
    keys = keys.to(wide)
    logits = torch.einsum("thd,tkd->thk", q.to(wide), keys) * scale
    logits = logits.masked_fill((ids < 0).unsqueeze(1), -torch.inf)
    sinks = sink.to(wide).view(1, -1, 1).expand(len(q), -1, 1)
    share = torch.softmax(torch.cat([logits, sinks], dim=2), dim=2)[..., :-1]
    return torch.einsum("thk,tkd->thd", share, keys).to(q.dtype)
