"""The defaults: the exact replay plan, and the grammar that allows everything."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.config import ModelConfig
from deepinfer.slots.grammar import NoGrammar
from deepinfer.slots.protocols import Prompt
from deepinfer.slots.replay import Exact

CONFIG = ModelConfig.v41_flash()
LAYERS = CONFIG.num_layers


@given(st.integers(0, 5000), st.data())
def test_exact_drops_nothing_and_keeps_the_laws(length, data):
    hit = data.draw(st.integers(0, length))
    prompt = Prompt(length, hit, data.draw(st.integers(0, hit)), data.draw(st.booleans()))
    plan = Exact().plan(prompt, CONFIG).validate(prompt, LAYERS)
    assert plan == Exact().plan(prompt, CONFIG) and plan.exact and plan.why
    assert set(plan.floor) == set(plan.kv_from) == set(plan.rows_from) == {0}
    assert plan.write_from == plan.start <= prompt.state_at
    if prompt.wants_all_logits:
        assert plan.start == 0
    elif length:
        assert plan.start == min(prompt.state_at, length - 1)


def test_no_grammar():
    compiled = NoGrammar().compile(None, None)
    state = compiled.start()
    assert state.allowed() is None and state.accept(3) and not state.done
    state.rollback(1)
    assert state.fork().accept(5)
    with pytest.raises(ValueError, match=r"eng.with_\(grammar=...\)"):
        NoGrammar().compile({"type": "object"}, None)
