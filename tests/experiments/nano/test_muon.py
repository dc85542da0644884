"""The optimiser against the update as it is written down, one weight at a time in FP64."""

import math

import pytest
import torch

from experiments.nano.train.muon import Optimiser, orthogonalised, schedule, stack

RATES, DECAYS, SINK_RATE, CLIP = (0.03, 0.01), (0.4, 0.2), 0.05, 2.0
SHAPES = {
    "a.wq_a.weight": (4, 9),
    "b.wq_a.weight": (4, 9),  # of one shape with the first: they are worked off together
    "c.wkv.weight": (9, 4),
    "c.experts.w1.weight": (3, 4, 9),  # a stack of three matrices
    "embed.weight": (7, 3),
    "head.weight": (7, 3),
    "norm.weight": (5,),
    "a.attn_sink": (5,),
    "a.hc_attn_fn": (2, 6),
    "engram.q_weight": (2, 3),
}
DECAYED = {"embed.weight", "head.weight"}  # of AdamW's: matrices that are no mixing and no norm


def is_muon(name):
    return name.endswith((".wq_a.weight", ".wkv.weight", ".w1.weight"))


def gradients(step):
    """FP32 values, larger at some steps, so that the clip binds at some only."""
    generator = torch.Generator().manual_seed(step)
    size = (0.05, 3.0)[step % 2]
    return {n: torch.randn(s, generator=generator) * size for n, s in SHAPES.items()}


def start():
    generator = torch.Generator().manual_seed(99)
    return {n: torch.randn(s, generator=generator) for n, s in SHAPES.items()}


def pressed(g):
    """The five Newton-Schulz steps on the singular values alone: g = U diag(s) V."""
    u, s, v = torch.linalg.svd(g, full_matrices=False)
    s = s / s.square().sum().sqrt()
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return (u * s) @ v


class Naive:
    """The documented update of every weight by itself."""

    def __init__(self):
        self.w = {n: w.double() for n, w in start().items()}
        self.first = {n: torch.zeros_like(w) for n, w in self.w.items()}
        self.second = {n: torch.zeros_like(w) for n, w in self.w.items()}
        self.steps = 0

    def step(self, grads, scale):
        self.steps += 1
        grads = {n: g.double() for n, g in grads.items()}
        adam = {n: g for n, g in grads.items() if not is_muon(n)}
        norm = math.sqrt(sum(float((g**2).sum()) for g in adam.values()))
        for name, g in grads.items():
            if is_muon(name):
                self._muon(name, g, RATES[0] * scale)
            else:
                self._adam(name, g * min(1.0, CLIP / norm), scale)
        return norm

    def _muon(self, name, g, rate):
        m = self.first[name] = 0.95 * self.first[name] + g
        ahead = g + 0.95 * m
        whole = ahead.view(-1, *ahead.shape[-2:])
        update = torch.stack([pressed(x) for x in whole]).view(g.shape)
        size = 0.2 * math.sqrt(max(g.shape[-2:]))
        self.w[name] -= rate * (size * update + DECAYS[0] * self.w[name])

    def _adam(self, name, g, scale):
        rate = (SINK_RATE if name.endswith("attn_sink") else RATES[1]) * scale
        m = self.first[name] = 0.9 * self.first[name] + 0.1 * g
        v = self.second[name] = 0.95 * self.second[name] + 0.05 * g**2
        m, v = m / (1 - 0.9**self.steps), v / (1 - 0.95**self.steps)
        decay = DECAYS[1] if name in DECAYED else 0.0
        self.w[name] -= rate * (m / v.sqrt() + decay * self.w[name])


@pytest.fixture(scope="module")
def both():
    """(naive, optimiser, its weights, [(norm, naive norm)]) after five steps at three rates."""
    naive, held = Naive(), {n: torch.nn.Parameter(w) for n, w in start().items()}
    opt = Optimiser(held, is_muon, RATES, DECAYS, {"attn_sink": SINK_RATE}, CLIP)
    norms = []
    for step, scale in enumerate((0.5, 1.0, 1.0, 1.0, 0.2)):
        for name, g in gradients(step).items():
            held[name].grad = g
        norms.append((float(opt.step(scale)), naive.step(gradients(step), scale)))
    return naive, opt, held, norms


@pytest.mark.parametrize("name", SHAPES)
def test_every_weight_takes_the_documented_steps(both, name):
    naive, opt, held, _ = both
    moved = (naive.w[name] - start()[name]).abs().max()
    assert moved > 5e-3
    master = opt.masters()[name]
    assert master.shape == SHAPES[name] and master.dtype == torch.float32
    torch.testing.assert_close(master.double(), naive.w[name], rtol=0, atol=2e-5)
    assert torch.equal(held[name], master), "the model computes with the masters"


def test_the_norm_is_that_of_the_weights_that_are_clipped(both):
    for got, wanted in both[3]:
        assert got == pytest.approx(wanted, rel=1e-5)
    assert min(w for _, w in both[3]) < CLIP < max(w for _, w in both[3])


def test_orthogonalised_presses_the_singular_values_alone():
    for shape in ((2, 3, 8), (2, 8, 3)):
        g = torch.randn(shape, dtype=torch.float64)
        wanted = torch.stack([pressed(x) for x in g])
        torch.testing.assert_close(orthogonalised(g), wanted, rtol=0, atol=1e-6)
        values = torch.linalg.svdvals(wanted)
        assert 0.3 < values.min() and values.max() < 1.3


def test_a_step_writes_what_the_model_computes_with_in_its_own_dtype():
    held = {n: torch.nn.Parameter(w.bfloat16()) for n, w in start().items()}
    opt = Optimiser(held, is_muon, RATES, DECAYS)
    for w in held.values():
        w.grad = torch.ones_like(w)
    opt.step(1.0)
    for name, master in opt.masters().items():
        assert torch.equal(held[name], master.bfloat16()) and held[name].dtype == torch.bfloat16
        assert not torch.equal(held[name].float(), master), "masters keep more digits"
    opt.step(0.0, lambda name, master: torch.full_like(master, 7.0))
    assert all((w == 7).all() for w in held.values())
    assert not any((master == 7).any() for master in opt.masters().values())


def test_stack_lays_matrices_and_stacks_of_them_behind_each_other():
    one, three = torch.randn(2, 5), torch.randn(3, 2, 5)
    assert torch.equal(stack([one, three], (2, 5)), torch.cat([one[None], three]))


def test_schedule_warms_up_holds_and_falls_to_its_last_value():
    assert [schedule(s, 20, 4, 0.5, 0.1) for s in range(11)] == [0.25, 0.5, 0.75, *[1.0] * 8]
    assert schedule(15, 20, 4, 0.5, 0.1) == pytest.approx(0.55)
    assert schedule(20, 20, 4, 0.5, 0.1) == pytest.approx(0.1)
    assert schedule(8, 20, 8, 0.1, 0.1) == 1.0, "no fall before the warm-up is over"
