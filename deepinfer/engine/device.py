"""Device: where the work of a step runs, one piece after another, in the order of launching.

    Device             the call that launches it: on a CPU it is over then; on CUDA it is queued in
                       the current stream, and an event says when it is over
    WorkerDevice       a thread of its own, so that the host can go on. On a CPU both share the same
                       cores: it shows that an overlapped engine is right, and gains nothing
    SimulatedDevice    the same, and every step takes a given time, as on a device that is not there

The order is what makes freed pages and slots safe: who gets them next writes after all that was
launched for their last owner.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from deepinfer.engine.stats.device_clock import DeviceClock


class Job:
    """Work that was launched: what it gave or raised once it is over, and the CUDA event behind it
    where there is one."""

    __slots__ = ("work", "result", "error", "event", "over")

    def __init__(self, work: Callable[[], Any]) -> None:
        self.work: Callable[[], Any] | None = work
        self.result: Any = None
        self.error: BaseException | None = None
        self.event: Any = None
        self.over = threading.Event()

    def run(self) -> None:
        """Do it, keeping hold of nothing that it was done with."""
        work, self.work = self.work, None
        try:
            assert work is not None
            with torch.inference_mode():  # a mode of the thread, not of the process
                self.result = work()
        except BaseException as error:
            self.error = error
        # Freed before anybody is woken: freeing a tensor lets other threads go first, and the
        # device would stand still until the host has nothing to do.
        del work
        self.over.set()

    def give(self) -> Any:
        """What it gave. Raises what it raised."""
        error, self.error = self.error, None
        if error is not None:
            raise error
        return self.result


class Device:
    """Runs work in the call that launches it. host_phase: what the host does meanwhile."""

    def __init__(self, device: torch.device, clock: DeviceClock) -> None:
        self.device = device
        self.host_phase = clock.host_phase

    def launch(self, work: Callable[[], Any]) -> Job:
        """Queue a step's work; `wait` gives its result."""
        job = Job(work)
        job.run()
        job.give()
        if self.device.type == "cuda":
            job.event = torch.cuda.Event()
            job.event.record(torch.cuda.current_stream(self.device))
        return job

    def post(self, work: Callable[[], Any]) -> None:
        """Queue work whose result nobody asks for."""
        work()

    def wait(self, job: Job) -> Any:
        """The result of a step's work, once it is over. Raises what the work raised."""
        if job.event is not None:
            job.event.synchronize()
        return job.result

    def drain(self) -> None:
        """Return when all that was queued is over, whatever came of it."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def finish(self) -> None:
        """Called as the last thing of a step's work."""

    def close(self) -> None:
        """Wait for what is queued and take no more."""
        self.drain()


class WorkerDevice(Device):
    """Runs work on a thread of its own, first come, first served. The thread ends with `close`, or
    when nobody holds the device any more."""

    def __init__(self, device: torch.device, clock: DeviceClock) -> None:
        super().__init__(device, clock)
        self.host_phase = "launch"
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._thread = threading.Thread(
            target=serve, args=(self._jobs,), name="device", daemon=True
        )
        self._stop = weakref.finalize(self, self._jobs.put, None)
        self._thread.start()
        _WORKERS[self._thread] = weakref.ref(self)
        self._failure: BaseException | None = None  # of posted work, raised by the next `wait`

    def launch(self, work: Callable[[], Any]) -> Job:
        if not self._stop.alive:
            raise RuntimeError("this device is closed")
        job = Job(partial(self.run, work))
        self._jobs.put(job)
        return job

    def run(self, work: Callable[[], Any]) -> Any:
        return work()

    def post(self, work: Callable[[], Any]) -> None:
        def guarded() -> None:
            try:
                work()
            except BaseException as error:
                self._failure = error

        self._jobs.put(Job(guarded))

    def wait(self, job: Job) -> Any:
        job.over.wait()
        result = job.give()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        return result

    def drain(self) -> None:
        self.launch(int).over.wait()  # behind everything else
        self._failure = None

    def close(self) -> None:
        self._stop()  # behind what is queued
        self._thread.join()


# Threads that run, and the devices that they belong to.
_WORKERS: weakref.WeakKeyDictionary[threading.Thread, weakref.ref[WorkerDevice]] = (
    weakref.WeakKeyDictionary()
)


@atexit.register
def close_workers() -> None:
    """At the interpreter's end: a thread that is still in a kernel then would abort the process."""
    for thread, device in list(_WORKERS.items()):
        if (open := device()) is not None:
            open.close()
        thread.join()


def serve(jobs: SimpleQueue[Job | None]) -> None:
    """The worker: one job after another until there is a None."""
    while (job := jobs.get()) is not None:
        job.run()
        del job  # its result belongs to who waits for it


class SimulatedDevice(WorkerDevice):
    """A worker whose steps take at least `seconds` each: what a timeline looks like on a device
    that works that long, beside a host that is free meanwhile.

        eng.runtime.device = di.engine.device.SimulatedDevice(0.020)
    """

    def __init__(self, seconds: float) -> None:
        if not seconds > 0:
            raise ValueError(f"SimulatedDevice({seconds!r}): want the seconds of a step, above 0")
        super().__init__(torch.device("cpu"), DeviceClock())
        self.seconds = seconds
        self._began = 0.0

    def run(self, work: Callable[[], Any]) -> Any:
        self._began = time.perf_counter()
        return super().run(work)

    def finish(self) -> None:
        time.sleep(max(self._began + self.seconds - time.perf_counter(), 0.0))


def make_device(device: torch.device, clock: DeviceClock, overlap: bool) -> Device:
    """What an engine launches its steps on: a CPU needs a thread to be anything beside the host."""
    kind = WorkerDevice if overlap and device.type != "cuda" else Device
    return kind(device, clock)


def put(values: Any, device: torch.device | str, dtype: torch.dtype = torch.long) -> Tensor:
    """A tensor of host values on the device, without waiting for what the device does: a copy from
    memory that is not pinned would."""
    device = torch.device(device)
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype).pin_memory().to(device, non_blocking=True)


def to_host(x: Tensor) -> Tensor:
    """A copy in host memory, complete once the work behind it is over (`Device.wait`)."""
    return x if x.device.type == "cpu" else x.to("cpu", non_blocking=True)
