"""Counter-based random numbers: Philox4x32-10 keyed by (seed, output position, purpose).

A number is a function of its key alone. It is never keyed by row, step, state or a count of draws,
so a request draws the same numbers in any batch, with any draft length, after any preemption, and
on any device: everything below is integer arithmetic, done by torch operations.

Layout (that of cuRAND's Philox4_32_10, which the released engine's kernels use):

    key      = (low 32 bits of seed, high 32 bits of seed)
    sequence = 3 * output position + purpose              draw 0, residual 1, accept 2
    counter  = (block, 0, low 32 bits of sequence, high 32 bits of sequence)

Words 0..3 come from block 0, words 4..7 from block 1, and so on. Output position 0 is the first
generated token, whatever the prompt.

Source of the generator: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as
1, 2, 3" (SC'11); its published answers (Random123) are the tests.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

WORD = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)  # the key's increments: golden ratio, sqrt(3) - 1
ROUNDS = 10
DRAFT_OFFSET = 1000000007  # the released engine's: added to the seed of a draft's own draw
GREEDY_BELOW = 1e-5  # the released engine's: below this temperature nothing is left to chance


class Purpose(IntEnum):
    """What a number is for; one output position needs at most these three."""

    DRAW = 0
    RESIDUAL = 1
    ACCEPT = 2


def signed(seed: int) -> int:
    """The 64 bits of `seed` as a signed integer, which is how a torch long holds them."""
    seed &= (1 << 64) - 1
    return seed - (1 << 64) if seed >> 63 else seed


def request_seed(engine_seed: int, number: int) -> int:
    """Seed of request `number` where none was given: 64 bits of a stream of its own."""
    import torch

    key = torch.tensor([signed(~engine_seed)], dtype=torch.long)
    low, high = words(key, torch.tensor([number], dtype=torch.long), Purpose.DRAW, 2)[0].tolist()
    return (high << 32) | low


def draft_seed(seed: Tensor) -> Tensor:
    """Seeds of a drafter's draws, apart from the target's at the same positions. [t] long."""
    return seed + DRAFT_OFFSET


def philox(key: Tensor, counter: Tensor) -> Tensor:
    """Philox4x32-10. key [..., 2], counter [..., 4] -> [..., 4], long tensors of 32-bit words."""
    import torch

    rounds = torch.arange(ROUNDS, device=key.device)[:, None] * _constant(WEYL, key)
    keys = (key[..., None, :] + rounds) & WORD  # [..., rounds, 2]
    by = _constant(MULTIPLIERS, key)
    even, odd = counter[..., 0::2], counter[..., 1::2]
    for r in range(ROUNDS):
        # A product of two 32-bit words wraps to the right 64 bits in a signed long: only the
        # shift is arithmetic, hence the mask.
        product = even * by
        even = ((product >> 32) & WORD).flip(-1) ^ odd ^ keys[..., r, :]
        odd = (product & WORD).flip(-1)
    return torch.stack((even, odd), -1).flatten(-2)


def words(seed: Tensor, position: Tensor, purpose: Purpose | int, count: int = 4) -> Tensor:
    """The first `count` 32-bit words of each key. seed, position: [t] long -> [t, count] long."""
    import torch

    blocks = -(-count // 4)
    sequence = 3 * position + int(purpose)
    key = torch.stack((seed & WORD, (seed >> 32) & WORD), -1)[:, None]
    block = torch.arange(blocks, device=seed.device).expand(seed.shape[0], blocks)
    low = (sequence & WORD)[:, None].expand_as(block)
    high = ((sequence >> 32) & WORD)[:, None].expand_as(block)
    counter = torch.stack((block, torch.zeros_like(block), low, high), -1)
    return philox(key, counter).flatten(1)[:, :count]


def uniform(seed: Tensor, position: Tensor, purpose: Purpose | int) -> Tensor:
    """One number a row in (0, 1): x 2^-32 + 2^-33, exact in FP64. seed, position: [t] -> [t]."""
    import torch

    return words(seed, position, purpose, 1)[:, 0].to(torch.float64) * 2.0**-32 + 2.0**-33


def _constant(values: tuple[int, ...], like: Tensor) -> Tensor:
    import torch

    from deepinfer.kernels.numerics import constant

    return constant(values, like.device, torch.long)
