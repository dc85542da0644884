"""ReplayReport: the tables of a replay measurement, their summary with intervals, and its
pictures."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from deepinfer.measure.bootstrap import SEED, Estimate, over_groups, quantile
from deepinfer.tables.table import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMAT = "deepinfer.ReplayReport/1"
NAMES = ("passages", "tokens", "windows", "plans")
TITLES = {
    "passages": "replay against exact, by text; kl in nats, length: tokens of a drafter's step",
    "tokens": "replay against exact, by token of the continuation; kl and -log p in nats",
    "windows": "window keys against exact, by layer and distance from the cut in tokens",
    "plans": "what each policy costs: one prompt's prefill; ran: rows x layers of this measurement",
}
METERS = ("kl", "agreement", "dlogprob", "perplexity_ratio", "length_change")
TAILED = ("kl", "dlogprob")  # the others are one number of all rows: a mean, a ratio, a root
QUANTILES = {"median": 0.5, "p99": 0.99}
OFS = ("mean", *QUANTILES, "max")
SHAPE = ("keep", "windows", "depth", "cut_layer", "cut_layers")


@dataclass(frozen=True, eq=False)
class ReplayReport:
    """What `replay_error` measured. Everything else here is computed from its four tables.

    passages: one row a text and policy. ids: a hash of the text's ids. kl, dlogprob: mean over the
    continuation (and _median, _p99, _max); agreement; perplexity_ratio; nats_p, nats_q: sums of
    -log p, exact and by the policy; length_exact, length: expected tokens of a step over `blocks`
    draft blocks; window_rel_l2. tokens: one row a token. windows: one a text, policy, layer and
    distance bin, counted from `lowest`. plans: one a policy.
    """

    passages: Table
    tokens: Table
    windows: Table
    plans: Table

    @staticmethod
    def of(
        passages: Sequence[Mapping[str, object]],
        tokens: Sequence[Mapping[str, object]],
        windows: Sequence[Mapping[str, object]],
        plans: Sequence[Mapping[str, object]],
        facts: Mapping[str, object],
    ) -> ReplayReport:
        """A report of rows; facts: provenance of all tables."""
        facts = dict(facts) | dict(bootstrap_seed=SEED)
        rows = (passages, tokens, windows, plans)
        return ReplayReport(
            *(Table(x, title=TITLES[n], provenance=facts) for n, x in zip(NAMES, rows, strict=True))
        )

    @staticmethod
    def joined(reports: Sequence[ReplayReport]) -> ReplayReport:
        """One report of several that measured the same policies on other texts (their numbers go on
        counting, and with them the labels of texts that were given no groups), or other policies on
        the same texts. ValueError where they do not fit, and where a policy would count a text
        twice."""
        from deepinfer.measure.replay.joining import joined

        return joined(reports)

    @property
    def policies(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(str(row["policy"]) for row in self.passages))

    @property
    def facts(self) -> dict[str, Any]:
        """Provenance: engine, policies, sizes, a hash of the ids."""
        return self.passages.provenance

    # --------------------------------------------------------------------------------- numbers

    @property
    def compared(self) -> str:
        """What with what, in words: a report of `logits_error` has no plans."""
        return "replay against exact" if len(self.plans) else "engines against the first"

    def table(self) -> Table:
        """The table by passage."""
        return self.passages

    def summary(self) -> Table:
        """One row a policy: means over all tokens and their median, p99 and maximum, each with its
        95 % interval over groups (columns _low, _high; None with fewer than 8 groups); and the
        cost.

        length_change: mean expected tokens of a step, less that of exact. window_rel_l2: of all
        window keys of the layers that the policy touches.
        """
        if "_summary" not in self.__dict__:  # bootstraps take a second
            self.__dict__["_summary"] = self._summarised()
        return self.__dict__["_summary"]

    def _summarised(self) -> Table:
        plans = {row["policy"]: row for row in self.plans}
        lines = [self._line(name, plans.get(name, {})) for name in self.policies]
        title = (
            f"{self.compared} on {self.facts['texts']} texts of {self.facts['groups']} "
            f"groups, {self.facts['continuation']} tokens behind a prompt of {self.facts['prompt']}"
        )
        return Table(lines, title=title, provenance=self.facts)

    def estimate(self, policy: str, meter: str, of: str = "mean") -> Estimate:
        """A meter with its interval. of: 'mean', or for kl and dlogprob 'median', 'p99' or 'max'
        (of tokens; a maximum has no interval). KeyError for a policy that was not measured, an
        unknown meter, and an `of` that the meter does not have; an Estimate of None where no row
        has the meter."""
        if policy not in self.policies:
            raise KeyError(f"no policy {policy!r} was measured: {', '.join(self.policies)} were")
        check_meter(meter, of)
        if meter == "window_rel_l2":
            return self._windows(policy)
        if meter == "length_change":
            rows = [r for r in self._rows(self.passages, policy) if r.get("blocks")]
            return _mean(rows, lambda r: (r["length"] - r["length_exact"]) * r["blocks"], "blocks")
        rows = self._rows(self.tokens, policy)
        if meter == "perplexity_ratio":
            e = _mean(rows, lambda r: r["nats_q"] - r["nats_p"])
            return Estimate(*(None if x is None else math.exp(x) for x in (e.value, e.low, e.high)))
        if of == "mean":
            return _mean(rows, lambda r: r[meter])
        values = [torch.tensor([r[meter] for r in g], dtype=torch.float64) for g in _groups(rows)]
        if of == "max":
            return Estimate(max(float(v.max()) for v in values))
        return quantile(values, QUANTILES[of])

    def _line(self, name: str, plan: Mapping[str, Any]) -> dict[str, object]:
        line: dict[str, object] = dict(policy=name, **{k: plan.get(k) for k in SHAPE})
        for meter in METERS:
            for of in OFS if meter in TAILED else OFS[:1]:
                if meter == "length_change" and "length" not in self.passages.columns:
                    continue
                column, e = (
                    meter if of == "mean" else f"{meter}_{of}",
                    self.estimate(name, meter, of),
                )
                line[column] = e.value
                if of != "max":
                    line |= {f"{column}_low": e.low, f"{column}_high": e.high}
        if len(self.windows):
            e = self._windows(name)
            line |= dict(window_rel_l2=e.value, window_rel_l2_low=e.low, window_rel_l2_high=e.high)
        return line | {
            k: plan.get(k) for k in ("rows_x_layers", "flops", "rows_share", "flops_share")
        }

    def by_layer(self) -> Table:
        """Relative L2 of window keys by policy and layer, over all texts and distances."""
        return self._pooled(("policy", "keep", "layer"), "by layer")

    def by_distance(self) -> Table:
        """Relative L2 of window keys by policy and distance from the cut, over all texts and
        the layers whose window is cut (all layers of a policy that cuts none)."""
        rows = [dict(row) for row in self.windows]
        cut = {row["policy"] for row in rows if row.get("lowest")}
        return self._pooled(
            ("policy", "keep", "distance", "until"),
            "by distance from the cut, tokens",
            [row for row in rows if row.get("lowest") != 0 or row["policy"] not in cut],
        )

    def _pooled(
        self, by: tuple[str, ...], words: str, cells: Iterable[dict[str, Any]] | None = None
    ) -> Table:
        sums: dict[tuple, dict[str, list[float]]] = {}
        for row in self.windows if cells is None else cells:
            group = sums.setdefault(tuple(row[k] for k in by), {})
            total = group.setdefault(str(row["group"]), [0.0, 0.0, 0])
            for i, k in enumerate(("error2", "norm2", "rows")):
                total[i] += row[k]  # type: ignore[operator]
        rows = []
        for key, group in sums.items():
            e = _root(list(group.values()))
            rows.append(
                dict(
                    zip(by, key, strict=True), rel_l2=e.value, rel_l2_low=e.low, rel_l2_high=e.high
                )
                | dict(rows=sum(x[2] for x in group.values()))
            )
        return Table(rows, title=f"relative L2 of window keys, {words}", provenance=self.facts)

    def _windows(self, policy: str) -> Estimate:
        rows = self._rows(self.windows, policy)
        return _root(
            [[sum(r["error2"] for r in g), sum(r["norm2"] for r in g)] for g in _groups(rows)]
        )

    def _rows(self, table: Table, policy: str) -> list[dict[str, Any]]:
        return self._split(table).get(policy, [])

    def _split(self, table: Table) -> dict[str, list[dict[str, Any]]]:
        """The rows of a table by policy, read once."""
        held = self.__dict__.setdefault("_by_policy", {})
        if id(table) not in held:
            out: dict[str, list[dict[str, Any]]] = {}
            for row in table:
                out.setdefault(str(row["policy"]), []).append(row)
            held[id(table)] = out
        return held[id(table)]

    # ----------------------------------------------------------------------------------- files

    def to_json(self, path: str | Path | None = None) -> str:
        """All four tables as JSON that `from_json` reads back equal. Also writes it."""
        tables = ",\n".join(f"{json.dumps(n)}: {getattr(self, n).to_json().strip()}" for n in NAMES)
        text = f'{{"format": "{FORMAT}",\n{tables}\n}}\n'
        if path is not None:
            Path(path).write_text(text, "utf-8", newline="")
        return text

    @classmethod
    def from_json(cls, source: str | Path) -> ReplayReport:
        """The report that `to_json` wrote: its text, or the path of its file. ValueError for
        others."""
        whole = _read(source)
        if not isinstance(whole, dict) or whole.get("format") != FORMAT:
            raise ValueError(f"not a replay report: format {FORMAT!r} expected")
        for name in NAMES:
            if not isinstance(whole.get(name), dict):
                raise ValueError(f"not a replay report: it has no table {name!r}")
        tables = []
        for name in NAMES:
            try:
                tables.append(Table.from_json(json.dumps(whole[name])))
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise ValueError(f"not a replay report: table {name!r}: {error}") from error
        return cls(*tables)

    # -------------------------------------------------------------------------------- pictures

    def plot_error(
        self,
        meter: str = "kl",
        x: str = "keep",
        of: str = "mean",
        ax: Axes | None = None,
        floors: ReplayReport | None = None,
        by: Callable[[str], str] | None = None,
    ) -> Axes:
        """A meter over keep (or x='windows', 'depth', 'rows_share', 'flops_share') with its
        interval. floors: another report (`logits_error`), whose policies are drawn as horizontal
        lines. by: policy name -> name of the line it is a point of; default: policies that differ
        in keep alone are one line."""
        from deepinfer.display.replay import plot_error

        return plot_error(self, meter, x, of, ax, floors, by)

    def plot_layers(self, ax: Axes | None = None, policies: Iterable[str] | None = None) -> Axes:
        """Relative L2 of window keys by layer, a line a policy."""
        from deepinfer.display.replay import plot_layers

        return plot_layers(self, ax, policies)

    def plot_distance(self, ax: Axes | None = None, policies: Iterable[str] | None = None) -> Axes:
        """Relative L2 of window keys over the distance from the cut, a line a policy."""
        from deepinfer.display.replay import plot_distance

        return plot_distance(self, ax, policies)

    def plot_cost(self, ax: Axes | None = None, policies: Iterable[str] | None = None) -> Axes:
        """FLOPs of the prompt's prefill by op, a bar a policy, exact first."""
        from deepinfer.display.replay import plot_cost

        return plot_cost(self, ax, policies)

    def __repr__(self) -> str:
        from deepinfer.display.replay import report_text

        return report_text(self)

    def _repr_html_(self) -> str:
        from deepinfer.display.replay import report_html

        return report_html(self)


def check_meter(meter: str, of: str) -> None:
    """KeyError for an unknown meter, an unknown `of`, and one that the meter does not have."""
    if meter not in (*METERS, "window_rel_l2"):
        raise KeyError(f"no meter {meter!r}: {', '.join(METERS)}, window_rel_l2")
    if of not in OFS:
        raise KeyError(f"of={of!r}: 'mean', 'median', 'p99' or 'max'")
    if of != "mean" and meter not in TAILED:
        raise KeyError(f"of={of!r}: {meter} has 'mean' only; {' and '.join(TAILED)} have more")


def _read(source: str | Path) -> Any:
    """What JSON says: a text of it, or the file of that path, which may begin with a bracket."""
    if isinstance(source, str) and source.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(source)
        except ValueError:
            if source.lstrip()[0] == "{":
                raise
    return json.loads(Path(source).read_text("utf-8"))


# ------------------------------------------------------------------------------------- statistics


def _groups(rows: Iterable[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The rows of each group, groups in the order of their names: the draws of all policies
    pair."""
    out: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        out.setdefault(row["group"], []).append(row)
    return [out[name] for name in sorted(out)]


def _mean(rows: list[dict[str, Any]], value, weight: str | None = None) -> Estimate:
    """The mean of value(row), or its sum over that of a column, with its interval over groups."""
    sums = [
        [math.fsum(value(r) for r in g), sum(1 if weight is None else r[weight] for r in g)]
        for g in _groups(rows)
    ]
    return over_groups(sums, lambda x: x[..., 0] / x[..., 1])


def _root(groups: list[list[float]]) -> Estimate:
    """sqrt(sum of error2 / sum of norm2) of groups (error2, norm2, ...)."""
    sums = [g[:2] for g in groups]
    return over_groups(sums, lambda x: (x[..., 0] / x[..., 1]).nan_to_num(0.0).sqrt())
