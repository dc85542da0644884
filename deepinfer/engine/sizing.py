"""Sizing: the limits an engine runs with, after defaults; its cache; its snapshot budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from deepinfer.cache.addressing import most_page_ends, pages_of
from deepinfer.cache.kv_cache import CacheSize, KVCache
from deepinfer.cache.snapshots import snapshot_bytes
from deepinfer.config import EngineConfig, ModelConfig

DEFAULT_MODEL_LEN = 4096  # DeepInfer's default where max_model_len is not given


@dataclass(frozen=True)
class Limits:
    """The sizes that an engine runs with, after defaults. model_len: most tokens of a sequence;
    seqs: most sequences that run at once; rows: most rows of a step, drafts included; page_size:
    tokens of a page; pages: of block KV; lookahead: most drafts of a sequence in one step."""

    model_len: int
    seqs: int
    rows: int
    page_size: int
    pages: int
    lookahead: int

    @property
    def backtracking(self) -> int:
        """Tokens that a verification of this engine may step back: the drafts of a step and one. At
        most `ModelConfig.backtracking`."""
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
        per_seq = pages_of(model_len + max_draft, page)
        rows = settings.max_num_batched_tokens or max(model_len, seqs * (1 + max_draft))
        return Limits(
            model_len=model_len,
            seqs=seqs,
            rows=rows,
            page_size=page,
            pages=settings.num_pages or seqs * per_seq,
            lookahead=max_draft,
        )


def cache_size(settings: EngineConfig, limits: Limits, device: torch.device) -> CacheSize:
    """How much the cache holds. Records are packed by default, and floats on a CPU and at fidelity 0,
    which rounds nothing. There is one state id more than sequences, for teacher-forced passes."""
    packed = device.type != "cpu" if settings.packed_cache is None else settings.packed_cache
    return CacheSize(
        num_pages=limits.pages,
        num_states=limits.seqs + 1,
        page_size=limits.page_size,
        backtracking=limits.backtracking,
        packed=packed and settings.fidelity >= 1,
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
    """The cache of an engine. on: the device of its storage if it is another one; a meta device gives
    the sizes without memory."""
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
    """Bytes by component of the cache that an engine would make; takes no memory."""
    limits = Limits.of(settings, config, slots["verifier"].max_draft)
    cache = make_cache(config, settings, slots, limits, dtype, device, torch.device("meta"))
    if settings.prefix_cache:
        return cache.nbytes | {"snapshots": snapshot_budget(settings, limits, cache)}
    return cache.nbytes


def snapshot_budget(settings: EngineConfig, limits: Limits, cache: KVCache) -> int:
    """Most bytes of window snapshots that the prefix cache holds.

    A snapshot is window * layers records: 128 * 40 * 528 B = 2.58 MiB in the release, 192 KiB in
    nano (64 * 12 rows of 64 floats); a prompt that is cut leaves only the first layers. The default
    is 8 snapshots for each of max_num_seqs (16) sequences, so 330 MiB and 24 MiB. In the release a
    request keeps up to 4 of its own (repeat and tail), and up to 3 at its branch, which many
    requests share. 3 are planned for spare ones: a prompt that differs somewhere inside computes
    less than half of it again. With smaller pages a tail has more page ends, and the default grows
    by as many.
    """
    c, count = cache.config, settings.num_snapshots
    if count is None:
        count = (5 + most_page_ends(c.ring_length, limits.page_size)) * limits.seqs
    return count * snapshot_bytes(cache)
