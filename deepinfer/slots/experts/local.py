"""Local: every expert on this device, one grouped product. The reference of the experts slot."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from deepinfer.slots.protocols import EngineInfo, ExpertLayer, Routing, Rows
from deepinfer.slots.registry import registry
from deepinfer.slots.settings import shown


@registry("experts").register("local")
@dataclass(eq=False, repr=False)
class Local:
    """Router and experts of one device, nothing dispatched."""

    version: ClassVar[int] = 1
    exact: ClassVar[bool] = True
    batch_invariant: ClassVar[bool] = True  # as far as the step's kernels are
    on_device: ClassVar[bool] = True

    def __repr__(self) -> str:
        return shown(self)

    def start(self, info: EngineInfo) -> Local:
        return copy.copy(self)

    def route(self, layer: ExpertLayer, x: Tensor, rows: Rows) -> Routing:
        """Padding rows (seq -1) get expert -1 and weight 0."""
        ids, weights = layer.ops.route(
            x, layer.gate, layer.bias, layer.bias_image, rows.image, layer.top_k, layer.scaling
        )
        padding = (rows.set.seq < 0)[:, None]
        return Routing(ids.masked_fill(padding, -1), weights.masked_fill(padding, 0))

    def forward(self, layer: ExpertLayer, x: Tensor, routing: Routing) -> Tensor:
        return layer.ops.experts(
            x,
            routing.ids,
            routing.weights,
            layer.w1,
            layer.w3,
            layer.w2,
            layer.limit,
            act=layer.act,
        )
