"""The bare loop: forward, law, draw, and the next rows; nothing else that an engine does.

The same cache, kernels and sampler as the engine's, over the same rows. Left out: queues, growing
pages, stops, results per request, statistics. What an engine's step takes beyond it is the engine's
share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from deepinfer import rng
from deepinfer.engine.engine import Engine
from deepinfer.engine.step.batch import Work, build
from deepinfer.slots.protocols import RowKeys, RowParams, RowSet


class BareLoop:
    """Decoding of a fixed batch in the cache of an engine that nobody else uses meanwhile.

    prompts: ids of each sequence; steps: the most that will be run; temperature, seeds: as of its
    SamplingParams. The first tokens are drawn when it is made. `close` gives pages and slots back.
    """

    @torch.inference_mode()
    def __init__(
        self,
        eng: Engine,
        prompts: Sequence[Sequence[int]],
        steps: int,
        *,
        temperature: float,
        seeds: Sequence[int],
    ) -> None:
        rt = self.rt = eng.runtime
        if rt.verifier.max_draft:
            raise ValueError(f"the bare loop runs a row a sequence, not {rt.verifier!r}")
        b, device = len(prompts), rt.model.device
        size = rt.limits.page_size
        self.pages = [rt.pages.take(-(-(len(p) + steps + 1) // size)) for p in prompts]
        self.slots = rt.states.take(b)
        works = [
            Work([*p], pages=pages, state=slot)
            for p, pages, slot in zip(prompts, self.pages, self.slots)
        ]
        one = [replace(w, ids=[0], start=len(w.ids), logits="all") for w in works]
        self.frame = build(one, rt.config, device, decode=True)
        self.params = RowParams(
            torch.full((b,), temperature, dtype=torch.float64, device=device),
            torch.ones(b, dtype=torch.float64, device=device),
            torch.full((b,), -1, dtype=torch.long, device=device),
        )
        self.seeds = torch.tensor([rng.signed(s) for s in seeds], device=device)
        self.output: list[Tensor] = []
        self.positions = self.frame.positions
        back = rt.config.engram_max_ngram_size - 1
        ends = [[-1] * (back - len(p)) + [*p[-back:]] for p in prompts]
        self.lookback = torch.tensor(ends, device=device).flip(1)  # nearest first
        self._draw(rt.model(rt.context(build(works, rt.config, device))).logits)

    @torch.inference_mode()
    def step(self) -> None:
        """The next token of every sequence."""
        f, p = self.frame, self.positions
        rows = RowSet(p, f.seq, f.row_set.first, p)
        batch = replace(
            f,
            ids=self.output[-1],
            positions=p,
            length=p,
            row_set=rows,
            lookback=self.lookback,
            reach=f.reach + len(self.output) - 1,
        )
        self._draw(self.rt.model(self.rt.context(batch)).logits)
        self.positions = p + 1
        self.lookback = torch.cat([self.output[-2][:, None], self.lookback[:, :-1]], 1)

    def _draw(self, logits: Tensor) -> None:
        keys = RowKeys(self.seeds, torch.full_like(self.seeds, len(self.output)))
        law = self.rt.sampler.distribution(logits, self.params, None)
        self.output.append(self.rt.sampler.draw(law, keys).tokens)

    @property
    def tokens(self) -> list[list[int]]:
        """What each sequence has so far."""
        return torch.stack(self.output, 1).tolist()

    def close(self) -> None:
        """Give pages and slots back."""
        for pages in self.pages:
            self.rt.pages.give(pages)
        self.rt.states.give(self.slots)
        self.pages, self.slots = [], []
