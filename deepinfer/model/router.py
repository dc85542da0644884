"""The MoE sub-layer: router, routed experts (the experts slot), shared expert.

s = sqrt(softplus(Wg x));  choose top-k of s + bias (bias_vl for image rows);
w = s / sum s * scaling;  expert(x) = W2 (silu(min(g, limit)) * clamp(u, -limit, limit) * w),  g = W1 x, u = W3 x
y = sum of the chosen experts + the shared expert
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from deepinfer.config import ModelConfig
from deepinfer.model.layers import Linear, Weight, frozen
from deepinfer.slots.protocols import ExpertLayer, Routing, Rows
from deepinfer.slots.results import expect, expect_record


class Gate(nn.Module):
    """Router weight [e, d] and the two selection biases [e] (text, image)."""

    def __init__(self, experts: int, width: int) -> None:
        super().__init__()
        self.weight = frozen(experts, width)
        self.bias = frozen(experts, dtype=torch.float32)
        self.bias_vl = frozen(experts, dtype=torch.float32)


class StackedExperts(nn.Module):
    """All routed experts of a layer: w1, w3 [e, i, d], w2 [e, d, i] (floats or as stored).

    The official layout has one tensor an expert; the loader stacks them, the writer takes them
    apart.
    """

    def __init__(self, experts: int, inner: int, width: int) -> None:
        super().__init__()
        for name, shape in (("w1", (inner, width)), ("w2", (width, inner)), ("w3", (inner, width))):
            setattr(self, name, Weight(experts, *shape, rounded=True))


class SharedExpert(nn.Module):
    def __init__(self, inner: int, width: int) -> None:
        super().__init__()
        self.w1 = Linear(width, inner, rounded=True)
        self.w2 = Linear(inner, width, rounded=True)
        self.w3 = Linear(width, inner, rounded=True)

    def forward(self, x: Tensor, ctx) -> Tensor:
        gated = ctx.ops.swiglu(self.w1(x, ctx), self.w3(x, ctx), ctx.config.swiglu_limit)
        return self.w2(gated, ctx)


class MoE(nn.Module):
    """One MoE sub-layer; drafter layers have their own expert count and top-k."""

    def __init__(self, config: ModelConfig, draft: bool = False) -> None:
        super().__init__()
        c = config
        experts = c.dspark_n_routed_experts if draft else c.n_routed_experts
        self.top_k = c.dspark_num_experts_per_tok if draft else c.num_experts_per_tok
        self.gate = Gate(experts, c.hidden_size)
        self.experts = StackedExperts(experts, c.moe_intermediate_size, c.hidden_size)
        self.shared_experts = SharedExpert(
            c.n_shared_experts * c.moe_intermediate_size, c.hidden_size
        )

    def layer(self, name: str, ctx) -> ExpertLayer:
        c, e = ctx.config, self.experts
        return ExpertLayer(
            name,
            self.gate.weight,
            self.gate.bias,
            self.gate.bias_vl,
            e.w1.weight,
            e.w3.weight,
            e.w2.weight,
            self.top_k,
            c.routed_scaling_factor,
            c.swiglu_limit,
            ctx.act,
            ctx.ops,
        )

    def forward(self, x: Tensor, rows: Rows, name: str, ctx) -> Tensor:
        """x [t, d] -> routed sum + shared expert [t, d]. Padding rows are routed to no expert."""
        layer = self.layer(name, ctx)
        routing = ctx.experts.route(layer, x, rows)
        who = f"experts {type(ctx.experts).__name__}"
        expect_record(routing, Routing, f"{who}.route")
        expect(routing.ids, (x.shape[0], *routing.ids.shape[1:2]), f"{who}.route (ids)", False)
        expect(routing.weights, tuple(routing.ids.shape), f"{who}.route (weights)", True)
        if ctx.tap is not None:
            ids = ctx.see(f"{name}.experts", routing.ids, rows.set)
            weights = ctx.see(f"{name}.weights", routing.weights, rows.set)
            routing = replace(routing, ids=ids, weights=weights)
        routed = ctx.experts.forward(layer, x, routing)
        expect(routed, tuple(x.shape), f"{who}.forward", True)
        return routed + self.shared_experts(x, ctx)
