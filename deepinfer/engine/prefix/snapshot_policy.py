"""Keeping: at which page ends a request leaves a snapshot, and which snapshots make room first.

A hit ends at a snapshot, and in the release one takes the bytes of 3,000 tokens of block KV. So a
request leaves them only where somebody is likely to begin:

    branch    where the pages that others have left of its tokens end, and back to the `bound` of
              that length. What two prompts share, a third is likely to share too: it then begins
              right there or, with few tokens of its own, at its own bound
    repeat    the last page end that the same prompt can use: `bound(prompt)`, or below its cut
    tail      from `bound(length)` to the last page end that it has reached: for the next turn, and
              for the request itself once it has been preempted. They move along: one that falls behind
              is dropped, unless another request has it as its tail too, began there or keeps it
    spare     every 2**k-th page end of what it prefills, with the smallest k at which they fit its
              share of the budget: whoever differs first in between computes less than 2**k pages
              again. Powers of 2, so that prompts of other lengths use the same ones

Where a page end lies decides, not how rows were cut into chunks. Spare ones take free room, or that
of the oldest spare one, and make room first; the others go least recently used first, of one
request its tail before branch and repeat. A spare one where somebody began is spare no more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from deepinfer.cache.addressing import ending_page, full_pages, most_page_ends, page_end
from deepinfer.cache.prefix_index import SnapshotStore
from deepinfer.engine.request import Request

if TYPE_CHECKING:
    from deepinfer.cache.snapshots import Snapshot


class SnapshotPolicy:
    """reserve: tokens at the end of a sequence that no hit covers; per_request: snapshots of one request
    that fit the budget when as many run as can; kept: rows at the end of a prompt above a replay
    policy's cut (0: it cuts nothing), which no hit saves either. Lengths and positions in tokens."""

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
        self.tails: dict[bytes, set[int]] = {}  # ids of the requests that have it as their tail

    # -------------------------------------------------------------------------------- where

    def bound(self, length: int) -> int:
        """The last page end at which a sequence of so many tokens may begin."""
        return page_end(length - self.reserve, self.page_size)

    def below_cut(self, length: int) -> int:
        """The last page end at which a prompt of so many tokens may begin where it is cut."""
        return page_end(length - self.kept, self.page_size)

    def repeat(self, request: Request) -> int:
        """The last page end that the same prompt can use."""
        if cut := request.prefix.cut:
            return page_end(cut, self.page_size)
        return self.bound(len(request.prompt))

    def stride(self, length: int) -> int:
        """Tokens from one spare page end of a prefill to the next; 0 where none fits."""
        pages, every = full_pages(length, self.page_size), 1
        while self.most_spare and pages // every > self.most_spare:
            every *= 2
        return every * self.page_size if self.most_spare else 0

    def role(self, request: Request, at: int) -> str | None:
        """What a snapshot at this page end is to the request: 'branch', 'repeat', 'tail', 'spare',
        or None, which is none."""
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
        """The request begins with the snapshot at `at` (0: with none). shared: tokens in the pages
        that others have left of it."""
        mine = request.prefix
        mine.goal, mine.stride = request.optimistic_tokens, self.stride(request.optimistic_tokens)
        if mine.cached_tokens is None:  # later, what is there is mostly its own
            mine.branch = shared
        if at:
            self._wanted(keys[ending_page(at, self.page_size)], request)
        self.move_on(request)  # its tail from before it was preempted
        here = [keys[ending_page(p, self.page_size)] for p in mine.tail]
        mine.tail = [
            p
            for p, key in zip(mine.tail, here)
            if key in self.store and request.id in self.tails.get(key, ())
        ]

    def keep(
        self, request: Request, keys: Sequence[bytes], at: int, role: str, new: Snapshot | None
    ) -> None:
        """The request has passed a page end. new: the snapshot there, None where the store has it
        already or nobody can make it any more."""
        key = keys[ending_page(at, self.page_size)]
        there = key in self.store
        if new is not None and not (there and self.store.get(key).rank >= new.rank):
            if not self._room(new.nbytes, spare=role == "spare"):
                return
            if not self.store.put(key, new):
                return
        elif not there:
            return
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
        """The request has become longer: what was its tail and fell behind is dropped. After it
        was preempted its tail may lie past what is computed again; its keys reach as far all the same."""
        mine, edge = request.prefix, self.bound(request.num_tokens)
        keys = mine.keys
        for at in [p for p in mine.tail if p < edge]:
            mine.tail.remove(at)
            key = keys[ending_page(at, self.page_size)]
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
                self.store.get(keys[ending_page(at, self.page_size)])

    def clear(self) -> None:
        """Nothing is kept any more."""
        self.spare.clear()
        self.tails.clear()

    # ---------------------------------------------------------------------------------- room

    def _wanted(self, key: bytes, by: Request | None = None) -> None:
        """It is neither spare nor anybody's tail alone: somebody else begins there."""
        self.spare.pop(key, None)
        if by is None or self.tails.get(key) != {by.id}:
            self.tails.pop(key, None)

    def _make_spare(self, key: bytes) -> None:
        self.tails.pop(key, None)
        self.spare[key] = None

    def _room(self, nbytes: int, spare: bool) -> bool:
        """Let spare ones make room. False where a spare one would take the place of another kind."""
        store = self.store
        if len(self.tails) > 2 * len(store) + 64:  # of those that made room
            self.tails = {k: v for k, v in self.tails.items() if k in store}
        while store.nbytes + nbytes > store.budget and self.spare:
            key = next(iter(self.spare))
            store.evicted += key in store
            store.evict(key)
            del self.spare[key]
        return not spare or store.nbytes + nbytes <= store.budget
