"""The backbone stage: language-model loss, router balance, and the indexer's own loss."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer.config import ModelConfig
from deepinfer.model.context import ForwardContext
from deepinfer.model.stack import Layer, Model
from deepinfer.slots.protocols import RowSet

from . import fast, weights
from .batches import Split, Stream, mixed, pieces
from .config import Backbone
from .log import Log
from .muon import Optimiser, Rounding, schedule


@dataclass
class Training:
    """A tap: dropout on what the sub-layers give, and a count of what each expert got."""

    dropout: float
    of: str = "layers."  # the layers it trains; "mtp." are the drafter's
    load: dict[str, Tensor] = field(default_factory=dict)

    def __call__(self, name: str, x: Tensor, rows: RowSet) -> Tensor:
        if not name.startswith(self.of):
            return x
        if name.endswith((".attn.out", ".ffn.out")) and self.dropout:
            return F.dropout(x, self.dropout)
        if name.endswith(".ffn.experts"):
            self.load[name.removesuffix(".experts")] = x
        return x


def expert_load(ids: Tensor, experts: int) -> Tensor:
    """[experts] rows that chose each expert; ids "t k" (-1: a padding row, counted nowhere)."""
    counts = torch.zeros(experts + 1, device=ids.device)
    flat = (ids.flatten() + 1).clamp(min=0)
    return counts.scatter_add_(0, flat, torch.ones_like(flat, dtype=counts.dtype))[1:]


class Balance:
    """Selection biases move by a fixed step towards equal load (no auxiliary loss)."""

    def __init__(self, layers: Iterable[Layer], rates: tuple[tuple[float, float], ...]) -> None:
        self.rates = rates
        self.gates = {layer.name + ".ffn": layer.ffn.gate for layer in layers}
        self.total = {n: torch.zeros_like(g.bias) for n, g in self.gates.items()}

    def rate(self, done: float) -> float:
        """The biases' step when a share `done` of the steps is behind us."""
        return next(r for until, r in self.rates if done <= until)

    @torch.no_grad()
    def step(self, chosen: dict[str, Tensor], rate: float | Tensor) -> None:
        """chosen: {layer: ids "t k"}."""
        for name, ids in chosen.items():
            gate = self.gates[name]
            load = expert_load(ids, gate.bias.shape[0])
            self.total[name] += load
            gate.bias += rate * torch.sign(load.mean() - load)
            gate.bias_vl.copy_(gate.bias)  # no image is ever seen: an image row is routed as text

    def worst(self) -> tuple[float, float]:
        """(largest max/mean, smallest min/mean) load over layers since the last call."""
        ratios = [(x.max() / x.mean(), x.min() / x.mean()) for x in self.total.values()]
        high, low = zip(*ratios)
        for x in self.total.values():
            x.zero_()
        return float(max(high)), float(min(low))


class Stepper:
    """One training step; on an accelerator a captured graph of it, for a step is some ten thousand
    small kernels that take longer to launch than to run.

    `step(ids, phase, factor, bias_rate)` copies its arguments into fixed tensors, so that eager and
    captured steps are the same code. Returns {name: value on the device}.
    """

    EAGER = 5  # steps before the capture: kernels are compiled and memory is laid out in them

    def __init__(self, model: Model, recipe: Backbone, optimiser: Optimiser, balance: Balance,
                 compiled: bool, capture: bool) -> None:
        self.model, self.recipe, self.optimiser, self.balance = model, recipe, optimiser, balance
        self.compiled, self.capture, self.done = compiled, capture, 0
        self.weights = [w for g in (*optimiser.muon, *optimiser.adam) for w in g.weights]
        r, device = recipe, model.device
        self.ids = torch.zeros(r.rows, r.length + 1, dtype=torch.long, device=device)
        self.phase = torch.zeros((), dtype=torch.long, device=device)
        self.factor = torch.zeros((), device=device)
        self.bias_rate = torch.zeros((), device=device)
        self.constants: dict = {}
        self.graph: torch.cuda.CUDAGraph | None = None
        self.out: dict[str, Tensor] = {}

    def step(
        self, ids: Tensor, phase: int, factor: float, bias_rate: float, rounding: Rounding | None
    ) -> dict[str, Tensor]:
        self.ids.copy_(ids, non_blocking=True)
        for held, value in ((self.phase, phase), (self.factor, factor), (self.bias_rate, bias_rate)):
            held.fill_(value)
        if self.capture and rounding is None and self.done >= self.EAGER:
            if self.graph is None:
                self.graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self.graph):
                    self.out = self._run(None)
            self.graph.replay()
        elif self.capture:
            self.graph = None
            side = torch.cuda.Stream()  # as the capture will, so that memory is laid out alike
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self.out = self._run(rounding)
            torch.cuda.current_stream().wait_stream(side)
        else:
            self.out = self._run(rounding)
        self.done += 1
        return self.out

    def _run(self, rounding: Rounding | None) -> dict[str, Tensor]:
        r = self.recipe
        index_loss = fast.IndexLoss(r.index_every, r.index_random, self.phase)
        tap = Training(r.dropout)
        ctx = fast.context(
            self.model.config, self.ids[:, :-1], tap=tap, index_loss=index_loss,
            compiled=self.compiled, dtype=self.model.dtype, constants=self.constants,
        )
        loss = language_loss(self.model, self.ids, ctx)
        self.constants = fast.constants_of(ctx)
        index = torch.stack(list(index_loss.terms().values())).sum()
        (loss + r.index_weight * index).backward()
        self.balance.step(tap.load, self.bias_rate)
        norm = self.optimiser.step(self.factor, rounding)
        for w in self.weights:
            w.grad = None
        return {"nats": loss.detach(), "index_kl": index.detach(), "grad": norm}


def train(
    model: Model, recipe: Backbone, data: dict[str, Split], *, seed: int, log: Log,
    compiled: bool = False, capture: bool = False, stop_after: float | None = None,
) -> dict[str, Tensor]:
    """Train the backbone of `model`; returns {the model's weight name: FP32 master}.

    compiled, capture: torch.compile and a CUDA graph, for an accelerator. stop_after: seconds after
    which the stage ends wherever it is (the log says so).
    """
    r = recipe
    torch.manual_seed(seed)
    trained = {
        n: p for n, p in model.named_parameters()
        if not n.startswith("mtp.") and not n.endswith(("gate.bias", "gate.bias_vl"))
    }
    for p in trained.values():
        p.requires_grad_(True)
    optimiser = Optimiser(
        trained, weights.is_matrix, (r.muon_rate, r.adam_rate), (r.muon_decay, r.adam_decay),
        {"attn_sink": r.sink_rate}, r.clip,
    )
    streams = [Stream(data["library"], seed), Stream(data["tests"], seed + 1)]
    balance = Balance(model.layers, r.bias_rates)
    stepper = Stepper(model, r, optimiser, balance, compiled, capture)
    stored = weights.rounding(model.config)
    phases = np.random.default_rng(seed)
    began = last = time.perf_counter()
    for step in range(r.steps):
        done = (step + 1) / r.steps
        share = next(share for until, share in r.library_shares if done <= until)
        ids = torch.from_numpy(mixed(streams, [share, 1 - share], r.rows, r.length + 1))
        factor = schedule(step, r.steps, r.warmup, r.constant, r.last)
        rounding = stored if step >= r.rounded_from * r.steps else None
        phase = int(phases.integers(r.index_every))
        found = stepper.step(ids, phase, factor, balance.rate(done), rounding)
        late = stop_after is not None and time.perf_counter() - began > stop_after
        if step % 20 == 19 or step + 1 == r.steps or late:
            high, low = balance.worst()
            numbers = {k: x.item() for k, x in found.items()}  # waits, so the clock is honest
            now = time.perf_counter()
            per_second = (step % 20 + 1) * r.rows * r.length / (now - last)
            last = now
            log.row(
                stage="backbone", step=step + 1, seconds=now - began, **numbers, rate=factor,
                max_load=high, min_load=low, tokens_per_second=per_second,
                library_epochs=streams[0].epoch, tests_epochs=streams[1].epoch,
            )
        if (step + 1) % r.dev_every == 0 or step + 1 == r.steps or late:
            log.row(stage="dev", step=step + 1, **evaluate(model, data["dev"], r, compiled))
            last = time.perf_counter()
        if late:
            log.row(stage="stopped", step=step + 1, seconds=stop_after)
            break
    for p in trained.values():
        p.requires_grad_(False)
    masters = optimiser.masters()
    held = {n: p.detach() for n, p in model.named_parameters() if n not in masters}
    return {**held, **masters}


def language_loss(model: Model, ids: Tensor, ctx: ForwardContext) -> Tensor:
    """Mean nats a token of ids [b, t+1], each given those before it; ctx: of ids[:, :-1]."""
    return F.cross_entropy(model(ctx).logits, ids[:, 1:].flatten())


@torch.no_grad()
def evaluate(model: Model, split: Split, recipe: Backbone, compiled: bool) -> dict[str, float]:
    """Mean nats a token of a split in pieces of the training length (whatever follows what)."""
    ids = torch.from_numpy(pieces(split, recipe.length + 1)).to(model.device)
    total, count = 0.0, 0
    for part in ids.split(recipe.rows):
        full = compiled and len(part) == recipe.rows
        ctx = fast.context(model.config, part[:, :-1], compiled=full, dtype=model.dtype)
        total += language_loss(model, part, ctx).item() * len(part)
        count += len(part)
    return {"nats": total / max(count, 1), "pieces": count}
