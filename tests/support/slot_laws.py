"""Helpers: the law of a row in plain Python, and a chi-square test."""

import math

import torch

from deepinfer.slots.protocols import RowKeys, RowParams


def params(rows):
    """RowParams of (temperature, top_p, top_k) triples."""
    t, p, k = zip(*rows) if rows else ((), (), ())
    return RowParams(
        torch.tensor(t, dtype=torch.float64),
        torch.tensor(p, dtype=torch.float64),
        torch.tensor(k, dtype=torch.long),
    )


def keys(seeds, positions=None):
    seeds = torch.as_tensor(seeds, dtype=torch.long)
    positions = (
        torch.zeros_like(seeds)
        if positions is None
        else torch.as_tensor(positions, dtype=torch.long)
    )
    return RowKeys(seeds, positions)


def plain_distribution(logits, temperature, top_p, top_k):
    """Probabilities of one row by the definition, on Python floats; None where rounding decides."""
    v = len(logits)
    order = sorted(range(v), key=lambda i: (-logits[i], i))
    if temperature < 1e-5:
        return [1.0 if i == order[0] else 0.0 for i in range(v)]
    top = logits[order[0]]
    e = [math.exp((x - top) / temperature) for x in logits]
    total, before, kept = math.fsum(e), 0.0, []
    for i in order:
        if top_p >= 1 or before <= top_p:
            kept.append(i)
        before += e[i] / total
        if 0 < abs(before - top_p) < 1e-12 and top_p < 1:
            return None
    if top_k >= 1:
        kept = kept[:top_k]
    total = math.fsum(e[i] for i in kept)
    return [e[i] / total if i in kept else 0.0 for i in range(v)]


def chi_square_fits(counts, probs, tail=1e-3):
    """Whether counts [v] could be draws from probs [v]; cells expecting less than 5 are pooled."""
    counts, probs = counts.double(), probs.double()
    if (counts[probs <= 0] > 0).any():
        return False
    expected = probs * counts.sum()
    big = expected >= 5
    seen = torch.cat((counts[big], counts[~big].sum()[None]))
    want = torch.cat((expected[big], expected[~big].sum()[None]))
    seen, want = seen[want > 0], want[want > 0]
    free = len(seen) - 1
    if free == 0:
        return True
    stat = ((seen - want) ** 2 / want).sum()
    return 1 - torch.special.gammainc(torch.tensor(free / 2.0).double(), stat / 2) > tail
