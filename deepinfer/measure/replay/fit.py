"""The smallest keep whose error is small enough, and how often it is on texts that had no say.

Which groups of texts calibrate and which check is a matter of their names alone, and the others run
only when the keep is chosen. See `Bounded.fit`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, TypeVar

from deepinfer.measure.bootstrap import FEWEST
from deepinfer.measure.distributions import METERS
from deepinfer.measure.replay.calibration import Calibration, share_within, tried
from deepinfer.measure.replay.error import check_hit, policies, replay_error
from deepinfer.measure.replay.report import ReplayReport
from deepinfer.measure.replay.texts import Texts

if TYPE_CHECKING:
    from deepinfer.config import ModelConfig
    from deepinfer.engine.engine import Engine, Prompts
    from deepinfer.slots.replay import Bounded
    from deepinfer.tables.table import Table

P = TypeVar("P", bound="Bounded")
METRICS = ("kl", "dlogprob")  # of METERS those that are an error of a token, 0 at best
STEPS = 11  # of the default candidates

assert set(METRICS) < set(METERS)


def fit(
    make: Callable[[int], P],
    eng: Engine,
    texts: Prompts,
    tolerance: float,
    q: float,
    *,
    prompt: int,
    continuation: int,
    groups: Sequence[Any] | None,
    metric: str,
    candidates: Iterable[int] | None,
    hit: int,
    who: str,
) -> P:
    """See Bounded.fit. make: keep -> the policy of it; q: the quantile; who: signs the errors."""
    check_asked(tolerance, q, metric, who)
    found = Texts.of(eng, texts, prompt, continuation, groups, who)
    first, second = halves(found, who)
    check_tokens(len(first) * continuation, q, who)
    check_sides(make(1), eng.config, prompt, hit, who)
    keeps = keeps_of(make, eng.config, prompt, candidates, who)
    tries = {f"keep {keep}": make(keep) for keep in keeps}
    policies(eng, tries, who)  # one that the model refuses is named before anything runs

    def measured(part: list[int], some: dict[str, P]) -> ReplayReport:
        return replay_error(
            eng,
            [list(found.ids[i]) for i in part],
            some,
            prompt,
            continuation,
            groups=[found.groups[i] for i in part],
            hit=hit,
            drafter=False,
        )

    report = measured(first, tries)
    table = tried(report, dict(zip(tries, keeps, strict=True)), metric, q, tolerance)
    keep = smallest(table)
    if keep is None:
        raise ValueError(f"{who}: {too_much(table, tolerance, q, metric, make, eng)}")
    name, policy = f"keep {keep}", make(keep)
    check = measured(second, {name: policy})
    held = share_within(check, name, metric, tolerance)
    policy.calibration = Calibration(
        repr(policy), keep, tolerance, q, metric, table, held, report, check
    )
    return policy


def smallest(table: Table) -> int | None:
    """The smallest keep that meets the tolerance as all larger ones do; None where the largest
    does not."""
    taken = None
    rows: list[dict[str, Any]] = table.rows
    for row in sorted(rows, key=lambda row: -row["keep"]):
        if not row["meets"]:
            break
        taken = row["keep"]
    return taken


# ----------------------------------------------------------------------------------------- texts


def halves(found: Texts, who: str) -> tuple[list[int], list[int]]:
    """The numbers of the texts that calibrate and of those that check: groups in turn, in the order
    of their names."""
    names = sorted(set(found.groups))
    if len(names) < 2 * FEWEST:
        raise ValueError(
            f"{who}: {len(names)} groups of texts: want at least {2 * FEWEST}, half of them to "
            "choose the keep by and the others to check it on; an interval over fewer than "
            f"{FEWEST} says nothing. Give texts of more modules"
        )
    chosen = set(names[::2])
    first = [i for i, name in enumerate(found.groups) if name in chosen]
    second = [i for i, name in enumerate(found.groups) if name not in chosen]
    held = {found.digest(i): i for i in first}
    for i in second:
        if found.digest(i) in held:
            other = held[found.digest(i)]
            raise ValueError(
                f"{who}: text {other} of group {found.groups[other]!r} and text {i} of group "
                f"{found.groups[i]!r} are the same: one would calibrate and the other check. "
                "Give each text once, or both the same group"
            )
    return first, second


# -------------------------------------------------------------------------------------- candidates


def keeps_of(
    make: Callable[[int], Bounded],
    config: ModelConfig,
    prompt: int,
    candidates: Iterable[int] | None,
    who: str,
) -> list[int]:
    """The keeps to try, rising."""
    window = config.sliding_window
    most = prompt - window
    if candidates is None:
        least = config.ring_length
        if most < least:
            raise ValueError(
                f"{who}: prompt={prompt}: the least keep of this model is {least}, and a cut "
                f"shows its whole error with a window ({window}) below it; want prompt >= "
                f"{least + window}"
            )
        return default_keeps(make, config, most)
    if isinstance(candidates, (str, bytes)) or not isinstance(candidates, Iterable):
        raise ValueError(f"{who}: candidates={candidates!r}: want a list of keeps, in tokens")
    keeps = [int(k) if isinstance(k, Integral) and k is not True else k for k in candidates]
    for keep in keeps:
        if type(keep) is not int or keep < 1:
            raise ValueError(f"{who}: candidates: {keep!r}: want keeps, whole numbers of tokens")
        if keep > most:
            raise ValueError(
                f"{who}: candidates: keep {keep} with prompt={prompt}: a cut shows its whole "
                f"error with a window ({window}) below it, so the prompt must have at least "
                f"keep + window = {keep + window} tokens; give longer prompts or smaller keeps"
            )
    if not keeps:
        raise ValueError(f"{who}: no candidates: give at least one keep, or None")
    return sorted(set(keeps))


def default_keeps(make: Callable[[int], Bounded], config: ModelConfig, most: int) -> list[int]:
    """From the least keep to the exact length or `most`, closer together at the lower end, where
    the error falls fastest; and the default keep of Bounded."""
    least = config.ring_length
    exact = make(least).exact_keep(config)
    most = max(min(most, least if exact is None else exact), least)
    keeps = {least + round((most - least) * (i / STEPS) ** 2) for i in range(STEPS + 1)}
    usual = config.ring_length + config.backtracking
    return sorted(keeps | ({usual} if usual <= most else set()))


# ------------------------------------------------------------------------------------- refusals


def check_asked(tolerance: float, q: float, metric: str, who: str) -> None:
    if metric not in METRICS:
        raise ValueError(f"{who}: metric={metric!r}: {' or '.join(map(repr, METRICS))}")
    number = isinstance(tolerance, Real) and not isinstance(tolerance, bool)
    if not number or not 0 < tolerance < math.inf:
        raise ValueError(
            f"{who}: tolerance={tolerance!r}: want nats, more than 0; what errs nothing is "
            "replay='exact' or di.replay.Halo()"
        )
    if not isinstance(q, Real) or not 0 < q < 1:
        raise ValueError(
            f"{who}: quantile={q!r}: want a share of the tokens, between 0 and 1; no sample shows "
            "that all tokens of all texts keep to a tolerance"
        )


def check_tokens(tokens: int, q: float, who: str) -> None:
    """A quantile is seen where one token in the sample may lie beyond it: (n + 1)(1 - q) >= 1."""
    need = math.ceil(1 / (1 - q) - 1 - 1e-6)
    if tokens < need:
        raise ValueError(
            f"{who}: quantile={q!r}: the texts that calibrate have {tokens:,} tokens behind the "
            f"prompt, and that quantile needs at least {need:,}; give more texts or a longer "
            "continuation, or ask for a smaller quantile"
        )


def check_sides(policy: Bounded, config: ModelConfig, prompt: int, hit: int, who: str) -> None:
    if not policy.cuts:
        raise ValueError(
            f"{who}: sides={policy.sides!r} cuts nothing and has no keep: want 'decoder' or 'both'"
        )
    if policy.layer is None and policy.cut_layer(config) is None:  # an engine refuses others
        raise ValueError(f"{who}: this model has no layer to cut at, so no keep changes anything")
    if policy.replays != bool(hit):
        raise ValueError(
            f"{who}: sides={policy.sides!r} and hit={hit!r}: sides='both' errs behind a prefix "
            "hit, so say how many tokens are found (hit=); 'decoder' does not use a hit (hit=0)"
        )
    check_hit(hit, prompt, who)
    if policy.replays and hit <= config.sliding_window:
        raise ValueError(
            f"{who}: hit={hit}: one that is no longer than the window ({config.sliding_window}) is "
            "not replayed, so it shows no error of the encoder side"
        )


def too_much(
    table: Table,
    tolerance: float,
    q: float,
    metric: str,
    make: Callable[[int], Bounded],
    eng: Engine,
) -> str:
    """What to say where no candidate meets the tolerance."""
    rows: list[dict[str, Any]] = table.rows
    best = min(rows, key=lambda row: (row["high"], row["keep"]))
    last = max(rows, key=lambda row: row["keep"])
    exact, window = make(best["keep"]).exact_keep(eng.config) or 0, eng.config.sliding_window
    said = (
        f"no keep of {len(rows)} candidates has {metric} <= {tolerance:g} for {100 * q:.6g} % of "
        f"the tokens: the best is keep {best['keep']} with {best['error']:.3g}, whose 95 % "
        f"interval ends at {best['high']:.3g}"
    )
    if best["meets"]:
        said += f"; but that of keep {last['keep']} ends at {last['high']:.3g}, so it is chance"
    if last["keep"] < exact:
        more = f"candidates up to {exact}, which is exact (prompt >= {exact + window} shows it)"
    elif make(best["keep"]).replays:
        more = "sides='decoder': the encoder side errs with any keep"
    else:
        more = "dtype='float64': at the exact length what is left is rounding"
    return (
        f"{said}. Ask for a larger tolerance or a smaller quantile, give more texts for a narrower "
        f"interval, or take {more}"
    )
