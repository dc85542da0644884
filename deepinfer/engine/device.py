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

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepinfer.engine.device_clock import DeviceClock


@dataclass(slots=True)
class Job:
    """Work that was launched: its result, and the CUDA event behind it where there is one."""

    result: Any = None
    event: Any = None


class Device:
    """Runs work in the call that launches it. host_phase: what the host does meanwhile."""

    def __init__(self, device: torch.device, clock: DeviceClock) -> None:
        self.device = device
        self.host_phase = clock.host_phase

    def launch(self, work: Callable[[], Any]) -> Any:
        """Queue a step's work; `wait` gives its result."""
        with torch.inference_mode():
            job = Job(work())
        if self.device.type == "cuda":
            job.event = torch.cuda.Event()
            job.event.record(torch.cuda.current_stream(self.device))
        return job

    def post(self, work: Callable[[], Any]) -> None:
        """Queue work whose result nobody asks for."""
        work()

    def wait(self, job: Any) -> Any:
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
    """Runs work on a thread of its own, first come, first served."""

    def __init__(self, device: torch.device, clock: DeviceClock) -> None:
        super().__init__(device, clock)
        self.host_phase = "launch"
        self._thread = ThreadPoolExecutor(1, "deepinfer-device")
        self._failure: BaseException | None = None  # of posted work, raised by the next `wait`

    def launch(self, work: Callable[[], Any]) -> Any:
        return self._thread.submit(self.run, work)

    def run(self, work: Callable[[], Any]) -> Any:
        with torch.inference_mode():  # a mode of the thread, not of the process
            return work()

    def post(self, work: Callable[[], Any]) -> None:
        self._thread.submit(self._run_posted, work)

    def _run_posted(self, work: Callable[[], Any]) -> None:
        try:
            self.run(work)
        except BaseException as error:
            self._failure = error

    def wait(self, job: Any) -> Any:
        result = job.result()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        return result

    def drain(self) -> None:
        self._thread.submit(int).result()  # behind everything else
        self._failure = None

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)


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
