"""SnapshotPolicy: at which page ends a request leaves a snapshot, and which snapshots make room first.

A hit ends at a snapshot, and in the release a snapshot takes as many bytes as the block KV of 3,000
tokens. So a request leaves them only where another one is likely to begin:

    branch    the last page end of its tokens that other requests have left pages for, and the
              `bound` of that length. What two prompts share, a third is likely to share: it begins
              right there, or at its own bound if it has few tokens of its own
    repeat    the last page end that the same prompt can use: `bound(prompt)`, or below its cut
    tail      from `bound(length)` to its last page end: for the next turn, and for the request
              itself after a preemption. The tail moves along: a snapshot that falls behind is
              dropped, unless another request has it as its tail, began there or keeps it
    spare     every 2**k-th page end of its prefill, with the smallest k at which these fit its
              share of the budget. A prompt that differs in between computes less than 2**k pages
              again. Powers of 2, so that prompts of other lengths use the same page ends

The position of a page end decides, not how rows were cut into chunks. A spare snapshot takes free
room or that of the oldest spare one, and spare ones are dropped first. The others are dropped least
recently used first; of one request, tail before branch and repeat. A spare snapshot at which a
request began is spare no more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from deepinfer.cache.addressing import ending_page, full_pages, most_page_ends, page_end
from deepinfer.cache.prefix_index import SnapshotStore, improves
from deepinfer.engine.request import Request

if TYPE_CHECKING:
    from deepinfer.cache.snapshots import Snapshot


class SnapshotPolicy:
    """reserve: tokens at the end of a sequence that no hit covers (`ModelConfig.ring_length`);
    per_request: snapshots of one request that fit the budget when as many run as can; kept: rows
    above a replay policy's cut at the end of a prompt, which no hit saves either (0: it cuts
    nothing). Lengths and positions in tokens; a position is a page end."""

    def __init__(
        self,
        store: SnapshotStore[Snapshot],
        page_size: int,
        reserve: int,
        per_request: int,
        kept: int = 0,
    ) -> None:
        self.store, self.page_size = store, page_size
        # A cut just above the reserve moves a bound by a page end; one far above it, by too many.
        self.reserve = kept if reserve < kept <= reserve + page_size else reserve
        self.kept = max(kept, self.reserve)
        self.most_spare = max(per_request - most_page_ends(self.reserve, page_size) - 2, 0)
        self.spare: dict[bytes, None] = {}  # oldest first; some may be gone
        self.tails: dict[bytes, set[int]] = {}  # key -> ids of the requests whose tail it is

    # -------------------------------------------------------------------------------- where

    def bound(self, length: int) -> int:
        """The last page end at which a sequence of so many tokens may begin."""
        return page_end(length - self.reserve, self.page_size)

    def below_cut(self, length: int) -> int:
        """The last page end at which a prompt of so many tokens may begin if it is cut."""
        return page_end(length - self.kept, self.page_size)

    def repeat(self, request: Request) -> int:
        """The last page end that the same prompt can use."""
        if cut := request.prefix.cut:
            return page_end(cut, self.page_size)
        return self.bound(len(request.prompt))

    def stride(self, length: int) -> int:
        """Tokens from one spare page end of a prefill to the next; 0 if none fits the budget."""
        pages, every = full_pages(length, self.page_size), 1
        while self.most_spare and pages // every > self.most_spare:
            every *= 2
        return every * self.page_size if self.most_spare else 0

    def role(self, request: Request, at: int) -> str | None:
        """What a snapshot at this page end is to the request: 'branch', 'repeat', 'tail' or 'spare';
        None if it leaves none there."""
        mine = request.prefix
        if self.bound(mine.branch) <= at <= mine.branch or at == self.below_cut(mine.branch):
            return "branch"
        if at == self.repeat(request):
            return "repeat"
        if at >= self.bound(request.num_tokens):
            return "tail"
        return "spare" if mine.stride and at <= mine.goal and at % mine.stride == 0 else None

    # --------------------------------------------------------------------------------- when

    def begin(self, request: Request, keys: Sequence[bytes], at: int, shared: int) -> None:
        """The request begins at the snapshot at `at` (0: without one). shared: tokens in the pages
        of its prefix that other requests have left."""
        mine = request.prefix
        mine.goal, mine.stride = request.optimistic_tokens, self.stride(request.optimistic_tokens)
        if mine.cached_tokens is None:  # later, most of what is there is its own
            mine.branch = shared
        if at:
            self._wanted(self._key(keys, at), request)
        self.move_on(request)  # its tail from before it was preempted
        mine.tail = [p for p in mine.tail if self._is_tail(self._key(keys, p), request)]

    def keep(
        self, request: Request, keys: Sequence[bytes], at: int, role: str, new: Snapshot | None
    ) -> None:
        """The request has passed a page end. new: the snapshot there; None if the store has it
        already, or if its rows are gone."""
        key = self._key(keys, at)
        there = key in self.store
        if new is not None and improves(self.store, key, new.rank):
            if not self._room(new.nbytes, spare=role == "spare"):
                return
            if not self.store.put(key, new):
                return
        elif not there:
            return
        elif new is not None:
            self.store.get(key)  # another request has left it meanwhile: counts as a use
        if role in ("branch", "repeat"):
            self._wanted(key)
        elif role == "tail" and (not there or key in self.tails):
            holders = self.tails.setdefault(key, set()) if there else set()
            self.tails[key] = holders | {request.id}
            if at not in request.prefix.tail:
                request.prefix.tail.append(at)
            self.spare.pop(key, None)
        elif role == "spare" and not there:
            self._make_spare(key)

    def move_on(self, request: Request) -> None:
        """The request has become longer: drop the part of its tail that fell behind. After a
        preemption its tail may lie past what is computed again; its keys still reach that far."""
        mine, edge = request.prefix, self.bound(request.num_tokens)
        keys = mine.keys
        for at in [p for p in mine.tail if p < edge]:
            mine.tail.remove(at)
            key = self._key(keys, at)
            holders = self.tails.get(key, set())
            if request.id not in holders:
                continue
            holders.remove(request.id)
            if not holders:
                del self.tails[key]
                if self.role(request, at) == "spare":
                    self._make_spare(key)
                else:
                    self.store.evict(key)
        branch = range(self.bound(mine.branch), mine.branch + 1, self.page_size)
        for at in (*branch, self.below_cut(mine.branch), self.repeat(request)):  # after the tail
            if 0 < at <= len(keys) * self.page_size:
                self.store.get(self._key(keys, at))

    def clear(self) -> None:
        """Forget every role."""
        self.spare.clear()
        self.tails.clear()

    # ---------------------------------------------------------------------------------- room

    def _key(self, keys: Sequence[bytes], at: int) -> bytes:
        """Key of the page that ends at `at`."""
        return keys[ending_page(at, self.page_size)]

    def _is_tail(self, key: bytes, request: Request) -> bool:
        return key in self.store and request.id in self.tails.get(key, ())

    def _wanted(self, key: bytes, by: Request | None = None) -> None:
        """Another request begins there, so it is neither spare nor the tail of one request alone."""
        self.spare.pop(key, None)
        if by is None or self.tails.get(key) != {by.id}:
            self.tails.pop(key, None)

    def _make_spare(self, key: bytes) -> None:
        self.tails.pop(key, None)
        self.spare[key] = None

    def _room(self, nbytes: int, spare: bool) -> bool:
        """Let spare snapshots make room. False if a spare one would take the place of another
        kind."""
        store = self.store
        if len(self.tails) > 2 * len(store) + 64:  # of those that made room
            self.tails = {k: v for k, v in self.tails.items() if k in store}
        while store.nbytes + nbytes > store.budget and self.spare:
            key = next(iter(self.spare))
            store.evicted += key in store
            store.evict(key)
            del self.spare[key]
        return not spare or store.nbytes + nbytes <= store.budget
