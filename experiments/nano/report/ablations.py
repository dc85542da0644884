"""What each mechanism is worth at inference: the stored model with one thing taken away.

Nothing is retrained, so a figure says what the trained model leans on, not what a model without the
mechanism could learn. Each removal below opens an engine in which it holds and puts everything back
on exit; the control is the same engine untouched, on the same tokens and path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from deepinfer import rng
from deepinfer.engine.engine import Engine
from deepinfer.slots.attention import CSA2, Selected
from deepinfer.slots.protocols import AttnPlan, IndexQuery, LayerInfo
from experiments.nano.report.findings import Finding
from experiments.nano.report.intervals import aligned, change, over_modules, verdict
from experiments.nano.report.study import Study
from experiments.nano.report.texts import Scored, totals

Opened = AbstractContextManager[Engine]
NOTHING = 0.01  # percent: what rounding may move from run to run, by where memory lies


# -------------------------------------------------------------------- three ways to take away


@contextmanager
def weights_set(eng: Engine, values: dict[str, float]) -> Iterator[Engine]:
    """The engine with whole weights, or parts of them, set to a value. Names are parameter names,
    `name[a:]` the rows from a on."""
    parts = dict(eng.model.named_parameters())
    kept = []
    with torch.no_grad():
        for name, value in values.items():
            name, _, first = name.partition("[")
            x = parts[name][int(first.removesuffix(":]") or 0) if first else 0 :]
            kept.append((x, x.clone()))
            x.fill_(value)
    try:
        yield eng
    finally:
        with torch.no_grad():
            for x, before in kept:
                x.copy_(before)


@contextmanager
def values_edited(eng: Engine, *names: str, edit: Callable[[Tensor], Tensor]) -> Iterator[Engine]:
    """The engine with traced values replaced as they pass; nothing is recorded."""

    def nothing(at) -> Tensor:
        return torch.zeros_like(at.position, dtype=torch.bool)

    with eng.trace(*names, edit=lambda x, at: edit(x), keep=nothing):
        yield eng


@contextmanager
def attention_of(eng: Engine, attention: CSA2) -> Iterator[Engine]:
    """An engine over the same weights with another attention slot."""
    with eng.with_(attention=attention) as other:
        yield other


# ------------------------------------------------------------------- attention with a part less


class NoEntries(CSA2):
    """The window alone: no layer looks at a compressed entry."""

    exact: ClassVar[bool] = False

    def attend(self, layer, q, kv, selected, plan) -> Tensor:
        return super().attend(layer, q, kv, None, plan)


class AllBlocks(CSA2):
    """The candidate restriction lifted: later index layers pick among all visible entries."""

    exact: ClassVar[bool] = False

    def select(
        self, layer: LayerInfo, index: IndexQuery, kv, plan: AttnPlan, carried: Selected | None
    ) -> Selected:
        return super().select(replace(layer, candidate_source=False), index, kv, plan, None)


class NewestBlocks(CSA2):
    """Candidates that know nothing: the newest visible blocks instead of the best-scored ones."""

    exact: ClassVar[bool] = False

    def select(
        self, layer: LayerInfo, index: IndexQuery, kv, plan: AttnPlan, carried: Selected | None
    ) -> Selected:
        picked = super().select(layer, index, kv, plan, carried)
        if not layer.candidate_source or picked.candidates is None:
            return picked
        newest = plan.visible[layer.ratio] - 1
        last = newest.div(layer.candidate_block_size, rounding_mode="floor")
        back = torch.arange(picked.candidates.shape[1], device=last.device)
        return replace(picked, candidates=(last[:, None] - back).clamp(min=-1))


class RandomPicks(CSA2):
    """An indexer that knows nothing: as many visible entries, drawn at random. What a row gets is a
    function of its layer and position alone."""

    exact: ClassVar[bool] = False

    def select(
        self, layer: LayerInfo, index: IndexQuery, kv, plan: AttnPlan, carried: Selected | None
    ) -> Selected:
        n, visible = plan.reach[layer.ratio], plan.visible[layer.ratio]
        scores = random_scores(layer.index, plan.queries.positions, n)
        hidden = torch.arange(n, device=visible.device) >= visible[:, None]
        k = min(self.topk or layer.top_k, n)
        return Selected(layer.ops.topk(scores.masked_fill(hidden, -torch.inf), k))


def random_scores(layer: int, positions: Tensor, n: int) -> Tensor:
    """[t, n] numbers in [0, 1): one word a row and one an entry, from the counter-based generator,
    mixed by a multiplication and two shifts (a full generator for t * n would take minutes)."""
    seed = torch.full_like(positions, layer)
    row = rng.words(seed, positions, rng.Purpose.DRAW, 1)
    entries = torch.arange(n, device=positions.device)
    entry = rng.words(torch.full_like(entries, layer), entries, rng.Purpose.RESIDUAL, 1)[:, 0]
    x = row ^ entry
    for _ in range(2):
        x = ((x ^ (x >> 16)) * 0x45D9F3B) & 0xFFFFFFFF
    return (x ^ (x >> 16)).float() * 2.0**-32


# ----------------------------------------------------------------------------------- removals


@dataclass(frozen=True)
class Removal:
    """what: goes; how: it is done; open: engine -> context manager of the engine without it."""

    what: str
    how: str
    open: Callable[[Engine], Opened]


def removals(eng: Engine) -> list[Removal]:
    """Everything that is taken away from the backbone, one at a time."""
    c = eng.config
    layers = range(c.num_hidden_layers)
    value = f"[{c.hc_mult * c.hidden_size}:]"  # rows of wkv behind the keys: what is added

    def engram(ids: Sequence[int]) -> Callable[[Engine], Opened]:
        return lambda e: weights_set(e, {f"layers.{i}.engram.wkv.weight{value}": 0 for i in ids})

    def scales(e: Engine) -> Opened:
        sites = [f"layers.{i}.hc_{site}_scale" for i in layers for site in ("attn", "ffn")]
        return weights_set(e, dict.fromkeys(sites, 0.0))

    def identity(comb: Tensor) -> Tensor:
        return torch.eye(comb.shape[-1]).to(comb).expand_as(comb)

    def mixing(e: Engine) -> Opened:
        return values_edited(e, "layers.*.attn.comb", "layers.*.ffn.comb", edit=identity)

    def sinks(e: Engine) -> Opened:
        return weights_set(e, {f"layers.{i}.attn.attn_sink": -1e4 for i in layers})

    found = []
    if c.engram_layer_ids:
        found.append(Removal("Engram", "its values are zero", engram(c.engram_layer_ids)))
    for i in c.engram_layer_ids if len(c.engram_layer_ids) > 1 else ():
        found.append(Removal(f"Engram of layer {i}", "its values are zero", engram([i])))
    return [
        *found,
        Removal("compressed entries", "windows alone", lambda e: attention_of(e, NoEntries())),
        Removal(
            "indexer",
            f"{c.index_topk} random visible entries",
            lambda e: attention_of(e, RandomPicks()),
        ),
        Removal("candidate limit", "any visible entry", lambda e: attention_of(e, AllBlocks())),
        Removal("candidate choice", "newest blocks", lambda e: attention_of(e, NewestBlocks())),
        Removal("sinks", "their logits are -10,000", sinks),
        Removal("mHC mixing", "the matrix is the identity", mixing),
        Removal("mHC input dependence", "scales are 0: base only", scales),
    ]


def markov(eng: Engine) -> Opened:
    """The drafter without its Markov head: each draft ignores the token before it."""
    last = eng.config.num_nextn_predict_layers - 1
    return weights_set(eng, {f"mtp.{last}.markov_head.head.weight": 0.0})


# ------------------------------------------------------------------------------------- section


def findings(study: Study) -> Iterator[Finding]:
    part, size, eng = study.part, study.sizes.part, study.stored
    control, rows = study.part_scored, []
    for removal in removals(eng):
        with removal.open(eng) as without:
            rows.append(_row(removal, control, study.score(without.logits, part, size)))
    again = Removal("nothing", "the same run again", nullcontext)
    rows.append(_row(again, control, study.score(eng.logits, part, size)))
    if abs(rows[-1]["change_percent"]) > NOTHING:
        raise AssertionError(
            f"after the removals the engine is {rows[-1]['change_percent']} % from its control: "
            "something was not put back"
        )
    says = (
        "What each mechanism is worth at inference: more bits, in %, with it taken away from the "
        f"stored model, on the first {size} tokens of each file "
        f"({sum(len(s.nats) for s in control):,} tokens), the same tokens and path for both. low, "
        "high: paired 95 % over modules; where 0 is inside, nothing was shown. The last row is the "
        "noise of the measurement itself."
    )
    yield Finding("ablations", says, study.table(rows, "held-out change without a mechanism"))


def _row(removal: Removal, control: Sequence[Scored], without: Sequence[Scored]) -> dict:
    e = over_modules(aligned(totals(control), totals(without)), change)
    return dict(
        removed=removal.what,
        how=removal.how,
        change_percent=e.value,
        low=e.low,
        high=e.high,
        says=verdict(e),
    )
