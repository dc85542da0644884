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
from deepinfer.model.stack import Layer, Model
from deepinfer.slots.protocols import RowSet

from . import fast, weights
from .batches import Split, Stream, mixed, pieces
from .config import Backbone
from .log import Log
from .muon import Optimiser, schedule


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

    @torch.no_grad()
    def step(self, chosen: dict[str, Tensor], done: float) -> None:
        """chosen: {layer: ids "t k"}; done: the share of the steps behind us."""
        rate = next(r for until, r in self.rates if done <= until)
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


def train(
    model: Model, recipe: Backbone, data: dict[str, Split], *, seed: int, log: Log,
    compiled: bool = False, stop_after: float | None = None,
) -> dict[str, Tensor]:
    """Train the backbone of `model`; returns {the model's weight name: FP32 master}.

    stop_after: seconds after which the stage ends wherever it is (the log says so).
    """
    r, config, device = recipe, model.config, model.device
    torch.manual_seed(seed)
    trained = {
        n: p for n, p in model.named_parameters()
        if not n.startswith("mtp.") and not n.endswith(("gate.bias", "gate.bias_vl"))
    }
    for p in trained.values():
        p.requires_grad_(True)
    optimiser = Optimiser(
        trained, weights.is_matrix, (r.muon_rate, r.adam_rate), r.weight_decay,
        {"attn_sink": r.sink_rate}, r.clip,
    )
    streams = [Stream(data["library"], seed), Stream(data["tests"], seed + 1)]
    shares = [r.library_share, 1 - r.library_share]
    balance = Balance(model.layers, r.bias_rates)
    stored = weights.rounding(config)
    phases = np.random.default_rng(seed)
    began = last = time.perf_counter()
    for step in range(r.steps):
        ids = mixed(streams, shares, r.rows, r.length + 1)
        ids = torch.from_numpy(ids).to(device, non_blocking=True)
        index_loss = fast.IndexLoss(r.index_every, r.index_random, int(phases.integers(r.index_every)))
        tap = Training(r.dropout)
        loss, terms = losses(model, ids, tap, index_loss, compiled)
        (loss + r.index_weight * sum(terms.values())).backward()
        balance.step(tap.load, (step + 1) / r.steps)
        rounded = stored if step >= r.rounded_from * r.steps else None
        factor = schedule(step, r.steps, r.warmup, r.constant, r.last)
        norm = optimiser.step(factor, rounded)
        for p in trained.values():
            p.grad = None
        late = stop_after is not None and time.perf_counter() - began > stop_after
        if step % 20 == 19 or step + 1 == r.steps or late:
            high, low = balance.worst()
            loss = loss.item()  # waits for the device, so the clock below is honest
            now = time.perf_counter()
            per_second = (20 if step % 20 == 19 else step % 20 + 1) * r.rows * r.length / (now - last)
            last = now
            log.row(
                stage="backbone", step=step + 1, seconds=now - began, nats=loss,
                index_kl=sum(x.item() for x in terms.values()), grad=norm.item(), rate=factor,
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


def losses(
    model: Model, ids: Tensor, tap: Training | None, index_loss: fast.IndexLoss | None, compiled: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """(mean nats a token of ids [b, t+1] given those before, {layer: KL of its indexer})."""
    context = fast.context(
        model.config, ids[:, :-1], tap=tap, index_loss=index_loss, compiled=compiled, dtype=model.dtype
    )
    logits = model(context).logits
    loss = F.cross_entropy(logits, ids[:, 1:].flatten())
    return loss, {} if index_loss is None else index_loss.terms()


@torch.no_grad()
def evaluate(model: Model, split: Split, recipe: Backbone, compiled: bool) -> dict[str, float]:
    """Mean nats a token of a split in pieces of the training length (whatever follows what)."""
    ids = torch.from_numpy(pieces(split, recipe.length + 1)).to(model.device)
    total, count = 0.0, 0
    for part in ids.split(recipe.rows):
        loss, _ = losses(model, part, None, None, compiled and len(part) == recipe.rows)
        total += loss.item() * len(part)
        count += len(part)
    return {"nats": total / max(count, 1), "pieces": count}
