"""Small models of many layouts, and what the laws about them need: ids, garbage in a cache."""

from __future__ import annotations

import dataclasses
import functools
import zlib

import torch
from torch import Tensor

from deepinfer.checkpoint import names
from deepinfer.checkpoint.memory import MemoryCheckpoint
from deepinfer.checkpoint.tiny import tiny_config
from deepinfer.checkpoint.tiny_tokenizer import tiny_tokenizer
from deepinfer.config import EngineConfig, ModelConfig
from deepinfer.engine import weights
from deepinfer.engine.engine import Engine
from deepinfer.model.engram_hash import table_rows

WINDOW = 16
DRAFTS = 5
RING = WINDOW + 1 + DRAFTS  # window and backtracking

# layer ratios (the drafter's last), KV sources, index sources, candidate source
LAYOUTS: dict[str, tuple] = {
    "2 and 1": ((0, 2, 1, 1, 0, 0), (1, 2), (1, 2, 3), 2),
    "all 1": ((1, 1, 1, 0, 1, 0), (0,), (0, 2), None),
    "all 2": ((2, 2, 0, 2, 2, 0), (0, 3), (0, 3), 0),
    "4 and 2 and 1": ((4, 4, 2, 2, 1, 0), (0, 2, 4), (0, 1, 2, 4), 2),
    "windows only": ((0, 0, 0, 0, 0, 0), (), (), None),
}
ONE = {
    "one layer": ((1, 0), (0,), (0,), None),  # the cheapest step, where numbers do not matter
    "two layers": ((2, 1, 0), (0, 1), (0, 1), None),  # where window rows of the past do matter
}


def small_config(layout: str = "2 and 1", vocab: int | None = None, **changes) -> ModelConfig:
    """A few layers and one draft layer. vocab: its size, without n-gram memory and tokenizer."""
    ratios, sources, index, candidates = {**LAYOUTS, **ONE}[layout]
    layers = len(ratios) - 1
    config = dataclasses.replace(
        tiny_config(quantised=False),
        hidden_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        head_dim=32,
        q_lora_rank=32,
        o_lora_rank=16,
        o_groups=2,
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        compress_ratios=(0,) * len(ratios),
        kv_source_layer_ids=(),
        index_source_layer_ids=(),
        index_topk=8,
        candidate_source_layer_id=None,
        candidate_topk_blocks=4,
        candidate_block_size=4,
        engram_layer_ids=(0,),
        engram_num_embeddings=(1,),
        engram_vocab_size=300,
        num_nextn_predict_layers=1,
        dspark_target_layer_ids=tuple(sorted({layers // 2, layers - 1})),
        dspark_n_routed_experts=4,
        sliding_window=WINDOW,
        dspark_block_size=DRAFTS,
    )
    if vocab is None:
        changes = {"engram_num_embeddings": tuple(table_rows(config).values()), **changes}
    else:
        special = dict(image_token_id=vocab - 1, dspark_noise_token_id=vocab - 2)
        changes = {
            **special,
            "vocab_size": vocab,
            "engram_layer_ids": (),
            "engram_num_embeddings": (),
            **changes,
        }
    config = dataclasses.replace(config, **changes)
    # Set past the checks: the released model has ratios 1 and 2, the code is held to any.
    for name, value in zip(
        (
            "compress_ratios",
            "kv_source_layer_ids",
            "index_source_layer_ids",
            "candidate_source_layer_id",
        ),
        (ratios, sources, index, candidates),
    ):
        object.__setattr__(config, name, value)
    return config


def draw(seed: int, name: str, shape: tuple[int, ...]) -> Tensor:
    """Random values of a weight, of a size at which every mechanism matters."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + zlib.crc32(name.encode()))
    x = torch.randn(shape, generator=generator)
    if name.endswith("norm.weight"):
        return 1 + 0.2 * x
    if name.endswith("scale"):
        return 1 + 0.1 * x
    if len(shape) == 1 or name.endswith("base"):
        return x
    if name.endswith("embed.weight"):
        return 2 * x
    return (1.5 if name.endswith(("wq_b.weight", "gate.weight")) else 1.0) * x * shape[-1] ** -0.5


@functools.cache
def base_engine(
    layout: str, vocab: int | None, seed: int, dtype: str, window: int = WINDOW
) -> Engine:
    """An engine over a small model that is made once a process."""
    config = small_config(layout, vocab, sliding_window=window)
    state = {w.name: draw(seed, w.name, w.shape) for w in names.weights(config)}
    checkpoint = MemoryCheckpoint(config, state, tiny_tokenizer() if vocab is None else None)
    loaded = weights.from_checkpoint(
        checkpoint,
        dtype=getattr(torch, dtype),
        device=torch.device("cpu"),
        source=f"small({layout})",
    )
    slots = dict(
        attention="csa2",
        experts="local",
        verifier="off",
        replay="exact",
        sampler="philox",
        grammar="none",
    )
    return Engine(loaded, EngineConfig(max_model_len=512, max_num_seqs=4), slots)


def small_engine(
    layout: str = "2 and 1",
    *,
    vocab=None,
    weights_seed=0,
    dtype="float64",
    window=WINDOW,
    **changes,
) -> Engine:
    """An engine of its own over shared small weights; changes as of `Engine.with_`."""
    return base_engine(layout, vocab, weights_seed, dtype, window).with_(**changes)


def stream(
    n: int, seed: int, low: int = 8, high: int = 900, period: int | None = None
) -> list[int]:
    """n ids; with a period they repeat, which makes index scores tie."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(low, high, (period or n,), generator=generator).tolist()
    return (ids * (n // len(ids) + 1))[:n]


def poison(cache) -> None:
    """Fill a cache with NaN (packed: with bytes that decode to huge or NaN values): what an earlier
    request may have left. Record 0 stays zero, as it must."""
    for store in cache.stores().values():
        store[1:] = 255 if store.dtype == torch.uint8 else torch.nan
