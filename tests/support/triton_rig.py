"""Where tests of Triton kernels run: compiled on a GPU, or in Triton's interpreter on a CPU.

Imported before Triton is, which reads once whether to interpret.
"""

import importlib.util
import os
import sys

import pytest
import torch

CUDA = torch.cuda.is_available()
TRITON = importlib.util.find_spec("triton") is not None
if TRITON and not CUDA and "triton" not in sys.modules:
    os.environ["TRITON_INTERPRET"] = "1"

INTERPRETED = not CUDA and os.environ.get("TRITON_INTERPRET") == "1"

interpreter = pytest.param(
    "cpu",
    id="interpreter",
    marks=[
        pytest.mark.skipif(
            not (TRITON and INTERPRETED),
            reason="triton is not installed" if not TRITON else "Triton compiles here: see -m gpu",
        ),
        # The interpreter computes in numpy, which warns where a kernel divides by zero.
        pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    ],
)
gpu = pytest.param("cuda", id="gpu", marks=pytest.mark.gpu)
everywhere = pytest.mark.parametrize("device", [interpreter, gpu])
