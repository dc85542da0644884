import pytest

import deepinfer as di


@pytest.fixture(scope="session")
def engine() -> di.Engine:
    """A tiny engine in float64, where the order of a sum does not show."""
    return di.Engine.tiny(dtype="float64", max_model_len=256, max_num_seqs=4)


@pytest.fixture(scope="session")
def drafting(engine) -> di.Engine:
    return engine.with_(verifier="fixed")


@pytest.fixture(scope="session")
def long_text() -> str:
    """More compressed entries than the candidate blocks hold."""
    return "The walk of a token through the layers of the model, again and again, " * 5
