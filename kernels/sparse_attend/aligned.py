"""Sparse attention whose rows do not depend on their batch: per-row products over padded lists.

The width of a list of keys comes from the longest sequence of the batch. Windows are padded in
front and entries behind, both to a multiple of WIDTH: what a row lists then keeps its place in the
order of every sum, with exact zeros around it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..numerics import acc_dtype

WIDTH = 64
ROWS = 64  # of a block, which bounds the gathered keys held at once


def sparse_attend(q, window, window_ids, entries, entry_ids, sink, scale):
    """As the reference."""
    wide = acc_dtype(q)
    sources = [(window, F.pad(window_ids, (-window_ids.shape[1] % WIDTH, 0), value=-1))]
    if entries is not None and entry_ids.shape[1]:
        sources.append((entries, F.pad(entry_ids, (0, -entry_ids.shape[1] % WIDTH), value=-1)))
    parts = []
    for i in range(0, max(len(q), 1), ROWS):
        rows = slice(i, i + ROWS)
        listed = [(records, ids[rows]) for records, ids in sources]
        block = [(records.gather(ids, q.dtype).to(wide), ids) for records, ids in listed]
        parts.append(_attend(q[rows].to(wide), block, sink.to(wide), scale))
    return torch.cat(parts).to(q.dtype)


def _attend(q, sources, sink, scale):
    """q "t h d", sources [(keys "t k d", ids "t k")] -> "t h d"."""
    t, h, _ = q.shape
    logits = [
        (torch.bmm(q, keys.mT) * scale).masked_fill((ids < 0).unsqueeze(1), -torch.inf)
        for keys, ids in sources
    ]
    share = torch.softmax(torch.cat([*logits, sink.view(1, h, 1).expand(t, h, 1)], dim=2), dim=2)
    parts = share.split([*(keys.shape[1] for keys, _ in sources), 1], dim=2)
    return sum(torch.bmm(part, keys) for part, (keys, _) in zip(parts, sources))
