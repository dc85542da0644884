"""PageManager: pages are shared by counting holders, and none is ever lost or handed out twice."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.cache.pages import PageManager
from support.accounting import check_pages


def manager(size=4, known=()) -> PageManager:
    """`size` pages of which these were used, known and given back, in this order."""
    pages = PageManager(size)
    taken = pages.take(len(known))
    assert taken == list(range(1, len(known) + 1))
    for page in known:
        pages.keep(page)
        pages.give([page])
    return pages


def test_a_page_is_used_then_free_or_cached():
    pages = PageManager(3)
    a, b = pages.take(2)
    assert (a, b) == (1, 2) and pages.holders(a) == 1
    pages.keep(a)
    pages.give([a, b])
    assert (pages.used, pages.cached, pages.free) == (0, 1, 2)
    pages.pin([a])
    assert (pages.holders(a), pages.cached) == (1, 0)
    pages.forget(a)
    pages.give([a])
    assert (pages.cached, pages.free) == (0, 3)
    check_pages(pages)


def test_a_shared_page_is_used_until_its_last_holder_gives_it_back():
    pages = PageManager(2)
    shared = pages.take(1)
    pages.pin(shared)
    pages.pin(shared)
    for left in (2, 1, 0):
        pages.give(shared)
        assert pages.holders(shared[0]) == left and pages.used == bool(left)
    with pytest.raises(RuntimeError, match="page 1 is given back but is free"):
        pages.give(shared)


def test_freed_pages_are_used_again_last():
    pages = PageManager(3)
    first = pages.take(1)
    pages.give(first)
    assert pages.take(3) == [2, 3, 1]


def test_cached_pages_go_only_when_no_free_page_is_left_oldest_first():
    told = []
    pages = manager(4, known=[3, 1, 2])
    pages.on_reclaim = told.append
    assert pages.take(1) == [4] and told == []
    assert pages.take(2) == [3, 1] and told == [3, 1]
    check_pages(pages)


def test_a_hit_makes_a_cached_page_the_most_recently_used():
    pages = manager(3, known=[1, 2, 3])
    pages.pin([1])
    assert pages.take(1) == [2]  # 1 is used: never reclaimed
    pages.give([1])
    assert pages.take(2) == [3, 1]


def test_of_one_sequence_the_tail_goes_before_the_head():
    pages = PageManager(3)
    sequence = pages.take(3)
    for page in sequence:
        pages.keep(page)
    pages.give(sequence)
    assert pages.take(3) == sequence[::-1]


def test_a_reclaimed_page_is_known_no_more():
    pages = manager(1, known=[1])
    again = pages.take(1)
    pages.give(again)
    assert (pages.free, pages.cached) == (1, 0)


def test_a_pool_full_of_cached_pages_is_not_full():
    pages = manager(6, known=[1, 2, 3, 4, 5, 6])
    assert (pages.free, pages.ask(6), len(pages.take(6))) == (0, "ok", 6)


def test_a_used_page_is_never_reclaimed():
    pages = manager(3, known=[1, 2, 3])
    pages.pin([1, 2, 3])
    assert pages.ask(1) == "later"
    words = r"1 pages asked, 0 free and 0 cached of 3: ask\(n\) first"
    with pytest.raises(RuntimeError, match=words):
        pages.take(1)


def test_ask_says_what_take_will_do():
    pages = PageManager(4)
    assert [pages.ask(n) for n in (0, 4, 5)] == ["ok", "ok", "never"]
    held = pages.take(3)
    assert [pages.ask(n) for n in (0, 1, 2, 4, 5)] == ["ok", "ok", "later", "later", "never"]
    pages.give(held)
    assert pages.ask(4) == "ok"
    with pytest.raises(ValueError, match="-1 pages asked"):
        pages.ask(-1)
    with pytest.raises(ValueError, match="-1 pages asked"):
        pages.take(-1)


def test_a_hit_page_is_not_counted_as_one_to_reclaim():
    """2 hit and 1 new of 3 pages, all else used: the hit pages are all that is available."""
    pages = manager(3, known=[1, 2])
    other = pages.take(1)
    assert pages.ask(1) == "ok" and pages.ask(1, hit=[1, 2]) == "later"
    pages.give(other)
    assert pages.ask(1, hit=[1, 2]) == "ok" and pages.ask(2, hit=[1, 2]) == "never"
    pages.pin([1, 2])
    assert pages.take(1) == [3]


@pytest.mark.parametrize(
    "use, words",
    [
        (lambda p: p.give([0]), "page 0 is given back but is 0, which means 'no page'"),
        (lambda p: p.pin([0]), "page 0 is pinned but is 0"),
        (lambda p: p.give([9]), r"page 9 is given back but is none of 1\.\.4"),
        (lambda p: p.give([4]), "page 4 is given back but is free"),
        (lambda p: p.give([3]), "page 3 is given back but is cached: pin it first"),
        (lambda p: p.give([1, 2, 1]), "page 1 is given back but is listed twice"),
        (lambda p: p.give([1, 4]), "page 4 is given back"),
        (lambda p: p.pin([4]), "page 4 is pinned but is free: nobody holds it"),
        (lambda p: p.pin([1, 1]), "page 1 is pinned but is listed twice"),
        (lambda p: p.pin([1, 3, 4]), "page 4 is pinned"),
        (lambda p: p.keep(4), "page 4 is kept but is free"),
        (lambda p: p.keep(3), "page 3 is kept but is cached"),
        (lambda p: p.forget(1), "page 1 is forgotten but is used by 1, its content not known"),
        (lambda p: p.forget(4), "page 4 is forgotten but is free"),
        (lambda p: p.take(3), "3 pages asked, 1 free and 1 cached of 4"),
    ],
)
def test_a_wrong_use_is_refused_and_changes_nothing(use, words):
    pages = PageManager(4)
    taken = pages.take(3)
    pages.keep(taken[2])
    pages.give([taken[2]])  # 1, 2 used; 3 cached; 4 free

    def state():
        return list(pages._free), list(pages._cached), dict(pages._holders), set(pages._known)

    before = state()
    with pytest.raises(RuntimeError, match=words):
        use(pages)
    assert state() == before
    check_pages(pages)


def test_a_store_that_fails_to_forget_loses_no_page():
    pages = manager(2, known=[1, 2])
    pages.on_reclaim = lambda page: 1 / 0
    with pytest.raises(ZeroDivisionError):
        pages.take(2)
    check_pages(pages)
    assert pages.cached == 2


def test_a_manager_without_pages_is_refused():
    with pytest.raises(ValueError, match="0 pages was asked"):
        PageManager(0)


MOVES = st.tuples(
    st.sampled_from(["take", "pin", "give", "keep", "forget"]),
    st.lists(st.integers(0, 7), max_size=4),
)


@given(st.integers(1, 6), st.lists(MOVES, max_size=50))
def test_any_moves_keep_the_count(size, moves):
    """Against a plain model: holders per page and what is known."""
    pages, holders, known = PageManager(size), {}, set()
    pages.on_reclaim = lambda page: known.remove(page)
    for move, some in moves:
        cached = known - set(holders)
        one = some[0] if some else 1
        if move == "take":
            fits = len(some) <= size - len(holders)
        elif move == "keep":
            fits = one in holders
        elif move == "forget":
            fits = one in known
        else:
            allowed = set(holders) | (cached if move == "pin" else set())
            fits = len(set(some)) == len(some) and set(some) <= allowed
        argument = {"take": len(some), "keep": one, "forget": one}.get(move, some)
        if not fits:
            with pytest.raises(RuntimeError):
                getattr(pages, move)(argument)
        else:
            out = getattr(pages, move)(argument)
            if move == "take":
                assert not set(out) & set(holders) and not set(out) & known
                holders.update(dict.fromkeys(out, 1))
            elif move == "keep":
                known.add(one)
            elif move == "forget":
                known.remove(one)
            else:
                for page in some:
                    holders[page] = holders.get(page, 0) + (1 if move == "pin" else -1)
                holders = {p: n for p, n in holders.items() if n}
        check_pages(pages)
        assert pages._holders == holders and pages._known == known
