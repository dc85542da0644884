"""One sub-layer's output back into the streams, in plain torch."""

from __future__ import annotations

import torch


def mhc_expand(
    streams: torch.Tensor, y: torch.Tensor, post: torch.Tensor, comb: torch.Tensor
) -> torch.Tensor:
    """Stream k becomes post_k * y + sum_j comb[j, k] * streams_j, accumulated in comb's dtype.

    streams "t m d", y "t d", post "t m", comb "t m m" -> "t m d" in streams' dtype.
    """
    mixed = torch.matmul(comb.mT, streams.to(comb.dtype))
    added = post.unsqueeze(-1) * y.to(comb.dtype).unsqueeze(1)
    return (added + mixed).to(streams.dtype)
