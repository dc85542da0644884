"""The checkpoint of the expected numbers, unpacked once a session and loaded through the reader."""

import pytest

from deepinfer.engine.engine import Engine
from deepinfer.slots.verifier import Fixed
from support import oracle


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A folder in the official layout, bfloat16."""
    return oracle.write_checkpoint(tmp_path_factory.mktemp("oracle") / "bf16")


@pytest.fixture(scope="session")
def engine(folder):
    """Fidelity 0 in float32: the terms under which the expected numbers were computed. It drafts,
    so that the drafter's context is kept and its values can be traced."""
    return Engine.from_pretrained(
        str(folder),
        fidelity=0,
        dtype="float32",
        device="cpu",
        verifier=Fixed(5),
        sampler="greedy",
        max_model_len=768,
        max_num_seqs=2,
    )


@pytest.fixture(scope="session")
def engine64(folder):
    """The same in float64, where an equality is an equality."""
    return Engine.from_pretrained(
        str(folder), fidelity=0, dtype="float64", device="cpu", max_model_len=768, max_num_seqs=2
    )
