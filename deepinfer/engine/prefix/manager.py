"""PrefixCacheManager: how a request begins behind a cached prefix, and what it leaves in the cache.

How it begins. `match` looks up the prompt's pages and asks the replay policy where its rows begin;
`adopt` takes that over when the request is admitted, again after a preemption. A hit covers whole
pages and leaves at least window + backtracking tokens (`ModelConfig.ring_length`) to compute, so
that the rows behind it fill the drafter's window; the limit is the same without a drafter. The
policy decides the rest. `exact` begins at the last snapshot, whose window rows are then written into
the request's rings. `bounded` begins at a snapshot of the layers before its cut (decoder side), or
one window below the hit on empty rings (encoder side). `halo` begins as far below the hit as exact
windows need.

What it leaves. After each commit the pages that became full are registered, and the window rows at
some page ends (`SnapshotPolicy`) become snapshots: copied while a prefill chunk runs
(`SnapshotCapture`), or from the rings behind decode rows. Rows of a draft that was rejected lie
above `num_computed` and are in no registered page.

Exactness. What an inexact plan computes is marked inexact, also the block KV that a decoder-side cut
does not touch: the cache of an engine with such a policy serves that engine only. A prompt that is
cut leaves snapshots of the layers before the cut, which are exact (in the release these are the
encoder layers: V4.1 technical report). A request that begins at one makes its own cut behind it, so
a hit changes no number.

NaN and inf. Only finite numbers are served. A decode row emits a token only if its logits are
finite, and NaN and inf in a row propagate to its logits; rows of a prefill chunk are checked by
`NonFiniteRows`. If a row is not finite, its request ends, and the pages that it took over are
dropped like its own: they may be the cause.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING

from deepinfer.cache.addressing import ending_page, full_pages, page_end, page_ends
from deepinfer.cache.prefix_index import (
    PageStore,
    PrefixIndex,
    PrefixMatch,
    SnapshotStore,
    improves,
)
from deepinfer.cache.snapshots import Snapshot, held, rows_at, snapshot_bytes, snapshot_rank
from deepinfer.engine.prefix.admission import Admission
from deepinfer.engine.prefix.report import CacheReport
from deepinfer.engine.prefix.snapshot_capture import SnapshotCapture
from deepinfer.engine.prefix.snapshot_policy import SnapshotPolicy
from deepinfer.engine.replay import ReplayPlanner, first_cut
from deepinfer.engine.request import Request
from deepinfer.slots.protocols import Prompt, ReplayPlan

if TYPE_CHECKING:
    from deepinfer.cache.kv_cache import KVCache
    from deepinfer.cache.pages import PageManager
    from deepinfer.config import ModelConfig
    from deepinfer.engine.device import Device
    from deepinfer.engine.scheduling.output import ScheduledRequest
    from deepinfer.engine.sizing import Limits
    from deepinfer.engine.trace import Trace
    from deepinfer.engine.weight_edits import WeightEdits


class PrefixCacheManager:
    """The prefix cache of one engine.

    config: of the model; limits: of the engine; pages, cache, device: where block KV and window rows
    are and what writes them; replay: plans of the replay policy; edits: tells if weights were edited
    in place; model: identifies weights and
    settings that decide what is in a page; snapshot_budget: in bytes.

    cut, uncut: lowest position at which the replay policy cuts the longest prompt (0: nowhere), and
    how many of the first layers it does not cut. traces: the engine's list; while a trace edits
    values, nothing is served or registered, because page keys do not tell of edits. hits,
    hit_tokens, lost_tokens: as in `CacheReport`.
    """

    def __init__(
        self,
        *,
        config: ModelConfig,
        limits: Limits,
        pages: PageManager,
        cache: KVCache,
        replay: ReplayPlanner,
        device: Device,
        edits: WeightEdits | None = None,
        model: str = "",
        snapshot_budget: int = 0,
    ) -> None:
        self.config, self.cache, self.replay, self.device = config, cache, replay, device
        self.page_size = limits.page_size
        self.page_manager = pages
        self.pages = PageStore(pages)
        self.snapshots: SnapshotStore[Snapshot] = SnapshotStore(snapshot_budget)
        self.index = PrefixIndex(self.page_size, self.pages, self.snapshots, model=model)
        longest = limits.model_len - 1
        self.cut, self.uncut = first_cut(replay.plan(Prompt(longest)))
        most = snapshot_budget // max(snapshot_bytes(cache, self.uncut), 1)
        self.snapshot_policy = SnapshotPolicy(
            self.snapshots,
            page_size=self.page_size,
            reserve=config.ring_length,
            per_request=most // limits.seqs,
            kept=longest - self.cut if self.cut else 0,
        )
        self.traces: list[Trace] = []
        self.edits = edits
        self.weights_generation = 0 if edits is None else edits.generation
        self.hits = 0
        self.hit_tokens = 0
        self.lost_tokens = 0
        self._warn_of_no_hits(longest)

    @property
    def edited(self) -> bool:
        """Whether a trace edits values now."""
        return any(t.edits for t in self.traces)

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

    def match(self, request: Request) -> Admission:
        """How a waiting request would begin now. The answer is kept with the request, and looked up
        again only if the cache or the request has changed. Raises ValueError naming a replay policy
        whose plan cannot be followed."""
        self.forget_if_edited()
        now = (self.pages.changes, self.snapshots.changes, self.edited, request.optimistic_tokens)
        before = request.prefix.matched
        if before is not None and before[0] == now:
            return before[1]
        made = self._match(request)
        request.prefix.matched = (now, made)
        return made

    def _match(self, request: Request) -> Admission:
        hit = self._lookup(request)
        plan = self._plan(request, hit)
        if plan.write_from != page_end(plan.write_from, self.page_size):
            raise ValueError(
                f"replay {self.replay!r}: write_from {plan.write_from} is inside a page of "
                f"{self.page_size} tokens; a hit is adopted in whole pages"
            )
        exact, layers = hit.exact, plan.layers_below
        if layers:
            snapshot = self._snapshot(request, plan.start)  # counts as a use
            assert snapshot.layers >= layers  # a valid plan begins where it has that many
            exact = exact and snapshot.exact
        return Admission(
            pages=hit.pages[: full_pages(plan.write_from, self.page_size)],
            plan=plan,
            layers=layers,
            exact=exact,
            found=hit.length,
        )

    def _lookup(self, request: Request) -> PrefixMatch:
        """What is cached of a waiting request; nothing if log-probabilities of its prompt are asked,
        which need all rows."""
        mine = request.prefix
        if not self.current(request):  # nothing that it computed is left, so its keys are new
            mine.generation, mine.keys, mine.tail = self.index.generation, [], []
        limit = request.optimistic_tokens - self.config.ring_length
        if limit < self.page_size or request.wants_prompt_logprobs or self.edited:
            return PrefixMatch()
        return self.index.lookup(self.keys(request, limit), limit, exact=self.replay.exact)

    def _snapshot(self, request: Request, at: int) -> Snapshot:
        """The snapshot at a page end, which is there."""
        found = self.snapshots.get(self.keys(request, at)[-1])
        assert found is not None
        return found

    def _plan(self, request: Request, hit: PrefixMatch) -> ReplayPlan:
        """The policy's plan for the prompt with this hit. A request that was preempted may begin
        behind its prompt: then the plan of the prompt stays as it is, nothing is dropped there, and
        the rows begin at a snapshot of all layers. A snapshot from a request with a different cut
        cannot be used for that."""
        prompt, layers = len(request.prompt), self.config.num_layers
        inside = min(hit.length, page_end(prompt - 1, self.page_size))
        behind = [s for s in hit.snapshots if s.position > inside and s.layers == layers]
        if behind:
            cold = self._cold_plan(request)
            floors = {max(p.floor) for p in (cold, request.plan) if p is not None}
            if own := [s.position for s in behind if s.floor in floors]:
                return replace(cold, start=own[0], write_from=own[0])
        states = tuple((s.position, s.layers) for s in hit.snapshots if s.position <= inside)
        if not inside and not states:
            return self._cold_plan(request)
        whole = max((at for at, have in states if have == layers), default=0)
        wants = request.wants_prompt_logprobs
        return self.replay.plan(
            Prompt(length=prompt, hit=inside, state_at=whole, wants_all_logits=wants, states=states)
        )

    def _cold_plan(self, request: Request) -> ReplayPlan:
        """The plan of its prompt with nothing cached: made when the request was added, and again
        once the log-probabilities of the prompt, which need every row, are complete."""
        prompt = Prompt(len(request.prompt), wants_all_logits=request.wants_prompt_logprobs)
        if request.prefix.cold is None or request.prefix.cold[0] != prompt:
            request.prefix.cold = (prompt, self.replay.plan(prompt))
        return request.prefix.cold[1]

    def adopt(self, request: Request, admission: Admission) -> None:
        """The request, which has its pages and its state id, begins behind what it takes over."""
        mine, at, layers = request.prefix, admission.plan.start, admission.layers
        if layers:  # posted, because a step in flight may still write these rings
            snapshot = self._snapshot(request, at).first(layers)
            snapshot.check(self.cache)
            self.device.post(partial(snapshot.restore, self.cache, request.state_id, at))
        request.plan, request.optimistic_computed = admission.plan, at
        mine.matched = None
        mine.adopted = mine.registered = len(admission.pages)
        mine.exact = admission.plan.exact and admission.exact
        mine.edited = False
        low = at - rows_at(self.cache, at) if layers else at
        mine.window_from = tuple(
            max(low if i < layers else at, lowest)
            for i, lowest in enumerate(admission.plan.kv_from)
        )
        mine.cut, mine.uncut = first_cut(self._cold_plan(request))
        keys = self.keys(request, request.optimistic_tokens)
        self.snapshot_policy.begin(request, keys, at if layers else 0, self._shared(keys))
        # Above its cut a hit saves nothing: the layers behind the cut need those window rows.
        usable = page_end(mine.cut, self.page_size) if mine.cut else admission.found
        self.lost_tokens += max(min(admission.found, usable) - at, 0)
        self.hits += bool(admission.pages)  # also if a replay begins at 0, below all it adopts
        self.hit_tokens += at
        if mine.cached_tokens is None:
            mine.cached_tokens = at

    def _shared(self, keys: list[bytes]) -> int:
        """Tokens in the leading pages that are known, also past the limit of a hit."""
        known = (self.pages.get(key) for key in keys)
        exact = self.replay.exact
        run = takewhile(lambda page: page is not None and (page.exact or not exact), known)
        return sum(self.page_size for _ in run)

    # ------------------------------------------------------------------------- what it leaves

    def capture(
        self, scheduled: Sequence[ScheduledRequest], requests: Sequence[Request]
    ) -> SnapshotCapture | None:
        """What collects the window rows at the page ends inside the prefill chunks of a step; None
        if no snapshot is to be made there. requests: those of `scheduled`, in its order."""
        wanted: dict[int, dict[int, int]] = {}
        for i, item in enumerate(scheduled):
            if not item.decode and (ends := self._ends(requests[i], item)):
                wanted[i] = ends
        return SnapshotCapture(self.cache, scheduled, requests, wanted) if wanted else None

    def _leaves(self, request: Request) -> bool:
        """Whether what it computes now may serve other requests."""
        return not self.edited and not request.prefix.edited and self.current(request)

    def _layers(self, request: Request, at: int) -> int:
        """How many of the first layers a snapshot at a page end would have; 0 if those before the
        cut are not complete. Rows that a cut prompt has behind its cut fit no other prompt: one
        that ends elsewhere is cut elsewhere."""
        mine, low = request.prefix, at - rows_at(self.cache, at)
        complete = takewhile(lambda lowest: lowest <= low, mine.window_from)
        count = sum(1 for _ in complete)
        if not mine.exact and at < len(request.prompt):
            count = min(count, mine.uncut)
        return count if count >= min(self.uncut, self.config.first_decoder_layer) else 0

    def _ends(self, request: Request, item: ScheduledRequest) -> dict[int, int]:
        """Page ends in a chunk at which a snapshot is wanted and none as good is there, with the
        number of its layers."""
        if not self.snapshots.budget or not self._leaves(request):
            return {}
        ends = page_ends(item.start, item.stop, self.page_size)
        keys = self.keys(request, item.stop)
        found = {p: self._layers(request, p) for p in ends if self.snapshot_policy.role(request, p)}
        return {p: n for p, n in found.items() if n and self._better(keys, request, p, n)}

    def _better(self, keys: list[bytes], request: Request, at: int, layers: int) -> bool:
        """Whether a snapshot of so many layers would be worth more than what is there."""
        rank = snapshot_rank(request.prefix.exact, layers)
        return improves(self.snapshots, keys[ending_page(at, self.page_size)], rank)

    def register(self, request: Request, written: int, seen: dict[int, Snapshot]) -> None:
        """Register what a committed step has completed. written: end of the positions that this step
        and those in flight write, drafts included; seen: captured snapshots by position. A request
        that failed is invalidated, and one that began before the cache was cleared registers
        nothing."""
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
        first = mine.registered * self.page_size
        for at in page_ends(first, request.num_computed, self.page_size):
            if (role := self.snapshot_policy.role(request, at)) is not None:
                snapshot = seen.get(at) or self._from_rings(request, at, written)
                self.snapshot_policy.keep(request, keys, at, role, snapshot)
        self.snapshot_policy.move_on(request)
        mine.registered = full

    def _from_rings(self, request: Request, at: int, written: int) -> Snapshot | None:
        """The window rows at a page end, while the rings still hold them; None if a snapshot as good
        is there, or the rows are overwritten."""
        mine, layers = request.prefix, self._layers(request, at)
        how = dict(computed=request.num_computed, drafts=written - request.num_computed)
        if not layers or not self._better(mine.keys, request, at, layers):
            return None
        if not held(self.cache, at, **how):
            return None
        marks = dict(layers=layers, exact=mine.exact, floor=max(request.plan.floor))
        return Snapshot.from_rings(self.cache, request.state_id, at, **marks, **how)

    def invalidate(self, request: Request) -> None:
        """Serve nothing any more that this request has registered. If its numbers were not finite,
        also nothing that it took over, and no snapshot at its page ends: they may be the cause, and
        every request that begins there would fail."""
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

    # ------------------------------------------------------------------------------- as a whole

    def forget_if_edited(self) -> None:
        """Forget everything, once, if weights were edited in place since it was computed."""
        if self.edits is not None and (now := self.edits.generation) != self.weights_generation:
            self.clear()
            self.weights_generation = now

    def clear(self) -> None:
        """Forget every page and snapshot. Running requests keep their pages and register nothing.
        An interrupt cannot leave it half done."""
        try:
            self._clear()
        except BaseException:
            self.recover()
            self.page_manager.recount()
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
        """After an interrupt anywhere: keys, pages and the bytes of snapshots agree again."""
        self.pages.recover()
        self.snapshots.recover()

    def _warn_of_no_hits(self, longest: int) -> None:
        """Warn if the policy cuts prompts and can begin at nothing that they leave."""
        hit = page_end(min(longest // 2, self.cut), self.page_size)
        if not self.cut or not hit:
            return
        states = ((hit, self.uncut),) if self.uncut else ()
        if not self.replay.plan(Prompt(longest, hit, states=states)).write_from:
            warnings.warn(
                f"prefix_cache=True with replay {self.replay!r}: a prompt that is cut leaves the "
                f"window rows of its first {self.uncut} layers only, and this policy begins "
                "neither there (Prompt.state_for) nor behind a hit without any (as "
                "Bounded(sides='both') does), so no long prompt will begin behind another",
                stacklevel=2,
            )
