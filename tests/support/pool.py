"""What must hold of an engine's pools at any time, and when nothing is left."""

from collections import Counter

from support.accounting import check_pages, check_prefix


def check(eng) -> None:
    """Free, cached and held make up each pool; what is held belongs to running requests, each its
    own but for pages that the prefix cache knows."""
    rt = eng.runtime
    running = [r for r in eng.requests.values() if r.status == "running"]
    waiting = [r for r in eng.requests.values() if r.status == "waiting"]
    assert running == sorted(rt.scheduler.running, key=lambda r: r.id) and waiting == list(
        rt.scheduler.waiting
    )
    assert len(running) <= rt.limits.seqs
    slots = [r.state_id for r in running]
    assert len(slots) == len(set(slots)) and 0 not in slots
    assert set(slots) == set(range(1, rt.states.size + 1)) - set(rt.states._free)
    assert rt.states.free + len(slots) == rt.states.size
    assert all(len(r.pages) == len(set(r.pages)) and 0 not in r.pages for r in running)
    assert rt.pages._holders == Counter(p for r in running for p in r.pages)
    check_pages(rt.pages)
    assert not any(r.pages or r.state_id for r in waiting)
    for r in eng.requests.values():
        assert 0 <= r.num_computed < r.num_tokens or r.finished
        assert r.num_computed <= r.optimistic_computed <= r.optimistic_tokens and len(
            r.in_flight
        ) <= len(eng._loop.in_flight)
        assert r.status == "running" or not r.in_flight
        assert len(r.output) == len(r.logprobs) == len(r.steps) <= r.params.max_tokens
    for r in running:
        places = len(r.pages) * rt.limits.page_size
        assert max([r.num_computed, *(a.written for a in r.in_flight)]) <= places
        if r.decoding and not r.in_flight:  # nothing that its next step does not write to
            assert len(r.pages) <= rt.resources.pages_of(
                r.optimistic_tokens + rt.resources.lookahead
            )
    check_reuse(rt, running)


def check_reuse(rt, running) -> None:
    """A page that is known holds what its key says, is computed, and alone may be shared."""
    if rt.prefix_cache is None:
        assert all(n == 1 for n in rt.pages._holders.values()) and not rt.pages.cached
        return
    prefix, size = rt.prefix_cache.index, rt.limits.page_size
    check_prefix(prefix)
    shared = {}
    for r in running:
        mine = r.prefix
        full = max(
            r.num_computed // size, mine.adopted
        )  # a replay's rows begin below what it took over
        assert mine.adopted <= mine.registered <= full
        if not rt.prefix_cache.current(r):  # it began before the cache was cleared
            assert not any(p in prefix.pages._keys for p in r.pages)
            continue
        keys = prefix.keys(r.token_slice(0, r.num_tokens), salt=mine.salt, images=mine.images)
        assert mine.keys == keys[: len(mine.keys)]
        for i, page in enumerate(r.pages):
            key = prefix.pages._keys.get(page)
            assert key is None or (i < full and key == keys[i])
            if rt.pages.holders(page) > 1:
                assert i < full and shared.setdefault(page, keys[i]) == keys[i]
    for snapshot in prefix.snapshots._held.values():
        snapshot.check(rt.cache)


def check_empty(eng) -> None:
    check(eng)
    rt = eng.runtime
    assert (rt.pages.available, rt.states.free) == (rt.pages.size, rt.states.size)
    assert rt.pages.used == 0
    assert eng.unfinished == 0 and eng.requests == {}
