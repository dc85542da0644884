"""The k best entries of each row by a stable sort."""

from __future__ import annotations

import torch


def topk(scores: torch.Tensor, k: int) -> torch.Tensor:
    """scores "t n" -> ids "t min(k, n)" int64 of the largest, ascending, -1 behind them.

    Entries that score -inf are never picked. Among equal scores the lowest index comes first, so
    that a pick depends neither on the width of the row nor on the device. A NaN counts as inf.
    """
    k = min(k, scores.shape[1])
    scores = torch.where(torch.isnan(scores), torch.inf, scores)
    order = torch.sort(scores, dim=1, descending=True, stable=True)
    return ascending(order.indices[:, :k], order.values[:, :k] > -torch.inf, scores.shape[1])


def ascending(ids: torch.Tensor, picked: torch.Tensor, n: int) -> torch.Tensor:
    """ids "t k" in ascending order, those not picked as -1 at the end. n: above every id."""
    ids = torch.where(picked, ids, n).sort(dim=1).values
    return torch.where(ids < n, ids, -1)
