"""Attention of whole draft blocks: the rows of a block share their keys, so they are gathered once.

The general kernel gathers the keys of every row for itself. In a draft step the n rows of a block
list the same places: W of the context, then the block's own rows. Gathered once a block they take a
fifth of the memory, and the gradient comes back to the context without a long list of repeats.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.kernels.numerics import acc_dtype, taken
from deepinfer.slots.attention.csa2 import CSA2
from deepinfer.slots.protocols import AttnPlan, LayerInfo, Selected
from experiments.nano.train.fast import fused, spread


class DraftBlocks(CSA2):
    """The attention slot of a draft step of n rows a block; the plan is `Drafter.block_plan`'s."""

    def __init__(self, n: int, compiled: bool = False) -> None:
        super().__init__()
        self.n, self.compiled = n, compiled

    def attend(
        self, layer: LayerInfo, q: Tensor, kv, selected: Selected | None, plan: AttnPlan
    ) -> Tensor:
        n, window = self.n, kv.window
        places = plan.window_ids.unflatten(0, (-1, n))[:, 0, :-n]  # the block's own rows come last
        held = taken(window.stored, spread(places, len(window.stored)))
        look = fused(attend_blocks) if self.compiled else attend_blocks
        return look(q, held, window.own, places < 0, layer.sink, layer.scale)


def attend_blocks(
    q: Tensor, held: Tensor, own: Tensor, none: Tensor, sink: Tensor, scale: float
) -> Tensor:
    """q "b*n h d", held "b w d" keys of the context with none "b w" True where there is no key, own
    "b*n d", sink "h" -> "b*n h d". Every row sees its block's context and all its block's rows."""
    b = none.shape[0]
    rows, h, d = q.shape
    n = rows // max(b, 1)
    wide = acc_dtype(q)
    keys = torch.cat([held, own.view(b, n, d)], 1)
    logits = (q.view(b, n * h, d) @ keys.mT).to(wide) * scale
    none = torch.cat([none, none.new_zeros(b, n)], 1)
    logits = logits.masked_fill(none[:, None], -torch.inf)
    sinks = sink.to(wide).expand(b, n, h).reshape(b, n * h, 1)
    share = torch.cat([logits, sinks], 2).softmax(2)[..., :-1]
    return (share.to(q.dtype) @ keys).view(rows, h, d)
