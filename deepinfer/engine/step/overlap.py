"""Overlap: which steps may still be on their way while the next one is scheduled and launched.

    synchronous    schedule(n) launch(n) commit(n) | schedule(n+1) ...
    overlapped     schedule(n+1) launch(n+1) commit(n) | schedule(n+2) launch(n+2) commit(n+1) | ...

Both are the same code; the only difference is whether a launched step is committed at once
(`why_synchronous`) or behind the next launch. Whatever needs the host to have seen a step's tokens
before the next launch is named here, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable

from deepinfer.engine.request import Request
from deepinfer.engine.runtime import Runtime
from deepinfer.engine.scheduling.output import SchedulerOutput
from deepinfer.engine.step.in_flight import InFlightStep
from deepinfer.slots import registry

ON_DEVICE = ("attention", "experts", "sampler", "verifier")  # the slots that run inside a launch


def why_synchronous(rt: Runtime, step_in_flight: InFlightStep) -> str | None:
    """Why this step is committed before the next one is scheduled; None where it need not be."""
    if not rt.settings.overlap:
        return "overlap is off"
    if step_in_flight.traced:
        return "a trace is on"  # it is told at once which rows were accepted
    if any(s.request.grammar is not None for s in step_in_flight.scheduled):
        return "a grammar is asked on the host"
    if not step_in_flight.wanted:
        return "nobody waits for it any more"
    if rt.model.device.type == "cuda":
        waits = [n for n in ON_DEVICE if not registry.promises(rt.slots[n], n).on_device]
        if waits:  # its launch may wait for the device
            return f"{', '.join(waits)} does not promise on_device"
    return None


def short_of_pages(rt: Runtime, requests: Iterable[Request]) -> bool:
    """Whether somebody would have to be preempted if every draft on its way were accepted. Then the step
    is committed first: who has finished makes room, and nobody is preempted for tokens that do not
    come, or with its own last token in the air."""
    resources = rt.resources
    missing = sum(
        max(resources.pages_of(r.optimistic_tokens + resources.lookahead) - len(r.pages), 0)
        for r in requests
        if r.status == "running" and r.decoding
    )
    return resources.pages.ask(missing) != "ok"


def needs_the_step_before(schedule: SchedulerOutput, in_flight: list[InFlightStep]) -> bool:
    """Whether a schedule has to be made anew once what is on its way is committed: except in a pure
    decode step the host tells rows from rows, so it has to know how many each sequence has."""
    return schedule.kind != "decode" and any(
        f.place(s.request) >= 0 for f in in_flight for s in schedule.scheduled
    )
