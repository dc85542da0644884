"""How pytest runs the notebooks (nbval 0.11.0): stable displays, honest failures.

Applies to the notebooks under this folder. What each part works around is said beside it; the
guard in tests/test_notebooks.py fails when another nbval is installed, so that an upgrade is read.
"""

import os
import time
from queue import Empty

os.environ["IPYKERNEL_CELL_NAME"] = "<cell>"  # warnings name a path with the process id otherwise
os.environ["DI_DISPLAY"] = "test"  # no progress bars; changes what is shown, never a result
os.environ["OMP_NUM_THREADS"] = "1"

import nbval.kernel
import pytest

OUTPUT_TIMEOUT_S = 60  # nbval waits 5 s for an output, which a busy two-core machine exceeds


def _execute(self, cell_input, allow_stdin=None):
    """As nbval's, with history: IPython shows a value in spite of a trailing `;` without it."""
    return self.kc.execute(
        cell_input, store_history=True, allow_stdin=allow_stdin, stop_on_error=False
    )


_get_message = nbval.kernel.RunningKernel.get_message


def _get_message_of_the_living(self, stream, timeout=None):
    """As nbval's, but a kernel that died is told at once, not after the whole cell timeout."""
    end = None if timeout is None else time.monotonic() + timeout
    while True:
        left = 1.0 if end is None else max(0.0, min(1.0, end - time.monotonic()))
        try:
            return _get_message(self, stream, timeout=left)
        except Empty:
            if not self.is_alive():
                raise RuntimeError("the kernel died: out of memory, a crash, or an exit") from None
            if end is not None and time.monotonic() >= end:
                raise


nbval.kernel.RunningKernel.execute_cell_input = _execute
nbval.kernel.RunningKernel.get_message = _get_message_of_the_living


def pytest_collectstart(collector):
    """SVG holds ids and dates, and HTML its layout: the text twin of both is compared."""
    if hasattr(collector, "skip_compare"):
        collector.skip_compare += ("image/svg+xml", "text/html")


def pytest_collection_modifyitems(items):
    for item in items:
        if hasattr(item, "output_timeout"):
            item.output_timeout = OUTPUT_TIMEOUT_S


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """A cell after a timeout or a dead kernel is a failure; nbval reports it as xfail or xpass."""
    report = (yield).get_result()
    if hasattr(item, "output_timeout") and hasattr(report, "wasxfail"):
        del report.wasxfail
        report.outcome = "failed"
        report.longrepr = "not run: an earlier cell timed out or the kernel died"
