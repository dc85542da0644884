"""A tiny engine in float64, two documents, and the standard library as it is split."""

import pytest

import deepinfer as di
from deepinfer.engine.engine import Engine
from experiments.nano.data.split import sources, split, standard_library
from experiments.nano.report import texts

TEXT = "def walk(token):\n    return [layer(token) for layer in self.layers if layer.window]\n"


@pytest.fixture(scope="session")
def eng():
    return Engine.tiny(
        dtype="float64", max_model_len=256, max_num_seqs=4, max_num_batched_tokens=40
    )


@pytest.fixture(scope="session")
def docs(eng):
    about = dict(path="", sha256="", licence="")
    named = [di.data.Text(TEXT * (i + 1), module=f"m{i}", **about) for i in range(2)]
    return texts.documents(eng.tokenizer, named)


@pytest.fixture(scope="session")
def real():
    """(files of this Python's library, their split)."""
    found = sources(standard_library())
    return found, split(found)
