"""Weight holders: a Linear or a Norm knows its official tensor name and nothing about how it is
computed."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from deepinfer.kernels.quantised import Quantised


def frozen(*shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
    """A parameter that takes no gradient until a trainer asks for one (`requires_grad_`)."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)


class Weight(nn.Module):
    """One tensor called `weight`: a float parameter, or a `Quantised` kept as it is stored.

    rounded=True marks the matrices that the release stores in FP8 or FP4: at fidelity 2 their
    inputs are rounded to MXFP8, as the production matrix products do.
    """

    weight: nn.Parameter | Quantised

    def __init__(self, *shape: int, rounded: bool = False) -> None:
        super().__init__()
        self.shape = shape
        self.rounded = rounded
        self.weight = frozen(*shape)

    def set_weight(self, weight: Tensor | Quantised) -> None:
        """Put a loaded tensor in place. Raises ValueError when its logical shape differs."""
        if tuple(weight.shape) != self.shape:
            raise ValueError(
                f"weight of shape {tuple(weight.shape)} where {self.shape} is expected"
            )
        self._parameters.pop("weight", None)
        self.__dict__.pop("weight", None)
        if isinstance(weight, Quantised):
            self.__dict__["weight"] = weight
        else:
            self._parameters["weight"] = nn.Parameter(weight, requires_grad=False)

    def extra_repr(self) -> str:
        return f"{list(self.shape)}{', rounded inputs at fidelity 2' if self.rounded else ''}"


class Linear(Weight):
    """[n, k] matrix, no bias: y = x W^T, computed by the step's `linear` op."""

    def __init__(self, inputs: int, outputs: int, *, rounded: bool = False) -> None:
        super().__init__(outputs, inputs, rounded=rounded)

    def forward(self, x: Tensor, ctx, out_dtype: torch.dtype | None = None) -> Tensor:
        act = ctx.act if self.rounded else None
        return ctx.ops.linear(x, self.weight, act=act, out_dtype=out_dtype)


class Norm(Weight):
    """RMSNorm weight [d]; the sum of squares and the product with the weight are in FP32 or
    FP64."""

    def __init__(self, width: int) -> None:
        super().__init__(width)

    def forward(self, x: Tensor, ctx) -> Tensor:
        return ctx.ops.rms_norm(x, self.weight, ctx.config.rms_norm_eps)
