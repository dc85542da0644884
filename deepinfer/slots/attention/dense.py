"""Dense: every visible compressed entry, no index, no top-k. What the indexer approximates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from deepinfer.slots.attention.csa2 import CSA2, everything
from deepinfer.slots.protocols import AttnPlan, IndexQuery, LayerInfo, Selected
from deepinfer.slots.registry import registry

if TYPE_CHECKING:
    from deepinfer.cache.layer_kv import LayerKV


@registry("attention").register("dense")
@dataclass(eq=False, repr=False)
class Dense(CSA2):
    """The window and ALL visible entries. Equal to CSA2 while no more than top-k entries are
    visible; beyond that another function than the trained one (exact = False)."""

    version: ClassVar[int] = 1
    exact: ClassVar[bool] = False
    batch_invariant: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.topk is not None:
            raise ValueError("Dense takes no topk: it attends to every visible entry")

    def select(
        self,
        layer: LayerInfo,
        index: IndexQuery,
        kv: LayerKV,
        plan: AttnPlan,
        carried: Selected | None,
    ) -> Selected:
        n, visible = plan.reach[layer.ratio], plan.visible[layer.ratio]
        return Selected(everything(torch.arange(n, device=visible.device) >= visible[:, None]))
