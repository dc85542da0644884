"""Overlap: which steps may still be in flight while the next one is scheduled and launched.

    synchronous    schedule(n) launch(n) commit(n) | schedule(n+1) ...
    overlapped     schedule(n+1) launch(n+1) commit(n) | schedule(n+2) launch(n+2) commit(n+1) | ...

Both are the same code; the only difference is whether a launched step is committed at once
(`why_synchronous`) or after the next launch. Every reason for which the host has to see a step's
tokens before the next launch is in this file, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from deepinfer.engine.request import Request
from deepinfer.engine.runtime import Runtime
from deepinfer.engine.scheduling.output import SchedulerOutput
from deepinfer.engine.step.in_flight import InFlightStep
from deepinfer.slots import registry

ON_DEVICE = ("attention", "experts", "sampler", "verifier")  # the slots that run inside a launch


def why_synchronous(rt: Runtime, step: InFlightStep) -> str | None:
    """Why this step is committed before the next one is scheduled; None if it need not be."""
    if not rt.settings.overlap:
        return "overlap is off"
    if step.traced:
        return "a trace is on"  # it is told at once which rows were accepted
    if any(r.grammar is not None for r in step.requests):
        return "a grammar is asked on the host"
    if not step.wanted:
        return "nobody waits for it any more"
    if rt.model.device.type == "cuda":
        waits = [n for n in ON_DEVICE if not registry.promises(rt.slots[n], n).on_device]
        if waits:  # its launch may wait for the device
            return f"{', '.join(waits)} does not promise on_device"
    return None


def short_of_pages(rt: Runtime, requests: Iterable[Request]) -> bool:
    """Whether a request would have to be preempted if every draft in flight were accepted. Then the
    step is committed first. Finished requests free their pages first, so no request is preempted for
    drafts that end up rejected, or while its own last token is in flight."""
    resources = rt.resources
    missing = sum(
        max(resources.pages_of(r.optimistic_tokens + resources.lookahead) - len(r.pages), 0)
        for r in requests
        if r.status == "running" and r.decoding
    )
    return resources.pages.ask(missing) != "ok"


def needs_the_step_before(
    schedule: SchedulerOutput, requests: Mapping[int, Request], in_flight: list[InFlightStep]
) -> bool:
    """Whether the steps in flight have to be committed and the schedule made again. The host lays out
    the rows of every step but a pure decode step, so it has to know how many each sequence has.
    requests: all of the engine, by id."""
    return schedule.kind != "decode" and any(
        f.place(requests[s.id]) >= 0 for f in in_flight for s in schedule.scheduled
    )
