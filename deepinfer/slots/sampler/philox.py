"""Philox: draws keyed by (seed, output position, purpose); the default sampler."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfer import rng
from deepinfer.slots.protocols import Dist, RowKeys, RowParams, Sampled
from deepinfer.slots.registry import registry
from deepinfer.slots.sampler.distribution import distribution
from deepinfer.slots.sampler.draw import draw_by_weight
from deepinfer.slots.settings import shown

if TYPE_CHECKING:
    from torch import Tensor


@registry("sampler").register("philox")
class Philox:
    """Each row draws from its own distribution with the random numbers of its own key.

    The token at an output position is a function of seed, position and logits: the same in any
    batch, in any order, with any draft length, on any device.
    """

    exact = True
    batch_invariant = True
    on_device = True

    def __repr__(self) -> str:
        return shown(self)

    def distribution(self, logits: Tensor, params: RowParams, mask: Tensor | None = None) -> Dist:
        """See `distribution`. logits: [t, v] -> Dist of [t, v]."""
        return distribution(logits, params, mask)

    def draw(self, dist: Dist, keys: RowKeys) -> Sampled:
        """One token a row and its log-probability at temperature 1.

        A row whose distribution is not finite gives token 0 with log-probability NaN.
        """
        return sampled(dist, draw_by_weight(dist.probs, keys, rng.Purpose.DRAW))


def sampled(dist: Dist, tokens: Tensor) -> Sampled:
    """Tokens [t] with their log-probabilities under `dist`."""
    return Sampled(tokens, dist.logprobs.gather(-1, tokens[:, None])[:, 0])
