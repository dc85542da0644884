"""Runtime: what one engine owns. Its copies of the slots, cache, pools, scheduler and counters.

It is made when the engine first runs and freed by close(). So an engine that never runs takes no
cache, and two engines over the same weights share only the weights.
"""

from __future__ import annotations

from typing import Any

from deepinfer import kernels
from deepinfer.cache.pages import PageManager, Pool
from deepinfer.config import EngineConfig
from deepinfer.engine.device import make_device
from deepinfer.engine.prefix.manager import PrefixCacheManager
from deepinfer.engine.replay import ReplayPlanner
from deepinfer.engine.scheduling import scheduler
from deepinfer.engine.scheduling.resources import Resources
from deepinfer.engine.sizing import Limits, cache_bytes, make_cache, snapshot_budget
from deepinfer.engine.stats.device_clock import device_clock
from deepinfer.engine.stats.stats import Stats
from deepinfer.engine.weight_edits import WeightEdits
from deepinfer.engine.weights import require
from deepinfer.kernels.registry import Ops
from deepinfer.model.context import ForwardContext, OnWindowWrite, RowCheck, Tap
from deepinfer.model.stack import Model
from deepinfer.slots.protocols import Batch, Prompt, ReplayPlan
from deepinfer.slots.verifier.cost import CostCurve


class Runtime:
    """Everything of an engine that is not weights or settings. slots: started copies; edits: of the
    weights. Raises MemoryError, before memory is taken, if the cache does not fit the device."""

    def __init__(
        self,
        model: Model,
        settings: EngineConfig,
        slots: dict[str, Any],
        limits: Limits,
        edits: WeightEdits,
    ) -> None:
        self.model, self.settings = model, settings
        self.config = model.config
        self.slots, self.limits, self.edits = slots, limits, edits
        self._ops = kernels.bind(settings.kernels, settings.batch_invariant)
        self.stats = Stats(clock=device_clock(model.device))
        self.device = make_device(model.device, self.stats.clock, settings.overlap)
        require(
            "the cache",
            cache_bytes(self.config, settings, self.slots, model.dtype, model.device),
            model.device,
            "Lower max_num_seqs, max_model_len or num_pages.",
        )
        self.pages = PageManager(self.limits.pages)
        self.states = Pool("state ids", self.limits.seqs + 1)  # one for teacher-forced passes
        self.cache = make_cache(
            self.config, settings, self.slots, self.limits, model.dtype, model.device
        )
        self.planner = ReplayPlanner(self.replay, self.config)
        self.prefix_cache: PrefixCacheManager | None = None
        if settings.prefix_cache:
            self.prefix_cache = PrefixCacheManager(
                config=self.config,
                limits=self.limits,
                pages=self.pages,
                cache=self.cache,
                replay=self.planner,
                device=self.device,
                edits=edits,
                model=edits.fingerprint,
                snapshot_budget=snapshot_budget(settings, self.limits, self.cache),
            )
        self.resources = Resources(
            self.pages,
            self.states,
            self.stats,
            page_size=self.limits.page_size,
            max_num_seqs=self.limits.seqs,
            max_rows=self.limits.rows,
            lookahead=self.limits.lookahead,
            prefix_cache=self.prefix_cache,
        )
        self.scheduler = scheduler.resolve(settings.scheduler, settings.max_context).start(
            self.resources
        )

    @property
    def attention(self):
        return self.slots["attention"]

    @property
    def verifier(self):
        return self.slots["verifier"]

    @property
    def cost(self) -> CostCurve:
        """Cost of a step by its number of rows, for the verifier's budget."""
        return getattr(self.verifier, "cost", None) or CostCurve()

    @property
    def sampler(self):
        return self.slots["sampler"]

    @property
    def replay(self):
        return self.slots["replay"]

    def replay_plan(self, prompt: Prompt) -> ReplayPlan:
        """The replay slot's plan for a prompt, checked; errors as of `ReplayPlanner.plan`."""
        return self.planner.plan(prompt)

    @property
    def ops(self) -> Ops:
        """The engine's kernels, under the `kernels.use` blocks that are open now."""
        self._ops = self._ops.current()
        return self._ops

    def context(
        self,
        batch: Batch,
        tap: Tap | None = None,
        on_window_write: OnWindowWrite | None = None,
        row_check: RowCheck | None = None,
    ) -> ForwardContext:
        """What one forward over `batch` carries besides rows; see `ForwardContext`."""
        return ForwardContext(
            config=self.config,
            batch=batch,
            ops=self.ops,
            attention=self.attention,
            experts=self.slots["experts"],
            cache=self.cache,
            fidelity=self.settings.fidelity,
            drafter=self.verifier.max_draft > 0,
            tap=tap,
            on_window_write=on_window_write,
            row_check=row_check,
        )
