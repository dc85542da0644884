"""The nano model and the recipe of each training stage.

The model is DeepSeek-V4.1-Flash in small: every mechanism, no size changed that would switch one
off. What is odd has its reason beside it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from deepinfer.config import ModelConfig
from deepinfer.model import engram_hash

NOISE_ID, IMAGE_ID = 3, 4

_TEXT: dict[str, Any] = {
    "model_type": "deepseek_v41_text",
    "hidden_size": 224,  # 7 x 32: every storage block whole; 256 would not fit into 24 MB
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "qk_rope_head_dim": 32,
    "q_lora_rank": 128,
    "o_lora_rank": 64,
    "o_groups": 2,
    "hidden_act": "silu",
    "swiglu_limit": 10.0,
    "rms_norm_eps": 1e-20,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "max_position_embeddings": 1048576,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 2048,
    },
    "sliding_window": 64,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 32,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    # encoder: 0, 1 window only, sources 2, 4; decoder: source 6, reindex 8 and 10; 3 draft layers
    "compress_ratios": [0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 0, 0, 0],
    "kv_source_layer_ids": [2, 4, 6],
    "index_source_layer_ids": [2, 4, 6, 8, 10],
    "index_n_heads": 8,
    "index_head_dim": 32,
    "index_topk": 64,
    "candidate_source_layer_id": 6,
    "candidate_topk_blocks": 32,  # 256 entries: they bind from 257 tokens on
    "candidate_block_size": 8,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "engram_layer_ids": [1, 4],
    "engram_max_ngram_size": 4,
    "engram_vocab_size": 1700,  # as many as 24 MB leave room for
    "engram_n_heads": 4,
    "engram_head_dim": 32,
    "engram_pad_token_id": 2,
    "num_nextn_predict_layers": 3,
    "dspark_block_size": 5,
    "dspark_noise_token_id": NOISE_ID,
    "dspark_target_layer_ids": [9, 10, 11],
    "dspark_markov_rank": 64,
    "dspark_n_routed_experts": 16,
    "dspark_num_experts_per_tok": 6,  # the release has 3 of 128; experts this narrow want company
}

# In miniature, for tests: the same roles of layers, nothing of the same size.
_SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "head_dim": 32,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 32,
    "o_lora_rank": 32,
    "sliding_window": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "compress_ratios": [0, 2, 2, 2, 1, 1, 1, 1, 0, 0],
    "kv_source_layer_ids": [1, 2, 4],
    "index_source_layer_ids": [1, 2, 4, 6],
    "index_n_heads": 2,
    "index_topk": 8,
    "candidate_source_layer_id": 4,
    "candidate_topk_blocks": 2,
    "engram_layer_ids": [1, 2],
    "engram_vocab_size": 50,
    "engram_n_heads": 2,
    "num_nextn_predict_layers": 2,
    "dspark_target_layer_ids": [6, 7],
    "dspark_markov_rank": 16,
    "dspark_n_routed_experts": 4,
    "dspark_num_experts_per_tok": 2,
    "dspark_block_size": 3,
}


def nano_config(tokenizer: Any) -> ModelConfig:
    """The model for a `tokenizers.Tokenizer`, whose entries decide the size of the vocabulary and
    of the n-gram memory. Storage FP8 and FP4."""
    return _config(tokenizer, _TEXT)


def small_config(tokenizer: Any) -> ModelConfig:
    """Every mechanism of nano in 8 layers of width 64, for tests."""
    return _config(tokenizer, {**_TEXT, **_SMALL})


def _config(tokenizer: Any, text: dict[str, Any]) -> ModelConfig:
    classes = engram_hash.token_map(tokenizer)
    text = {
        **text,
        "vocab_size": tokenizer.get_vocab_size(with_added_tokens=True),
        "engram_compressed_vocab_size": int(classes.max()) + 1,
        "engram_num_embeddings": _table_rows(text),
    }
    return ModelConfig.from_dict(
        {
            "architectures": ["DeepseekV41ForCausalLM"],
            "model_type": "deepseek_v41",
            "dtype": "bfloat16",
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": 2,
            "image_token_id": IMAGE_ID,
            "text_config": text,
            "quantization_config": {
                "quant_method": "fp8",
                "expert_dtype": "fp4",
                "activation_scheme": "dynamic",
                "weight_block_size": [32, 32],
                "scale_fmt": "ue8m0",
            },
        }
    )


class _Sizes(dict):
    """Just the keys that the n-gram primes depend on, as attributes."""

    __getattr__ = dict.__getitem__


def _table_rows(text: dict[str, Any]) -> list[int]:
    """Rows of each Engram table: sums of primes, which the format repeats in the config."""
    return list(engram_hash.table_rows(_Sizes(text)).values())


@dataclass(frozen=True, kw_only=True)
class Backbone:
    """Recipe of the backbone stage. Rates are per step; a step has rows * length tokens."""

    steps: int = 4500
    rows: int = 4  # sequences a step
    length: int = 4096
    muon_rate: float = 4e-3
    adam_rate: float = 1.5e-3
    sink_rate: float = 1.5e-2  # sinks move too little at the rate of the others
    muon_decay: float = 0.6  # 0.1 was 1.6 % worse than 0.4 on dev text after 1,000 steps
    adam_decay: float = 0.1
    warmup: int = 200
    constant: float = 0.3  # share of the steps before the rate falls linearly to `last`
    last: float = 0.02
    dropout: float = 0.15  # on what both sub-layers give; 0.25 was worse with renamed text
    unseen: tuple[float, ...] = (0.05, 0.2, 0.4)  # bigrams, trigrams, ... passed off as new ones
    noise: float = 0.0  # share of the input tokens replaced by the noise token
    clip: float = 1.0
    # The router's biases: fast while experts nearly die, then slower, then left alone.
    bias_rates: tuple[tuple[float, float], ...] = ((0.3, 5e-3), (0.9, 1e-3), (1.0, 0.0))
    # Training starts with attention to every entry, on shorter sequences: what is never picked
    # teaches nothing, and an indexer that copies an attention to its own picks stays blind.
    dense: float = 0.4  # share of the steps
    dense_length: int = 1024
    index_weight: float = 1.0
    index_every: int = 4  # queries that the indexer's loss looks at
    index_random: int = 32  # random visible entries beside the picked ones
    # Share of the rows that is library text, until a share of the steps. More of it in the last
    # 30 % over-fitted: it was then seen twelve times.
    library_shares: tuple[tuple[float, float], ...] = ((1.0, 0.45),)
    renamed: float = 0.5  # share of the library rows whose text has other names in it
    rounded_from: float = 1.0  # share of the steps after which weights are rounded as stored
    dev_every: int = 500

    def small(self) -> Backbone:
        return replace(self, steps=12, rows=2, length=64, dense_length=32, warmup=4, dev_every=6)


@dataclass(frozen=True, kw_only=True)
class Drafter:
    """Recipe of the drafter stage, on the frozen backbone as it is stored."""

    fresh: bool = True  # False: go on with the drafter of the checkpoint
    steps: int = 4500
    rows: int = 8
    length: int = 4096
    anchors: int = 1024  # blocks a row of `length` tokens
    muon_rate: float = 5e-3
    adam_rate: float = 2e-3
    muon_decay: float = 0.1
    adam_decay: float = 0.0
    warmup: int = 50
    constant: float = 0.3
    last: float = 0.02
    dropout: float = 0.05
    clip: float = 1.0
    bias_rates: tuple[tuple[float, float], ...] = ((0.9, 1e-3), (1.0, 0.0))
    rounded_from: float = 0.6  # share of the steps after which its weights are rounded as stored
    # Of the steps on: the corpus, text that the target wrote, what it goes on with greedily.
    shares: tuple[float, ...] = (0.55, 0.3, 0.15)
    renamed: float = 0.5  # share of the corpus's library rows whose text has other names in it
    written: int = 4096  # sequences of each of the latter two
    written_length: int = 512  # with their prompts
    prompt: int = 32  # so short that most of the text is new
    temperatures: tuple[float, ...] = (0.6, 1.0)  # of the first kind, spread evenly
    dev_every: int = 500

    def small(self) -> Drafter:
        return replace(
            self,
            steps=6,
            rows=2,
            length=64,
            anchors=8,
            warmup=2,
            written=4,
            written_length=32,
            prompt=8,
            dev_every=3,
        )
