"""Two lanes, host and device, over the time of some steps, and where the device idled.

A pure function of step records: the same records give the same timeline, wherever they come from.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from deepinfer.engine.stats.records import StepRecord

if TYPE_CHECKING:
    from deepinfer.tables.table import Table

FORMAT = "deepinfer.Timeline/1"
OUTSIDE = "outside"  # between two calls of `step`: whoever drives the engine has the host
NOTHING = "no work"  # no request was left, so nothing was missed
OTHERS = "other steps"  # in a slice: the device was at work for a step that was cut off


class Span(NamedTuple):
    """Seconds since the first record began; what: a phase, a kind of step or a gap's cause."""

    start: float
    stop: float
    what: str
    step: int

    @property
    def seconds(self) -> float:
        return self.stop - self.start


class Timeline:
    """What host and device did, step by step.

    records: in the order of their steps. Times become seconds since the first of them began.
    host: phases; device: kinds of steps, and 'draft'; gaps: the stretches in which the device did
    nothing for these steps, cut where the cause changes: the phase the host was in, 'outside' (of
    `step`), 'no work', or 'other steps': in an overlapped run the host's first phase of a slice lies
    beside the device's work of the step before it. The step of a gap is that of the device's work
    behind it, -1 behind the last.

    busy + idle + no_work + others = span. Raises ValueError where a lane overlaps itself.
    cut: the records that a slice left out, whose device work is no idle time. facts: of the engine,
    for a table's provenance.
    """

    def __init__(
        self,
        records: Iterable[StepRecord],
        cut: Iterable[StepRecord] = (),
        *,
        facts: Callable[[], dict[str, object]] = dict,
    ) -> None:
        self._facts = facts
        self.records: tuple[StepRecord, ...] = tuple(records)
        self._cut: tuple[StepRecord, ...] = tuple(cut)
        host = [(a, b, phase, r.step) for r in self.records for phase, a, b in r.host]
        device = [(a, b, what, r.step) for r in self.records for what, a, b in r.device]
        self._origin = min((s[0] for s in (*host, *device)), default=0.0)
        self.host = _lane("host", host, self._origin)
        self.device = _lane("device", device, self._origin)
        self.span = max((s.stop for s in (*self.host, *self.device)), default=0.0)
        self.gaps = tuple(self._gaps())

    # -- sums ------------------------------------------------------------------------------------

    @property
    def busy(self) -> float:
        """Seconds in which the device worked."""
        return math.fsum(s.seconds for s in self.device)

    @property
    def no_work(self) -> float:
        """Seconds in which no request was left."""
        return math.fsum(g.seconds for g in self.gaps if g.what == NOTHING)

    @property
    def others(self) -> float:
        """Seconds in which the device worked for steps that a slice left out."""
        return math.fsum(g.seconds for g in self.gaps if g.what == OTHERS)

    @property
    def idle(self) -> float:
        """Seconds in which the device did nothing although there were requests."""
        return math.fsum(g.seconds for g in self.gaps if g.what not in (NOTHING, OTHERS))

    @property
    def idle_share(self) -> float:
        """idle / (busy + idle); 0 for an empty timeline."""
        return self.idle / (self.busy + self.idle) if self.idle else 0.0

    @property
    def idle_by_cause(self) -> dict[str, float]:
        """Idle seconds by what the host did meanwhile, most first."""
        idle = [g for g in self.gaps if g.what not in (NOTHING, OTHERS)]
        causes = dict.fromkeys((g.what for g in idle), 0.0)
        for g in idle:
            causes[g.what] += g.seconds
        return dict(sorted(causes.items(), key=lambda c: (-c[1], c[0])))

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[StepRecord]:
        return iter(self.records)

    def __getitem__(self, key: slice) -> Timeline:
        """The timeline of some of the steps: `t[-20:]`."""
        if not isinstance(key, slice):
            raise TypeError(f"a timeline is cut by a slice, t[-20:]; got {key!r}")
        kept = self.records[key]
        steps = {id(r) for r in kept}
        cut = (*self._cut, *(r for r in self.records if id(r) not in steps))
        return Timeline(kept, cut, facts=self._facts)

    def table(self) -> Table:
        """A row a step: its load, and milliseconds of host phases, device and the gap before it."""
        from deepinfer.tables.table import Table

        before = {r.step: 0.0 for r in self.records}
        for g in self.gaps:
            if g.what not in (NOTHING, OTHERS) and g.step in before:
                before[g.step] += g.seconds
        return Table(
            [{**r.row(), "idle before ms": 1e3 * before[r.step]} for r in self.records],
            title="steps of a timeline",
            provenance=self._facts(),
        )

    # -- exports ---------------------------------------------------------------------------------

    def to_json(self, path: str | Path | None = None) -> str:
        """Lanes, gaps (seconds since the first step began) and sums; also written to a file."""
        whole = {
            "format": FORMAT,
            "span": self.span,
            "busy": self.busy,
            "idle": self.idle,
            "no_work": self.no_work,
            "others": self.others,
            "idle_share": self.idle_share,
            "idle_by_cause": self.idle_by_cause,
            "host": [s._asdict() for s in self.host],
            "device": [s._asdict() for s in self.device],
            "gaps": [s._asdict() for s in self.gaps],
        }
        return _written(json.dumps(whole, allow_nan=False) + "\n", path)

    def to_chrome_trace(self, path: str | Path | None = None) -> str:
        """The lanes as Chrome's trace event JSON, which ui.perfetto.dev opens."""
        lanes = {"host": self.host, "device": self.device, "device idle": self.gaps}
        events: list[dict] = []
        for number, (name, spans) in enumerate(lanes.items(), 1):
            lane = {"pid": 1, "tid": number}
            events.append({"ph": "M", "name": "thread_name", **lane, "args": {"name": name}})
            events += [
                {
                    "ph": "X",
                    "name": s.what,
                    "ts": 1e6 * s.start,
                    "dur": 1e6 * s.seconds,
                    **lane,
                    "args": {"step": s.step},
                }
                for s in spans
            ]
        return _written(json.dumps({"traceEvents": events}, allow_nan=False) + "\n", path)

    # -- showing ---------------------------------------------------------------------------------

    def __repr__(self) -> str:
        from deepinfer.display.timeline import timeline_text

        return timeline_text(self)

    def _repr_html_(self) -> str:
        return self.html()

    def html(self, seconds: float | None = None) -> str:
        """The picture; seconds: what its full width stands for (None: this timeline's span), so
        that two timelines can be compared by eye."""
        from deepinfer.display.timeline import timeline_html

        return timeline_html(self, seconds)

    # -- inside ----------------------------------------------------------------------------------

    def _gaps(self) -> Iterator[Span]:
        """The device's gaps, cut where the cause changes."""
        pauses = self._pauses()
        others = sorted(
            Span(a - self._origin, b - self._origin, OTHERS, r.step)
            for r in self._cut
            for _, a, b in r.device
        )
        work = [(s.start, s.stop, s.step) for s in self.device]
        edges = [(0.0, 0.0, -1), *work, (self.span, self.span, -1)]
        for (_, start, _), (stop, _, step) in zip(edges, edges[1:]):
            if stop <= start:
                continue
            reasons = [s for lane in (others, pauses, self.host) for s in _near(lane, start, stop)]
            cuts = {t for s in reasons for t in s[:2] if start < t < stop} | {start, stop}
            ordered = sorted(cuts)
            pieces: list[Span] = []
            for a, b in zip(ordered, ordered[1:]):
                cause = next((s.what for s in reasons if s.start <= a < s.stop), OUTSIDE)
                if pieces and pieces[-1].what == cause:
                    pieces[-1] = pieces[-1]._replace(stop=b)
                else:
                    pieces.append(Span(a, b, cause, step))
            yield from pieces

    def _pauses(self) -> list[Span]:
        """From the end of a step that left no request to the beginning of the next step."""
        ran = [r for r in self.records if r.host or r.device]
        return [
            Span(_stop(a) - self._origin, _start(b) - self._origin, NOTHING, b.step)
            for a, b in zip(ran, ran[1:])
            if a.unfinished == 0 and _start(b) > _stop(a)
        ]


def _start(r: StepRecord) -> float:
    return min((*(h[1] for h in r.host), *(d[1] for d in r.device)))


def _stop(r: StepRecord) -> float:
    return max((*(h[2] for h in r.host), *(d[2] for d in r.device)))


def _near(spans: Sequence[Span], start: float, stop: float) -> Sequence[Span]:
    """Those of a lane's spans that may touch start..stop."""
    first = bisect_right(spans, start, key=lambda s: s.start) - 1
    return spans[max(first, 0) : bisect_right(spans, stop, key=lambda s: s.start)]


def _lane(name: str, spans: list[tuple[float, float, str, int]], origin: float) -> tuple[Span, ...]:
    """Sorted spans, seconds since the origin. Raises ValueError where two of them overlap."""
    ordered = [Span(a - origin, b - origin, what, step) for a, b, what, step in sorted(spans)]
    for s in ordered:
        if not s.start <= s.stop:
            raise ValueError(f"the {name} lane's {s.what!r} of step {s.step} ends before it begins")
    for a, b in zip(ordered, ordered[1:]):
        if b.start < a.stop:
            raise ValueError(
                f"the {name} lane overlaps: {b.what!r} of step {b.step} begins "
                f"{1e3 * (a.stop - b.start):.3g} ms before {a.what!r} of step {a.step} ends"
            )
    return tuple(ordered)


def _written(text: str, path: str | Path | None) -> str:
    if path is not None:
        Path(path).write_text(text, "utf-8", newline="")
    return text
