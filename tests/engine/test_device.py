"""Devices: the order of work, errors of the worker, and the lane of a device that takes its time."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
import torch

from deepinfer.engine.device import Device, SimulatedDevice, WorkerDevice
from support.overlapped import PARAMS, PROMPTS, engine

torch.set_num_threads(1)


def test_which_device_an_engine_runs_on():
    assert type(engine().runtime.device) is WorkerDevice
    assert type(engine(overlap=False).runtime.device) is Device
    with pytest.raises(ValueError, match="above 0"):
        SimulatedDevice(0)


def test_work_is_done_in_the_order_of_launching():
    device, seen = engine().runtime.device, []
    slow = device.launch(lambda: (time.sleep(0.05), seen.append("slow"))[1])
    device.post(lambda: seen.append("posted"))
    last = device.launch(lambda: seen.append("last") or torch.is_inference_mode_enabled())
    assert device.wait(last) and seen == ["slow", "posted", "last"]
    device.wait(slow)
    device.post(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        device.wait(device.launch(int))
    device.post(lambda: 1 / 0)
    device.drain()
    assert device.wait(device.launch(lambda: 3)) == 3


def test_a_device_of_twenty_milliseconds_is_never_idle():
    """On two lanes: with overlap the device goes from step to step; a synchronous engine lets it
    wait for schedule, launch and post-process. The best of some runs: others use this machine too."""

    def idle_share(on: bool) -> float:
        eng = engine("one layer", overlap=on, verifier="off")
        eng.generate(PROMPTS, max_tokens=3)
        eng.runtime.device.close()
        eng.runtime.device = SimulatedDevice(0.02)
        eng.stats.reset()
        eng.generate(PROMPTS, PARAMS)
        line = eng.stats.timeline()
        assert line.busy >= 0.02 * eng.stats.steps
        eng.close()
        return line.idle_share

    for _ in range(5):
        overlapped, synchronous = idle_share(True), idle_share(False)
        if overlapped <= 0.03 and overlapped < synchronous:
            break
    assert overlapped <= 0.03 and overlapped < synchronous, (overlapped, synchronous)


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["", "del eng", "raise SystemExit(0)", "eng.close()"])
def test_a_process_may_end_with_a_step_on_its_way(ending):
    """The interpreter stops threads where they are; one in a kernel would take the process along."""
    lines = [
        "import deepinfer as di",
        "eng = di.Engine.tiny(overlap=True)",
        "eng.add([5] * 300, max_tokens=20)",
        "eng.step(), eng.step(), eng.step()",
        ending,
    ]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
