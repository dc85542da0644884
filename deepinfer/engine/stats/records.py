"""What is known of one step and of one request: plain records, and the clocks that fill them.

Times are seconds of `time.perf_counter`, which starts anywhere: only differences mean something. No
decision of the engine reads them. The names are the field's (TTFT, TPOT, ITL, seqlen_k).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter

PHASES: tuple[str, ...] = ("schedule", "launch", "wait", "post-process")  # of a step, on the host


@dataclass(slots=True, eq=False)
class StepRecord:
    """One committed step.

    rows: prompt and decode rows that ran, verified drafts included; tokens: emitted; chunked:
    prompts that are not complete after it; verified / accepted: drafts; preempted: requests preempted for it;
    sum_seqlen_qxk: summed over its sequences, rows times context length. While it ran: running,
    waiting (requests), kv_usage, state_usage (0 to 1). unfinished: requests left after it.
    began, ended: its first and last moment on the host. host: (phase, start, stop); device: (kind
    of step or 'draft', start, stop), each in the order of time.
    """

    step: int
    kind: str = "idle"
    began: float = 0.0
    ended: float = 0.0
    requests: int = 0
    prefill_rows: int = 0
    decode_rows: int = 0
    tokens: int = 0
    chunked: int = 0
    verified: int = 0
    accepted: int = 0
    preempted: int = 0
    sum_seqlen_qxk: int = 0
    max_seqlen_k: int = 0
    min_seqlen_k: int = 0
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    state_usage: float = 0.0
    unfinished: int = 0
    host: list[tuple[str, float, float]] = field(default_factory=list)
    device: list[tuple[str, float, float]] = field(default_factory=list)

    @property
    def rows(self) -> int:
        return self.prefill_rows + self.decode_rows

    @property
    def device_seconds(self) -> float:
        return math.fsum(stop - start for _, start, stop in self.device)

    def host_seconds(self) -> dict[str, float]:
        """Seconds by phase, every phase of PHASES; `wait` is time in which the host only waits."""
        spent = dict.fromkeys(PHASES, 0.0)
        for phase, start, stop in self.host:
            spent[phase] = spent.get(phase, 0.0) + stop - start
        return spent

    def row(self, times: bool = True) -> dict[str, object]:
        """As a table's row; times=False leaves out what a clock said. Milliseconds."""
        first = ("step", "kind", "requests", "rows", "tokens")
        rest = (
            "prefill_rows",
            "decode_rows",
            "chunked",
            "verified",
            "accepted",
            "preempted",
            "running",
            "waiting",
            "kv_usage",
            "state_usage",
            "sum_seqlen_qxk",
            "max_seqlen_k",
            "min_seqlen_k",
        )
        out: dict[str, object] = {name: getattr(self, name) for name in first}
        if times:
            out |= {f"{phase} ms": 1e3 * s for phase, s in self.host_seconds().items()}
            out["device ms"] = 1e3 * self.device_seconds
        out |= {name: getattr(self, name) for name in rest}
        return out


@dataclass(slots=True, eq=False)
class RequestRecord:
    """One request from `add` to its end. The times are None for what did not happen.

    request: its id; cached_tokens: prompt tokens found in the prefix cache; gaps: seconds between
    one emission and the next (the tokens of one step arrive together), kept until the request has
    finished; itl: their 50th, 90th and 99th percentile then.
    """

    request: int
    prompt_tokens: int
    arrived: float
    cached_tokens: int = 0
    tokens: int = 0
    preemptions: int = 0
    finish_reason: str | None = None
    scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    ended: float | None = None
    gaps: list[float] = field(default_factory=list)
    itl: tuple[float, float, float] | None = None

    @property
    def queue_time(self) -> float | None:
        """Seconds from arrival to the start of the first step it ran in."""
        return None if self.scheduled is None else self.scheduled - self.arrived

    @property
    def ttft(self) -> float | None:
        """Time to first token: seconds from arrival, the queue included."""
        return None if self.first_token is None else self.first_token - self.arrived

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first, in seconds; None below two tokens."""
        if self.first_token is None or self.last_token is None or self.tokens < 2:
            return None
        return (self.last_token - self.first_token) / (self.tokens - 1)

    @property
    def latency(self) -> float | None:
        """Seconds from arrival to the end."""
        return None if self.ended is None else self.ended - self.arrived

    def row(self, times: bool = True) -> dict[str, object]:
        """As a table's row; times=False leaves out what a clock said. Milliseconds."""
        out: dict[str, object] = dict(
            request=self.request,
            prompt_tokens=self.prompt_tokens,
            tokens=self.tokens,
            finish_reason=self.finish_reason,
        )
        if times:
            for name, seconds in self.seconds().items():
                out[f"{name} ms"] = None if seconds is None else 1e3 * seconds
        out |= dict(cached_tokens=self.cached_tokens, preemptions=self.preemptions)
        return out

    def seconds(self) -> dict[str, float | None]:
        """Every time of it by name."""
        p50, p90, p99 = self.itl or (None, None, None)
        return {
            "queue": self.queue_time,
            "TTFT": self.ttft,
            "TPOT": self.tpot,
            "ITL p50": p50,
            "ITL p90": p90,
            "ITL p99": p99,
            "latency": self.latency,
        }


@dataclass(slots=True)
class Tally:
    """Count, sum and largest of what was added: exact, however much it was."""

    count: int = 0
    total: float = 0.0
    most: float = 0.0

    def add(self, *values: float) -> None:
        self.most = max(values) if not self.count else max(self.most, *values)
        self.count += len(values)
        self.total += sum(values)

    @property
    def mean(self) -> float | None:
        return self.total / self.count if self.count else None


def percentile(ordered: Sequence[float], fraction: float) -> float | None:
    """The value below which `fraction` (0 to 1) of sorted values lie, linear between neighbours."""
    if not ordered:
        return None
    at = fraction * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


class HostLane:
    """What the host does, one thing at a time: turning to the next one ends the one before."""

    __slots__ = ("_record", "_phase", "_since")

    def __init__(self) -> None:
        self._record: StepRecord | None = None
        self._phase, self._since = "", 0.0

    def turn(self, record: StepRecord | None, phase: str = "") -> float:
        """From now on the host works at this step's phase; None: at none. Returns now."""
        now = perf_counter()
        if self._record is not None:
            self._record.host.append((self._phase, self._since, now))
        self._record, self._phase, self._since = record, phase, now
        return now
