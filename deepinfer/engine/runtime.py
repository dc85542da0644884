"""What one engine owns: its copies of the slots, its cache, pools, scheduler and counters.

Made at the first step and freed by close(), so that an engine costs nothing until it runs and two
engines over the same weights share nothing else.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch

from deepinfer import kernels
from deepinfer.cache.kv_cache import CacheSize, KVCache
from deepinfer.cache.pages import PageManager, Pool
from deepinfer.config import EngineConfig, ModelConfig
from deepinfer.engine.device import make_device
from deepinfer.engine.prefix.manager import Reuse, snapshot_bytes
from deepinfer.engine.prefix.snapshot_policy import tail_ends
from deepinfer.engine.scheduling import scheduler
from deepinfer.engine.scheduling.resources import Room
from deepinfer.engine.stats.device_clock import device_clock
from deepinfer.engine.stats.stats import Stats
from deepinfer.engine.weights import require
from deepinfer.kernels.registry import Ops
from deepinfer.model.context import ForwardContext, RowCheck, Tap, WindowSink
from deepinfer.model.stack import Model
from deepinfer.slots import registry
from deepinfer.slots.protocols import SLOTS, Batch, EngineInfo, Prompt, ReplayPlan
from deepinfer.slots.verifier.cost import CostCurve

DEFAULT_MODEL_LEN = 4096  # DeepInfer's default where max_model_len is not given


@dataclass(frozen=True)
class Limits:
    """The sizes an engine runs with, after defaults. Lengths in tokens."""

    model_len: int
    seqs: int
    rows: int
    page_size: int
    pages: int
    lookahead: int

    @property
    def backtracking(self) -> int:
        """How far back a ring must still hold keys: one step's drafts and its anchor row."""
        return self.lookahead + 1

    @staticmethod
    def of(settings: EngineConfig, config: ModelConfig, max_draft: int) -> Limits:
        """Raises ValueError naming the setting, or the verifier's max_draft, that does not fit the model."""
        if not 0 <= max_draft <= config.max_draft:
            raise ValueError(
                f"the verifier's max_draft is {max_draft!r}: this model drafts 0 to {config.max_draft} tokens a step"
            )
        model_len = settings.max_model_len or min(DEFAULT_MODEL_LEN, config.max_position_embeddings)
        if model_len > config.max_position_embeddings:
            raise ValueError(
                f"max_model_len={model_len} is more than the model's {config.max_position_embeddings} positions"
            )
        page = settings.page_size or config.sliding_window
        for ratio in sorted(set(config.compress_ratios) - {0}):
            if page % ratio:
                asked = (
                    ""
                    if settings.page_size
                    else " (the sliding window, where page_size is not given)"
                )
                raise ValueError(
                    f"page_size={page}{asked} is no multiple of compress ratio {ratio}: entries would straddle pages"
                )
        seqs = settings.max_num_seqs
        per_seq = -(-(model_len + max_draft) // page)
        rows = settings.max_num_batched_tokens or max(model_len, seqs * (1 + max_draft))
        return Limits(model_len, seqs, rows, page, settings.num_pages or seqs * per_seq, max_draft)


def cache_size(settings: EngineConfig, limits: Limits, device: torch.device) -> CacheSize:
    """Packed records by default where memory is dear, float records on a CPU; always floats at
    fidelity 0, which rounds nothing. One state slot more than sequences: for teacher-forced passes."""
    packed = device.type != "cpu" if settings.packed_cache is None else settings.packed_cache
    return CacheSize(
        limits.pages,
        limits.seqs + 1,
        limits.page_size,
        limits.backtracking,
        packed and settings.fidelity >= 1,
    )


def make_cache(
    config: ModelConfig,
    settings: EngineConfig,
    slots: dict[str, Any],
    limits: Limits,
    dtype: torch.dtype,
    device: torch.device,
    on: torch.device | None = None,
) -> KVCache:
    """The cache of an engine; `on` a meta device only its sizes."""
    specs = [slots["attention"].kv_spec(config, i) for i in range(len(config.compress_ratios))]
    return KVCache(
        config, specs, cache_size(settings, limits, device), dtype=dtype, device=on or device
    )


def cache_bytes(
    config: ModelConfig,
    settings: EngineConfig,
    slots: dict[str, Any],
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, int]:
    """Bytes by component of the cache an engine would make, without taking them."""
    limits = Limits.of(settings, config, slots["verifier"].max_draft)
    cache = make_cache(config, settings, slots, limits, dtype, device, torch.device("meta"))
    if settings.prefix_cache:
        return cache.nbytes | {"snapshots": snapshot_budget(settings, limits, cache)}
    return cache.nbytes


def snapshot_budget(settings: EngineConfig, limits: Limits, cache: KVCache) -> int:
    """Most bytes of window snapshots that the prefix cache holds.

    One is window * layers records: 128 * 40 * 528 B = 2.58 MiB in the release, 192 KiB in nano
    (64 * 12 rows of 64 floats); those of a prompt that is cut are of the first layers only. The
    default, 8 for each of max_num_seqs (16) sequences, is then 330 MiB and 24 MiB. In the release a
    request keeps up to 4 of its own (repeat and tail) and up to 3 where it branches off, which many
    share. 3 are planned for spare ones: whoever differs first somewhere inside a prompt computes
    less than half of it again. With smaller pages a tail has more ends, and the default is as many
    more.
    """
    c, count = cache.config, settings.num_snapshots
    if count is None:
        count = (5 + tail_ends(c.sliding_window + c.max_draft + 1, limits.page_size)) * limits.seqs
    return count * snapshot_bytes(cache)


def start_slots(model: Model, settings: EngineConfig, slots: dict[str, Any]) -> dict[str, Any]:
    """The engine's own copies of the slot objects."""
    info = EngineInfo(
        config=model.config,
        device=model.device,
        dtype=model.dtype,
        max_num_seqs=settings.max_num_seqs,
        seed=settings.seed,
    )
    return {name: registry.start(slots[name], info) for name in SLOTS}


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
        self._told_of_little = False
        self.reuse: Reuse | None = None
        if settings.prefix_cache:
            self.reuse = Reuse(self, identity, snapshot_budget(settings, self.limits, self.cache))
            self._warn_of_no_reuse()
        self.room = Room(
            self.pages,
            self.states,
            self.stats,
            page_size=self.limits.page_size,
            max_num_seqs=self.limits.seqs,
            max_rows=self.limits.rows,
            lookahead=self.limits.lookahead,
            reuse=self.reuse,
        )
        self.scheduler = scheduler.resolve(settings.scheduler, settings.max_context).start(
            self.room
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
        needs = self.config.sliding_window + self.config.max_draft + 1
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

    def _warn_of_no_reuse(self) -> None:
        """A policy that cuts prompts and begins at nothing that they leave."""
        length, page = self.limits.model_len - 1, self.limits.page_size
        cut, layers = self.reuse.cut, self.reuse.uncut
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
        window_sink: WindowSink | None = None,
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
            window_sink=window_sink,
            row_check=row_check,
        )
