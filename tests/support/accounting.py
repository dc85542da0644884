"""What must hold of a PageManager and of the prefix cache over it, at any time."""


def check_pages(pages) -> None:
    """Every page is in exactly one place, and what is cached is known."""
    free, cached, used = list(pages._free), list(pages._cached), list(pages._holders)
    assert sorted(free + cached + used) == list(range(1, pages.size + 1))
    assert (pages.free, pages.cached, pages.used) == (len(free), len(cached), len(used))
    assert pages.available == pages.free + pages.cached == pages.size - pages.used
    assert all(pages.holders(p) >= 1 for p in used)
    assert not any(pages.holders(p) for p in (0, *free, *cached))
    assert set(cached) <= pages._known and not set(free) & pages._known


def check_prefix(cache) -> None:
    """Each key names one page and each known page has one key; the snapshots add up."""
    store, snapshots = cache.pages, cache.snapshots
    check_pages(store.pages)
    assert {held.page: key for key, held in store._held.items()} == store._keys
    assert len(store._keys) == len(store._held) == len(store)
    assert set(store._keys) == store.pages._known
    assert snapshots.nbytes == sum(s.nbytes for s in snapshots._held.values()) <= snapshots.budget
