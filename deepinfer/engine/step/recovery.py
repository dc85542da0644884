"""Recovery: after an error or an interrupt at any line of a step, no page, slot or request is lost.

No step that was in flight comes to an end. A request keeps what it has emitted and goes on from its
last valid key, or waits and is computed again if that key is lost. Every part may be interrupted
itself and is then done again.
"""

from __future__ import annotations

from collections.abc import Collection

from deepinfer.engine.request import Request
from deepinfer.engine.runtime import Runtime
from deepinfer.engine.step import commit
from deepinfer.engine.step.in_flight import InFlightStep


def recover(
    rt: Runtime,
    in_flight: list[InFlightStep],
    requests: Collection[Request],
    gone: list[Request],
) -> None:
    """Bring an engine back to a state without steps in flight, in which every page, slot and request
    is in its place. requests: all that the engine has; gone: dropped ones that may not be counted
    yet. Empties `in_flight` and `gone`."""
    rt.device.drain()
    rt.stats.recover()
    undo(rt, in_flight)
    in_flight.clear()
    for request in (*requests, *gone):
        if request.finished:
            rt.stats.ended(request)
    gone.clear()
    rt.resources.recover(requests)
    rt.scheduler.recover(requests)


def undo(rt: Runtime, in_flight: list[InFlightStep]) -> None:
    """Take the steps in flight back out of their requests. A few rows are simply written again. If
    more rows were written than the rings can step back, they have overwritten the places of their own
    history: such a request waits and is computed again, in pages that no other request reads."""
    began = {s.id: s.start for f in reversed(in_flight) for s in f.scheduled if not s.decode}
    for request in {r.id: r for f in in_flight for r in f.requests}.values():
        if request.status != "running":
            continue
        whole = request.repair()
        commit.contain_errors(request, retell, rt, request)
        if request.finished or request.output and commit.stops(rt, request):
            continue  # `resources.recover` frees what it holds, and `recover` counts it
        written = max([0, *(a.written for a in request.in_flight)])
        lost = written - request.num_computed > rt.limits.backtracking
        if lost or not whole or request.num_computed < began.get(request.id, 0):
            rt.resources.requeue(request)  # `scheduler.recover` puts it into its queue
        request.in_flight = ()


def retell(rt: Runtime, request: Request) -> None:
    """Give the request a grammar state that knows exactly the emitted tokens. After an interrupted
    commit or mask it is unknown which tokens the old state was told. Raises ValueError if the grammar
    now refuses one of them."""
    if request.grammar is None:
        return
    state, told = request.compiled.start(), list(request.output)
    if told and commit.at_eos(rt, request):
        told.pop()
    for token in told:
        if not state.accept(token):
            raise ValueError(
                f"request {request.id}: its grammar refuses token {token}, which it had accepted; "
                "di.check the grammar"
            )
    request.grammar = state
