"""Numbers that are handed out: state ids (Pool) and pages of block KV (PageManager).

Neither knows what is stored under a number. Number 0 means 'none': writes that must go nowhere land
there, and padding rows point at it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Sequence


class Pool:
    """First-in first-out free list over 1..size. Freed numbers are reused last, which keeps stale
    reads visible in tests. Invariant: free + held = size, each number in exactly one of them."""

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.size = size
        self._free: deque[int] = deque(range(1, size + 1))
        self._held: set[int] = set()

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, n: int) -> list[int]:
        """n numbers. Raises RuntimeError when fewer are free; ask `free` first."""
        if n > len(self._free):
            raise RuntimeError(f"{n} {self.name} asked, {len(self._free)} of {self.size} free")
        out = [self._free.popleft() for _ in range(n)]
        self._held.update(out)
        return out

    def give(self, numbers: list[int]) -> None:
        """Return numbers. Raises RuntimeError naming one that is not held (freed twice)."""
        for number in numbers:
            if number not in self._held:
                raise RuntimeError(f"{self.name} {number} is given back but is not held")
            self._held.remove(number)
            self._free.append(number)

    def recount(self, held: Iterable[int]) -> None:
        """After an interrupt anywhere: exactly these numbers are held."""
        self._held = set(held)
        kept = [n for n in dict.fromkeys(self._free) if n not in self._held]
        lost = set(range(1, self.size + 1)) - self._held - set(kept)
        self._free = deque([*kept, *sorted(lost)])


class PageManager:
    """Pages 1..size, shared by counting who holds them. A page is in exactly one of three places:

        used     somebody holds it: never evicted, never handed out again
        cached   nobody holds it but its content is known (`keep`): a hit may `pin` it
        free     nobody holds it and nothing is known about it
    Invariant: free + cached + used = size. `take` uses up the free pages, oldest first, and then
    reclaims cached ones, least recently used first, telling `on_reclaim`. Pages given back
    together go last page first: the tail of a sequence is reclaimed before its head, which other
    sequences share.
    """

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"a PageManager of {size} pages was asked: at least 1 is needed")
        self.size = size
        self.on_reclaim: Callable[[int], None] | None = None
        """Called with a page just before its content is given up. It must only forget the page."""
        self._free: deque[int] = deque(range(1, size + 1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._holders: dict[int, int] = {}
        self._known: set[int] = set()

    def __repr__(self) -> str:
        parts = f"{self.used} used + {self.cached} cached + {self.free} free"
        return f"PageManager({parts} = {self.size})"

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def cached(self) -> int:
        return len(self._cached)

    @property
    def used(self) -> int:
        return len(self._holders)

    @property
    def available(self) -> int:
        """Pages that `take` can hand out now: free and cached."""
        return self.free + self.cached

    def holders(self, page: int) -> int:
        """How many hold a page; 0 where it is cached or free."""
        return self._holders.get(page, 0)

    def ask(self, n: int, hit: Collection[int] = ()) -> str:
        """Whether `take(n)` would work after `pin(hit)`: 'ok', 'later' (pages have to come back
        first) or 'never'. A hit page that is still cached is not there to be reclaimed as well."""
        if n < 0:
            raise ValueError(f"{n} pages asked: a number of pages is 0 or more")
        if n + len(hit) > self.size:
            return "never"
        return "ok" if n <= self.available - sum(p in self._cached for p in hit) else "later"

    def take(self, n: int) -> list[int]:
        """n pages with one holder each and nothing known about them. Raises RuntimeError, changing
        nothing, where `ask(n)` is not 'ok'."""
        if self.ask(n) != "ok":
            raise RuntimeError(
                f"{n} pages asked, {self.free} free and {self.cached} cached of {self.size}: "
                "ask(n) first, and wait or preempt where it does not say 'ok'"
            )
        while len(self._free) < n:
            self._reclaim()
        pages = [self._free.popleft() for _ in range(n)]
        self._holders.update(dict.fromkeys(pages, 1))
        return pages

    def pin(self, pages: Sequence[int]) -> None:
        """One more holder for each of these pages, used or cached. Raises RuntimeError, changing
        nothing, for a page that is neither or is listed twice."""
        self._check(pages, "pinned", lambda p: p in self._holders or p in self._cached)
        for page in pages:
            self._cached.pop(page, None)
            self._holders[page] = self.holders(page) + 1

    def give(self, pages: Sequence[int]) -> None:
        """One holder less for each of these pages. Raises RuntimeError, changing nothing, for one
        that nobody holds (given back twice) or that is listed twice."""
        self._check(pages, "given back", lambda p: p in self._holders)
        for page in reversed(pages):
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            del self._holders[page]
            if page in self._known:
                self._cached[page] = None
            else:
                self._free.append(page)

    def keep(self, page: int) -> None:
        """From now on the content of this used page is known, so that it is cached when its last
        holder gives it back."""
        self._check([page], "kept", lambda p: p in self._holders)
        self._known.add(page)

    def forget(self, page: int) -> None:
        """The content of this page is known no more: a cached page is free at once, a used one when
        its last holder gives it back. Raises RuntimeError where it was not known."""
        self._check([page], "forgotten", lambda p: p in self._known)
        self._known.remove(page)
        if page in self._cached:
            del self._cached[page]
            self._free.append(page)

    def know(self, pages: Iterable[int]) -> None:
        """The content of these pages is known and of no other; `recount` then says where each page
        is. Both put right what an interrupt anywhere has left."""
        self._known = set(pages)

    def recount(self, holders: Iterable[Sequence[int]] | None = None) -> None:
        """These are all the lists of pages that somebody holds; None: that is as it was, only what
        is known has changed."""
        if holders is not None:
            self._holders = dict(Counter(page for pages in holders for page in pages))
        idle = [p for p in range(1, self.size + 1) if p not in self._holders]
        cached = dict.fromkeys(p for p in (*self._cached, *idle) if p in self._known and p in idle)
        kept = dict.fromkeys(p for p in (*self._free, *idle) if p not in self._known and p in idle)
        self._cached, self._free = OrderedDict(cached), deque(kept)

    def _reclaim(self) -> None:
        page = next(iter(self._cached))
        if self.on_reclaim is not None:
            self.on_reclaim(page)
        self.forget(page)

    def _check(self, pages: Sequence[int], what: str, fits: Callable[[int], bool]) -> None:
        if len(set(pages)) != len(pages):
            twice = next(p for i, p in enumerate(pages) if p in pages[:i])
            raise RuntimeError(
                f"page {twice} is {what} but is listed twice: a holder lists each page once"
            )
        for page in pages:
            if not fits(page):
                raise RuntimeError(f"page {page} is {what} but is {self._where(page)}")

    def _where(self, page: int) -> str:
        """Where a page is, for errors."""
        if page == 0:
            return "0, which means 'no page': leave it out"
        if not 1 <= page <= self.size:
            return f"none of 1..{self.size}"
        if page in self._holders:
            known = "known" if page in self._known else "not known"
            return f"used by {self._holders[page]}, its content {known}"
        return "cached: pin it first" if page in self._cached else "free: nobody holds it"
