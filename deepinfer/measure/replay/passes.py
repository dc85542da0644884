"""Teacher-forced passes of one text under many replay plans, with what they have in common run
once.

Without a cache a forward sees the step's own rows alone, so a text that is run whole, with a plan's
cuts and floors, has the numbers of prefill and decode by that plan. Up to the first layer that a
plan touches its pass is the exact one: `Passage` keeps the rows that enter each such layer, and a
plan runs from there on, over the rows it keeps. Plans that start behind a prefix hit read block KV
out of pages; `behind_hit` runs them through the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from deepinfer.engine.runtime import Runtime
from deepinfer.engine.step.batch import Work, build
from deepinfer.slots.protocols import ReplayPlan, Rows, RowSet


@dataclass(frozen=True)
class Pass:
    """What one pass over a text of `prompt` and more ids has left.

    logits: [c, v] of the last prompt row and those behind it. features: [k, f] drafter features of
    the rows that reach the end, the first of them at position `first`. keys: layer -> (position of
    the first, [k, d] window keys as a record keeps them). ran: layer -> rows that ran past its
    attention, in this pass itself.
    """

    logits: Tensor
    features: Tensor
    first: int
    keys: dict[int, tuple[int, Tensor]]
    ran: dict[int, int]

    @property
    def rows_x_layers(self) -> int:
        return sum(self.ran.values())


@dataclass
class Watch:
    """A tap that keeps window keys and counts the rows of every backbone layer."""

    keys: dict[int, list[tuple[Tensor, Tensor]]] = field(default_factory=dict)
    ran: dict[int, int] = field(default_factory=dict)

    def __call__(self, name: str, x: Tensor, rows: RowSet) -> Tensor:
        stack, _, rest = name.partition(".")
        layer, _, what = rest.partition(".")
        if stack == "layers" and what == "attn.window_keys":
            self.keys.setdefault(int(layer), []).append((rows.positions, x))
        elif stack == "layers" and what == "ffn.in":
            self.ran[int(layer)] = self.ran.get(int(layer), 0) + x.shape[0]
        return x

    def found(self) -> dict[int, tuple[int, Tensor]]:
        """Pass.keys; the rows of a layer are one run of positions, also over several chunks."""
        out = {}
        for layer, parts in self.keys.items():
            parts = [p for p in parts if len(p[1])]
            out[layer] = (int(parts[0][0][0]), torch.cat([x for _, x in parts]))
        return out


def first_layer(plan: ReplayPlan) -> int | None:
    """The first layer that a plan of a whole prompt makes different; None where none is."""
    touched = (i for i, (r, f) in enumerate(zip(plan.rows_from, plan.floor)) if r or f)
    return next(touched, None)


class Passage:
    """The exact pass over ids, and from it the pass by any plan that starts at position 0.

    layers: where rows are kept for plans: those plans' `first_layer`. ids: prompt and continuation;
    its last id is fed too, so leave off one that nothing follows.
    """

    def __init__(self, rt: Runtime, ids: list[int], prompt: int, layers: set[int]) -> None:
        self.rt, self.ids, self.prompt = rt, ids, prompt
        self._entering: dict[int, Rows] = {}
        self.exact = self._whole(layers)

    def _whole(self, layers: set[int]) -> Pass:
        watch = Watch()
        ctx = self._context(None, watch)
        rows, model = self.rt.model.first_rows(ctx.batch), self.rt.model
        at = 0
        for layer in sorted(layers):
            rows = model.run(rows, ctx, at, layer)
            self._entering[layer] = rows
            at = layer
        return self._done(model.run(rows, ctx, at), ctx, watch)

    def by(self, plan: ReplayPlan) -> Pass:
        """The pass by a plan; the exact one itself where the plan drops and hides nothing."""
        if plan.start or plan.write_from:
            raise ValueError(f"a plan from {plan.start} reads block KV of pages: use behind_hit")
        first = first_layer(plan)
        if first is None:
            return replace(self.exact, ran={})
        watch = Watch()
        ctx = self._context(plan, watch)
        return self._done(self.rt.model.run(self._entering[first], ctx, first), ctx, watch)

    def _context(self, plan: ReplayPlan | None, watch: Watch):
        """A context without a cache, whose logits are those of the continuation's rows."""
        rt, wanted = self.rt, len(self.ids) - self.prompt + 1
        batch = build([Work(self.ids, plan=plan, logits="all")], rt.config, rt.model.device)
        batch = replace(batch, logit_rows=batch.logit_rows[-wanted:])
        return replace(rt.context(batch, watch), cache=None)

    def _done(self, rows: Rows, ctx, watch: Watch) -> Pass:
        return Pass(
            self.rt.model.logits(rows, ctx),
            joined(rows),
            int(rows.set.positions[0]),
            watch.found(),
            watch.ran,
        )


def joined(rows: Rows) -> Tensor:
    """[t, f] the features of all target layers; f = 0 for a model without a drafter."""
    return (
        torch.cat(rows.features, -1) if rows.features else rows.streams.new_zeros(rows.set.count, 0)
    )


# ------------------------------------------------------------------------------------ behind a hit


@contextmanager
def prefix_pages(rt: Runtime, ids: list[int]) -> Iterator[list[int]]:
    """Pages with the exact block KV of ids (whole pages of them). Its window keys lie in a state
    slot that is held as well, so that no later pass gets it."""
    pages, (slot,) = rt.pages.take(len(ids) // rt.limits.page_size), rt.states.take(1)
    try:
        for _ in _chunks(rt, ids, 0, len(ids), pages, slot, None, None):
            pass
        yield pages
    finally:
        rt.pages.give(pages)
        rt.states.give([slot])


def behind_hit(rt: Runtime, ids: list[int], prompt: int, plan: ReplayPlan, held: list[int]) -> Pass:
    """The pass by a plan behind a hit, through the cache. held: pages of exact block KV.

    Raises ValueError where plan.write_from is inside a page, or past the pages held.
    """
    size = rt.limits.page_size
    whole, rest = divmod(plan.write_from, size)
    if rest or whole > len(held):
        raise ValueError(
            f"write_from {plan.write_from}: {len(held)} pages of {size} tokens are held, and a "
            "hit is adopted in whole pages"
        )
    own = rt.pages.take(-(-len(ids) // size) - whole)
    try:
        return over_pages(rt, ids, prompt, plan, [*held[:whole], *own])
    finally:
        rt.pages.give(own)


def over_pages(
    rt: Runtime, ids: list[int], prompt: int, plan: ReplayPlan, table: list[int]
) -> Pass:
    """The pass by a plan over the pages of a table: it reads those below plan.write_from and writes
    the others, where a later pass finds its block KV. Its window keys are in no later pass."""
    (slot,), watch, parts = rt.states.take(1), Watch(), []
    try:
        for start, stop in ((plan.start, prompt), (prompt, len(ids))):
            parts += _chunks(rt, ids, start, stop, table, slot, plan, watch)
    finally:
        rt.states.give([slot])
    logits = torch.cat([x for x, _ in parts])[-(len(ids) - prompt + 1) :]
    alive = [rows for _, rows in parts if rows.set.count]
    features = torch.cat([joined(rows) for rows in alive])
    return Pass(logits, features, int(alive[0].set.positions[0]), watch.found(), watch.ran)


def _chunks(rt: Runtime, ids, start: int, stop: int, pages, slot: int, plan, watch: Watch | None):
    """(logits, rows) of each step over ids[start:stop]."""
    back = rt.config.engram_max_ngram_size - 1
    for at in range(start, stop, rt.limits.rows):
        part = ids[at : min(at + rt.limits.rows, stop)]
        work = Work(
            part, at, ids[max(at - back, 0) : at], pages, slot, plan, "all" if watch else "none"
        )
        out = rt.model(rt.context(build([work], rt.config, rt.model.device), watch))
        yield out.logits, out.rows
