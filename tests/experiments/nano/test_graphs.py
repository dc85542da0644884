"""What a graph would capture never waits for the device, and a captured step is the eager one."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from deepinfer import kernels
from deepinfer.checkpoint.tiny_tokenizer import tiny_tokenizer
from experiments.nano.config import Backbone, Drafter, small_config
from experiments.nano.train import backbone, drafter, weights, written
from experiments.nano.train.graphs import EAGER, Captured
from experiments.nano.train.muon import Optimiser


class OnDevice(TorchDispatchMode):
    """Refuses what a capture refuses: values read, shapes that depend on values, host data."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert not name.startswith(("_local_scalar", "nonzero", "masked_select", "_unique")), name
        assert name != "lift_fresh" or not args[0].ndim, "a tensor of the host's numbers"
        for ids in args[1] if name in ("index", "index_put", "index_put_") else ():
            assert ids is None or ids.dtype != torch.bool, name
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def model():
    tokenizer = tiny_tokenizer()
    config = small_config(tokenizer)
    model = weights.model_from(config, weights.initial(config, 0), tokenizer, torch.float32, "cpu")
    for name, p in model.named_parameters():
        p.requires_grad_(not name.endswith(("gate.bias", "gate.bias_vl")))
    return model


@pytest.fixture
def references():
    """The plain torch of every op: what runs where no GPU kernel does, and never numpy."""
    with kernels.use(**dict.fromkeys(kernels.names(), "reference")):
        yield


def optimiser(model, prefix):
    held = {
        n: p
        for n, p in model.named_parameters()
        if p.requires_grad and n.startswith("mtp.") == (prefix == "mtp.")
    }
    return Optimiser(held, weights.is_matrix, (1e-3, 1e-3), (0.1, 0.1))


def twice(step: Captured, **values) -> None:
    step(**values)  # constants of the model are brought to the device in the first call
    for name, value in values.items():
        held = step.inputs[name]
        held.copy_(value) if isinstance(value, torch.Tensor) else held.fill_(value)
    with OnDevice():
        step.run()


@pytest.mark.parametrize(("rounded", "dense"), [(False, False), (True, False), (False, True)])
def test_a_backbone_step_never_waits(model, references, rounded, dense):
    rounding = weights.rounding(model.config) if rounded else None
    recipe = Backbone(rows=2, length=32, noise=0.1)
    balance = backbone.Balance(model.layers, recipe.bias_rates)
    step = backbone.step_of(
        model, recipe, optimiser(model, "layers."), balance, False, False, rounding, dense
    )
    twice(step, ids=torch.randint(5, 900, (2, 33)), phase=1, factor=0.5, bias_rate=1e-3)


@pytest.mark.parametrize("rounded", [False, True])
def test_a_drafter_step_never_waits(model, references, rounded):
    rounding = weights.rounding(model.config) if rounded else None
    recipe = Drafter(rows=2, length=32, anchors=4)
    source = drafter.Source("greedy", None, 8, 2, 32)
    balance = backbone.Balance(model.mtp, recipe.bias_rates)
    step = drafter.step_of(
        model, recipe, source, optimiser(model, "mtp."), balance, False, False, rounding
    )
    twice(step, ids=torch.randint(5, 900, (2, 33)), factor=0.5, bias_rate=1e-3)


@torch.no_grad()
def test_a_written_token_never_waits(model, references):
    cache, pages, states = written._cache(model, 3, 24)
    out = torch.randint(5, 900, (3, 24))
    heat = torch.tensor([0.0, 1.0, 1.0])
    twice(written._step(model, cache, pages, states, out, heat, False), at=9)


def test_the_guard_sees_what_it_should():
    x = torch.arange(4)
    for waits in (
        lambda: x[x > 1],
        lambda: (x > 1).any().item(),
        lambda: torch.tensor([1.0]),
        lambda: x[x[0]],
    ):
        with OnDevice(), pytest.raises(AssertionError):
            waits()


@pytest.mark.gpu
def test_a_graph_replays_what_the_eager_step_does():
    """More calls than are eager, with inputs that change: the same sums."""
    x, total = torch.zeros(4, device="cuda"), torch.zeros(4, device="cuda")

    def run():
        total.add_(x * 2)
        return {"total": total}

    step = Captured(run, {"x": x}, capture=True)
    for i in range(EAGER + 4):
        out = step(x=float(i))
    assert out["total"].tolist() == [2.0 * sum(range(EAGER + 4))] * 4


@pytest.mark.gpu
def test_captured_steps_and_texts_equal_eager_ones():
    """A few steps and some written tokens, eager and captured, from one start."""
    tokenizer = tiny_tokenizer()
    config = small_config(tokenizer)
    models, steps = {}, {}
    recipe = Backbone(rows=2, length=64, dropout=0.0, unseen=(), index_random=0)
    for capture in (False, True):
        state = weights.initial(config, 0)
        model = weights.model_from(config, state, tokenizer, torch.float32, "cuda")
        for name, p in model.named_parameters():
            p.requires_grad_(not name.endswith(("gate.bias", "gate.bias_vl")))
        balance = backbone.Balance(model.layers, recipe.bias_rates)
        models[capture] = model
        steps[capture] = backbone.step_of(
            model, recipe, optimiser(model, "layers."), balance, False, capture
        )
    random = torch.Generator().manual_seed(1)

    def flat(capture):
        return torch.cat([p.detach().flatten() for p in models[capture].parameters()])

    for i in range(EAGER + 5):
        # Sums on a GPU differ in the last bits, and ten steps of this optimiser make much of them:
        # every step starts from the same weights.
        with torch.no_grad():
            for ours, theirs in zip(models[True].parameters(), models[False].parameters()):
                ours.copy_(theirs)
        before = flat(False)
        ids = torch.randint(5, 900, (2, 65), generator=random).cuda()
        given = dict(ids=ids, phase=i % 4, factor=1.0, bias_rate=0.0)
        eager, captured = (
            {k: float(x) for k, x in steps[c](**given).items() if x.numel() == 1}
            for c in (False, True)
        )
        assert captured["nats"] == pytest.approx(eager["nats"], abs=1e-3), i
        assert captured["grad"] == pytest.approx(eager["grad"], rel=0.02), i
        moved = [flat(c) - before for c in (False, True)]
        assert torch.cosine_similarity(*moved, dim=0) > 0.9, i
    model = models[False]
    starts = torch.randint(5, 900, (4, 16), generator=random)
    for p in model.parameters():
        p.requires_grad_(False)
    eager, captured = (
        written.write(model, starts, 24, torch.zeros(4), seed=0, capture=c).cpu()
        for c in (False, True)
    )
    assert (eager == captured).double().mean() > 0.8  # near-ties may turn
