"""The optimiser: Muon for matrices, AdamW for the rest, on FP32 master weights.

    M = momentum M + g;  u = orthogonalised(g + momentum M)
    w -= rate (0.2 sqrt(max(r, c)) u + decay w)
The orthogonalisation is five Newton-Schulz steps in BF16 (Jordan et al. 2024), the factor makes the
update as large as AdamW's (Liu et al. 2025). Matrices of one shape are worked off as one batch.
The model computes with its own, rounded copies; each step writes them anew from the masters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

Rounding = Callable[[str, Tensor], Tensor]


def orthogonalised(g: Tensor, steps: int = 5) -> Tensor:
    """Matrices g "n r c", their singular values pressed to about 1 (0.7 .. 1.2), in g's dtype."""
    x = g.to(torch.bfloat16 if g.device.type == "cuda" else g.dtype)
    wide = g.shape[-2] > g.shape[-1]
    x = x.mT if wide else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return (x.mT if wide else x).to(g.dtype)


@dataclass
class Group:
    """Weights of one shape and one treatment; `master` and the moments are stacked along axis 0."""

    names: list[str]
    weights: list[Tensor]
    master: Tensor
    first: Tensor
    second: Tensor | None
    rate: float
    decay: float


class Optimiser:
    """Steps the named weights that have a gradient.

    weights: {name: the model's tensor}. muon(name): True for matrices that Muon takes; 3-axis
    weights are stacks of matrices. rates: (Muon's, AdamW's); special: {suffix: rate} of single
    AdamW weights. decays: of Muon's and of AdamW's matrices, times the rate. clip: the largest norm
    of the AdamW weights' gradient.
    """

    def __init__(
        self,
        weights: dict[str, Tensor],
        muon: Callable[[str], bool],
        rates: tuple[float, float],
        decays: tuple[float, float],
        special: dict[str, float] | None = None,
        clip: float = 1.0,
    ) -> None:
        self.clip = clip
        device = next(iter(weights.values())).device
        self.steps = torch.zeros((), device=device)  # a tensor, as is the scale: no value is baked
        special = special or {}
        stacks: dict[tuple, list[str]] = defaultdict(list)
        for name, w in weights.items():
            rate = next((r for suffix, r in special.items() if name.endswith(suffix)), rates[1])
            shape = tuple(w.shape[-2:]) if muon(name) else tuple(w.shape)
            rate, decay = (rates[0], decays[0]) if muon(name) else (rate, decays[1])
            if w.ndim < 2 or ".hc_" in name or name.endswith(("q_weight", "k_weight")):
                decay = 0.0  # norms, sinks, mixing: nothing says that they should be small
            stacks[(muon(name), shape, rate, decay)].append(name)
        self.muon: list[Group] = []
        self.adam: list[Group] = []
        for (is_muon, shape, rate, decay), names in stacks.items():
            held = [weights[n] for n in names]
            master = stack(held, shape)
            second = None if is_muon else torch.zeros_like(master)
            group = Group(names, held, master, torch.zeros_like(master), second, rate, decay)
            (self.muon if is_muon else self.adam).append(group)

    @torch.no_grad()
    def step(self, scale: float | Tensor, rounding: Rounding | None = None) -> Tensor:
        """One step at `scale` times the rates. rounding(name, master): what the model computes with
        (None: the master in the weight's dtype). Returns the norm of AdamW's gradient. Nothing
        waits for the device, and without a rounding a step can be captured in a graph."""
        self.steps += 1
        grads = [stack([w.grad for w in g.weights], g.master.shape[1:]) for g in self.adam]
        norm = torch.stack([x.square().sum() for x in grads]).sum().sqrt()
        shrink = (self.clip / (norm + 1e-6)).clamp(max=1.0)
        for group, g in zip(self.adam, grads):
            self._adam(group, g * shrink, scale)
            self._write(group, rounding)
        for group in self.muon:
            g = stack([w.grad for w in group.weights], group.master.shape[1:])
            self._muon(group, g, scale)
            self._write(group, rounding)
        return norm

    def masters(self) -> dict[str, Tensor]:
        """{name: FP32 weight}, unrounded."""
        out = {}
        for group in (*self.muon, *self.adam):
            for name, w, part in zip(group.names, group.weights, self._parts(group)):
                out[name] = part.reshape(w.shape)
        return out

    def _muon(self, group: Group, g: Tensor, scale: float | Tensor, momentum: float = 0.95) -> None:
        group.first.mul_(momentum).add_(g)
        update = orthogonalised(g.add(group.first, alpha=momentum))
        rate = group.rate * scale
        size = 0.2 * max(g.shape[-2:]) ** 0.5
        group.master.mul_(1 - rate * group.decay).sub_(update * (rate * size))

    def _adam(self, group: Group, g: Tensor, scale: float | Tensor) -> None:
        b1, b2, eps = 0.9, 0.95, 1e-10
        group.first.lerp_(g, 1 - b1)
        group.second.lerp_(g.square(), 1 - b2)
        first = group.first / (1 - b1**self.steps)
        second = group.second / (1 - b2**self.steps)
        rate = group.rate * scale
        if group.decay:
            group.master.mul_(1 - rate * group.decay)
        group.master.sub_(first / second.sqrt().add_(eps) * rate)

    def _parts(self, group: Group) -> Iterable[Tensor]:
        sizes = [w.numel() // group.master[0].numel() for w in group.weights]
        return group.master.split(sizes)

    def _write(self, group: Group, rounding: Rounding | None) -> None:
        values = [part.view(w.shape) for w, part in zip(group.weights, self._parts(group))]
        if rounding is not None:
            values = [rounding(name, value) for name, value in zip(group.names, values)]
        torch._foreach_copy_(group.weights, values)


def stack(tensors: list[Tensor], shape) -> Tensor:
    """One FP32 tensor "n *shape" of tensors that have that shape or stacks of it."""
    return torch.cat([x.detach().reshape(-1, *shape) for x in tensors]).float()


def schedule(step: int, steps: int, warmup: int, constant: float, last: float) -> float:
    """Factor of the rates: linear warm-up, 1 to `constant` of the steps, then linear to `last`."""
    if step < warmup:
        return (step + 1) / warmup
    start = max(constant * steps, warmup)
    done = (step - start) / max(steps - start, 1)
    return 1.0 if done <= 0 else 1 - (1 - last) * min(done, 1.0)
