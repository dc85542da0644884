"""Each law of an experts variant fails on a variant that breaks it."""

import pytest
import torch

from deepinfer.slots.experts import Local
from deepinfer.slots.protocols import Routing
from support.breaking import Breakers

B = Breakers("experts")


class Claiming(Local):
    def __init__(self):
        self.exact = True


@B.breaks("any number of rows", "rows 0")
class NeedsRows(Claiming):
    def forward(self, layer, x, routing):
        return super().forward(layer, x / x.abs().amax(), routing)


@B.breaks("any number of rows", "dtype bfloat16")
class Widens(Claiming):
    def forward(self, layer, x, routing):
        y = super().forward(layer, x, routing)
        return y.float() if y.dtype == torch.bfloat16 else y


@B.breaks("a row's experts are distinct", "twice")
class SameTwice(Claiming):
    def route(self, layer, x, rows):
        r = super().route(layer, x, rows)
        return Routing(r.ids[:, :1].expand_as(r.ids), r.weights)


@B.breaks("a row's experts are distinct", "goes to")
class BeyondTheLast(Claiming):
    def route(self, layer, x, rows):
        r = super().route(layer, x, rows)
        return Routing(torch.where(r.ids >= 0, r.ids + 1, -1), r.weights)

    def forward(self, layer, x, routing):
        return super().forward(layer, x, Routing(routing.ids - 1, routing.weights))


@B.breaks("a padding row goes to no expert", "a padding row goes to")
class RoutesPadding(Claiming):
    def route(self, layer, x, rows):
        ids, weights = layer.ops.route(
            x, layer.gate, layer.bias, layer.bias_image, rows.image, layer.top_k, layer.scaling
        )
        return Routing(ids, weights)


@B.breaks("an expert of -1", "with weight 0")
class MinusOneIsTheLast(Claiming):
    def forward(self, layer, x, routing):
        return super().forward(layer, x, Routing(routing.ids % layer.num_experts, routing.weights))


@B.breaks("a row does not depend on its neighbours", "rows 2")
class Capacity(Claiming):
    """An expert takes two rows, the first come; the others are dropped."""

    def forward(self, layer, x, routing):
        ids = routing.ids.clone()
        for e in range(layer.num_experts):
            at = (ids == e).nonzero()[1:]
            ids[at[:, 0], at[:, 1]] = -1
        return super().forward(layer, x, Routing(ids, routing.weights))


@B.breaks("a row does not depend on its neighbours", "gives")
class ClaimsBits(Claiming):
    """Wrong only by rounding, and only because it claims batch_invariant."""

    def __init__(self):
        self.exact = self.batch_invariant = True

    def forward(self, layer, x, routing):
        return super().forward(layer, x, routing) * (1 + 1e-12 * len(x))


@B.breaks("the same call gives the same bits", "differs")
class RandomTies(Claiming):
    def route(self, layer, x, rows):
        r = super().route(layer, x, rows)
        return Routing(r.ids, r.weights * (1 + 1e-6 * torch.rand((), dtype=torch.float64)))


@B.breaks("inputs are not changed", "its input x")
class ScalesInPlace(Claiming):
    def forward(self, layer, x, routing):
        y = super().forward(layer, x, routing)
        x.mul_(2)
        return y


@B.breaks("experts and weights are those", "it should go to")
class TiesToTheHighest(Claiming):
    def route(self, layer, x, rows):
        import dataclasses

        flipped = dataclasses.replace(
            layer,
            gate=layer.gate.flip(0),
            bias=layer.bias.flip(0),
            bias_image=layer.bias_image.flip(0),
        )
        r = super().route(flipped, x, rows)
        return Routing(torch.where(r.ids >= 0, layer.num_experts - 1 - r.ids, -1), r.weights)


@B.breaks("experts and weights are those", "images yes")
class OneBiasForAll(Claiming):
    def route(self, layer, x, rows):
        import dataclasses

        return super().route(layer, x, dataclasses.replace(rows, image=None))


@B.breaks("the result is the weighted sum", "it should be")
class FirstExpertOnly(Claiming):
    def forward(self, layer, x, routing):
        return super().forward(layer, x, Routing(routing.ids[:, :1], routing.weights[:, :1]))


@pytest.mark.parametrize("cls, law, shows", B.made)
def test_a_broken_variant_is_told_on(cls, law, shows):
    B.judge(cls, law, shows)


def test_every_law_can_fail():
    B.covered()
