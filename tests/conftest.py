"""For every test: one thread, a seed, no deadline for properties, GPU tests only where there is a GPU."""

import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch loads; the tests' sizes want one
os.environ["DI_DISPLAY"] = "test"

import hypothesis
import pytest

# A first call builds kernels and caches, so a deadline would fail on a busy machine.
# CI draws the same examples every time; elsewhere each run looks at new ones.
hypothesis.settings.register_profile(
    "deepinfer", deadline=None, print_blob=True, derandomize=bool(os.environ.get("CI"))
)
hypothesis.settings.load_profile("deepinfer")


@pytest.fixture(autouse=True)
def seeded():
    """A test that draws from torch's own stream draws the same numbers in any order of tests."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


def pytest_collection_modifyitems(items):
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no GPU here"))
