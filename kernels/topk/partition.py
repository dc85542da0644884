"""The k best entries from the k-th largest score: what is above it and the first of its equals."""

from __future__ import annotations

import numpy as np
import torch

# Entries a row up to which numpy's partition is faster than torch's top-k: measured with relu's
# ties and hidden entries, which slow partition down (at 8,192 entries four times as long, at 512 as
# long).
NARROW = 1024


def supports(scores, k) -> str | None:
    if scores.device.type != "cpu":
        return f"it runs on the CPU only, not on {scores.device.type}"
    return None


def topk(scores: torch.Tensor, k: int) -> torch.Tensor:
    """As the reference."""
    t, n = scores.shape
    k = min(k, n)
    if k <= 0 or t == 0:
        return torch.empty(t, k, dtype=torch.int64)
    if scores.dtype not in (torch.float32, torch.float64):
        scores = scores.to(torch.float32)
    s = scores.detach().numpy()
    nan = np.isnan(s)
    if nan.any():
        s = np.where(nan, np.inf, s)
    if k == n and np.isfinite(s).all():
        return torch.arange(n).repeat(t, 1)
    picked = _largest(s, k) if k < n else np.ones(s.shape, bool)
    # Every row has exactly k picks and nonzero walks rows in order: ascending ids of each row.
    ids = np.nonzero(picked)[1].reshape(t, k)
    dropped = np.take_along_axis(s, ids, axis=1) == -np.inf
    if dropped.any():
        ids[dropped] = n
        ids.sort(axis=1)
        ids[ids == n] = -1
    return torch.from_numpy(ids)


def _largest(s: np.ndarray, k: int) -> np.ndarray:
    """Exactly k True a row: the largest, equal ones from the left."""
    n = s.shape[1]
    if n <= NARROW:
        kth = np.partition(s, n - k, axis=1)[:, n - k, None]
    else:
        kth = torch.topk(torch.from_numpy(s), k, sorted=False).values.amin(1, keepdim=True).numpy()
    picked = s >= kth
    surplus = np.count_nonzero(picked, axis=1) - k
    for row in np.flatnonzero(surplus):
        equal = np.flatnonzero(s[row] == kth[row])
        picked[row, equal[len(equal) - surplus[row] :]] = False
    return picked
