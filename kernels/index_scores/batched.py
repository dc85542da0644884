"""Index scores in as few products as the rows allow."""

from __future__ import annotations

import torch

from ..numerics import acc_dtype

ELEMENTS = 1 << 18  # of one product's result: about what a core's cache holds


def supports(query, weights, keys, seq, segments=None) -> str | None:
    if segments is None and seq.device.type != "cpu":
        return "which rows belong to which sequence is not known to the host"
    if torch.is_grad_enabled() and any(x.requires_grad for x in (query, weights, keys)):
        return "a gradient is wanted"
    return None


def index_scores(query, weights, keys, seq, segments=None):
    """As the reference, without a gradient."""
    wide = acc_dtype(query)
    query, weights, keys = query.to(wide), weights.to(wide), keys.to(wide)
    if segments is None:
        segments = _runs(seq.tolist())
    out = query.new_zeros(query.shape[0], keys.shape[1])
    rows = _rows_each(segments, len(keys), len(query))
    if rows and rows * query.shape[1] * keys.shape[1] <= ELEMENTS:
        # One row count for all sequences (decode, verify): one batched product.
        _score(query.unflatten(0, (-1, rows)), weights.unflatten(0, (-1, rows)), keys, out)
        return out
    step = max(1, ELEMENTS // max(1, query.shape[1] * keys.shape[1]))
    for b, start, stop in segments:
        for i in range(start, stop, step):
            j = min(i + step, stop)
            _score(query[None, i:j], weights[None, i:j], keys[b : b + 1], out[i:j])
    return out


def _score(query, weights, keys, out) -> None:
    """query "b r h d", weights "b r h", keys "b n d" -> out "b*r n"."""
    b, r, h, _ = query.shape
    if b == 0 or r == 0:
        return
    dots = torch.bmm(query.flatten(1, 2), keys.mT).relu_().view(b * r, h, -1)
    torch.bmm(weights.reshape(b * r, 1, h), dots, out=out.unsqueeze(1))


def _runs(seq: list[int]) -> list[tuple[int, int, int]]:
    """(sequence, start, stop) of consecutive rows of one sequence; padding rows are in none."""
    starts = [i for i in range(len(seq)) if i == 0 or seq[i] != seq[i - 1]]
    stops = [*starts[1:], len(seq)]
    return [(seq[i], i, j) for i, j in zip(starts, stops) if seq[i] >= 0]


def _rows_each(segments, sequences: int, rows: int) -> int:
    """Rows of each sequence when all have as many, in order and without gaps; else 0."""
    if len(segments) != sequences or not sequences or rows % sequences:
        return 0
    each = rows // sequences
    even = all(s == (b, b * each, (b + 1) * each) for b, s in enumerate(map(tuple, segments)))
    return each if even else 0
