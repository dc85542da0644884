"""Timelines are pure functions of step records. Made-up ones have whole seconds: sums are exact."""

import json
import re

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

import deepinfer as di
from deepinfer.display import timeline as shown
from deepinfer.engine.stats.records import StepRecord
from deepinfer.engine.stats.timeline import NOTHING, OUTSIDE, Timeline

durations = st.integers(0, 9)


@st.composite
def synchronous(draw) -> list[StepRecord]:
    """SchedulerOutput, launch, wait while the device works, post-process; then the caller's time."""
    t, out = draw(st.integers(0, 1000)), []
    for step in range(draw(st.integers(0, 6))):
        s, l, d, p, away = (draw(durations) for _ in range(5))
        kind = draw(st.sampled_from(["prefill", "decode", "mixed"]))
        r = StepRecord(step, kind, unfinished=draw(st.integers(0, 1)))
        a, b, c = t + s, t + s + l, t + s + l + d
        r.host = [("schedule", t, a), ("launch", a, b), ("wait", b, c), ("post-process", c, c + p)]
        r.device = [(kind, b, c)]
        t = c + p + away
        out.append(r)
    return out


@st.composite
def overlapped(draw) -> list[StepRecord]:
    """schedule(n+1) and launch(n+1) before post-process(n); the device works through its queue."""
    n, t, free = draw(st.integers(1, 6)), 7, 7
    records = [StepRecord(i, "decode", unfinished=2) for i in range(n)]
    before = None
    for r in [*records, None]:
        if r is not None:
            s, l, d = (draw(durations) for _ in range(3))
            r.host += [("schedule", t, t + s), ("launch", t + s, t + s + l)]
            t += s + l
            free = max(free, t) + d
            r.device.append(("decode", free - d, free))
        if before is not None:
            done, p = max(t, before.device[-1][2]), draw(durations)
            before.host += [("wait", t, done), ("post-process", done, done + p)]
            t = done + p
        before = r
    records[-1].unfinished = 0
    return records


records = st.one_of(synchronous(), overlapped())


@given(records, st.data())
def test_a_slice_idles_only_where_the_whole_does(made, data):
    """What the device did for steps that were cut off is no idle time of those that are left."""
    whole = Timeline(made)
    a = data.draw(st.integers(0, len(made)))
    part = whole[a : data.draw(st.integers(a, len(made)))]
    assert part.busy + part.idle + part.no_work + part.others == part.span
    assert part.idle <= whole.idle and part[:].idle == part.idle
    assert whole[:].gaps == whole.gaps and not whole.others


@given(records)
def test_gaps_and_work_fill_the_device_lane(made):
    t = Timeline(made)
    assert t.busy + t.idle + t.no_work == t.span
    lane = sorted((*t.device, *t.gaps))
    at = 0
    for s in lane:
        assert s.start == at and s.stop >= s.start
        at = s.stop
    assert at == t.span
    assert sum(t.idle_by_cause.values()) == t.idle and 0 <= t.idle_share <= 1
    assert all(g.stop > g.start for g in t.gaps)


@given(records)
def test_causes_are_what_the_host_did(made):
    """By brute force, a second at a time."""
    t = Timeline(made)
    origin = min([x for r in made for x in (r.host[0][1],)], default=0)
    found = {}
    for g in t.gaps:
        for second in range(int(g.start), int(g.stop)):
            found[second] = g.what
    for second in range(int(t.span)):
        at = second + origin
        if any(a <= at < b for r in made for _, a, b in r.device):
            assert second not in found
            continue
        phase = [p for r in made for p, a, b in r.host if a <= at < b]
        idle = any(
            a.unfinished == 0 and a.host[-1][2] <= at < b.host[0][1] for a, b in zip(made, made[1:])
        )
        assert found[second] == (NOTHING if idle else phase[0] if phase else OUTSIDE)


@given(records)
def test_deterministic_and_free_of_the_origin(made):
    moved = []
    for r in made:
        m = StepRecord(r.step, r.kind, unfinished=r.unfinished)
        m.host = [(p, a + 1000, b + 1000) for p, a, b in r.host]
        m.device = [(k, a + 1000, b + 1000) for k, a, b in r.device]
        moved.append(m)
    a, b, c = Timeline(made), Timeline(made), Timeline(moved)
    for other in (b, c):
        assert (a.host, a.device, a.gaps) == (other.host, other.device, other.gaps)
        assert repr(a) == repr(other) and a._repr_html_() == other._repr_html_()
        assert a.to_json() == other.to_json()


@given(records)
@settings(max_examples=50)
def test_json_and_trace_hold_the_lanes(made):
    t = Timeline(made)
    whole = json.loads(t.to_json())
    assert whole["span"] == t.span and whole["idle_share"] == t.idle_share
    assert [tuple(s.values()) for s in whole["gaps"]] == [tuple(s) for s in t.gaps]
    events = json.loads(t.to_chrome_trace())["traceEvents"]
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    for name, spans in (("host", t.host), ("device", t.device), ("device idle", t.gaps)):
        got = [e for e in events if e["ph"] == "X" and lanes[e["tid"]] == name]
        assert [(e["ts"] / 1e6, e["dur"] / 1e6, e["name"]) for e in got] == [
            (s.start, s.seconds, s.what) for s in spans
        ]


def step(number: int, start: float, device: float = 10, unfinished: int = 1) -> StepRecord:
    r = StepRecord(number, "decode", unfinished=unfinished)
    a, b = start + 1, start + 1 + device
    r.host = [("schedule", start, a), ("wait", a, b), ("post-process", b, b + 2)]
    r.device = [("decode", a, b)]
    return r


def test_sums_of_a_known_case():
    """5 seconds in which requests wait and nobody calls the engine, then 100 without work."""
    t = Timeline([step(0, 0), step(1, 18, unfinished=0), step(2, 131)])
    assert (t.span, t.busy) == (144, 30)
    assert t.idle_by_cause == {"post-process": 6, OUTSIDE: 5, "schedule": 3}
    assert (t.idle, t.no_work, t.idle_share) == (14, 100, 14 / 44)
    assert [r["idle before ms"] for r in t.table()] == [1000, 8000, 3000]  # both sides of the pause


def test_a_lane_that_overlaps_is_refused():
    with pytest.raises(ValueError, match="device lane overlaps.*step 1 begins 1e\\+03 ms before"):
        bad = step(1, 13)
        bad.device = [("decode", 10, 24)]
        Timeline([step(0, 0), bad])
    with pytest.raises(ValueError, match="host lane overlaps"):
        Timeline([step(0, 0), step(1, 12)])
    with pytest.raises(ValueError, match="ends before it begins"):
        Timeline([StepRecord(0, device=[("decode", 2, 1)])])


@given(records)
@settings(max_examples=50)
def test_lanes_are_drawn_side_by_side(made):
    t = Timeline(made)
    page = t._repr_html_()
    assert "<script" not in page and "<style" not in page
    if not t.span:
        assert "no steps" in page and "no steps" in repr(t)
        return
    drawn, total = shown.axis(t, None)[1], shown.axis(t, None)[0]
    for spans in (t.host, shown.busy_and_gaps(t)):
        pieces = shown.pieces(spans, drawn, total)
        assert sum(p.share for p in pieces) <= 1 + 1e-9 and all(p.share >= 0 for p in pieces)
        at = 0.0
        for p in pieces:
            if p.span is not None:
                assert abs(at - drawn(p.span.start) / total) < 1e-9
            at += p.share
    assert abs(sum(p.share for p in shown.pieces(shown.busy_and_gaps(t), drawn, total)) - 1) < 1e-9


def test_what_is_hidden_is_said():
    many = Timeline([step(i, 20 * i) for i in range(100)])
    for text in (repr(many), many._repr_html_()):
        assert f"the last {shown.SHOWN_STEPS} of 100 steps" in text and "100 steps in" in text
    few = many[:3]
    assert len(few) == 3 and "Drawn are" not in repr(few)
    away = Timeline([step(0, 0, unfinished=0), step(1, 1000)])
    for text in (repr(away), away._repr_html_()):
        assert "987 s without work" in text and "Cut short where // stands" in text
    total, drawn = shown.axis(away, None)
    assert total < 30 and drawn(1000) < 20


def test_same_scale_for_two():
    """With the seconds of the longer one both are drawn to one scale: equal steps, equal widths."""
    short, long = Timeline([step(0, 0)]), Timeline([step(0, 0), step(1, 14)])
    page, other = short.html(long.span), long.html()
    wait = re.compile(r'<div style="[^"]*width:([\d.]+)%[^"]*" title="wait of step 0')
    assert wait.search(page).group(1) == wait.search(other).group(1)
    assert short.html() != page


def test_text_of_a_known_case():
    lines = repr(Timeline([step(0, 0, device=7)])).splitlines()
    assert lines[0] == "Timeline of 1 step in 10 s: device busy 7 s, idle 3 s (30 %)"
    assert lines[1] == "  host   |" + "s" * 10 + "-" * 70 + "p" * 20 + "|"
    assert lines[2] == "  device |" + "." * 10 + "D" * 70 + "." * 20 + "|"


def test_the_legend_names_every_letter_that_is_drawn():
    """Those of steps that a slice left out too."""
    eng = di.Engine.tiny(device="cpu", overlap=True, max_model_len=64)
    eng.generate(["The walk", "A cache"], max_tokens=12, ignore_eos=True, seed=1)
    line = eng.stats.timeline()
    drawn_others = 0
    for part in (line, line[3:7], line[5:6]):
        *_, host, device, legend = repr(part).splitlines()
        drawn = set(host.split("|")[1] + device.split("|")[1]) - {" "}
        assert all(f"{letter} " in legend for letter in drawn)
        assert ("o other steps, which are not shown" in legend) == ("o" in drawn)
        drawn_others += "o" in drawn
        assert ("other steps" in part._repr_html_()) == any(
            g.what == "other steps" for g in part.gaps
        )
    assert drawn_others
