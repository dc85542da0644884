"""From a distribution to a token, with integers only: the twin of the released engine's device
kernel.

    w_v   = floor(prob_v * 2^31)
    lane  = v mod BD,  BD = 2048 for v >= 8192 tokens, else the next power of two
    total = sum of w;  limit = floor(2^32 / total) * total
    r     = the first random word below `limit`, mod total
    token = where the running sum first exceeds r, lane by lane: (v mod BD, v div BD)

The device kernel divides 2^32 - 1; that differs where total is a power of two, above all where it
is 2^31: there half of all words would be refused, and the least rounding of the distribution, which
takes the total below 2^31, would give the row another word.

Sums of integers do not depend on their order, so the token is the same on every device. The order
of the running sum is lane-major, not by id; below 8192 tokens the two agree.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from deepinfer import rng

if TYPE_CHECKING:
    from torch import Tensor

    from deepinfer.slots.protocols import RowKeys

WEIGHT = 2.0**31
LANES = 2048
LARGE_VOCAB = 8192
TRIES = 32  # a word is redrawn with probability <= 1/2, so all 32 fail once in 2^32 draws at worst


def draw_by_weight(probs: Tensor, keys: RowKeys, purpose: rng.Purpose) -> Tensor:
    """One token per row with probability proportional to floor(probs * 2^31).

    probs: [t, v], each row summing to 1 -> [t] long. A row without any weight gives token 0: the
    caller has to know such rows (Dist.finite). A token of weight 0 is never drawn.
    """
    t, v = probs.shape
    if probs.device.type == "cpu" and t and bool((probs.count_nonzero(-1) == 1).all()):
        return probs.argmax(-1)  # greedy rows: nothing to draw (elsewhere a look would wait)
    lanes = LANES if v >= LARGE_VOCAB else 1 << (v - 1).bit_length()
    weights = (probs.to(torch.float64) * WEIGHT).long()
    columns = -(-v // lanes)
    weights = torch.nn.functional.pad(weights, (0, columns * lanes - v)).view(t, columns, lanes)

    upto = weights.sum(1).cumsum(-1)  # [t, lanes], inclusive
    total = upto[:, -1:].clamp(min=1)
    limit = (rng.WORD + 1) // total * total
    r = _first_below(limit, keys, purpose) % total

    lane = (upto <= r).sum(-1, keepdim=True).clamp(max=lanes - 1)
    rest = r - (upto.gather(-1, lane) - weights.sum(1).gather(-1, lane))
    column = weights.gather(-1, lane[:, None].expand(t, columns, 1))[:, :, 0].cumsum(-1)
    token = (column <= rest).sum(-1, keepdim=True) * lanes + lane
    return torch.where(upto[:, -1:] > 0, token, 0)[:, 0]


def _first_below(limit: Tensor, keys: RowKeys, purpose: rng.Purpose) -> Tensor:
    """The first word of each row below limit [t, 1] -> [t, 1]; word 0 where none of TRIES is."""
    tries = 4 if limit.device.type == "cpu" else TRIES  # elsewhere a look would wait for the device
    words = rng.words(keys.seed, keys.position, purpose, tries)
    if tries < TRIES and not (words < limit).any(-1).all():
        words = rng.words(keys.seed, keys.position, purpose, TRIES)
    return words.gather(-1, (words < limit).long().argmax(-1, keepdim=True))
