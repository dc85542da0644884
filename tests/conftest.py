"""For every test: one thread, a seed, no deadline for properties; GPU tests only if there is a GPU.

The whole suite runs in as many processes as there are cores, at most four. A command that names
files or tests runs in one process, which starts at once. `-n 3` or `-n 0` says otherwise.
"""

import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch loads; the tests' sizes want one
os.environ["DI_DISPLAY"] = "test"

import hypothesis
import pytest

# A first call builds kernels and caches, so a deadline would fail on a busy machine.
# CI draws the same examples every time; elsewhere each run looks at new ones.
# A property says its own number of examples if it needs another one than these.
_HOW = dict(deadline=None, print_blob=True, derandomize=bool(os.environ.get("CI")))
hypothesis.settings.register_profile("deepinfer", max_examples=50, **_HOW)
hypothesis.settings.register_profile("thorough", max_examples=200, **_HOW)


def pytest_configure(config):
    """Fifty examples of each property by default; 200 of them with `-m slow`, or `-m ''` for all.

    `--hypothesis-profile=thorough` asks for them in any run.
    """
    thorough = config.option.markexpr in ("", "slow")
    if config.option.hypothesis_profile is None:
        hypothesis.settings.load_profile("thorough" if thorough else "deepinfer")


hypothesis.settings.load_profile("deepinfer")


@pytest.fixture(autouse=True)
def seeded():
    """A test that draws from torch's own stream draws the same numbers in any order of tests."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


def pytest_xdist_auto_num_workers(config):
    """What `-n auto` in pyproject.toml means: 0 is this process alone."""
    whole = config.args_source == pytest.Config.ArgsSource.TESTPATHS
    if not whole or config.option.collectonly or config.option.keyword:
        return 0
    return min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2, 4)


# Workers take whole files (`--dist=loadscope`) in this order, so one that runs for minutes begins
# first: notebooks, then the longest test files; the short ones fill up the end.
LONG_FIRST = (
    ".ipynb",
    "replay_error/test_replay_error_experiment.py",
    "nano/test_stages.py",
    "measure/test_compare.py",
    "measure/test_replay_error.py",
    "properties/test_batch_invariance.py",
    "properties/test_replay_hits.py",
    "properties/test_serial.py",
    "prefix/test_prefix.py",
    "serving/test_bench.py",
    "checkpoint/test_nano.py",
)


def _long_first(items):
    def place(item):
        file = item.nodeid.partition("::")[0]
        return next(
            (i for i, name in enumerate(LONG_FIRST) if file.endswith(name)), len(LONG_FIRST)
        )

    items.sort(key=place)


def pytest_collection_modifyitems(items):
    if "PYTEST_XDIST_WORKER" in os.environ:
        _long_first(items)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no GPU here"))
