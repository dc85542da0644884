"""When the device was busy, on the host's time axis.

Where the device is the host (a CPU), a mark is a reading of the host's clock. On a CUDA device it
is an event in its stream: taking it neither waits nor synchronises, and it is read once its step
has been post-processed, when the stream has passed it.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch


class DeviceClock:
    """A device whose work runs inside the call that starts it. host_phase: what the host does
    during that call."""

    host_phase = "wait"

    def anchor(self) -> None:
        """The device has nothing to do: tie its clock to the host's, if it has one of its own."""

    def mark(self) -> Any:
        """A point in the device's work, behind all that was launched so far."""
        return perf_counter()

    def wait(self, mark: Any) -> None:
        """Return when the device has passed the mark."""

    def read(self, mark: Any) -> float:
        """The mark's time on the host's axis, in seconds. Marks are read in the order of taking."""
        return mark


class CudaClock(DeviceClock):
    """Events of the current stream. The distance of an event to the one read before it is added up:
    the distance itself is a 32-bit float of milliseconds, which is coarse after some minutes."""

    host_phase = "launch"

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._event: Any = None
        self._at = 0.0

    def anchor(self) -> None:
        event = self.mark()
        event.synchronize()
        self._event, self._at = event, max(self._at, perf_counter())

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def wait(self, mark: Any) -> None:
        mark.synchronize()

    def read(self, mark: Any) -> float:
        mark.synchronize()  # passed long ago, unless the step ended early
        self._at += self._event.elapsed_time(mark) / 1e3
        self._event = mark
        return self._at


def device_clock(device: torch.device) -> DeviceClock:
    """The clock of this device; elsewhere than on CUDA that of the call that starts the work."""
    return CudaClock(device) if device.type == "cuda" else DeviceClock()
