"""Serial is the oracle: however the rows of sequences are cut into steps, drafted, rejected, padded
and batched, logits and cached rows are those of decoding one token at a time. In float64."""

import functools

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from deepinfer import kernels
from deepinfer.engine.engine import Engine
from deepinfer.slots.attention import CSA2
from deepinfer.slots.verifier import Fixed
from support.serial import TOLERANCE, Oracle, Place, Sequence, advance, check_block, check_rows
from support.small import DRAFTS, LAYOUTS, RING, WINDOW, poison, small_engine, stream

LONGEST = 3 * WINDOW + 14
LONG = 330  # a chunk of 300 rows goes through a ring of 22


@functools.cache
def engine(model: str, packed: bool) -> Engine:
    if model == "tiny":
        return _tiny().with_(packed_cache=packed)
    return small_engine(model, packed_cache=packed, verifier=Fixed(DRAFTS))


@functools.cache
def _tiny() -> Engine:
    return Engine.tiny(
        dtype="float64", device="cpu", verifier=Fixed(DRAFTS), max_model_len=512, max_num_seqs=4
    )


@functools.cache
def oracle(model: str, which: int) -> Oracle:
    """Streams: random ids; ids that repeat, so that index scores tie; a long one."""
    ids = [stream(LONGEST, 1), stream(LONGEST, 2, period=3), stream(LONG, 3)][which]
    return Oracle(engine(model, packed=False).runtime, ids, drafts_from=300 if which == 2 else 0)


edges = [0, 1, 2, 3, 4, 5, WINDOW - 1, WINDOW, WINDOW + 1, RING - 1, RING, RING + 1]
chunks = st.lists(
    st.one_of(st.sampled_from(edges), st.integers(0, 3 * WINDOW)), min_size=1, max_size=5
)
verified = st.integers(0, DRAFTS).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n)))
sequences = st.tuples(st.sampled_from([0, 1]), chunks, st.lists(verified, max_size=4))
batches = st.lists(sequences, min_size=1, max_size=3)


def moves(chunks, verified, limit: int) -> list[tuple[bool, int, int]]:
    """(decode?, true rows, rejected rows) of each step: chunks of at most 3W tokens, then verify
    steps of an anchor and n drafts of which a are accepted."""
    out, length = [], 0
    for rows in chunks:
        rows = min(rows, 3 * WINDOW - length)
        out.append((False, rows, 0))
        length += rows
    if not length:
        out, length = [(True, 1, 0)], 1
    for n, accepted in verified:
        true = min(1 + accepted, limit - length)
        if true:
            out.append((True, true, 1 + n - true))
            length += true
    return out


def run(model: str, packed: bool, batch, padding: int = 0, idle: bool = False) -> None:
    rt = engine(model, packed).runtime
    poison(rt.cache)
    plans = [
        moves(chunks, drafts, len(oracle(model, which).ids)) for which, chunks, drafts in batch
    ]
    seqs = [Sequence(oracle(model, which), Place.take(rt, LONG + DRAFTS)) for which, _, _ in batch]
    try:
        for k in range(max(map(len, plans))):
            now = [(s, p[k]) for s, p in zip(seqs, plans) if k < len(p)]
            decode = all(d for _, (d, _, _) in now)
            step = [(s, true, junk) for s, (_, true, junk) in now]
            step += [(s, 0, 0) for s, p in zip(seqs, plans) if k >= len(p) and idle]
            advance(rt, step, decode, padding)
        for s in seqs:
            check_rows(rt, s)
            check_block(rt, s)
    finally:
        for s in seqs:
            s.place.give(rt)
    assert (rt.pages.free, rt.states.free) == (rt.pages.size, rt.states.size)
    assert all(bool((store[0] == 0).all()) for store in rt.cache.stores().values())


QUICK = dict(deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("model", [*LAYOUTS, "tiny"])
@settings(max_examples=6, **QUICK)
@example(batch=[(0, [0], [(3, 1)])], packed=False, padding=1, idle=False)  # padding, and no history
@example(batch=[(0, [0, 1], [])], packed=False, padding=0, idle=False)  # a step of no rows
@given(batch=batches, packed=st.booleans(), padding=st.integers(0, 3), idle=st.booleans())
def test_any_way_is_serial(model, batch, packed, padding, idle):
    run(model, packed, batch, padding, idle)


@pytest.mark.parametrize("packed", [False, True], ids=["floats", "packed"])
@pytest.mark.parametrize("first", [0, 1, 13])
def test_a_chunk_longer_than_the_ring(first, packed):
    """300 rows through a ring of 22, behind a shorter chunk or none, then drafts; with company."""
    rt = engine("2 and 1", packed).runtime
    assert rt.cache.ring == RING < 300
    poison(rt.cache)
    long = Sequence(oracle("2 and 1", 2), Place.take(rt, LONG + DRAFTS))
    short = Sequence(oracle("2 and 1", 0), Place.take(rt, LONG + DRAFTS))
    try:
        advance(rt, [(long, first, 0), (short, 5, 0)], False, 0)
        advance(rt, [(short, 1, 0), (long, 300, 0)], False, 0)
        check_rows(rt, long)
        for true, junk in [(1, 5), (3, 3), (6, 0), (2, 0)]:
            advance(rt, [(long, true, junk), (short, 1, junk)], True, 0)
        for s in (long, short):
            check_rows(rt, s)
            check_block(rt, s)
    finally:
        long.place.give(rt)
        short.place.give(rt)


@pytest.mark.parametrize("model", LAYOUTS)
def test_every_accept_count_at_every_place(model):
    """Drafts 0..5 x accepted 0..n at every place relative to groups, pages and the ring's end."""
    rt = engine(model, False).runtime
    poison(rt.cache)
    limit = len(oracle(model, 0).ids) - DRAFTS - 1
    for start in (1, 2, 4, WINDOW - 3, RING - 2):
        s = Sequence(oracle(model, 0), Place.take(rt, LONG))
        advance(rt, [(s, start, 0)], False, 0)
        for n in range(DRAFTS + 1):
            for accepted in range(n + 1):
                if s.length < limit:
                    advance(rt, [(s, 1 + accepted, n - accepted)], True, 0)
        check_rows(rt, s)
        s.place.give(rt)


SETTINGS = [
    dict(verifier="off"),
    dict(fidelity=0),
    dict(fidelity=2),
    dict(fidelity=2, packed_cache=True),
    dict(attention="dense"),
    dict(attention=CSA2(topk=3)),
    dict(page_size=4),
    dict(page_size=48),
    dict(page_size=4, packed_cache=True),
    dict(kernels=dict.fromkeys(kernels.names(), "reference")),
]


@pytest.mark.parametrize("changes", SETTINGS, ids=lambda c: "-".join(c))
def test_chunks_and_decoding_agree_under_every_setting(changes):
    """Teacher-forced logits in one piece, in chunks, behind a prompt and one by one."""
    layout = "4 and 2 and 1"
    eng = small_engine(layout, **{"verifier": Fixed(DRAFTS), **changes})
    ids = stream(2 * WINDOW + 3, 8)
    serial = eng.logits(ids, prompt=1, chunks=[1] * len(ids))
    for prompt, chunks in ((None, None), (17, [7, 10, 1, 1, 6, 6, 4]), (1, [1, 0, 34])):
        torch.testing.assert_close(
            eng.logits(ids, prompt=prompt, chunks=chunks), serial, **TOLERANCE
        )
    if "attention" in changes:  # the setting is not ignored
        assert (serial - small_engine(layout).logits(ids)).abs().max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("model", [*LAYOUTS, "tiny"])
@settings(max_examples=30, **QUICK)
@given(batch=batches, packed=st.booleans(), padding=st.integers(0, 3), idle=st.booleans())
def test_any_way_is_serial_at_length(model, batch, packed, padding, idle):
    run(model, packed, batch, padding, idle)


def test_the_comparison_can_fail():
    """One wrong bit of one cached row is seen: the comparison looks at every store."""
    rt = engine("2 and 1", False).runtime
    for name, store in rt.cache.stores().items():
        s = Sequence(oracle("2 and 1", 0), Place.take(rt, LONG))
        advance(rt, [(s, 21, 0)], False, 0)  # an open group of ratio 2
        check_rows(rt, s)
        kept = store.clone()
        store += 1e-3
        with pytest.raises(
            AssertionError,
            match=name.replace("entries", "entry").replace("_keys", "").replace("groups", "group"),
        ):
            check_rows(rt, s)
        store.copy_(kept)
        s.place.give(rt)
    assert torch.isfinite(rt.cache.windows[0].stored[1:]).any()
