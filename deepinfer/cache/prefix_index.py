"""PrefixIndex: the pages of block KV and the window snapshots that earlier sequences have left.

A page is found by its key (`page_keys`). Pages and snapshots are stored and evicted separately:

    pages      key of a page -> the page. The PageManager reclaims them least recently used first.
               A page whose parent was reclaimed stays until its own turn. A lookup walks from the
               root and cannot reach it until the parent is registered again; then it is valid
    snapshots  key of the page that ends at a position -> the window rows there, in a byte budget
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

from deepinfer.cache.addressing import full_pages
from deepinfer.cache.page_keys import ImageSpan, page_key, root_key
from deepinfer.cache.pages import PageManager

if TYPE_CHECKING:
    from deepinfer.cache.snapshots import Snapshot

V = TypeVar("V")


# ---------------------------------------------------------------------------------------- stores


class Store(Protocol[V]):
    """Values by key: the seam for stores in other memory. PrefixIndex makes the keys; a value has a
    field `exact`.

    get: the value or None; counts as a use. put: store a value in place of an earlier one; False if
    it does not fit. evict: drop a value; an unknown key is no error. clear: drop all values.
    """

    def get(self, key: bytes) -> V | None: ...

    def put(self, key: bytes, value: V) -> bool: ...

    def evict(self, key: bytes) -> None: ...

    def clear(self) -> None: ...


class Peekable(Store[V], Protocol[V]):
    """A store that evicts by use. peek: the value or None; does not count as a use, and does not
    fetch a value from other memory."""

    def peek(self, key: bytes) -> V | None: ...


class HeldPage(NamedTuple):
    """A page whose content is known. exact: no row was computed on an approximate window."""

    page: int
    exact: bool = True


class PageStore:
    """Pages of one engine by key; tells the PageManager which pages are known. changes: grows with
    every change of what `get` returns; reclaimed: pages that had to make room."""

    def __init__(self, pages: PageManager) -> None:
        if pages.on_reclaim is not None:
            raise ValueError(
                f"{pages!r} already tells another store what it reclaims: "
                "make one PageStore an engine"
            )
        self.pages = pages
        self._held: dict[bytes, HeldPage] = {}
        self._keys: dict[int, bytes] = {}
        self.reclaimed = self.changes = 0
        pages.on_reclaim = self._reclaim

    def __len__(self) -> int:
        return len(self._held)

    def get(self, key: bytes) -> HeldPage | None:
        return self._held.get(key)

    def put(self, key: bytes, value: HeldPage) -> bool:
        """False if this page is there already; one that is inexact stays so. Raises RuntimeError for
        a page that no request holds, or that is known under another key."""
        other = self._keys.get(value.page, key)
        if other != key:
            raise RuntimeError(
                f"page {value.page} is registered as {key.hex()[:8]} but holds {other.hex()[:8]}: "
                "a page that is known is never written again"
            )
        old = self._held.get(key)
        if old is not None and old.page == value.page:
            return False
        self.pages.keep(value.page)
        self.changes += 1
        self.evict(key)
        self._held[key], self._keys[value.page] = value, key
        return True

    def evict(self, key: bytes) -> None:
        if key in self._held:
            page = self._held[key].page
            self._drop(page)
            self.pages.forget(page)

    def clear(self) -> None:
        """No page is known any more: cached ones are free now, used ones when they are given back."""
        self.changes += 1
        self._held, self._keys = {}, {}
        self.pages.know(())
        self.pages.recount()

    def recover(self) -> None:
        """After an interrupt anywhere: forget pages that only one of the two tables has. Call the
        PageManager's `recount` afterwards."""
        self.changes += 1
        both = {p: k for p, k in self._keys.items() if k in self._held and self._held[k].page == p}
        self._held = {k: self._held[k] for k in both.values()}
        self._keys = both
        self.pages.know(both)

    def _reclaim(self, page: int) -> None:
        self.reclaimed += 1
        self._drop(page)

    def _drop(self, page: int) -> None:
        self.changes += 1
        del self._held[self._keys.pop(page)]


class Sized(Protocol):
    """What SnapshotStore keeps: a value with its bytes, and a rank by which two compare."""

    @property
    def exact(self) -> bool: ...

    @property
    def rank(self) -> Any: ...

    @property
    def nbytes(self) -> int: ...


S = TypeVar("S", bound=Sized)


class SnapshotStore(Generic[S]):
    """Snapshots by key, at most `budget` bytes; the least recently used are evicted first. changes:
    grows with every change of what `get` returns; evicted: snapshots that had to make room."""

    def __init__(self, budget: int) -> None:
        if budget < 0:
            raise ValueError(f"a budget of {budget} bytes for snapshots: want 0 (none) or more")
        self.budget = budget
        self.nbytes = self.evicted = self.changes = 0
        self._held: OrderedDict[bytes, S] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, key: bytes) -> bool:
        """Not counted as a use."""
        return key in self._held

    def get(self, key: bytes) -> S | None:
        if key in self._held:
            self._held.move_to_end(key)
        return self._held.get(key)

    def peek(self, key: bytes) -> S | None:
        """The value or None; not counted as a use."""
        return self._held.get(key)

    def put(self, key: bytes, value: S) -> bool:
        """False, evicting nothing, if the value alone is larger than the budget."""
        if value.nbytes > self.budget:
            return False
        self.evict(key)
        while self.nbytes + value.nbytes > self.budget:
            self.evict(next(iter(self._held)))
            self.evicted += 1
        self._held[key] = value
        self.changes += 1
        self.nbytes += value.nbytes
        return True

    def evict(self, key: bytes) -> None:
        if (old := self._held.pop(key, None)) is not None:
            self.changes += 1
            self.nbytes -= old.nbytes

    def clear(self) -> None:
        self._held.clear()
        self.changes += 1
        self.nbytes = 0

    def recover(self) -> None:
        """After an interrupt anywhere: count the bytes again."""
        self.changes += 1
        self.nbytes = sum(s.nbytes for s in self._held.values())


def improves(store: Peekable[Sized], key: bytes, rank: Any) -> bool:
    """Whether a snapshot of this rank is worth more than the one that a store has, if any."""
    old = store.peek(key)
    return old is None or rank > old.rank


# ----------------------------------------------------------------------------------------- index


class PrefixMatch(NamedTuple):
    """What is known of a prompt. pages: those of its first `length` tokens; snapshots: at positions
    <= length, highest first; exact: whether all pages are.

    It holds nothing: `pin` the pages before the next `take`."""

    pages: tuple[int, ...] = ()
    length: int = 0
    snapshots: tuple[Snapshot, ...] = ()
    exact: bool = True


class PrefixIndex:
    """Pages and snapshots by the content of the prefix they end. Lengths and positions in tokens.

        keys = cache.keys(prompt, salt=salt)
        hit = cache.lookup(keys, len(prompt) - config.ring_length)
        pages.pin(hit.pages)
        ...                              # the rows behind the hit run
        cache.register(keys, request.pages, exact=plan.exact and hit.exact)

    A lookup has a limit, because the rows behind a hit fill the drafter's window before the first
    draft and give the logits of the last prompt token.
    """

    def __init__(
        self,
        page_size: int,
        pages: Store[HeldPage],
        snapshots: Peekable[Snapshot],
        *,
        model: str = "",
    ) -> None:
        if page_size < 1:
            raise ValueError(f"page_size={page_size}: a page holds 1 token or more")
        self.page_size, self.model, self.generation = page_size, model, 0
        self.pages, self.snapshots = pages, snapshots

    def keys(
        self,
        ids: Sequence[int],
        *,
        salt: str | None = None,
        adapter: str | None = None,
        images: Sequence[ImageSpan] = (),
        known: Sequence[bytes] = (),
    ) -> list[bytes]:
        """Keys of all full pages of `ids`. known: keys of its first pages from an earlier call for
        the same sequence; they are not computed again."""
        size, full = self.page_size, full_pages(len(ids), self.page_size)
        keys = list(known[:full])
        parent = keys[-1] if keys else root_key(self.model, salt, adapter, self.generation)
        for page in range(len(keys), full):
            parent = page_key(parent, page * size, ids[page * size : (page + 1) * size], images)
            keys.append(parent)
        return keys

    def clear(self) -> None:
        """Forget everything. Earlier keys never match again: make new ones before you register."""
        self.generation += 1  # first: what an interrupt leaves behind is not found
        self.pages.clear()
        self.snapshots.clear()

    def lookup(self, keys: Sequence[bytes], limit: int, *, exact: bool = True) -> PrefixMatch:
        """The longest run of known pages of at most `limit` tokens, and the snapshots at their ends;
        `snapshots.get` the one that is used. exact: serve no page or snapshot that was computed on
        an approximate window."""
        found: list[HeldPage] = []
        for key in keys[: full_pages(limit, self.page_size)]:
            held = self.pages.get(key)
            if held is None or (exact and not held.exact):
                break
            found.append(held)
        there = [self.snapshots.peek(key) for key in reversed(keys[: len(found)])]
        some = tuple(s for s in there if s is not None and (s.exact or not exact))
        pages = tuple(h.page for h in found)
        return PrefixMatch(pages, len(pages) * self.page_size, some, all(h.exact for h in found))

    def register(self, keys: Sequence[bytes], pages: Sequence[int], *, exact: bool = True) -> int:
        """The content of these used pages is known from now on: keys[i] names what is in pages[i],
        up to the shorter of both lists. Every position in them must be computed, and by a row that
        was accepted. Returns how many pages are new: of two pages with the same content the first
        stays, unless only the second is exact."""
        new = 0
        for key, page in zip(keys, pages):
            old = self.pages.get(key)
            if old is None or exact > old.exact:
                new += self.pages.put(key, HeldPage(page, exact))
        return new
