"""What one engine owns: its copies of the slots, its cache, pools, scheduler and counters.

Made at the first step and freed by close(), so that an engine costs nothing until it runs and two
engines over the same weights share nothing else.
"""

from __future__ import annotations

import warnings
from typing import Any

from deepinfer import kernels
from deepinfer.cache.pages import PageManager, Pool
from deepinfer.config import EngineConfig
from deepinfer.engine.device import make_device, warn_of_threads
from deepinfer.engine.prefix.manager import PrefixCacheManager
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.engine.scheduling import scheduler
from deepinfer.engine.scheduling.resources import Resources
from deepinfer.engine.sizing import Limits, cache_bytes, make_cache, snapshot_budget
from deepinfer.engine.stats.device_clock import device_clock
from deepinfer.engine.stats.stats import Stats
from deepinfer.engine.weights import require
from deepinfer.kernels.registry import Ops
from deepinfer.model.context import ForwardContext, OnWindowWrite, RowCheck, Tap
from deepinfer.model.stack import Model
from deepinfer.slots.protocols import Batch, Prompt, ReplayPlan
from deepinfer.slots.verifier.cost import CostCurve


class Runtime:
    """Everything of an engine that is not weights or settings. identity: of the weights."""

    def __init__(
        self,
        model: Model,
        settings: EngineConfig,
        slots: dict[str, Any],
        limits: Limits,
        identity: str = "",
    ) -> None:
        self.model, self.settings = model, settings
        self.config = model.config
        self.slots, self.limits = slots, limits
        self._ops = kernels.bind(settings.kernels, settings.batch_invariant)
        warn_of_threads(model.device)
        self.stats = Stats(clock=device_clock(model.device))
        self.device = make_device(model.device, self.stats.clock, settings.overlap)
        require(
            "the cache",
            cache_bytes(self.config, settings, self.slots, model.dtype, model.device),
            model.device,
            "Lower max_num_seqs, max_model_len or num_pages.",
        )
        self.pages = PageManager(self.limits.pages)
        self.states = Pool("state slots", self.limits.seqs + 1)  # one for teacher-forced passes
        self.cache = make_cache(
            self.config, settings, self.slots, self.limits, model.dtype, model.device
        )
        self._told_of_little = self._told_of_cut = False
        self.prefix_cache: PrefixCacheManager | None = None
        if settings.prefix_cache:
            self.prefix_cache = PrefixCacheManager(
                self, identity, snapshot_budget(settings, self.limits, self.cache)
            )
            self._warn_of_no_reuse()
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
        """What a step of so many rows costs, for the verifier's budget."""
        return getattr(self.verifier, "cost", None) or CostCurve()

    @property
    def sampler(self):
        return self.slots["sampler"]

    @property
    def replay(self):
        return self.slots["replay"]

    def replay_plan(self, prompt: Prompt) -> ReplayPlan:
        """The replay slot's plan for a prompt. Raises ValueError where it breaks a law, TypeError where
        it is none."""
        c = self.config
        plan = self.replay.plan(prompt, c)
        if not isinstance(plan, ReplayPlan):
            raise TypeError(f"replay {self.replay!r}.plan returned {plan!r}: want a ReplayPlan")
        if self.replay.exact and not plan.exact:
            raise ValueError(
                f"replay {self.replay!r} promises to be exact and made a plan that is not "
                f"({plan.why}): set exact = False in its class"
            )
        try:
            plan.validate(prompt, c.num_hidden_layers, c.kv_source_layer_ids)
        except ValueError as error:
            raise ValueError(f"replay {self.replay!r}, {prompt}: {error}") from None
        self._warn_of_little(prompt, plan)
        return plan

    def _warn_of_little(self, prompt: Prompt, plan: ReplayPlan) -> None:
        """Once, where a plan leaves less than decoding may look back to: `Bounded` refuses that
        when it starts, a policy of somebody's own may not."""
        needs = self.config.ring_length
        left = prompt.length - max(*plan.floor, plan.rows_from[-1])
        if self._told_of_little or left >= min(needs, prompt.length):
            return
        self._told_of_little = True
        warnings.warn(
            f"replay {self.replay!r} leaves {left} rows at the end of a prompt of {prompt.length}; "
            f"decoding looks back up to {needs} (the window and backtracking of this model), so the "
            "windows behind the prompt are short: di.check(policy, config=eng.config) shows where",
            stacklevel=2,
        )

    def warn_of_cut(self, max_tokens: int) -> None:
        """Once, if a request asks for more tokens than fit behind any prompt: it gets what fits."""
        limit = self.limits.model_len
        if self._told_of_cut or max_tokens < limit or max_tokens == SamplingParams.max_tokens:
            return
        self._told_of_cut = True
        warnings.warn(
            f"max_tokens={max_tokens} is more than max_model_len={limit} leaves behind any prompt: "
            "the request ends there with finish_reason 'length'",
            stacklevel=2,
        )

    def _warn_of_no_reuse(self) -> None:
        """A policy that cuts prompts and begins at nothing that they leave."""
        length, page = self.limits.model_len - 1, self.limits.page_size
        cut, layers = self.prefix_cache.cut, self.prefix_cache.uncut
        hit = min(length // 2, cut) // page * page
        behind = Prompt(length, hit, 0, states=((hit, layers),) if hit and layers else ())
        if cut and hit and not self.replay_plan(behind).write_from:
            warnings.warn(
                f"prefix_cache=True with replay {self.replay!r}: a prompt that is cut leaves the "
                f"window rows of its first {layers} layers only, and this policy begins neither "
                "there (Prompt.state_for) nor behind a hit without any (as Bounded(sides='both') "
                "does), so no long prompt will begin behind another",
                stacklevel=2,
            )

    @property
    def ops(self) -> Ops:
        """The engine's kernels under the `kernels.use` blocks in force now."""
        self._ops = self._ops.current()
        return self._ops

    def context(
        self,
        batch: Batch,
        tap: Tap | None = None,
        on_window_write: OnWindowWrite | None = None,
        row_check: RowCheck | None = None,
    ) -> ForwardContext:
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
