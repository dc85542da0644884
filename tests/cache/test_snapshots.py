"""Snapshots: a sequence goes on from a page boundary as if it had run there itself."""

import dataclasses

import pytest
import torch

from deepinfer.cache.kv_cache import CacheSize, KVCache
from deepinfer.cache.snapshots import Snapshot, as_stored, held
from deepinfer.engine.step.batch import Work, build
from deepinfer.slots.protocols import KVSpec
from deepinfer.slots.verifier import Fixed
from support.serial import TOLERANCE, Place, block, forward, state_rows, stored
from support.small import (
    DRAFTS,
    LAYOUTS,
    RING,
    WINDOW,
    poison,
    small_config,
    small_engine,
    stream,
)

PAGE = 8
IDS = stream(5 * WINDOW, 11)


def cache(packed=False, page=PAGE, ratio=2) -> KVCache:
    """A cache alone: 2 backbone layers and one of the drafter, rings full of noise."""
    config = small_config("one layer", vocab=97)
    ratios = (ratio, 0, 0)
    for name, value in (("compress_ratios", ratios), ("num_hidden_layers", 2)):
        object.__setattr__(config, name, value)
    specs = [KVSpec(WINDOW, "mxfp8", "mxfp8", "mxfp4", r) for r in ratios]
    size = CacheSize(4, 3, page, DRAFTS + 1, packed)
    out = KVCache(config, specs, size, dtype=torch.float32, device=torch.device("cpu"))
    assert out.ring == RING
    for records in out.windows:
        noise = torch.randn(records.count - 1, config.head_dim)
        records.write(torch.arange(1, records.count), noise)
    return out


def rows(cache: KVCache, layer: int, state: int, first: int, stop: int) -> torch.Tensor:
    at = torch.tensor([state * cache.ring + p % cache.ring for p in range(first, stop)])
    return cache.windows[layer].stored[at].clone()


# -------------------------------------------------------------------------------- rows as they are


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("position", [8, 16, 24, 40, 88])
def test_rows_come_out_of_one_slot_and_go_into_another(packed, position):
    a, b = cache(packed), cache(packed)
    n = min(position, WINDOW)
    snapshot = Snapshot.from_rings(a, 1, position, computed=position)
    assert snapshot.position == position and snapshot.exact
    assert [tuple(w.shape) for w in snapshot.windows] == [(n, a.windows[0].stored.shape[1])] * 2
    record = 33 if packed else 4 * 32
    assert snapshot.nbytes == 2 * n * record  # the official bytes, and no drafter rows
    before = [r.stored.clone() for r in b.windows]
    snapshot.restore(b, 2, position)
    for layer in (0, 1):
        want = rows(a, layer, 1, position - n, position)
        assert torch.equal(snapshot.windows[layer], want)
        assert torch.equal(rows(b, layer, 2, position - n, position), want)
    changed = [(x != r.stored).any(-1).sum() for x, r in zip(before, b.windows)]
    assert changed == [n, n, 0]  # nothing else, in no other slot, not the drafter's ring


def test_a_snapshot_does_not_change_with_the_ring():
    a = cache()
    snapshot = Snapshot.from_rings(a, 1, 24, computed=24)
    mine = [torch.randn(WINDOW, 32) for _ in range(2)]
    other = Snapshot.from_rows(a, mine, 24)
    kept = [w.clone() for w in (*snapshot.windows, *other.windows)]
    poison(a)
    for w in mine:
        w.fill_(7)
    assert all(torch.equal(x, y) for x, y in zip(kept, (*snapshot.windows, *other.windows)))


def test_a_boundary_is_held_until_the_ring_has_gone_past_its_rows():
    a = cache()
    # 32 needs rows 16..31; the ring holds the last 22 positions, drafts among them
    assert [held(a, 32, computed=n) for n in (31, 32, 38, 39)] == [False, True, True, False]
    assert [held(a, 32, computed=33, drafts=n) for n in (5, 6)] == [True, False]
    assert not held(a, 32, computed=31, drafts=5)  # row 31 is a draft that was not accepted
    assert [held(a, 8, computed=n) for n in (8, 22, 23)] == [True, True, False]
    for changes, found, back in [
        (dict(computed=39), r"17\.\.38", 6),
        (dict(computed=31), r"9\.\.30", 6),
        (dict(computed=35, drafts=5), r"18\.\.34", 1),
    ]:
        words = rf"rows 16\.\.31 were asked of rings that hold {found}: .* {back} positions back"
        with pytest.raises(ValueError, match=words):
            Snapshot.from_rings(a, 1, 32, **changes)


def test_to_another_device_and_back():
    snapshot = Snapshot.from_rings(cache(), 1, 16, computed=16, exact=False)
    moved = snapshot.to("meta")
    assert (moved.position, moved.exact, moved.nbytes) == (16, False, snapshot.nbytes)
    assert all(w.device.type == "meta" for w in moved.windows)


# ------------------------------------------------------------------------------------- wrong uses


def good(count=2, n=WINDOW, width=32, dtype=torch.float32):
    return [torch.zeros(n, width, dtype=dtype) for _ in range(count)]


@pytest.mark.parametrize(
    "windows, words",
    [
        (good(3), "window rows of 3 layers for a model of 2: one tensor a backbone layer"),
        (good(n=15), r"layer 0 at position 16 are torch.float32 \(15, 32\), .* \(16, 32\)"),
        (good(width=16), r"are torch.float32 \(16, 16\)"),
        (good(dtype=torch.float64), "are torch.float64 .* the ring stores torch.float32"),
    ],
)
def test_rows_that_are_not_those_of_the_ring_are_refused(windows, words):
    a = cache()
    assert Snapshot.from_rows(a, good(), 16).nbytes == 2 * 16 * 32 * 4
    with pytest.raises(ValueError, match=words):
        Snapshot.from_rows(a, windows, 16)
    before = [r.stored.clone() for r in a.windows]
    with pytest.raises(ValueError, match=words):
        Snapshot(16, tuple(windows)).restore(a, 1, 16)
    assert all(torch.equal(x, r.stored) for x, r in zip(before, a.windows))


def test_a_packed_snapshot_does_not_go_into_a_float_cache():
    snapshot = Snapshot.from_rings(cache(packed=True), 1, 16, computed=16)
    words = r"are torch.uint8 \(16, 33\), the ring stores torch.float32"
    with pytest.raises(ValueError, match=words):
        snapshot.restore(cache(), 1, 16)


def test_positions_slots_and_pages_that_do_not_fit_are_refused():
    a = cache()
    snapshot = Snapshot.from_rings(a, 1, 16, computed=16)
    with pytest.raises(ValueError, match="snapshot at position 16 cannot restore position 24"):
        snapshot.restore(a, 1, 24)
    for state in (0, 4):
        with pytest.raises(ValueError, match=rf"state id {state} is not in 1\.\.3"):
            snapshot.restore(a, state, 16)
    for position in (0, 12, -8):
        words = f"position {position} is no page boundary: want a multiple of 8"
        with pytest.raises(ValueError, match=words):
            Snapshot.from_rings(a, 1, position, computed=40)
    with pytest.raises(ValueError, match="page_size=9 is no multiple of compress ratio 2"):
        Snapshot.from_rings(cache(page=9), 1, 18, computed=18)


# ------------------------------------------------------------------------------------ in the model


def engine(layout, **changes):
    return small_engine(layout, verifier=Fixed(DRAFTS), page_size=PAGE, **changes)


def run(rt, place, start: int, stop: int, chunk: int = 14) -> torch.Tensor:
    """Logits of rows start..stop-1, in chunks."""
    out = []
    for at in range(start, stop, chunk):
        work = Work(
            IDS[at : min(at + chunk, stop)], at, IDS[max(at - 3, 0) : at], place.pages, place.state
        )
        out.append(forward(rt, [work], decode=False))
    return torch.cat(out)


@pytest.mark.parametrize(
    "layout, at, length",
    [
        *((layout, 16, 33) for layout in sorted(LAYOUTS)),
        *(("2 and 1", *x) for x in ((8, 31), (40, 56), (24, 27))),
    ],
)
def test_going_on_from_a_snapshot_is_having_run_there(layout, at, length):
    """Logits, every stored row and the drafts, whatever the slot's last owner has left in it."""
    rt = engine(layout).runtime
    poison(rt.cache)
    cold = Place.take(rt, len(IDS))
    run(rt, cold, 0, at)
    snapshot = Snapshot.from_rings(rt.cache, cold.state, at, computed=at)
    want = run(rt, cold, at, length)
    drafts = block(rt, cold, length, IDS[length])
    left = stored(rt, cold, at, length)
    shared = cold.pages[: at // PAGE]
    kept = {n: r for n, r in stored(rt, cold, 0, at).items() if n.startswith(("entry", "index"))}
    results = []
    for dirt in (torch.nan, 1e4):
        hit = Place.take(rt, len(IDS))
        own = hit.pages
        hit.pages = shared + own[len(shared) :]
        for view in state_rows(rt, hit.state):
            view.fill_(dirt)
        snapshot.restore(rt.cache, hit.state, at)
        got = run(rt, hit, at, length, chunk=9)
        torch.testing.assert_close(got, want, **TOLERANCE)
        still = {"window": length - RING, "group": length - rt.cache.group_ring}
        for name, numbered in stored(rt, hit, at, length).items():
            for number, row in numbered.items():
                if number >= still.get(name.split(".")[0], 0):
                    torch.testing.assert_close(row, left[name][number], **TOLERANCE)
        results.append([got])
        if length - at >= WINDOW:  # the rows behind the hit have filled the drafter's window
            results[-1].append(block(rt, hit, length, IDS[length]))
            torch.testing.assert_close(results[-1][1], drafts, **TOLERANCE)
        hit.pages = own
        hit.give(rt)
    assert all(torch.equal(x, y) for x, y in zip(*results))  # the old ring is nowhere in them
    for name, numbered in kept.items():  # and the shared pages are as they were
        for number, row in stored(rt, cold, 0, at)[name].items():
            assert torch.equal(row, numbered[number])


def test_without_the_snapshot_the_old_ring_would_be_read():
    """What the law above is there for: it fails when nothing is restored."""
    rt = engine("2 and 1").runtime
    poison(rt.cache)
    cold = Place.take(rt, len(IDS))
    want = run(rt, cold, 0, 40)
    dirty = Place.take(rt, len(IDS))
    dirty.pages[:3] = cold.pages[:3]
    for view in state_rows(rt, dirty.state):
        view.fill_(2.0)
    assert (run(rt, dirty, 24, 40) - want[24:]).abs().max() > 1e-3


@pytest.mark.parametrize("packed", [False, True])
def test_rows_handed_over_by_the_forward_are_those_of_the_ring(packed):
    """One chunk of 40 rows leaves boundaries in the middle that no ring holds any more."""
    rt = engine("2 and 1", packed_cache=packed).runtime
    place, seen = Place.take(rt, len(IDS)), {}

    def tap(name, x, row_set):
        if name.endswith("window_keys"):
            seen[name] = x
        return x

    batch = build([Work(IDS[:40], 0, [], place.pages, place.state)], rt.config)
    with torch.no_grad():
        rt.model(rt.context(batch, tap))
    keys = [seen[n] for n in seen if n.startswith("layers.")]
    assert len(keys) == rt.config.num_layers
    for at in (8, 24, 40):
        n = min(at, WINDOW)
        handed = [as_stored(w, k[at - n : at]) for w, k in zip(rt.cache.windows, keys)]
        snapshot = Snapshot.from_rows(rt.cache, handed, at)
        if at == 40:
            ring = Snapshot.from_rings(rt.cache, place.state, at, computed=at)
        else:
            assert not held(rt.cache, at, computed=40)
            serial = Place.take(rt, len(IDS))
            run(rt, serial, 0, at, chunk=at)
            ring = Snapshot.from_rings(rt.cache, serial.state, at, computed=at)
            serial.give(rt)
        for records, x, y in zip(rt.cache.windows, snapshot.windows, ring.windows):
            one, two = (dataclasses.replace(records, stored=s) for s in (x, y))
            every = torch.arange(n)
            rows = (x.gather(every, torch.float64) for x in (one, two))
            torch.testing.assert_close(*rows, **TOLERANCE)
