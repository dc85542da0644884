"""A model small enough for the laws, with every role of a layer."""

from __future__ import annotations

import dataclasses

import torch

from deepinfer.config import ModelConfig
from deepinfer.slots.protocols import EngineInfo

DRAFTS = 3


def small_config() -> ModelConfig:
    """Window 4; layers: window; full, reuse (ratio 2); full, reindex, reuse (ratio 1)."""
    return dataclasses.replace(
        ModelConfig.v41_flash(),
        vocab_size=32,
        hidden_size=32,
        num_hidden_layers=6,
        num_attention_heads=2,
        head_dim=32,
        qk_rope_head_dim=16,
        q_lora_rank=32,
        o_lora_rank=32,
        o_groups=1,
        max_position_embeddings=4096,
        sliding_window=4,
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        compress_ratios=(0, 2, 2, 1, 1, 1, 0),
        kv_source_layer_ids=(1, 3),
        index_source_layer_ids=(1, 3, 4),
        index_n_heads=2,
        index_head_dim=32,
        index_topk=3,
        candidate_source_layer_id=3,
        candidate_topk_blocks=2,
        candidate_block_size=2,
        engram_layer_ids=(),
        engram_num_embeddings=(),
        num_nextn_predict_layers=1,
        dspark_block_size=DRAFTS,
        dspark_target_layer_ids=(5,),
        dspark_noise_token_id=0,
        dspark_n_routed_experts=8,
        dspark_num_experts_per_tok=2,
        image_token_id=3,
        vision=None,
        quantization=None,
    )


def engine_info(config: ModelConfig) -> EngineInfo:
    """What an engine of this model would hand to `start`, on the CPU in FP64."""
    return EngineInfo(
        config=config, device=torch.device("cpu"), dtype=torch.float64, max_num_seqs=8
    )
