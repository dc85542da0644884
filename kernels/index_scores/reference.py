"""Scores of the sparse-attention indexer in plain torch."""

from __future__ import annotations

import torch

from ..numerics import acc_dtype


def index_scores(
    query: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    seq: torch.Tensor,
    segments: list[tuple[int, int, int]] | None = None,
) -> torch.Tensor:
    """score[t, n] = sum_h weights[t, h] * relu(query[t, h] . keys[seq[t], n]).

    query "t h d", weights "t h" (already scaled), keys "b n d", seq "t" int64 (-1: a padding row,
    scores 0) -> "t n" in the accumulation dtype. Visibility is the caller's.
    segments: (sequence, start, stop) row ranges known to the host that agree with seq; rows of a
    range are scored together instead of gathering keys per row. Rows in no range score 0.
    """
    wide = acc_dtype(query)
    query, weights, keys = query.to(wide), weights.to(wide), keys.to(wide)
    if segments is None:
        there = (seq >= 0).view(-1, 1)
        scores = _weighted(query, weights, keys[seq.clamp(min=0)])
        return torch.where(there, scores, 0)
    parts, row = [], 0
    for b, start, stop in segments:
        parts.append(query.new_zeros(start - row, keys.shape[1]))
        parts.append(_weighted(query[start:stop], weights[start:stop], keys[b]))
        row = stop
    parts.append(query.new_zeros(len(query) - row, keys.shape[1]))
    return torch.cat(parts)


def _weighted(query: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """query "t h d", keys "t n d" or "n d" -> "t n"."""
    return torch.einsum("thn,th->tn", torch.relu(query @ keys.mT), weights)
