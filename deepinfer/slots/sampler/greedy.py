"""Greedy: the most likely token of every row, whatever its temperature."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from deepinfer.slots.protocols import Dist, RowKeys, RowParams, Sampled
from deepinfer.slots.registry import registry
from deepinfer.slots.sampler.distribution import distribution
from deepinfer.slots.sampler.philox import sampled
from deepinfer.slots.settings import shown

if TYPE_CHECKING:
    from torch import Tensor


@registry("sampler").register("greedy")
class Greedy:
    """Every distribution is one-hot at the most likely legal token, ties to the lowest id.

    Not exact: a request that asks for a temperature does not get it.
    """

    exact = False
    batch_invariant = True
    on_device = True

    def __repr__(self) -> str:
        return shown(self)

    def distribution(self, logits: Tensor, params: RowParams, mask: Tensor | None = None) -> Dist:
        cold = torch.zeros_like(params.temperature)
        return distribution(logits, RowParams(cold, params.top_p, params.top_k), mask)

    def draw(self, dist: Dist, keys: RowKeys) -> Sampled:
        return sampled(dist, dist.probs.argmax(-1))
