"""A conversation whose every turn begins behind pages that the turns before it left.

Turn k has a prompt of first + k * step tokens: all before, and a message. The `continuation` tokens behind
it are the reply; they are fed as decode rows, and they are what is measured. The next turn takes over the
whole pages of all that, up to the limit that the engine sets (window + backtracking below its prompt's
end), without their state KV: no snapshot is kept.

    chained   the pages come from the policy's own turns: what it gets wrong in them adds up
    fresh     the pages are exact ones: the error of one turn
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from deepinfer.cache.addressing import page_end
from deepinfer.engine.engine import Engine
from deepinfer.engine.provenance import of_engine
from deepinfer.engine.runtime import Runtime
from deepinfer.measure.replay.error import check_finite, law_rows
from deepinfer.measure.replay.passes import Passage, behind_hit, over_pages, prefix_pages
from deepinfer.measure.replay.report import ReplayReport
from deepinfer.measure.replay.texts import Texts
from deepinfer.slots.protocols import Prompt, ReplayPlan
from experiments.replay_error.floors import engines, in_chunks
from experiments.replay_error.passages import Passages


@dataclass(frozen=True)
class Turns:
    """prompts: length of each turn's prompt; reply: tokens behind each."""

    prompts: tuple[int, ...]
    reply: int

    @staticmethod
    def of(first: int, turns: int, step: int, reply: int) -> Turns:
        if reply > step:
            raise ValueError(f"a reply of {reply} tokens does not fit in a turn of {step}")
        return Turns(tuple(first + k * step for k in range(turns)), reply)

    @property
    def tokens(self) -> int:
        return self.prompts[-1] + self.reply

    def stored(self, turn: int) -> int:
        """Positions that a turn has written: the last token of its reply is not fed."""
        return self.prompts[turn] + self.reply - 1

    def hit(self, turn: int, rt: Runtime) -> int:
        """Tokens in whole pages that a turn finds."""
        if not turn:
            return 0
        found = min(self.prompts[turn] - rt.config.ring_length, self.stored(turn - 1))
        return page_end(found, rt.limits.page_size)


def chained(rt: Runtime, ids: list[int], turns: Turns, policy) -> Iterator[torch.Tensor]:
    """[reply, v] logits of each turn. Pages that it has filled stay for the next ones; as in the engine, one
    that is known is not replaced by a later turn's."""
    known: list[int] = []
    own: list[int] = []
    size = rt.limits.page_size
    try:
        for turn, prompt in enumerate(turns.prompts):
            stop = turns.stored(turn)
            plan = plan_of(policy, Prompt(prompt, turns.hit(turn, rt)), rt)
            whole = plan.write_from // size
            own = rt.pages.take(-(-stop // size) - whole)
            table = [*known[:whole], *own]
            yield over_pages(rt, ids[:stop], prompt, plan, table).logits
            filled = table[len(known) : stop // size]
            known += filled
            rt.pages.give([p for p in own if p not in filled])
            own = []
    finally:
        rt.pages.give([*known, *own])


def fresh(rt: Runtime, ids: list[int], turns: Turns, policy) -> Iterator[torch.Tensor]:
    """[reply, v] logits of each turn, behind pages of exact block KV."""
    last = turns.hit(len(turns.prompts) - 1, rt)
    with prefix_pages(rt, ids[:last]) as held:
        for turn, prompt in enumerate(turns.prompts):
            plan = plan_of(policy, Prompt(prompt, turns.hit(turn, rt)), rt)
            yield behind_hit(rt, ids[: turns.stored(turn)], prompt, plan, held).logits


def plan_of(policy, prompt: Prompt, rt: Runtime) -> ReplayPlan:
    c = rt.config
    return policy.plan(prompt, c).validate(prompt, c.num_hidden_layers, c.kv_source_layer_ids)


def turn_engine(eng: Engine, turns: Turns) -> Engine:
    """An engine with pages for a conversation, and for its exact pages beside it."""
    page = eng.settings.page_size or eng.config.sliding_window
    pages = -(-turns.tokens // page)
    return eng.with_(
        replay="exact",
        max_model_len=turns.tokens,
        max_num_seqs=1,
        prefix_cache=False,
        num_snapshots=None,
        num_pages=3 * pages + 2,
    )


@torch.no_grad()
def turn_error(
    eng: Engine,
    texts: Passages,
    turns: Turns,
    policies: dict[str, tuple[object, bool]],
    names: Sequence[str] = (),
) -> ReplayReport:
    """The meters of `replay_error` for each turn. policies: by name, the policy and whether its turns are
    chained; names: floors, whose pass is over the whole conversation. Policies are named "NAME turn K" in the
    report."""
    sets = [
        Texts.of(
            eng, [x[: p + turns.reply] for x in texts.ids], p, turns.reply, texts.modules, "turns"
        )
        for p in turns.prompts
    ]
    passages, tokens = [], []
    with turn_engine(eng, turns) as own:
        rt = own.runtime
        around = {n: turn_engine(e, turns) for n, e in engines(eng, names).items()}
        for i in range(len(texts)):
            ids = list(texts.ids[i][: turns.tokens - 1])
            first = turns.prompts[0]
            exact = Passage(rt, ids, first, set()).exact.logits
            laws = {n: iter(_cut(_whole(e, ids, first), turns)) for n, e in around.items()}
            if "chunks" in names:
                whole = in_chunks(own, ids, turns.prompts[-1])[first - 1 :]
                laws["chunks"] = iter(_cut(whole, turns))
            for name, (policy, chain) in policies.items():
                laws[name] = (chained if chain else fresh)(rt, ids, turns, policy)
            for name, each in laws.items():
                for turn, (p, q) in enumerate(zip(_cut(exact, turns), each, strict=True)):
                    label = sets[turn].label(i) | dict(policy=f"{name} turn {turn}")
                    check_finite(q, label["policy"], i, turns.prompts[turn])
                    row, rows = law_rows(label, p, q, sets[turn], i)
                    passages.append(row)
                    tokens += rows
        for e in around.values():
            e.close()
    facts = of_engine(eng) | sets[-1].facts | dict(prompts=list(turns.prompts))
    facts["policies"] = {
        n: f"{p!r}, {'chained' if c else 'fresh'}" for n, (p, c) in policies.items()
    }
    return ReplayReport.of(passages, tokens, [], [], facts)


def _whole(eng: Engine, ids: list[int], first: int) -> torch.Tensor:
    return Passage(eng.runtime, ids, first, set()).exact.logits


def _cut(logits: torch.Tensor, turns: Turns) -> list[torch.Tensor]:
    """The rows of each turn's reply, of logits from the last row of the first prompt on."""
    first = turns.prompts[0]
    return [logits[p - first :][: turns.reply] for p in turns.prompts]
