"""The backbone stage: language-model loss, router balance, and the indexer's own loss."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer.model.context import ForwardContext
from deepinfer.model.stack import Layer, Model
from deepinfer.slots.protocols import RowSet
from experiments.nano.config import Backbone
from experiments.nano.train import fast, weights
from experiments.nano.train.batches import Split, mixed, pieces, trained_shares, trained_streams
from experiments.nano.train.graphs import Captured
from experiments.nano.train.log import Log
from experiments.nano.train.muon import Optimiser, Rounding, schedule


@dataclass
class Training:
    """A tap: dropout on what the sub-layers give, n-grams passed off as unseen, and a count of what
    each expert got. of: the layers it trains ("mtp." are the drafter's)."""

    dropout: float
    of: str = "layers."
    unseen: tuple[float, ...] = ()
    load: dict[str, Tensor] = field(default_factory=dict)
    _luck: Tensor | None = None

    def __call__(self, name: str, x: Tensor, rows: RowSet) -> Tensor:
        if not name.startswith(self.of):
            return x
        if name.endswith((".attn.out", ".ffn.out")) and self.dropout:
            return F.dropout(x, self.dropout)
        if name.endswith(".engram.rows") and self.unseen:
            return self._forget(x)
        if name.endswith(".ffn.experts"):
            self.load[name.removesuffix(".experts")] = x
        return x

    def _forget(self, table_rows: Tensor) -> Tensor:
        """Rows of other n-grams in place of some, the longest first.

        table_rows "t c": columns by n-gram size 2, 3, ...; unseen: how often each size is passed
        off. After one epoch training has no new n-gram left, while a third of the trigrams of
        unknown text are new, and their rows are those of others.
        """
        t, columns = table_rows.shape
        if self._luck is None:  # one token, one fate: the layers hash the same n-grams
            self._luck = torch.rand(t, 1, device=table_rows.device)
        often = torch.cat(
            [
                torch.full((columns // len(self.unseen),), p, device=table_rows.device)
                for p in self.unseen
            ]
        )
        others = table_rows[torch.randint(t, (t,), device=table_rows.device)]
        return torch.where(self._luck < often, others, table_rows)


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


def step_of(
    model: Model,
    recipe: Backbone,
    optimiser: Optimiser,
    balance: Balance,
    compiled: bool,
    capture: bool,
    rounding: Rounding | None = None,
    dense: bool = False,
) -> Captured:
    """A training step: step(ids=[rows, length + 1], phase=, factor=, bias_rate=) -> {'nats',
    'index_kl', 'grad'} on the device. phase: which queries the indexer's loss looks at; factor: of
    the rates; rounding: what the model computes with after it; dense: nothing is picked."""
    r, device = recipe, model.device
    inputs = {
        "ids": torch.zeros(r.rows, r.length + 1, dtype=torch.long, device=device),
        "phase": torch.zeros((), dtype=torch.long, device=device),
        "factor": torch.zeros((), device=device),
        "bias_rate": torch.zeros((), device=device),
    }
    held = [w for g in (*optimiser.muon, *optimiser.adam) for w in g.weights]
    constants: dict = {}

    def run() -> dict[str, Tensor]:
        index_loss = fast.IndexLoss(r.index_every, r.index_random, inputs["phase"])
        tap = Training(r.dropout, unseen=r.unseen)
        read = noisy(inputs["ids"][:, :-1], r.noise, model.config.dspark_noise_token_id)
        ctx = fast.context(
            model.config,
            read,
            tap=tap,
            index_loss=index_loss,
            compiled=compiled,
            dtype=model.dtype,
            constants=constants,
            dense=dense,
        )
        loss = language_loss(model, inputs["ids"], ctx)
        constants.update(fast.constants_of(ctx))
        index = torch.stack(list(index_loss.terms().values())).sum()
        (loss + r.index_weight * index).backward()
        balance.step(tap.load, inputs["bias_rate"])
        norm = optimiser.step(inputs["factor"], rounding)
        for w in held:
            w.grad = None
        return {"nats": loss.detach(), "index_kl": index.detach(), "grad": norm}

    return Captured(run, inputs, capture)


def train(
    model: Model,
    recipe: Backbone,
    data: dict[str, Split],
    *,
    seed: int,
    log: Log,
    compiled: bool = False,
    capture: bool = False,
    stop_after: float | None = None,
) -> dict[str, Tensor]:
    """Train the backbone of `model`; returns {the model's weight name: FP32 master}.

    compiled, capture: torch.compile and a CUDA graph, for an accelerator. stop_after: seconds after
    which the stage ends wherever it is (the log says so).
    """
    r = recipe
    torch.manual_seed(seed)
    trained = {
        n: p
        for n, p in model.named_parameters()
        if not n.startswith("mtp.") and not n.endswith(("gate.bias", "gate.bias_vl"))
    }
    for p in trained.values():
        p.requires_grad_(True)
    optimiser = Optimiser(
        trained,
        weights.is_matrix,
        (r.muon_rate, r.adam_rate),
        (r.muon_decay, r.adam_decay),
        {"attn_sink": r.sink_rate},
        r.clip,
    )
    streams = trained_streams(data, r.renamed, seed)
    balance = Balance(model.layers, r.bias_rates)
    short = replace(r, rows=r.rows * r.length // r.dense_length, length=r.dense_length)
    steps = {
        (dense, rounding is not None): step_of(
            model, short if dense else r, optimiser, balance, compiled, capture, rounding, dense
        )
        for dense in (True, False)
        for rounding in (None, weights.rounding(model.config))
    }
    phases = np.random.default_rng(seed)
    began = last = time.perf_counter()
    for step in range(r.steps):
        done = (step + 1) / r.steps
        share = next(share for until, share in r.library_shares if done <= until)
        dense = step < r.dense * r.steps
        size = short if dense else r
        shares = trained_shares(share, r.renamed)
        ids = torch.from_numpy(
            mixed(list(streams.values()), shares, size.rows, size.length + 1, step)
        )
        factor = schedule(step, r.steps, r.warmup, r.constant, r.last)
        found = steps[dense, step >= r.rounded_from * r.steps](
            ids=ids,
            phase=int(phases.integers(r.index_every)),
            factor=factor,
            bias_rate=balance.rate(done),
        )
        late = stop_after is not None and time.perf_counter() - began > stop_after
        if step % 20 == 19 or step + 1 == r.steps or late:
            high, low = balance.worst()
            numbers = {k: x.item() for k, x in found.items()}  # waits, so the clock is honest
            now = time.perf_counter()
            per_second = (step % 20 + 1) * r.rows * r.length / (now - last)
            last = now
            log.row(
                stage="backbone",
                step=step + 1,
                seconds=now - began,
                **numbers,
                rate=factor,
                dense=dense,
                max_load=high,
                min_load=low,
                tokens_per_second=per_second,
                **{f"{name}_epochs": stream.epoch for name, stream in streams.items()},
            )
        if (step + 1) % r.dev_every == 0 or step + 1 == r.steps or late:
            log.row(stage="dev", step=step + 1, **evaluate(model, data["dev"], r, compiled))
            last = time.perf_counter()
        if late:
            log.row(stage="stopped", step=step + 1, seconds=stop_after)
            break
    return weights.finished(model, optimiser.masters())


def noisy(ids: Tensor, share: float, noise: int) -> Tensor:
    """ids with a share of them replaced by the noise token: a regulariser of words and n-grams. The
    tokens to predict stay as they are."""
    if not share:
        return ids
    return torch.where(torch.rand(ids.shape, device=ids.device) < share, noise, ids)


def language_loss(model: Model, ids: Tensor, ctx: ForwardContext) -> Tensor:
    """Mean nats a token of ids [b, t+1], each given those before it; ctx: of ids[:, :-1], or of
    what the model is to read in their place."""
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
