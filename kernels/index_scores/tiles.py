"""Index scores in products of one fixed shape: tiles of query heads by tiles of keys.

A score then depends neither on the rows nor on the number of keys of the other sequences.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..numerics import acc_dtype, tiled_linear

KEYS = 64  # of a tile


def index_scores(query, weights, keys, seq, segments=None):
    """As the reference."""
    wide = acc_dtype(query)
    query, weights, keys = query.to(wide), weights.to(wide), keys.to(wide)
    out = query.new_zeros(query.shape[0], keys.shape[1])
    if segments is not None:
        covered = torch.full_like(seq, -1)
        for b, start, stop in segments:
            covered[start:stop] = b
        seq = covered
    for b in seq.unique().tolist():
        if b >= 0:
            rows = torch.where(seq == b)[0]
            out = out.index_copy(0, rows, _score(query[rows], weights[rows], keys[b]))
    return out


def _score(query, weights, keys):
    """query "r h d", weights "r h", keys "n d" -> "r n"."""
    r, h, d = query.shape
    n = len(keys)
    tiles = F.pad(keys, (0, 0, 0, -n % KEYS)).split(KEYS) if n else ()
    flat = query.reshape(r * h, d)
    parts = [tiled_linear(flat, tile).relu().view(r, h, KEYS) for tile in tiles]
    parts = [(part * weights.unsqueeze(-1)).sum(1) for part in parts]
    return torch.cat(parts, dim=1)[:, :n] if parts else query.new_zeros(r, 0)
