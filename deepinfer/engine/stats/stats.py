"""What an engine counts and how long it took.

    eng.stats                  the counters: the same run gives the same ones everywhere, no clock
    eng.stats.drafts()         verified and accepted drafts by depth
    eng.stats.times()          speeds, and where a step's time went
    eng.stats.latencies()      queue, TTFT, TPOT, ITL: mean and percentiles over finished requests
    eng.stats.by_step()        a row a step, the last ones            .by_request() a row a request
    eng.stats.timeline()       host and device lanes, idle gaps       .to_json(path), .reset()

A table's provenance says which weights, slots and settings it is of.

Totals are of everything since the engine was made or `reset`. Of single steps and requests the last
`held_steps` and `held_requests` are kept, and percentiles are of those.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass, field, fields
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from deepinfer.engine.stats import tables
from deepinfer.engine.stats.device_clock import DeviceClock
from deepinfer.engine.stats.records import HostLane, RequestRecord, StepRecord, Tally, percentile

if TYPE_CHECKING:
    from deepinfer.engine.request import Request
    from deepinfer.engine.scheduling.output import ScheduledRequest
    from deepinfer.engine.scheduling.resources import Resources
    from deepinfer.engine.stats.timeline import Timeline
    from deepinfer.engine.step.speculation import DraftRecord
    from deepinfer.tables.table import Table

HELD_STEPS = 4096  # about 4 MB of records
HELD_REQUESTS = 1024
HELD_DRAFTS = 4096  # what became of drafts, one record a sequence of a step
HELD_GAPS = 65536  # times between tokens, of all requests together


@dataclass(repr=False, eq=False)
class Stats:
    """Counters since the engine was made. drafted / accepted: by draft depth, 0 first; survival:
    the drafter's own probabilities that a draft of this depth is accepted, summed like them;
    synchronous: steps that an overlapped engine committed at once, by the reason why."""

    steps: int = 0
    prefill_steps: int = 0
    decode_steps: int = 0
    mixed_steps: int = 0
    prefill_rows: int = 0
    decode_rows: int = 0
    row_limit: int = 0
    tokens: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    sum_seqlen_qxk: int = 0
    max_seqlen_k: int = 0
    peak_running: int = 0
    peak_waiting: int = 0
    peak_kv_usage: float = 0.0
    ended_prompt_tokens: int = 0
    ended_tokens: int = 0
    finished: Counter = field(default_factory=Counter)
    drafted: Counter = field(default_factory=Counter)
    accepted: Counter = field(default_factory=Counter)
    survival: Counter = field(default_factory=Counter)
    synchronous: Counter = field(default_factory=Counter)

    held_steps: int = HELD_STEPS
    held_requests: int = HELD_REQUESTS
    clock: DeviceClock = field(default_factory=DeviceClock, repr=False)
    facts: Callable[[], dict[str, object]] = dict  # of the engine, asked where a table is made

    def __post_init__(self) -> None:
        self._live: dict[int, RequestRecord] = {}
        self._host = HostLane()
        self._marks: deque[list[Any]] = deque()  # [record, what, begin, end], not read yet
        self._clear()

    def _clear(self) -> None:
        self.step_records: deque[StepRecord] = deque(maxlen=self.held_steps)
        self.request_records: deque[RequestRecord] = deque(maxlen=self.held_requests)
        self.draft_records: deque[DraftRecord] = deque(maxlen=HELD_DRAFTS)
        self.gaps: deque[float] = deque(maxlen=HELD_GAPS)
        # of steps by kind, without the time in which no request was there; of the host by phase
        self.seconds: dict[str, float] = defaultdict(float)
        self.host_seconds: dict[str, float] = defaultdict(float)
        self.device_seconds = 0.0
        self.tallies = {name: Tally() for name in ("queue", "TTFT", "TPOT", "latency", "ITL")}
        self.closed_steps = 0
        self.ended_requests = 0  # of which there is a record, held or not
        self._preempted = 0  # preemptions up to the step before
        self._recorded = 0  # preemptions in the records of committed steps
        self._last_stop: float | None = None  # of the step before; None where it left nothing to do

    def reset(self) -> None:
        """Count from here on. Requests that are in the engine keep their own records."""
        for f in fields(self):
            if f.name not in ("held_steps", "held_requests", "clock", "facts"):
                setattr(self, f.name, Counter() if f.default_factory is Counter else f.default)
        self._clear()

    # ------------------------------------------------------------------------- recording: steps

    def begin(self, step: int) -> StepRecord:
        """A step begins, with the phase 'schedule'. It counts once it is `close`d."""
        record = StepRecord(step)
        if self._last_stop is None and not self._marks:
            self.clock.anchor()
        record.began = self._host.turn(record, "schedule")
        return record

    def turn(self, record: StepRecord, phase: str) -> None:
        """The host goes on with this phase of this step. See `records.PHASES`."""
        self._host.turn(record, phase)

    def device_begin(self, record: StepRecord, what: str = "") -> None:
        """What the device is given from here on belongs to this step; what: 'draft', or the step's
        kind. This and `device_end` may be called by a thread that drives the device, everything
        else by one other thread."""
        self._marks.append([record, what, self.clock.mark(), None])

    def device_end(self, record: StepRecord) -> None:
        """That was all, until the next `device_begin`."""
        if self._marks and self._marks[-1][0] is record:
            self._marks[-1][3] = self.clock.mark()

    def wait(self, record: StepRecord) -> None:
        """The host waits for what this step gave to the device."""
        self._host.turn(record, "wait")
        if self._marks and self._marks[-1][0] is record:
            self.clock.wait(self._marks[-1][3])

    def load(self, record: StepRecord, resources: Resources, unfinished: int) -> None:
        """What the engine holds while this step runs; unfinished: requests waiting or running."""
        record.running = resources.states.size - resources.states.free
        record.waiting = max(unfinished - record.running, 0)
        record.kv_usage = resources.pages.used / resources.pages.size
        record.state_usage = record.running / resources.max_num_seqs
        record.preempted, self._preempted = self.preemptions - self._preempted, self.preemptions

    def ran(
        self,
        record: StepRecord,
        kind: str,
        scheduled: Sequence[ScheduledRequest],
        drafts: Sequence[Sized],
        max_rows: int,
    ) -> None:
        """What this step ran: requests with their verified drafts; max_rows: most rows of a step."""
        record.kind, record.requests = kind, len(scheduled)
        shortest = 0
        for item, drafted in zip(scheduled, drafts):
            seqlen_k = item.stop + len(drafted)
            rows = seqlen_k - item.start
            if item.decode:
                record.decode_rows += rows
                record.verified += len(drafted)
            else:
                record.prefill_rows += rows
                record.chunked += not item.emits
            record.sum_seqlen_qxk += rows * seqlen_k
            record.max_seqlen_k = max(record.max_seqlen_k, seqlen_k)
            shortest = min(shortest or seqlen_k, seqlen_k)
            live = self._live.get(item.id)
            if live is not None and live.scheduled is None:
                live.scheduled = record.began
                self.prompt_tokens += live.prompt_tokens
        record.min_seqlen_k = shortest
        self.steps += 1
        self.prefill_steps += kind == "prefill"
        self.decode_steps += kind == "decode"
        self.mixed_steps += kind == "mixed"
        self.prefill_rows += record.prefill_rows
        self.decode_rows += record.decode_rows
        self.row_limit += max_rows
        self.sum_seqlen_qxk += record.sum_seqlen_qxk
        self.max_seqlen_k = max(self.max_seqlen_k, record.max_seqlen_k)
        self.peak_running = max(self.peak_running, record.running)
        self.peak_waiting = max(self.peak_waiting, record.waiting)
        self.peak_kv_usage = max(self.peak_kv_usage, record.kv_usage)

    def close(self, record: StepRecord, unfinished: int) -> None:
        """The step is committed. unfinished: requests that are left."""
        record.ended = now = self._host.turn(None)
        self._read_marks(record)
        record.unfinished = unfinished
        since = record.began if self._last_stop is None else self._last_stop
        self.seconds[record.kind] += now - since
        for phase, start, stop in record.host:
            self.host_seconds[phase] += stop - start
        self.device_seconds += record.device_seconds
        self._recorded += record.preempted
        self._last_stop = now if unfinished else None
        self.step_records.append(record)
        self.closed_steps += 1

    def drop(self, record: StepRecord) -> None:
        """The step, the last one begun, ran nothing: it is not recorded. One that failed: `recover`."""
        self._host.turn(None)
        self._preempted -= record.preempted
        while (
            self._marks and self._marks[-1][0] is record
        ):  # never walked: a thread may add its own
            self._marks.pop()

    def recover(self) -> None:
        """After an error or interrupt at any line, with nothing on its way: what was begun and not
        closed is not recorded. Can be done twice."""
        self._host.turn(None)
        self._marks.clear()
        self._preempted = self._recorded

    def _read_marks(self, record: StepRecord) -> None:
        while self._marks and self._marks[0][0].step <= record.step:  # earlier ones were dropped
            of, what, begin, end = self._marks.popleft()
            if of is record and end is not None:
                span = (what or record.kind, self.clock.read(begin), self.clock.read(end))
                record.device.append(span)

    # ---------------------------------------------------------------------- recording: requests

    def arrived(self, request: Request) -> None:
        """A request was added. What a fork has of its parent's output is prompt to it."""
        self._live[request.id] = RequestRecord(
            request.id, request.optimistic_tokens, perf_counter()
        )
        self.requests += 1

    def found(self, request: Request, tokens: int) -> None:
        """A request begins with this many prompt tokens that the prefix cache had. Where one that
        was preempted begins again, what it finds is no saving and is not counted."""
        live = self._live.get(request.id)
        if live is not None and live.scheduled is None:
            self.cached_tokens += tokens - live.cached_tokens
            live.cached_tokens = tokens

    def verified(self, record: StepRecord, draft: DraftRecord) -> None:
        """What became of the draft of one sequence."""
        record.accepted += draft.accepted
        for depth in range(draft.rows - 1):
            self.drafted[depth] += 1
            self.accepted[depth] += depth < draft.accepted
            self.survival[depth] += draft.survival[depth]
        self.draft_records.append(draft)

    def emitted(self, record: StepRecord, request: Request, kept: int) -> None:
        """A request got `kept` tokens."""
        self.tokens += kept
        record.tokens += kept
        live = self._live.get(request.id)
        if live is None or not kept:
            return
        now = perf_counter()
        if live.last_token is None:
            live.first_token = now
        else:
            live.gaps.append(now - live.last_token)
        live.last_token = now
        live.tokens += kept

    def ended(self, request: Request) -> None:
        """A request has finished, for the reason that it says."""
        live = self._live.pop(request.id, None)
        if live is None:  # counted already
            return
        self.finished[request.finish_reason] += 1
        live.ended, live.finish_reason = perf_counter(), request.finish_reason
        live.preemptions = request.preemptions
        gaps = sorted(live.gaps)
        if gaps:
            p50, p90, p99 = (percentile(gaps, fraction) or 0.0 for fraction in (0.5, 0.9, 0.99))
            live.itl = (p50, p90, p99)
            self.gaps.extend(gaps)
            self.tallies["ITL"].add(*gaps)
        live.gaps = []
        self.ended_prompt_tokens += live.prompt_tokens
        self.ended_tokens += live.tokens
        for name in ("queue", "TTFT", "TPOT", "latency"):
            value = live.seconds()[name]
            if value is not None:
                self.tallies[name].add(value)
        self.request_records.append(live)
        self.ended_requests += 1

    # --------------------------------------------------------------------------------- reading
    @property
    def acceptance(self) -> float | None:
        """Accepted share of the verified drafts, None before the first."""
        total = sum(self.drafted.values())
        return sum(self.accepted.values()) / total if total else None

    @property
    def tokens_per_step(self) -> float | None:
        """Output tokens per decode row of an anchor (bonus included), None before the first."""
        anchors = self.decode_rows - sum(self.drafted.values())
        return (anchors + sum(self.accepted.values())) / anchors if anchors else None

    @property
    def confidence_error(self) -> float | None:
        """How far the drafter's survival is from the accepted share: the difference of the two
        means per depth, averaged over the verified drafts. None before the first."""
        total = sum(self.drafted.values())
        off = sum(abs(self.survival[d] - self.accepted[d]) for d in self.drafted)
        return off / total if total else None

    @property
    def prefix_hit_rate(self) -> float | None:
        """Share of the prompt tokens of requests that began which the prefix cache had."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else None

    @property
    def idle_share(self) -> float | None:
        """Share of the time with work to do in which the device did nothing. None before a step."""
        seconds = sum(self.seconds.values())
        return 1 - self.device_seconds / seconds if seconds else None

    def table(self) -> Table:
        """name, value: every counter; nothing that a clock said."""
        return tables.counters(self)

    def drafts(self) -> Table:
        """A row a draft depth, 1 first: verified, accepted, and of the verified the share that was
        accepted (acceptance) and the one that the drafter expected (survival)."""
        return tables.drafts(self)

    def times(self, last: int = 100) -> Table:
        """name, unit, all: since the beginning, last: of the last `last` steps that are held."""
        return tables.times(self, last)

    def latencies(self) -> Table:
        """name, count, mean, p50, p90, p99, max of finished requests, in milliseconds. ITL is the
        time between two emissions of a request. Percentiles: of those held; the rest: of all."""
        return tables.latencies(self)

    def by_step(self, *, times: bool = True) -> Table:
        """A row a step that is held; times=False leaves out what a clock said."""
        return tables.rows(self, list(self.step_records), times, "step")

    def by_request(self, *, times: bool = True) -> Table:
        """A row a finished request that is held, as they finished; `request` is the id that `add`
        returned; times as of `by_step`."""
        return tables.rows(self, list(self.request_records), times, "request")

    def timeline(self, last: int | None = None) -> Timeline:
        """The lanes of the last steps (None: of all that are held)."""
        from deepinfer.engine.stats.timeline import Timeline

        whole = Timeline(list(self.step_records), facts=self.facts)
        return whole if last is None else whole[max(len(whole) - last, 0) :]

    def line(self, last: int = 100) -> str:
        """One line for a log: speeds of the last steps, what runs and waits, drafts, hits."""
        return tables.line(self, last)

    def json(self) -> dict[str, Any]:
        """Totals, steps and requests as plain dicts and lists; times in seconds."""
        return tables.as_dict(self)

    def to_json(self, path: str | Path | None = None) -> str:
        """`json()` as text, also written to a file where one is named."""
        return tables.as_json(self, path)

    def __repr__(self) -> str:
        return tables.as_text(self)

    def _repr_html_(self) -> str:
        return tables.as_html(self)
