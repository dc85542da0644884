"""Expert selection in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..numerics import acc_dtype

FLOOR = 1e-20  # on the sum of the chosen scores, so that a row of zeros divides to zeros


def route(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    bias_image: torch.Tensor,
    image: torch.Tensor | None,
    top_k: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The top_k experts of each row and their weights.

    x "t d", weight "e d", bias and bias_image "e", image "t" bool (None: no row is of an image)
    -> ids "t k" int64, best first, and weights "t k" in the accumulation dtype.
    Scores are sqrt(softplus(x weight^T)). The bias (bias_image for rows of an image) steers the
    selection only; a weight is the score over the sum of the chosen scores, times `scale`.
    Ties: lowest expert first.
    """
    wide = acc_dtype(x)
    logits = F.linear(x.to(wide), weight.to(wide))
    return from_logits(logits, bias, bias_image, image, top_k, scale)


def from_logits(logits, bias, bias_image, image, top_k, scale):
    """Selection and weights from router logits "t e"."""
    scores = sqrt_softplus(logits)
    steer = bias.to(scores.dtype)
    if image is not None:
        steer = torch.where(image.unsqueeze(1), bias_image.to(scores.dtype), steer)
    order = torch.sort(scores.detach() + steer, dim=1, descending=True, stable=True).indices
    ids = order[:, :top_k]
    chosen = scores.gather(1, ids)
    return ids, chosen / (chosen.sum(1, keepdim=True) + FLOOR) * scale


def sqrt_softplus(x: torch.Tensor) -> torch.Tensor:
    """sqrt(log(1 + exp(x))) without overflow above or loss to zero below (until exp underflows)."""
    soft = torch.logaddexp(x, torch.zeros((), dtype=x.dtype, device=x.device))
    # The square root's gradient at an underflowed zero would be infinite.
    safe = torch.where(soft == 0, 1.0, soft)
    return torch.where(soft == 0, 0.0, safe.sqrt())
