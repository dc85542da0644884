"""PrefixCacheManager: how a request begins behind a prefix that is cached, and what it leaves for others.

A hit is looked up whenever a request is admitted, again after it was preempted too. It is at most
length - (window + backtracking) tokens in whole pages, so that the rows behind it fill the window
of the drafter; the limit is the same without a drafter. The replay policy says where the rows
begin: `exact` at the last snapshot, whose window rows are then put into the request's rings;
`bounded` on its decoder side at a snapshot of the layers before the cut, on its encoder side one
window below the hit, on empty rings; `halo` as far below it as exact windows take. What an inexact
plan leaves is marked so, also the block KV that a decoder-side cut alone does not touch: nobody
exact reads the cache of an engine that is not.

A prompt that is cut leaves snapshots of the layers before the cut alone (in the release the encoder,
whose windows are all that is stored: V4.1 technical report). They are exact, and whoever begins at
one of them runs its own cut behind it, so that a hit changes no number.

After each commit the pages that have become full are registered, and the window rows at some of
their ends (`SnapshotPolicy` says which) kept as snapshots: a chunk's as they pass (`SnapshotCapture`), those of
decode rows out of the rings.
Rows of a draft that was not accepted lie above `computed` and are in no registered page.

Nothing is served whose numbers nobody has seen finite. A decode row has been seen: its token is
emitted only if its logits are finite, and what is not finite in a row stays so up to its logits.
Every row of a prefill chunk has too (`NonFiniteRows`). A request with one that is not finite ends, and
the pages that it took over are suspects like its own: nobody else begins there until they are
computed again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING

from deepinfer.cache.addressing import ending_page, full_pages, page_end, page_ends
from deepinfer.cache.prefix_index import PageStore, PrefixIndex, PrefixMatch, SnapshotStore
from deepinfer.cache.snapshots import Snapshot, held, rows_at, snapshot_bytes
from deepinfer.engine.prefix.snapshot_capture import SnapshotCapture
from deepinfer.engine.prefix.snapshot_policy import SnapshotPolicy
from deepinfer.engine.request import Request
from deepinfer.slots.protocols import Prompt, ReplayPlan

if TYPE_CHECKING:
    from deepinfer.engine.runtime import Runtime
    from deepinfer.engine.scheduling.output import ScheduledRequest
    from deepinfer.engine.trace import Trace
    from deepinfer.tables.table import Table


@dataclass(frozen=True, slots=True)
class Admission:
    """How a waiting request would begin. pages: those it takes over; plan: its rows; snapshot: the
    window rows at plan.start, None where none are needed; exact: all that it takes over is; found:
    tokens in pages that were found, with a snapshot for them or not."""

    pages: tuple[int, ...]
    plan: ReplayPlan
    snapshot: Snapshot | None = None
    exact: bool = True
    found: int = 0


@dataclass(frozen=True)
class CacheReport:
    """The prefix cache in numbers. hits: how often a request began with a hit, again after it gave
    way too; hit_tokens: what those did not compute; lost_tokens: what was found in pages and still
    computed again, for want of a snapshot (many: raise num_snapshots); pages, snapshots: that are
    known, in use or not; evictions: those that had to make room. `eng.clear_cache()` forgets what
    is cached, and counts on."""

    hits: int = 0
    hit_tokens: int = 0
    lost_tokens: int = 0
    pages: int = 0
    page_evictions: int = 0
    snapshots: int = 0
    snapshot_bytes: int = 0
    snapshot_evictions: int = 0
    facts: Callable[[], dict[str, object]] = field(default=dict, compare=False)  # of the engine

    def table(self) -> Table:
        """name, value rows."""
        from deepinfer.tables.table import Table

        counts = [f.name for f in dataclasses.fields(self) if f.name != "facts"]
        rows = [dict(name=n, value=getattr(self, n)) for n in counts]
        return Table(rows, title="prefix cache", provenance=self.facts())

    def __repr__(self) -> str:
        return repr(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


class PrefixCacheManager:
    """The prefix cache of one engine. Counters: requests that began with a hit (each time they
    began), the tokens they did not compute and those they found but had to compute. cut, uncut:
    where the replay policy cuts the longest prompt (0: nowhere), how many of the first layers it
    does not cut. traces: the engine's list; while one edits values, what runs is not what the keys
    say, so nothing is served or registered."""

    def __init__(self, rt: Runtime, model: str, snapshot_budget: int) -> None:
        self.rt = rt
        self.page_size = rt.limits.page_size
        self.pages = PageStore(rt.pages)
        self.snapshots: SnapshotStore[Snapshot] = SnapshotStore(snapshot_budget)
        self.index = PrefixIndex(self.page_size, self.pages, self.snapshots, model=model)
        longest = rt.limits.model_len - 1
        self.cut, self.uncut = cut_of(rt.replay_plan(Prompt(longest)))
        most = snapshot_budget // max(snapshot_bytes(rt.cache, self.uncut), 1)
        self.snapshot_policy = SnapshotPolicy(
            self.snapshots,
            self.page_size,
            self.reserve,
            most // rt.limits.seqs,
            longest - self.cut if self.cut else 0,
        )
        self.traces: list[Trace] = []
        self.weights_generation = rt.edits.generation
        self.hits = 0
        self.hit_tokens = 0
        self.lost_tokens = 0

    @property
    def edited(self) -> bool:
        return any(t.edits for t in self.traces)

    @property
    def reserve(self) -> int:
        """Tokens at the end of a sequence that are always computed: window and backtracking, with
        or without a drafter."""
        return self.rt.config.sliding_window + self.rt.config.max_draft + 1

    def current(self, request: Request) -> bool:
        """Whether a request began after the cache was last cleared."""
        return request.prefix.generation == self.index.generation

    def keys(self, request: Request, tokens: int) -> list[bytes]:
        """Keys of the full pages of its first `tokens` tokens."""
        mine, pages = request.prefix, full_pages(tokens, self.page_size)
        if len(mine.keys) < pages:
            ids = request.token_slice(0, pages * self.page_size)
            mine.keys = self.index.keys(ids, salt=mine.salt, images=mine.images, known=mine.keys)
        return mine.keys[:pages]

    # ---------------------------------------------------------------------------- how it begins

    def lookup(self, request: Request) -> PrefixMatch:
        """What is cached of a waiting request; nothing where rows of its prefix are asked for."""
        self.forget_if_edited()
        mine = request.prefix
        if not self.current(request):  # it has computed nothing that is left, so its keys are new
            mine.generation, mine.keys, mine.tail = self.index.generation, [], []
        limit = request.optimistic_tokens - self.reserve
        if limit < self.page_size or request.wants_prompt_logprobs or self.edited:
            return PrefixMatch()
        return self.index.lookup(self.keys(request, limit), limit, exact=self.rt.replay.exact)

    def match(self, request: Request) -> Admission:
        """How a waiting request would begin now. Raises ValueError naming a replay policy whose
        plan cannot be followed."""
        hit = self.lookup(request)
        plan = self.plan(request, hit)
        pages, rest = divmod(plan.write_from, self.page_size)
        if rest:
            raise ValueError(
                f"replay {self.rt.replay!r}: write_from {plan.write_from} is inside a page of "
                f"{self.page_size} tokens; a hit is adopted in whole pages"
            )
        exact, snapshot = hit.exact, None
        if need := plan.layers_below:
            key = self.keys(request, plan.start)[-1]
            found = self.snapshots.get(key)  # counts as a use
            assert found is not None and found.layers >= need  # a valid plan begins where it is
            exact, snapshot = exact and found.exact, found.first(need)
        return Admission(hit.pages[:pages], plan, snapshot, exact, hit.length)

    def plan(self, request: Request, hit: PrefixMatch) -> ReplayPlan:
        """The policy's plan for the prompt with this hit. Behind the prompt (a recompute) nothing
        is dropped: the plan of the prompt stays, and its rows begin at a snapshot of all layers.
        One that another request has left, whose prompt was cut elsewhere, is none of this one."""
        prompt, wants = len(request.prompt), request.wants_prompt_logprobs
        inside = min(hit.length, page_end(prompt - 1, self.page_size))
        layers = self.rt.config.num_layers
        behind = [s for s in hit.snapshots if s.position > inside and s.layers == layers]
        if behind:
            plan = self.rt.replay_plan(Prompt(prompt, 0, 0, wants))
            floors = {max(p.floor) for p in (plan, request.plan) if p is not None}
            if own := [s.position for s in behind if s.floor in floors]:
                return dataclasses.replace(plan, start=own[0], write_from=own[0])
        states = tuple((s.position, s.layers) for s in hit.snapshots if s.position <= inside)
        whole = max((at for at, have in states if have == layers), default=0)
        return self.rt.replay_plan(Prompt(prompt, inside, whole, wants, states))

    def adopt(self, request: Request, start: Admission) -> None:
        """The request has its pages and slot: it goes on behind what it took over."""
        mine, at = request.prefix, start.plan.start
        if start.snapshot is not None:  # in its turn: a step on its way may still write this slot
            cache, slot = self.rt.cache, request.state_id
            start.snapshot.check(cache)
            self.rt.device.post(partial(start.snapshot.restore, cache, slot, at))
        request.plan, request.optimistic_computed = start.plan, at
        mine.adopted = mine.registered = len(start.pages)
        mine.exact = start.plan.exact and start.exact
        mine.edited = False
        layers = 0 if start.snapshot is None else start.snapshot.layers
        low = at - rows_at(self.rt.cache, at) if layers else at
        mine.window_from = tuple(
            max(low if i < layers else at, lowest) for i, lowest in enumerate(start.plan.kv_from)
        )
        cold = self.rt.replay_plan(
            Prompt(len(request.prompt), wants_all_logits=request.wants_prompt_logprobs)
        )
        mine.cut, mine.uncut = cut_of(cold)
        keys = self.keys(request, request.optimistic_tokens)
        self.snapshot_policy.begin(request, keys, at if layers else 0, self.shared(keys))
        # Above its cut a hit saves nothing: the windows of the layers that are cut are needed.
        usable = page_end(mine.cut, self.page_size) if mine.cut else start.found
        self.lost_tokens += max(min(start.found, usable) - at, 0)
        self.hits += bool(start.pages)  # also where a replay begins at 0, below all that it adopts
        self.hit_tokens += at
        if mine.cached_tokens is None:
            mine.cached_tokens = at

    def shared(self, keys: list[bytes]) -> int:
        """Tokens in pages that are known, also past the limit of a hit."""
        exact, run = self.rt.replay.exact, 0
        for key in keys:
            held = self.pages.get(key)
            if held is None or (exact and not held.exact):
                break
            run += self.page_size
        return run

    # ------------------------------------------------------------------------- what it leaves

    def capture(
        self, scheduled: Sequence[ScheduledRequest], requests: Sequence[Request]
    ) -> SnapshotCapture | None:
        """What collects the window rows at the page ends inside the prefill chunks of a step."""
        wanted: dict[int, dict[int, int]] = {}
        for i, item in enumerate(scheduled):
            if not item.decode and (ends := self.ends(requests[i], item)):
                wanted[i] = ends
        return SnapshotCapture(self.rt.cache, scheduled, requests, wanted) if wanted else None

    def leaves(self, request: Request) -> bool:
        """Whether what it computes now may serve others."""
        return not self.edited and not request.prefix.edited and self.current(request)

    def layers(self, request: Request, at: int) -> int:
        """Of how many of the first layers a snapshot at a page end is worth keeping; 0 where those
        before the cut are not whole. Of a prompt that was cut, the rows of the layers behind the
        cut are nobody else's: whose prompt ends elsewhere is cut elsewhere."""
        mine, low = request.prefix, at - rows_at(self.rt.cache, at)
        whole = takewhile(lambda lowest: lowest <= low, mine.window_from)
        count = sum(1 for _ in whole)
        if not mine.exact and at < len(request.prompt):
            count = min(count, mine.uncut)
        return count if count >= min(self.uncut, self.rt.config.first_decoder_layer) else 0

    def ends(self, request: Request, item: ScheduledRequest) -> dict[int, int]:
        """Page ends in a chunk that are to be kept and whose snapshot is not there yet, and of how
        many layers it is to be."""
        if not self.snapshots.budget or not self.leaves(request):
            return {}
        ends = page_ends(item.start, item.stop, self.page_size)
        keys = self.keys(request, item.stop)
        found = {p: self.layers(request, p) for p in ends if self.snapshot_policy.role(request, p)}
        return {p: n for p, n in found.items() if n and self.better(keys, request, p, n)}

    def better(self, keys: list[bytes], request: Request, at: int, layers: int) -> bool:
        """Whether a snapshot of so many layers is worth more than what is there."""
        old = self.snapshots.peek(keys[ending_page(at, self.page_size)])
        return old is None or (request.prefix.exact, layers) > old.rank

    def register(self, request: Request, written: int, seen: dict[int, Snapshot]) -> None:
        """After a commit. written: where the positions end that the step and those on their way
        have written, drafts too; seen: snapshots by position. What a request that failed has left
        is not served, and nothing that began before the cache was cleared is registered."""
        mine = request.prefix
        mine.edited |= self.edited
        if request.error is not None:
            self.invalidate(request)
        if request.error is not None or mine.edited or not self.current(request):
            return
        full = full_pages(request.num_computed, self.page_size)
        if full <= mine.registered:
            return
        keys = self.keys(request, request.num_computed)
        new = slice(mine.registered, full)
        self.index.register(keys[new], request.pages[new], exact=mine.exact)
        for page in range(mine.registered, full):
            at = (page + 1) * self.page_size
            if (role := self.snapshot_policy.role(request, at)) is not None:
                snapshot = seen.get(at) or self.from_rings(request, at, written)
                self.snapshot_policy.keep(request, keys, at, role, snapshot)
        self.snapshot_policy.move_on(request)
        mine.registered = full

    def from_rings(self, request: Request, at: int, written: int) -> Snapshot | None:
        """The window rows at a page end that is only just behind, where they are not kept yet."""
        mine, cache, layers = request.prefix, self.rt.cache, self.layers(request, at)
        how = dict(computed=request.num_computed, drafts=written - request.num_computed)
        if not layers or not self.better(mine.keys, request, at, layers):
            return None
        if not held(cache, at, **how):
            return None
        marks = dict(layers=layers, exact=mine.exact, floor=max(request.plan.floor))
        return Snapshot.from_rings(cache, request.state_id, at, **marks, **how)

    def invalidate(self, request: Request) -> None:
        """Nothing that this request has registered is served any more. Where its numbers were not
        finite, what it took over is not either, nor a snapshot at any of its page ends: they may be
        the cause, and everybody who begins there would fail."""
        mine = request.prefix
        if isinstance(request.error, ArithmeticError):
            for key in mine.keys:
                self.pages.evict(key)
                self.snapshots.evict(key)
            mine.registered = mine.adopted = 0
            return
        own = slice(mine.adopted, mine.registered)
        for key, page in zip(mine.keys[own], request.pages[own]):
            there = self.pages.get(key)
            if there is not None and there.page == page:
                self.pages.evict(key)
                self.snapshots.evict(key)
        mine.registered = mine.adopted

    def forget_if_edited(self) -> None:
        """What was computed with weights that have been edited in place since is forgotten, once."""
        if (now := self.rt.edits.generation) != self.weights_generation:
            self.clear()
            self.weights_generation = now

    def clear(self) -> None:
        """Forget every page and snapshot. Requests that run keep their pages and register nothing.
        Where an interrupt breaks it off, it is cleared all the same."""
        try:
            self._clear()
        except BaseException:
            self.recover()
            self.rt.pages.recount()
            self._clear()
            raise

    def _clear(self) -> None:
        self.index.clear()
        self.snapshot_policy.clear()

    def report(self) -> CacheReport:
        """What is cached now, and what it was good for."""
        return CacheReport(
            hits=self.hits,
            hit_tokens=self.hit_tokens,
            lost_tokens=self.lost_tokens,
            pages=len(self.pages),
            page_evictions=self.pages.reclaimed,
            snapshots=len(self.snapshots),
            snapshot_bytes=self.snapshots.nbytes,
            snapshot_evictions=self.snapshots.evicted,
        )

    def recover(self) -> None:
        """After an interrupt anywhere: keys and pages, and the bytes of snapshots, agree again."""
        self.pages.recover()
        self.snapshots.recover()


def cut_of(cold: ReplayPlan) -> tuple[int, int]:
    """(lowest position of a cut, how many of the first layers are not cut) by the plan of a prompt
    of which nothing is available; (0, all) where nothing is cut."""
    floors = [f for f in cold.floor if f]
    return min(floors, default=0), next((i for i, f in enumerate(cold.floor) if f), len(cold.floor))
