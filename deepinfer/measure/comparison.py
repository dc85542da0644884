"""Comparison: what two engines' logits of the same rows say about each other, and its tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from deepinfer.engine.provenance import of_engine
from deepinfer.measure.bootstrap import SEED, Estimate, ratio
from deepinfer.tables.table import Table

if TYPE_CHECKING:
    from deepinfer.engine.engine import Engine
    from deepinfer.measure.compare import Clock

METRICS = ("mean_dlogit", "kl", "agreement")
PARTS = ("all", "prompt", "continuation")
ROWS_AT_ONCE = 64  # of [rows, vocabulary] in float64: 66 MB at the released vocabulary
COLUMNS = (
    "engine",
    "changes",
    "prompts",
    "rows",
    "dropped",
    "max_dlogit",
    *METRICS,
    "texts_differ",
    "first_diff",
    "margin",
    *(f"{m}_{end}" for m in METRICS for end in ("low", "high")),
)


@dataclass(frozen=True)
class Pair:
    """One prompt in two engines. values, of each of t rows, NaN where an engine dropped it:
    max_dlogit, mean_dlogit over the vocabulary, kl(a||b) in nats, agreement 0 or 1. top_a, top_b:
    [t]. prompt: tokens of the prompt; text_a, text_b: the continuations; first: output position of
    the first token that b chose otherwise; margin: a's logit of its own token there less b's."""

    prompt: int
    text_a: tuple[int, ...]
    text_b: tuple[int, ...]
    values: dict[str, Tensor]
    top_a: Tensor
    top_b: Tensor
    first: int | None
    margin: float | None

    @property
    def rows(self) -> int:
        return self.top_a.shape[0]

    @property
    def compared(self) -> Tensor:
        return ~self.values["kl"].isnan()

    def part(self, part: str) -> Tensor:
        """[t] rows of a part: those that chose the continuation, those before, or all."""
        chose = torch.arange(self.rows) >= self.rows - len(self.text_a)
        return {"all": torch.ones_like(chose), "prompt": ~chose, "continuation": chose}[part]

    def largest(self, rows: Tensor) -> float:
        """The largest difference of logits among some compared rows [t] bool."""
        return float(self.values["max_dlogit"][rows].max())

    def chosen_b(self, k: int) -> int:
        """The token b chose freely at output position k; -1 where its text had ended."""
        return self.text_b[k] if k < len(self.text_b) else -1


def pair(
    a: Tensor, b: Tensor, prompt: int, text_a: tuple[int, ...], text_b: tuple[int, ...]
) -> Pair:
    """What the two engines' logits [t, v] of one sequence say about each other."""
    parts: list[dict[str, Tensor]] = []
    for at in range(0, len(a), ROWS_AT_ONCE):
        x, y = (z[at : at + ROWS_AT_ONCE].detach().cpu().double() for z in (a, b))
        parts.append(row_values(x, y))
    whole = {name: torch.cat([p[name] for p in parts]) for name in parts[0]}
    first = next((k for k, (x, y) in enumerate(zip(text_a, [*text_b, -1])) if x != y), None)
    margin = None
    if first is not None and first < len(text_b):
        row = a[prompt - 1 + first].double()
        margin = float(row[text_a[first]] - row[text_b[first]])
    top_a, top_b = whole.pop("top_a"), whole.pop("top_b")
    return Pair(prompt, text_a, text_b, whole, top_a, top_b, first, margin)


def row_values(x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Per row of x and y [t, v] in float64; NaN where either row was dropped."""
    gone = x.isnan().any(-1) | y.isnan().any(-1)
    apart = (x - y).abs()
    p, q = x.log_softmax(-1), y.log_softmax(-1)
    top_a, top_b = x.argmax(-1), y.argmax(-1)
    values = {
        "max_dlogit": apart.amax(-1),
        "mean_dlogit": apart.mean(-1),
        "kl": (p.exp() * (p - q)).sum(-1).clamp(min=0),  # clamp keeps NaN
        "agreement": (top_a == top_b).double(),
    }
    out = {name: v.masked_fill(gone, torch.nan) for name, v in values.items()}
    return {**out, "top_a": top_a.masked_fill(gone, -1), "top_b": top_b.masked_fill(gone, -1)}


# -------------------------------------------------------------------------------------- result


class Comparison:
    """What `compare` measured. table(): one row an engine; per_prompt, per_token: what it sums up;
    difference(x, y): paired, between two engines of the dict; speed(): how fast each was here.

    dlogit: difference of logits; kl: of a's distribution from b's, KL(a||b) in nats at temperature
    1; agreement: share of rows with the same most likely token; first_diff: output position of the
    first token that b, running freely, chose otherwise; margin: a's logit of its own token there
    less that of b's (None where b's text had ended).
    """

    def __init__(
        self,
        a: Engine,
        engines: dict[str, Engine],
        prompts: tuple[tuple[int, ...], ...],
        pairs: dict[str, tuple[Pair, ...]],
        clocks: dict[str, Clock],
    ) -> None:
        from deepinfer.display.engine import changes

        self.prompts, self.pairs = prompts, pairs
        self.changes = {name: changes(a, engine) for name, engine in engines.items()}
        self.approximate = {
            name: tuple(engine.approximate_slots) for name, engine in {"a": a, **engines}.items()
        }
        self._tokenizer = a._shared.tokenizer
        self._clocks: list[dict[str, Any]] = [
            dict(
                engine=n,
                tokens=c.tokens,
                token_seconds=c.token_seconds,
                rows=c.rows,
                row_seconds=c.row_seconds,
            )
            for n, c in clocks.items()
        ]
        self._facts = of_engine(a) | dict(
            engines={name: of_engine(engine) for name, engine in engines.items()},
            changes=dict(self.changes),
            bootstrap_seed=SEED,
        )

    @property
    def names(self) -> tuple[str, ...]:
        """The engines compared with a."""
        return tuple(self.pairs)

    def table(self, rows: str = "all") -> Table:
        """One row an engine. rows: 'all', 'prompt' or 'continuation' (those that chose its tokens).

        <metric>_low and _high: 95 % bootstrap interval over prompts, None with fewer than 8.
        """
        if rows not in PARTS:
            raise ValueError(f"rows={rows!r}: {', '.join(map(repr, PARTS))}")
        title = f"compared with a, {rows} rows; kl in nats, low and high: 95 % over prompts"
        lines = [self._summary(name, pairs, rows) for name, pairs in self.pairs.items()]
        return Table(lines, COLUMNS, title=title, provenance=self._facts)

    def estimate(self, name: str, metric: str, rows: str = "all") -> Estimate:
        """A metric of one engine with its interval."""
        pairs = self._pairs(name)
        return ratio([(p.values[metric], p.compared & p.part(rows)) for p in pairs])

    def _summary(self, name: str, pairs: Sequence[Pair], rows: str) -> dict[str, Any]:
        masks = [p.part(rows) for p in pairs]
        kept = [p.compared & m for p, m in zip(pairs, masks, strict=True)]
        largest = [p.largest(k) for p, k in zip(pairs, kept, strict=True) if k.any()]
        out: dict[str, Any] = dict(
            engine=name,
            changes=self.changes[name],
            prompts=len(pairs),
            rows=sum(int(k.sum()) for k in kept),
            dropped=sum(int((m & ~k).sum()) for m, k in zip(masks, kept, strict=True)),
            max_dlogit=max(largest, default=None),
        )
        for metric in METRICS:
            e = self.estimate(name, metric, rows)
            out |= {metric: e.value, f"{metric}_low": e.low, f"{metric}_high": e.high}
        firsts = [p.first for p in pairs if p.first is not None]
        margins = [p.margin for p in pairs if p.margin is not None]
        out |= dict(texts_differ=len(firsts), first_diff=min(firsts, default=None))
        return out | dict(margin=max(margins, default=None))

    @property
    def per_prompt(self) -> Table:
        """One row an engine and prompt."""
        lines = [
            dict(
                engine=name,
                prompt=i,
                tokens=p.prompt,
                continuation=len(p.text_a),
                rows=int(p.compared.sum()),
                dropped=int((~p.compared).sum()),
                max_dlogit=p.largest(p.compared) if p.compared.any() else None,
                **{m: _nan_to_none(p.values[m].nanmean()) for m in METRICS},
                first_diff=p.first,
                says_a=None if p.first is None else self.text(p.text_a[p.first]),
                says_b=None if p.first is None else self.text(p.chosen_b(p.first)),
                margin=p.margin,
            )
            for name, pairs in self.pairs.items()
            for i, p in enumerate(pairs)
        ]
        return Table(lines, title="compared with a, by prompt", provenance=self._facts)

    @property
    def per_token(self) -> Table:
        """One row an engine, prompt and position; None where a policy dropped the row."""
        lines = []
        for name, pairs in self.pairs.items():
            for i, p in enumerate(pairs):
                columns = {m: v.tolist() for m, v in p.values.items()}
                chose = p.part("continuation").tolist()
                for t in range(p.rows):
                    row = dict(
                        engine=name,
                        prompt=i,
                        position=t,
                        part=PARTS[1 + chose[t]],
                        top_a=int(p.top_a[t]),
                        top_b=int(p.top_b[t]),
                    )
                    lines.append(
                        row | {m: None if v[t] != v[t] else v[t] for m, v in columns.items()}
                    )
        return Table(lines, title="compared with a, by token", provenance=self._facts)

    def difference(self, x: str, y: str, rows: str = "all") -> Table:
        """Engine x less engine y over the rows that both have: metric, x, y, difference, low, high.
        Paired: one resampling of the prompts for both."""
        lines = []
        for metric in METRICS:
            each = []
            for p, q in zip(self._pairs(x), self._pairs(y), strict=True):
                both = p.compared & q.compared & p.part(rows)
                each.append((p.values[metric], q.values[metric], both))
            apart = ratio([(u - v, m) for u, v, m in each])
            lines.append(
                dict(
                    metric=metric,
                    x=ratio([(u, m) for u, _, m in each]).value,
                    y=ratio([(v, m) for _, v, m in each]).value,
                    difference=apart.value,
                    low=apart.low,
                    high=apart.high,
                )
            )
        return Table(lines, title=f"x: {x}, y: {y}; paired over prompts", provenance=self._facts)

    def speed(self) -> Table:
        """Tokens/s of the greedy continuations, rows/s of the teacher-forced passes: one run each,
        on this machine and whatever else it was doing."""
        lines = []
        for c in self._clocks:
            row = {**c, "tokens_per_second": None, "rows_per_second": None}
            if c["token_seconds"]:
                row["tokens_per_second"] = c["tokens"] / c["token_seconds"]
            if c["row_seconds"]:
                row["rows_per_second"] = c["rows"] / c["row_seconds"]
            lines.append(row)
        return Table(lines, title="speed, one run each", provenance=self._facts)

    def text(self, token: int) -> str:
        """A token as text; its id where there is no tokenizer or it is special."""
        if token < 0:
            return "(ended)"
        said = (
            ""
            if self._tokenizer is None
            else self._tokenizer.decode([token], skip_special_tokens=False)
        )
        return said or f"<{token}>"

    def _pairs(self, name: str) -> tuple[Pair, ...]:
        if name not in self.pairs:
            raise KeyError(f"no engine {name!r} was compared: {', '.join(self.pairs)} were")
        return self.pairs[name]

    def __repr__(self) -> str:
        from deepinfer.display.compare import comparison_text

        return comparison_text(self)

    def _repr_html_(self) -> str:
        from deepinfer.display.compare import comparison_html

        return comparison_html(self)


def _nan_to_none(x: Tensor) -> float | None:
    value = float(x)
    return None if value != value else value
