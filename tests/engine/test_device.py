"""Devices: the order of work, errors of the worker, and the lane of a device that takes its time."""

from __future__ import annotations

import subprocess
import sys
import time
import warnings

import pytest
import torch

import deepinfer as di
from deepinfer.engine import device
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


FORKED = """
import os, sys, threading
sys.path.insert(0, "tests")
from support.small import small_engine

def engine(**changes):
    return small_engine("one layer", vocab=97, max_model_len=64, **changes)

def in_a_fork(work):
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            said = str(work())
        except RuntimeError as error:
            said = str(error)
        os.write(write, said.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        print(answer.read())
    os.waitpid(pid, 0)

RUN = dict(max_tokens=2, ignore_eos=True)
overlapped = engine(overlap=True)
overlapped.generate([5, 6], **RUN)
in_a_fork(lambda: overlapped.generate([5, 6], **RUN))
overlapped.add([5] * 9, **RUN)
overlapped.step()
in_a_fork(lambda: overlapped.generate([5, 6], **RUN))
in_a_fork(lambda: len(overlapped.with_(overlap=False).generate([5, 6], **RUN)))
in_a_fork(overlapped.close)
served = engine()
with served.background() as bg:
    running = bg.add([5, 6], **RUN)
    done = running.result()
    in_a_fork(lambda: bg.add([5, 6], **RUN))
    in_a_fork(lambda: len(running.result().token_ids))
    held, go_on = threading.Event(), threading.Event()
    busy = threading.Thread(target=lambda: served._lock.run(lambda: (held.set(), go_on.wait())))
    busy.start()
    held.wait()
    in_a_fork(lambda: served.generate([5, 6], **RUN))
    go_on.set()
    busy.join()
plain = engine()
plain.generate([5, 6], **RUN)
in_a_fork(lambda: len(plain.generate([5, 6], **RUN)))
"""


def test_a_forked_process_says_at_once_that_it_has_no_threads():
    done = subprocess.run(
        [sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    overlap = "this engine had run with overlap=True"
    want = [
        overlap,
        overlap,
        "1",
        "None",
        "this background runs",
        "2",
        "another thread was in",
        "1",
    ]
    assert len(said) == len(want) and all(w in s for w, s in zip(want, said)), said
    assert all("'spawn'" in s for s in said if "forked" in s)


@pytest.mark.parametrize(
    "threads, environment, told",
    [
        (1, {}, 0),  # chosen by somebody, or a machine of one core
        (2, {}, 1),
        (3, {}, 0),  # set after torch was loaded
        (2, {"OMP_NUM_THREADS": "2"}, 0),
        (2, {"OMP_WAIT_POLICY": "passive"}, 0),
    ],
)
def test_default_threads_are_warned_of_once(monkeypatch, threads, environment, told):
    for name in device.THREADS_SET_BY:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(device, "DEFAULT_THREADS", 2)
    monkeypatch.setattr(device, "_told_of_threads", False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            di.Engine.tiny(max_model_len=64, max_num_seqs=1).runtime
        device.warn_of_threads(torch.device("cuda"))
    assert [str(w.message).count("set_num_threads(1)") for w in seen] == [1] * told
