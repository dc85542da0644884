"""replay_error: what a replay policy changes in the tokens behind a prompt, and what it saves.

    report = di.measure.replay_error(eng, texts, [80, 128, 256], prompt=1024, continuation=64)
    report                      # a row a policy: errors with intervals, rows x layers, FLOPs
    report.plot_error()

Teacher-forced: the first `prompt` ids of a text are the prompt, the next `continuation` ids are
what follows, and the rows measured are those that predict them. The reference is the policy `exact`
with the same weights and slots. All policies share the layers in front of their cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from deepinfer.engine.provenance import of_engine
from deepinfer.measure.distributions import dist_error
from deepinfer.measure.replay.cost import prefill_cost
from deepinfer.measure.replay.drafts import accepted_lengths
from deepinfer.measure.replay.passes import Pass, Passage, behind_hit, first_layer, prefix_pages
from deepinfer.measure.replay.report import ReplayReport
from deepinfer.measure.replay.texts import Texts, check_count
from deepinfer.measure.replay.windows import window_errors
from deepinfer.slots.protocols import Prompt, Replay, ReplayPlan

if TYPE_CHECKING:
    from deepinfer.engine.engine import Engine, Prompts
    from deepinfer.engine.runtime import Runtime

Policy = int | str | Replay  # a keep of Bounded, a name of the slot, a policy
Keeps = Policy | Iterable[Policy] | Mapping[str, str | Replay]


@torch.no_grad()
def replay_error(
    eng: Engine,
    texts: Prompts,
    keeps: Keeps,
    prompt: int,
    continuation: int,
    *,
    groups: Sequence[Any] | None = None,
    hit: int = 0,
    drafter: bool = True,
    apart: int = 4,
) -> ReplayReport:
    """Errors and costs of replay policies on the tokens behind a prompt.

    eng: its own replay policy does not matter. prompt: the first tokens of each text, prefilled by
    each policy; continuation: the tokens behind them, which the text itself gives and whose
    distributions are compared. keeps: one policy or several, each a keep of Bounded(keep=...), an
    object or a name of the replay slot; or a dict of them, by the names that you give. groups: one
    label a text (the module it comes from, say), over which intervals are taken; default: the
    module of a text of di.data (a slice of one has lost it), each other text its own. hit: tokens
    of exact block KV, in whole pages, that are available without state KV, as after a prefix hit.
    drafter:
    expected accepted lengths too, of draft blocks every `apart` tokens (models with a drafter). A
    text is one step: its rows are not chunked, whatever max_num_batched_tokens says.

    Raises ValueError for a keep that the model refuses, a text that is too short, a plan that
    breaks a law; ArithmeticError, naming policy, text and position, for logits that are not finite.
    """
    found = Texts.of(eng, texts, prompt, continuation, groups, "replay_error")
    check_count("replay_error", "apart", apart, "tokens between draft blocks")
    check_hit(hit, prompt)
    engines = policies(eng, keeps, "replay_error")
    with measuring_engine(eng, prompt + continuation, hit) as own:
        rt = own.runtime
        check_pages(hit, prompt, rt.limits.page_size)
        plans = {name: plan_of(e, name, prompt, hit) for name, e in engines.items()}
        rows = Rows(found, plans, rt, apart if drafter else 0)
        for i in counted(len(found), "replay error"):
            rows.measure(i, hit)
        facts: dict[str, Any] = of_engine(eng) | found.facts | dict(hit=hit, apart=apart)
        facts["policies"] = {name: repr(e.slots["replay"]) for name, e in engines.items()}
        facts["slots"] = facts["slots"] | {"replay": "the policies'"}
        return ReplayReport.of(rows.passages, rows.tokens, rows.windows, rows.plans(), facts)


# ----------------------------------------------------------------------------- policies and plans


def policies(eng: Engine, keeps: Keeps, who: str) -> dict[str, Engine]:
    """An engine for every policy; nothing runs in them, they have checked the policy. keeps: a dict
    name -> policy, or one or more keeps, policy objects and names of the slot. who: signs the
    errors."""
    if isinstance(keeps, Mapping):
        items = [(str(name), policy) for name, policy in keeps.items()]
    else:
        alone = isinstance(keeps, str) or not isinstance(keeps, Iterable)
        items = [named_policy(value, who) for value in ([keeps] if alone else keeps)]
    if not items:
        raise ValueError(f"{who}: no keeps: give at least one, or policies by name")
    names = [name for name, _ in items]
    if "exact" in names:
        raise ValueError(f"{who}: the name 'exact' means the reference: give another")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{who}: keeps: {', '.join(map(repr, twice))} is given twice")
    return {name: eng.with_(replay=policy) for name, policy in items}


def named_policy(value: Any, who: str) -> tuple[str, Any]:
    """(name, policy) of a keep, a name of the slot, or a policy object or class."""
    from deepinfer.slots.replay import Bounded

    if isinstance(value, int) and not isinstance(value, bool):
        return f"keep {value}", Bounded(keep=value)
    if isinstance(value, str):
        return value, value
    if callable(getattr(value, "plan", None)):
        return (value.__name__ if isinstance(value, type) else repr(value)), value
    raise ValueError(
        f"{who}: keeps={value!r}: want a number of tokens, a policy, a name of the replay slot, "
        "or a dict of policies by name"
    )


def counted(total: int, what: str) -> Iterator[int]:
    """0..total-1, with a bar where a person watches."""
    from deepinfer.display.progress import bar

    with bar(total, what, unit="text") as shown:
        for i in range(total):
            yield i
            shown.update()


def plan_of(
    engine: Engine, name: str, prompt: int, hit: int, who: str = "replay_error"
) -> ReplayPlan:
    """The policy's plan. ValueError, TypeError naming the policy where it is none or breaks a
    distribution."""
    asked, c = Prompt(prompt, hit), engine.config
    plan = engine._started["replay"].plan(asked, c)
    if not isinstance(plan, ReplayPlan):
        raise TypeError(f"{who}: policy {name!r} planned {plan!r}: want a ReplayPlan")
    try:
        return plan.validate(asked, c.num_hidden_layers, c.kv_source_layer_ids)
    except ValueError as error:
        raise ValueError(f"{who}: policy {name!r}: {error}") from None


def measuring_engine(eng: Engine, length: int, hit: int) -> Engine:
    """An engine of the measurement's own, so that eng's cache and counters stay as they are: room
    for one text of `length` ids, and for the pages of a hit beside them."""
    page = eng.settings.page_size or eng.config.sliding_window
    return eng.with_(
        replay="exact",
        max_model_len=length,
        max_num_seqs=1,
        prefix_cache=False,
        num_snapshots=None,
        num_pages=-(-length // page) + hit // page + 1,
    )


def check_hit(hit: int, prompt: int, who: str = "replay_error") -> None:
    if isinstance(hit, bool) or not isinstance(hit, int) or not 0 <= hit < prompt:
        raise ValueError(
            f"{who}: hit={hit!r}: tokens of block KV found, whole pages below prompt={prompt}"
        )


def check_pages(hit: int, prompt: int, page: int) -> None:
    if hit % page:
        raise ValueError(
            f"replay_error: hit={hit!r}: tokens of block KV found, a multiple of the page size "
            f"({page}) below prompt={prompt}"
        )


# ------------------------------------------------------------------------------------- measuring


class Rows:
    """The rows of all tables, filled text by text."""

    def __init__(self, texts: Texts, plans: dict[str, ReplayPlan], rt: Runtime, apart: int) -> None:
        self.texts, self.by_name, self.rt, self.apart = texts, plans, rt, apart
        self.shape = {name: shape_of(plan, texts.prompt, rt.config) for name, plan in plans.items()}
        self.passages: list[dict[str, object]] = []
        self.tokens: list[dict[str, object]] = []
        self.windows: list[dict[str, object]] = []
        self.ran = dict.fromkeys(["exact", *plans], 0)
        self._cached = {n for n, p in plans.items() if p.start or p.write_from}
        self._layers = {
            at
            for n, p in plans.items()
            if n not in self._cached and (at := first_layer(p)) is not None
        }

    def measure(self, i: int, hit: int) -> None:
        """Every policy on text i."""
        rt, texts, ids = self.rt, self.texts, self.texts.fed(i)
        passage = Passage(rt, ids, texts.prompt, self._layers)
        exact = passage.exact
        self.ran["exact"] += exact.rows_x_layers
        check_finite(exact.logits, "exact", i, texts.prompt)
        lengths = self._lengths(exact, ids)
        with prefix_pages(rt, ids[:hit]) if self._cached else nullcontext([]) as held:
            for name, plan in self.by_name.items():
                if name in self._cached:
                    done = behind_hit(rt, ids, texts.prompt, plan, held)
                else:
                    done = passage.by(plan)
                self.ran[name] += done.rows_x_layers
                check_finite(done.logits, name, i, texts.prompt)
                whole = done.logits is exact.logits
                self._keep(
                    name, i, exact, done, lengths, lengths if whole else self._lengths(done, ids)
                )

    def _lengths(self, done: Pass, ids: list[int]) -> Tensor:
        if not self.apart:
            return torch.zeros(0)
        return accepted_lengths(self.rt, done, ids, self.texts.prompt, self.apart)

    def _keep(
        self, name: str, i: int, exact: Pass, done: Pass, before: Tensor, after: Tensor
    ) -> None:
        texts, plan = self.texts, self.by_name[name]
        label = texts.label(i) | dict(policy=name) | self.shape[name]
        windows: list[dict[str, Any]] = [
            label | row
            for row in window_errors(
                exact,
                done,
                plan,
                0 if name in self._cached else first_layer(plan) or 0,
                len(texts.fed(i)),
                self.rt.config,
            )
        ]
        self.windows += windows
        norm2 = sum(w["norm2"] for w in windows)
        rel_l2 = (sum(w["error2"] for w in windows) / norm2) ** 0.5 if norm2 else 0.0
        rows, tokens = law_rows(label, exact.logits, done.logits, texts, i)
        self.tokens += tokens
        lengths: dict[str, object] = dict(blocks=len(after), length_exact=None, length=None)
        if len(after):
            lengths |= dict(length_exact=float(before.mean()), length=float(after.mean()))
        self.passages.append(rows | lengths | dict(window_rel_l2=rel_l2))

    def plans(self) -> list[dict[str, object]]:
        """One row a policy: what its plan costs, and what this measurement ran for it."""
        config, prompt, n = self.rt.config, self.texts.prompt, len(self.texts)
        none = (0,) * config.num_layers
        everything = ReplayPlan(0, 0, none, none, none, why="all rows")
        whole = prefill_cost(everything, prompt, config)
        behind = (self.texts.continuation - 1) * config.num_layers
        rows = []
        for name, plan in {"exact": everything, **self.by_name}.items():
            cost = prefill_cost(plan, prompt, config)
            rows.append(
                dict(policy=name, **shape_of(plan, prompt, config), why=plan.why)
                | dict(rows_x_layers=cost.rows_x_layers, flops=cost.total)
                | dict(rows_share=cost.rows_x_layers / whole.rows_x_layers)
                | dict(flops_share=cost.total / whole.total)
                | {f"flops_{op}": x for op, x in cost.flops.items()}
                | dict(ran=self.ran[name], alone=n * (cost.rows_x_layers + behind))
            )
        return rows


def shape_of(plan: ReplayPlan, prompt: int, config: Any) -> dict[str, object]:
    """How a plan cuts. keep: prompt rows above the first cut (all of them where there is none);
    cut_layer: where; cut_layers: n, those whose window is cut; windows: keep / W; depth:
    (keep - W) / ((n - 1)(W - 1)), 1 at the exact length (None for n < 2)."""
    first, window = first_layer(plan), config.sliding_window
    cut = 0 if first is None else max(plan.start, plan.floor[first], plan.rows_from[first])
    keep = prompt - cut
    n = sum(f > 0 for f in plan.floor)
    depth = (keep - window) / ((n - 1) * (window - 1)) if n > 1 else None
    return dict(
        keep=keep,
        windows=keep / window,
        depth=depth,
        cut_layer=first,
        cut_layers=n,
        start=plan.start,
    )


def law_rows(
    label: dict[str, object], p: Tensor, q: Tensor, texts: Texts, i: int
) -> tuple[dict[str, object], list[dict[str, object]]]:
    """(the row of the passage, a row a token) of logits p and q [c, v] of text i."""
    error = dist_error(p, q, texts.next(i))
    names = ("kl", "agreement", "dlogprob", "nats_p", "nats_q")
    columns = {name: getattr(error, name).tolist() for name in names}
    brief = {k: label[k] for k in ("text", "group", "policy")}
    tokens = [
        brief | dict(position=texts.prompt + k) | {name: columns[name][k] for name in names}
        for k in range(texts.continuation)
    ]
    whole = label | dict(ids=texts.digest(i), rows=texts.continuation)
    return whole | error.summary(), tokens


def check_finite(
    logits: Tensor, name: str, text: int, prompt: int, who: str = "replay_error"
) -> None:
    bad = ~logits.isfinite().all(-1)
    if bad.any():
        at = prompt - 1 + int(bad.nonzero()[0])
        raise ArithmeticError(
            f"{who}: policy {name!r}, text {text}, position {at}: the logits are not finite"
        )


# --------------------------------------------------------------------------- floors, other engines


@torch.no_grad()
def logits_error(
    eng: Engine,
    others: Mapping[str, Any],
    texts: Prompts,
    prompt: int,
    continuation: int,
    *,
    groups: Sequence[Any] | None = None,
) -> ReplayReport:
    """The same meters of the same rows between eng and other engines: floors and baselines.

    others: by name, an Engine, or a function (ids, prompt) -> [t, v] logits of all rows, such as
    lambda ids, prompt: eng.logits(ids, prompt, chunks=[...]). Window keys, drafts and costs are not
    compared. Raises as `replay_error`, and ValueError where vocabularies differ.
    """
    from deepinfer.measure.compare import named

    engines = {n: x for n, x in others.items() if not callable(x)}
    laws: dict[str, Callable[..., Tensor]] = {
        n: engines[n].logits if n in engines else x for n, x in others.items()
    }
    if not others:
        raise ValueError("logits_error: no others: give engines or functions by name")
    if engines:
        named(eng, engines)
    found = Texts.of(eng, texts, prompt, continuation, groups, "logits_error")
    passages, tokens = [], []
    for i in counted(len(found), "logits error"):
        ids = found.fed(i)
        p = eng.logits(ids, prompt=prompt)[prompt - 1 :]
        check_finite(p, "the first engine", i, prompt, "logits_error")
        for name, other in laws.items():
            q = torch.as_tensor(other(ids, prompt))[prompt - 1 :]
            check_finite(q, name, i, prompt, "logits_error")
            row, rows = law_rows(found.label(i) | dict(policy=name), p, q, found, i)
            passages.append(row)
            tokens += rows
    facts = of_engine(eng) | found.facts
    facts["policies"] = {
        n: _changes(eng, engines[n]) if n in engines else "a function" for n in others
    }
    return ReplayReport.of(passages, tokens, [], [], facts)


def _changes(eng: Engine, other: Engine) -> str:
    from deepinfer.display.engine import changes

    return changes(eng, other)
