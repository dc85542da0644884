"""The best blocks of index scores, in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import reduce

from ..topk.reference import topk


def candidate_blocks(
    scores: torch.Tensor, visible: torch.Tensor, block: int, k: int
) -> torch.Tensor:
    """The k best blocks of `block` consecutive entries, by their best score.

    scores "t n", visible "t" int64 (entries a row sees: the first `visible`) -> int64
    "t min(k, ceil(n / block))", ascending, -1 behind them. The block of the newest visible entry is
    always kept, a block without a visible finite score never. Ties: lowest block first.
    """
    n = scores.shape[1]
    blocks = -(-n // block)
    entry = torch.arange(n, device=scores.device)
    scores = torch.where(entry < visible.unsqueeze(1), scores, -torch.inf)
    padded = F.pad(scores, (0, blocks * block - n), value=-torch.inf)
    best = reduce(padded, "t (c block) -> t c", "max", block=block)
    newest = torch.arange(blocks, device=scores.device) == ((visible - 1) // block).unsqueeze(1)
    return topk(torch.where(newest, torch.inf, best), k)
