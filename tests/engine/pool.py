"""What must hold of an engine's pools at any time, and when nothing is left."""


def check(eng) -> None:
    """Free and held make up each pool; what is held belongs to running requests, each its own."""
    rt = eng.runtime
    running = [r for r in eng.requests.values() if r.state == "running"]
    waiting = [r for r in eng.requests.values() if r.state == "waiting"]
    assert running == sorted(rt.scheduler.running, key=lambda r: r.id) and waiting == list(
        rt.scheduler.waiting
    )
    assert len(running) <= rt.limits.seqs
    for pool, held in (
        (rt.pages, [p for r in running for p in r.pages]),
        (rt.states, [r.slot for r in running]),
    ):
        assert len(held) == len(set(held)) and 0 not in held
        assert set(held) == set(range(1, pool.size + 1)) - set(pool._free)
        assert pool.free + len(held) == pool.size
    assert not any(r.pages or r.slot for r in waiting)
    assert rt.pages.free + rt.pages.cached + rt.pages.used == rt.pages.size
    for r in eng.requests.values():
        assert 0 <= r.computed < r.length or r.finished
        assert len(r.output) == len(r.logprobs) == len(r.steps) <= r.params.max_tokens
    for r in running:
        assert r.computed <= len(r.pages) * rt.limits.page_size


def check_empty(eng) -> None:
    check(eng)
    rt = eng.runtime
    assert (rt.pages.free, rt.states.free) == (rt.pages.size, rt.states.size)
    assert eng.unfinished == 0 and eng.requests == {}
