"""Expert selection with as few calls as it takes when no gradient is wanted."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..numerics import acc_dtype
from ..route.reference import FLOOR


def supports(x, weight, bias, bias_image, image, top_k, scale) -> str | None:
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return "a gradient is wanted"
    return None


def route(x, weight, bias, bias_image, image, top_k, scale):
    """As the reference, without a gradient."""
    wide = acc_dtype(x)
    logits = F.linear(x.to(wide), weight.to(wide))
    scores = torch.logaddexp(logits, logits.new_zeros(())).sqrt_()
    steer = bias if image is None else torch.where(image.unsqueeze(1), bias_image, bias)
    order = torch.sort(scores + steer, dim=1, descending=True, stable=True).indices
    ids = order[:, :top_k]
    chosen = scores.gather(1, ids)
    return ids, chosen.mul_(chosen.sum(1, keepdim=True).add_(FLOOR).reciprocal_().mul_(scale))
