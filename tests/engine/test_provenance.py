"""Where an engine's tables come from: weights, slots and settings, whenever they are made."""

import gc
import weakref

import pytest

import deepinfer as di
from deepinfer.engine.provenance import of_engine
from deepinfer.engine.scheduling.scheduler import DecodeOrder
from support.small import small_engine, stream


@pytest.fixture(scope="module")
def eng():
    return small_engine(
        "one layer",
        vocab=97,
        max_model_len=64,
        page_size=8,
        prefix_cache=True,
        max_num_seqs=3,
        scheduler=DecodeOrder(max_context=500),
        verifier=di.verifier.Fixed(2),
    )


def tables(eng):
    stats = eng.stats
    return {
        "table": stats.table(),
        "times": stats.times(),
        "latencies": stats.latencies(),
        "by_step": stats.by_step(),
        "by_request": stats.by_request(),
        "drafts": stats.drafts(),
        "timeline": stats.timeline().table(),
        "a slice": stats.timeline(last=2).table(),
        "cache": eng.cache.table(),
        "kernels": eng.kernels,
        "memory": eng.memory,
    }


def require_facts(eng):
    facts = di.Table(provenance=of_engine(eng)).provenance
    for name, table in tables(eng).items():
        assert table.provenance == facts, name
        assert table.provenance["settings"]["scheduler"] == "DecodeOrder(max_context=500)", name
        assert table.provenance["slots"]["verifier"].startswith("Fixed(2"), name


def test_every_table_has_the_engine_s_facts_before_and_after_it_ran(eng):
    require_facts(eng)
    eng.generate([stream(12, 3, high=90)] * 2, max_tokens=4, seed=1, ignore_eos=True)
    assert eng.stats.steps and eng.cache.pages
    require_facts(eng)
    eng.stats.reset()
    require_facts(eng)
    assert eng.stats.json()["provenance"]["weights"] == eng.fingerprint


def test_what_was_read_keeps_neither_engine_nor_weights(eng):
    mine = eng.with_()
    mine.generate([stream(12, 3, high=90)], max_tokens=2)
    gone, stats, cache, line = weakref.ref(mine), mine.stats, mine.cache, mine.stats.timeline()
    del mine
    gc.collect()
    assert gone() is None
    for table in (stats.table(), cache.table(), line.table()):
        assert table.provenance["weights"] == eng.fingerprint


def test_titles_say_whether_all_are_there(eng):
    mine = eng.with_()
    assert mine.stats.by_step().title == "no step yet"
    mine.generate([stream(5, i, high=90) for i in range(3)], max_tokens=3, ignore_eos=True)
    steps = mine.stats.steps
    assert mine.stats.by_step().title == f"all {steps} steps"
    assert mine.stats.by_request().title == "all 3 finished requests"
    assert mine.stats.times().title == f"speeds; last: of all {steps} steps"
    assert mine.stats.times(last=2).title == f"speeds; last: of the last 2 of {steps} steps"
    for held in (mine.stats.step_records, mine.stats.request_records):
        held.popleft()
    assert mine.stats.by_step().title == f"the last {steps - 1} of {steps} steps"
    assert mine.stats.by_request().title == "the last 2 of 3 finished requests"
