"""Driving parts of an engine by hand: one sequence in its cache, and forwards without a cache."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from deepinfer import kernels
from deepinfer.engine.step.batch import Work, build
from deepinfer.model.context import ForwardContext
from deepinfer.slots.attention import CSA2
from deepinfer.slots.experts import Local
from deepinfer.slots.protocols import EngineInfo, RowKeys, RowParams
from deepinfer.slots.sampler import Greedy


def context(
    model, works: list[Work], *, fidelity: int = 0, tap=None, config=None
) -> ForwardContext:
    """A forward without a cache: every key is the step's own row. config: another than the model's,
    with the same sizes of weights."""
    config = config or model.config
    info = EngineInfo(config, model.device, model.dtype, 16)
    return ForwardContext(
        config=config,
        batch=build(works, config),
        ops=kernels.bind(),
        attention=CSA2().start(info),
        experts=Local().start(info),
        fidelity=fidelity,
        tap=tap,
    )


@dataclass
class Seen:
    """A tap that keeps every named value."""

    values: dict[str, Tensor] = field(default_factory=dict)

    def __call__(self, name, x, rows):
        self.values[name] = x.detach().clone()
        return x


@dataclass
class Watched(Greedy):
    """Greedy that keeps the logits it was asked about."""

    logits: list[Tensor] = field(default_factory=list)

    def distribution(self, logits, params, mask=None):
        self.logits.append(logits)
        return super().distribution(logits, params, mask)


class Sequence:
    """One sequence in an engine's cache: `feed` ids, then `draft` from its end."""

    def __init__(self, engine, total: int) -> None:
        self.rt = engine.runtime
        self.pages = self.rt.pages.take(-(-total // self.rt.limits.page_size))
        (self.slot,) = self.rt.states.take(1)
        self.ids: list[int] = []

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        self.rt.pages.give(self.pages)
        self.rt.states.give([self.slot])

    def work(self, ids: list[int]) -> Work:
        return Work(ids, len(self.ids), self.ids[-3:], self.pages, self.slot, None, "all")

    @torch.no_grad()
    def feed(self, ids: list[int]) -> Tensor:
        """[t, v] logits of the next ids."""
        if not ids:
            return torch.zeros(0, self.rt.config.vocab_size)
        logits = self.rt.model(self.rt.context(build([self.work(ids)], self.rt.config))).logits
        self.ids = self.ids + ids
        return logits

    @torch.no_grad()
    def draft(self, token: int, n: int = 5) -> tuple[Tensor, Tensor, Tensor]:
        """(logits [n, v], tokens [n], confidence [n]) of the greedy block behind `token`."""
        batch = build([self.work([token])], self.rt.config, decode=True)
        sampler = Watched()
        one = torch.zeros(1, dtype=torch.long)
        zero = torch.zeros(1, dtype=torch.float64)
        params, keys = RowParams(zero, zero + 1, one - 1), RowKeys(one, one)
        draft = self.rt.model.drafter.propose(
            batch.ids, batch.positions, n, self.rt.context(batch), sampler, params, keys
        )
        return torch.cat(sampler.logits), draft.tokens[0], draft.confidence[0]
