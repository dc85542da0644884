"""How a timeline looks: a host lane, a device lane, the device's idle gaps hatched and summed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

from deepinfer.display import html
from deepinfer.display.numbers import counted, fmt

if TYPE_CHECKING:
    from deepinfer.engine.stats.timeline import Span, Timeline

SHOWN_STEPS = 24  # the last ones; what is hidden is said
TEXT_WIDTH = 100  # characters of a lane
NARROW = 0.06  # of the width: a narrower span carries no words
LONG_PAUSE = 0.4  # of what is left without them: longer pauses are drawn cut
CUT = 0.03  # of the drawn width: a cut pause

# what a span is -> (colour into PALETTE or None, letter, words)
Looks = dict[str, tuple[int | None, str, str]]
HOST: Looks = {
    "schedule": (0, "s", "who runs, how many rows"),
    "launch": (2, "l", "builds the batch and gives it to the device"),
    "wait": (None, "-", "has nothing to do until the device is done"),
    "post-process": (3, "p", "reads the tokens, stop checks, frees pages"),
}
DEVICE: Looks = {
    "prefill": (1, "P", "prompt rows"),
    "decode": (4, "D", "a row a sequence, and its drafts"),
    "mixed": (7, "M", "both"),
    "draft": (6, "d", "the drafter proposes the next tokens"),
    "other steps": (None, "o", "works for steps that are not shown"),
}
SAID = {"other steps": "other steps, which are not shown"}
HATCH = "repeating-linear-gradient(45deg,#D55E00d0 0 2px,transparent 2px 6px)"
IDLE_LETTER, PAUSE_LETTER, CUT_MARK = ".", " ", "//"


# a block of a lane; its edge is a shadow, for a border takes room and shifts what is behind it
BOX = "flex:none;overflow:hidden;white-space:nowrap"
EDGE = f"box-shadow:inset 1px 0 0 {html.LINE}"


class Piece(NamedTuple):
    """A stretch of one lane as it is drawn; share: of the width."""

    share: float
    span: Span | None  # None: nothing there
    cut: bool = False


def timeline_text(t: Timeline) -> str:
    """Two lines of letters, the device's idle time as dots, and the sums."""
    shown = t[-SHOWN_STEPS:]
    if not shown.span:
        return "Timeline: no steps"
    total, drawn = axis(shown, None)
    lines = [f"Timeline of {headline(t)}", *(f"  {n}" for n in notes(t, shown))]
    lanes = (("host", shown.host, HOST), ("device", busy_and_gaps(shown), DEVICE))
    for name, spans, looks in lanes:
        lines.append(f"  {name:<6} |{letters(spans, looks, drawn, total)}|")
    used = []
    for looks, found in ((HOST, shown.host), (DEVICE, busy_and_gaps(shown))):
        whats = {s.what for s in found}
        used += [
            f"{letter} {SAID.get(name, name)}"
            for name, (_, letter, _) in looks.items()
            if name in whats
        ]
    lines.append(f"  {', '.join(used)}, {IDLE_LETTER} idle; the width is {milli(total)}")
    return "\n".join(lines)


def timeline_html(t: Timeline, seconds: float | None = None) -> html.Html:
    """Lanes of blocks, each with its facts as a tooltip; seconds: of the full width."""
    shown = t[-SHOWN_STEPS:]
    if not shown.span:
        return html.card("Timeline", html.muted("no steps"))
    total, drawn = axis(shown, seconds)
    host = [block_of(p, HOST) for p in pieces(shown.host, drawn, total)]
    device = [block_of(p, DEVICE) for p in pieces(busy_and_gaps(shown), drawn, total)]
    numbers = [step_mark(p) for p in pieces(turns(shown), drawn, total)]
    rows = [("step", numbers), ("host", host), ("device", device), ("", ticks(total))]
    lines = [lane(name, blocks) for name, blocks in rows]
    return html.card(
        "Timeline",
        html.block(*lines, style="margin:6px 0"),
        legend(shown),
        causes(t),
        *(remark(n) for n in notes(t, shown)),
        note=headline(t),
    )


# ---------------------------------------------------------------------------------- what is drawn


def busy_and_gaps(t: Timeline) -> list[Span]:
    """The device lane without holes: its work, and between it idle stretches (one a gap, whatever
    the host did meanwhile), pauses, and work for steps that were cut off."""
    from deepinfer.engine.stats.timeline import NOTHING, OTHERS

    out: list[Span] = []
    gaps = [g if g.what in (NOTHING, OTHERS) else g._replace(what="idle") for g in t.gaps]
    for s in sorted((*t.device, *gaps)):
        if out and out[-1].what == s.what == "idle" and out[-1].stop == s.start:
            out[-1] = out[-1]._replace(stop=s.stop)
        else:
            out.append(s)
    return out


def turns(t: Timeline) -> list[Span]:
    """Where each step's device work begins, up to the next one's: for the step numbers."""
    first: dict[int, Span] = {}
    for s in t.device:
        first.setdefault(s.step, s)
    starts = list(first.values())
    ends = [s.start for s in starts[1:]] + [t.span]
    return [s._replace(stop=end) for s, end in zip(starts, ends)]


def long_pauses(t: Timeline) -> list[Span]:
    """Pauses without work, and stretches in which the engine was not called, that would leave
    little width for the rest."""
    from deepinfer.engine.stats.timeline import NOTHING, OUTSIDE

    quiet = [g for g in t.gaps if g.what in (NOTHING, OUTSIDE)]
    rest = t.span - sum(g.seconds for g in quiet)
    return [g for g in quiet if g.seconds > LONG_PAUSE * rest]


def axis(t: Timeline, seconds: float | None) -> tuple[float, Callable[[float], float]]:
    """The drawn width in seconds, and where a time lies on it: long pauses are cut short."""
    long = long_pauses(t)
    width = CUT * (t.span - sum(g.seconds for g in long))
    removed = [(g.start, g.stop, max(g.seconds - width, 0.0)) for g in long]

    def drawn(at: float) -> float:
        gone = sum(off * min(max((at - a) / (b - a), 0.0), 1.0) for a, b, off in removed)
        return at - gone

    return max(seconds or 0.0, drawn(t.span)), drawn


def pieces(spans: Iterable[Span], drawn: Callable[[float], float], total: float) -> list[Piece]:
    """The spans and the holes between them, left to right. Neighbours share their edge exactly."""
    out, at = [], 0.0
    for s in spans:
        start, stop = drawn(s.start), drawn(s.stop)
        if start > at:
            out.append(Piece((start - at) / total, None))
        out.append(Piece((stop - start) / total, s, stop - start < 0.99 * s.seconds))
        at = stop
    return out


def letters(
    spans: Iterable[Span], looks: Looks, drawn: Callable[[float], float], total: float
) -> str:
    """A lane as TEXT_WIDTH letters: what covers most of each cell."""
    cells: list[dict[str, float]] = [{} for _ in range(TEXT_WIDTH)]
    for s in spans:
        letter = IDLE_LETTER if s.what == "idle" else PAUSE_LETTER
        if s.what in looks:
            letter = looks[s.what][1]
        start, stop = (TEXT_WIDTH * drawn(x) / total for x in (s.start, s.stop))
        for i in range(int(start), min(int(stop) + 1, TEXT_WIDTH)):
            cells[i][letter] = cells[i].get(letter, 0.0) + min(stop, i + 1) - max(start, i)
    return "".join(max(c, key=lambda x: (c[x], x)) if c else " " for c in cells)


# ------------------------------------------------------------------------------------ how it looks


def lane(name: str, blocks: list[html.Html]) -> html.Html:
    label = html.block(html.muted(name), style="flex:none;width:4em")
    body = html.block(*blocks, style="flex:1;display:flex;min-width:0")
    return html.block(label, body, style="display:flex;margin:2px 0")


def block_of(p: Piece, looks: Looks) -> html.Html:
    box = f"{BOX};width:{p.share:.4%};height:1.9em"
    if p.span is None:
        return html.block(style=box)
    s = p.span
    colour, words = None, ""
    if s.what in looks:
        colour = looks[s.what][0]
        fill = html.WASH if colour is None else html.PALETTE[colour] + "80"
        box += f";background:{fill}"
        words = s.what if looks is HOST else f"{s.what} {milli(s.seconds)}"
    elif s.what == "idle":
        box += f";background:{HATCH}"
        words = milli(s.seconds)
    else:
        words = CUT_MARK if p.cut else ""
    box += f";{EDGE};{html.MONO};font-size:11px;line-height:2.1em;text-align:center"
    of = f" of step {s.step}" if s.step >= 0 and s.what in looks else ""
    title = f"{s.what}{of}: {milli(s.seconds)}, from {milli(s.start)} to {milli(s.stop)}"
    roomy = p.cut or p.share > max(NARROW, 0.0098 * len(words))
    return html.tag("div", words if roomy else "", style=box, title=title)


def step_mark(p: Piece) -> html.Html:
    box = f"{BOX};width:{p.share:.4%};font-size:11px"
    if p.span is None:
        return html.block(style=box)
    said = f"\u2009{p.span.step}" if p.share > 0.012 * len(str(p.span.step)) else ""
    return html.block(html.muted(said), style=f"{box};{EDGE}")


def ticks(total: float) -> list[html.Html]:
    """Marks at round times, four to ten of them."""
    unit = 10.0 ** math.floor(math.log10(total / 4))
    unit *= max(x for x in (1, 2, 5) if x * unit <= total / 4)
    box = f"{BOX};{EDGE};font-size:11px"
    ends = [i * unit for i in range(int(total / unit) + 1)] + [total]
    out = []
    for a, b in zip(ends, ends[1:]):
        share = (b - a) / total
        said = f"\u2009{milli(a)}" if share > NARROW else ""
        out.append(html.block(html.muted(said), style=f"{box};width:{share:.4%}"))
    return out


def legend(t: Timeline) -> html.Html:
    chips = []
    for looks, spans in ((HOST, t.host), (DEVICE, busy_and_gaps(t))):
        found = {s.what for s in spans}
        for name, (colour, _, words) in looks.items():
            if name in found:
                wash = html.WASH if colour is None else html.PALETTE[colour] + "80"
                chips.append(swatch(name, wash, words))
    chips.append(swatch("device idle", HATCH, "requests were there, and the device did nothing"))
    return html.block(*chips, style="margin:4px 0 0 4em")


def swatch(name: str, background: str, words: str) -> html.Html:
    box = f"display:inline-block;width:1.1em;height:.9em;background:{background}"
    box += f";border:1px solid {html.LINE};vertical-align:-1px;margin-right:4px"
    mark = html.tag("span", style=box)
    return html.tag("span", mark, name, style="display:inline-block;margin-right:14px", title=words)


def causes(t: Timeline) -> html.Html:
    """Where the idle time comes from."""
    named = t.idle_by_cause
    if not named:
        return html.block()
    said = ", ".join(f"{CAUSES.get(cause, cause)} {milli(s)}" for cause, s in named.items())
    return remark(f"The device idled while the host was in: {said}.")


CAUSES = {"outside": "code outside of step"}


def headline(t: Timeline) -> str:
    pause = f", {milli(t.no_work)} without work" if t.no_work else ""
    return (
        f"{counted(len(t), 'step')} in {milli(t.span)}: device busy {milli(t.busy)}, "
        f"idle {milli(t.idle)} ({fmt(100 * t.idle_share)} %){pause}"
    )


def notes(t: Timeline, shown: Timeline) -> list[str]:
    """What the picture leaves out."""
    out = []
    if len(shown) < len(t):
        out.append(f"Drawn are the last {len(shown)} of {len(t)} steps; t[a:b] draws others.")
    if long := long_pauses(shown):
        cut = milli(sum(g.seconds for g in long))
        out.append(
            f"Cut short where // stands, and left out of the axis: {cut} in which the engine was "
            "not called."
        )
    return out


def remark(text: str) -> html.Html:
    return html.block(html.muted(text), style="margin-left:4em")


def milli(seconds: float) -> str:
    return f"{fmt(seconds)} s" if seconds >= 1 else f"{fmt(1e3 * seconds)} ms"
