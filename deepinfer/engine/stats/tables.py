"""What `Stats` shows: counters, times, one line for a log, JSON.

Records are copied with `list` before they are looked at: another thread may be running steps.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepinfer.display.numbers import counted as number_of
from deepinfer.display.numbers import fmt
from deepinfer.engine.stats.records import PHASES, RequestRecord, StepRecord, percentile

if TYPE_CHECKING:
    from deepinfer.engine.stats.stats import Stats
    from deepinfer.tables.table import Table

FORMAT = "deepinfer.Stats/1"
TOTALS = (
    "steps",
    "prefill_steps",
    "decode_steps",
    "mixed_steps",
    "prefill_rows",
    "decode_rows",
    "tokens",
    "requests",
    "prompt_tokens",
    "cached_tokens",
    "preemptions",
    "sum_seqlen_qxk",
    "max_seqlen_k",
    "peak_running",
    "peak_waiting",
    "peak_kv_usage",
)
RARE = ("mixed_steps", "preemptions", "cached_tokens")  # shown once they happened


def counters(stats: Stats) -> Table:
    """name, value."""
    from deepinfer.tables.table import Table

    rows = [dict(name=n, value=v) for n, v in counted(stats).items()]
    return Table(rows, provenance=stats.facts())


def as_text(stats: Stats) -> str:
    """Every counter, then the drafts by depth where there are any."""
    parts = [counters(stats), *([drafts(stats)] if stats.drafted else [])]
    return "\n\n".join(table.to_text() for table in parts)


def as_html(stats: Stats) -> str:
    """As `as_text`."""
    from deepinfer.display import html

    pages = []
    for table in [counters(stats), *([drafts(stats)] if stats.drafted else [])]:
        columns, shown, numeric, note = table._shown(len(table))
        pages.append(html.table(columns, shown, numeric=numeric, note=note))
    return html.block(*pages)


def counted(stats: Stats) -> dict[str, object]:
    """Every counter by name, and what follows from counters alone."""
    out: dict[str, object] = {
        n: getattr(stats, n) for n in TOTALS if n not in RARE or getattr(stats, n)
    }
    n = sum(stats.finished.values())
    verified = sum(stats.drafted.values())
    anchors = stats.decode_rows - verified
    out["row_usage"] = ratio(stats.prefill_rows + stats.decode_rows, stats.row_limit)
    if stats.cached_tokens:
        out["prefix_hit_rate"] = stats.prefix_hit_rate
    out["tokens_per_step"] = stats.tokens_per_step
    if verified:
        out["acceptance"] = stats.acceptance
        out["verified_per_step"] = ratio(verified, anchors)
        out["confidence_error"] = stats.confidence_error
    if n:
        out["mean_prompt_tokens"] = stats.ended_prompt_tokens / n
        out["mean_tokens"] = stats.ended_tokens / n
    out |= {f"finished {k}": v for k, v in sorted(stats.finished.items())}
    return out


def drafts(stats: Stats) -> Table:
    """depth, verified, accepted, acceptance, survival."""
    from deepinfer.tables.table import Table

    columns = ("depth", "verified", "accepted", "acceptance", "survival")
    return Table(by_depth(stats), columns, provenance=stats.facts())


def by_depth(stats: Stats) -> list[dict[str, Any]]:
    out = []
    for depth, verified in sorted(stats.drafted.items()):
        accepted, survival = stats.accepted[depth], stats.survival[depth]
        row: dict[str, Any] = dict(depth=depth + 1, verified=verified, accepted=accepted)
        out.append(row | {"acceptance": accepted / verified, "survival": survival / verified})
    return out


def times(stats: Stats, last: int) -> Table:
    """name, unit, all, last: speeds, shares and milliseconds a step."""
    from deepinfer.tables.table import Table

    whole, recent = speeds_of_all(stats), speeds_of_last(stats, last)
    rows = [dict(name=n, unit=u, all=whole.get((n, u)), last=recent.get((n, u))) for n, u in whole]
    held = min(max(last, 0), len(stats.step_records))
    title = f"speeds; last: of {the_last(held, stats.closed_steps, 'step')}"
    return Table(rows, ("name", "unit", "all", "last"), title=title, provenance=stats.facts())


def latencies(stats: Stats) -> Table:
    """name, count, mean, p50, p90, p99, max."""
    from deepinfer.tables.table import Table

    rows = []
    for name, tally in stats.tallies.items():
        held = sorted(held_values(stats, name))
        row: dict[str, object] = dict(name=name, count=tally.count, mean=milli(tally.mean))
        row |= {f"p{n}": milli(percentile(held, n / 100)) for n in (50, 90, 99)}
        rows.append(row | {"max": milli(tally.most) if tally.count else None})
    title = "latencies of finished requests, in ms"
    return Table(rows, title=title, provenance=stats.facts())


def speeds_of_all(stats: Stats) -> dict[tuple[str, str], float | None]:
    """What the totals say."""
    anchors = stats.decode_rows - sum(stats.drafted.values())
    return speeds(
        stats.steps,
        stats.tokens,
        stats.prefill_rows,
        anchors + sum(stats.accepted.values()),
        stats.seconds,
        stats.host_seconds,
        stats.device_seconds,
    )


def speeds_of_last(stats: Stats, last: int) -> dict[tuple[str, str], float | None]:
    """The same of the last steps that are held."""
    held = list(stats.step_records)[-last:] if last > 0 else []
    seconds: dict[str, float] = {}
    host = dict.fromkeys(PHASES, 0.0)
    before: StepRecord | None = None
    for r in held:
        since = r.began if before is None or not before.unfinished else before.ended
        seconds[r.kind] = seconds.get(r.kind, 0.0) + r.ended - since
        for phase, spent in r.host_seconds().items():
            host[phase] = host.get(phase, 0.0) + spent
        before = r
    return speeds(
        len(held),
        sum(r.tokens for r in held),
        sum(r.prefill_rows for r in held),
        sum(r.decode_rows - r.verified + r.accepted for r in held),
        seconds,
        host,
        sum(r.device_seconds for r in held),
    )


def speeds(steps, tokens, prefill_rows, decode_tokens, seconds, host, device) -> dict:
    """(name, unit) -> value. Prompt and decode tokens are per second of their own steps."""
    total = sum(seconds.values())
    mixed = seconds.get("mixed", 0.0)
    out: dict[tuple[str, str], float | None] = {
        ("steps", "1/s"): ratio(steps, total),
        ("output tokens", "1/s"): ratio(tokens, total),
        ("prompt tokens", "1/s"): ratio(prefill_rows, seconds.get("prefill", 0.0) + mixed),
        ("decode tokens", "1/s"): ratio(decode_tokens, seconds.get("decode", 0.0) + mixed),
        ("step", "ms"): milli(ratio(total, steps)),
        ("prefill share", "%"): percent(ratio(seconds.get("prefill", 0.0), total)),
        ("decode share", "%"): percent(ratio(seconds.get("decode", 0.0), total)),
        ("device busy", "ms a step"): milli(ratio(device, steps)),
        ("device idle", "%"): percent(ratio(total - device, total)),
    }
    for phase in PHASES:
        out[f"host {phase}", "ms a step"] = milli(ratio(host.get(phase, 0.0), steps))
    return out


def held_values(stats: Stats, name: str) -> Iterable[float]:
    if name == "ITL":
        return list(stats.gaps)
    values = (r.seconds()[name] for r in list(stats.request_records))
    return [v for v in values if v is not None]


def rows(
    stats: Stats, records: Sequence[StepRecord] | Sequence[RequestRecord], times: bool, what: str
) -> Table:
    from deepinfer.tables.table import Table

    many = stats.closed_steps if what == "step" else stats.ended_requests
    title = the_last(len(records), many, what)
    title = title if what == "step" else title.replace("request", "finished request")
    return Table([r.row(times) for r in records], title=title, provenance=stats.facts())


def the_last(held: int, many: int, what: str) -> str:
    """'all 3 steps' or 'the last 100 of 230 steps'."""
    if held < many:
        return f"the last {held} of {number_of(many, what)}"
    return f"all {number_of(many, what)}" if many else f"no {what} yet"


def line(stats: Stats, last: int) -> str:
    """'[stats] decode: 61 steps/s, ...'. The last steps' speeds, the last step's load."""
    if not stats.step_records:
        return "[stats] no step yet"
    recent, now = speeds_of_last(stats, last), stats.step_records[-1]
    said = [
        f"{fmt(recent['steps', '1/s'])} steps/s",
        f"{fmt(recent['output tokens', '1/s'])} tokens/s",
        f"{now.running} running",
        f"{now.waiting} waiting",
        f"KV {fmt(100 * now.kv_usage)} %",
        f"device idle {fmt(recent['device idle', '%'])} %",
    ]
    if stats.acceptance is not None:
        said.append(f"drafts accepted {fmt(100 * stats.acceptance)} %")
    if stats.prefix_hit_rate:
        said.append(f"prefix hits {fmt(100 * stats.prefix_hit_rate)} %")
    return f"[stats] {now.kind}: {', '.join(said)}"


def as_dict(stats: Stats) -> dict[str, Any]:
    """Where it comes from, counters, times, steps, requests."""
    from deepinfer.tables import jsonable
    from deepinfer.tables.provenance import collect

    return {
        "format": FORMAT,
        "provenance": jsonable.plain(collect(**stats.facts())),
        "counters": counted(stats),
        "drafts": by_depth(stats),
        "seconds": {
            "by_kind": dict(stats.seconds),
            "host": dict(stats.host_seconds),
            "device": stats.device_seconds,
            **{n: dataclasses.asdict(t) for n, t in stats.tallies.items()},
        },
        "steps": [dataclasses.asdict(r) for r in list(stats.step_records)],
        "requests": [
            dataclasses.asdict(r) | {"seconds": r.seconds()} for r in list(stats.request_records)
        ],
    }


def as_json(stats: Stats, path: str | Path | None) -> str:
    text = json.dumps(as_dict(stats), allow_nan=False) + "\n"
    if path is not None:
        Path(path).write_text(text, "utf-8", newline="")
    return text


def ratio(a: float, b: float) -> float | None:
    return a / b if b else None


def milli(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds


def percent(fraction: float | None) -> float | None:
    return None if fraction is None else 100 * fraction
