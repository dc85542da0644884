"""The tiny model: random weights from a seed, every mechanism of the release, made in an instant.

It knows nothing, but it is not noise either: activations, attention and routing are strong enough
that each mechanism (sinks, window, selection, candidates, clamp, biases, n-gram memory, mixing)
moves the logits far more than rounding does, and the drafter shares a bigram distribution with the model, so
that drafts are accepted sometimes and rejected sometimes.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepinfer.checkpoint import names
from deepinfer.checkpoint.memory import MemoryCheckpoint
from deepinfer.checkpoint.tiny_tokenizer import IMAGE_ID, NOISE_ID, tiny_tokenizer
from deepinfer.checkpoint.writer import write
from deepinfer.config import ModelConfig

__all__ = ["tiny_checkpoint", "tiny_config", "tiny_state", "write_tiny"]

_TEXT: dict[str, Any] = {
    "model_type": "deepseek_v41_text",
    "vocab_size": 1024,
    "hidden_size": 128,
    "num_hidden_layers": 10,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 64,
    "o_lora_rank": 32,
    "o_groups": 2,
    "hidden_act": "silu",
    "swiglu_limit": 2.0,  # the release has 10; here low enough that the clamp acts
    "rms_norm_eps": 1e-20,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "max_position_embeddings": 1048576,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 64,
    },
    "sliding_window": 16,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 64,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    # 0, 1 window only; 2 and 4 encoder sources; 5 the decoder's; 7 and 9 reindex; then the drafter
    "compress_ratios": [0, 0, 2, 2, 2, 1, 1, 1, 1, 1, 0, 0, 0],
    "kv_source_layer_ids": [2, 4, 5],
    "index_source_layer_ids": [2, 4, 5, 7, 9],
    "index_n_heads": 4,
    "index_head_dim": 32,
    "index_topk": 16,
    "candidate_source_layer_id": 5,
    "candidate_topk_blocks": 8,
    "candidate_block_size": 8,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "engram_layer_ids": [1, 3],
    "engram_num_embeddings": [12126, 12436],
    "engram_max_ngram_size": 4,
    "engram_vocab_size": 2000,
    "engram_n_heads": 2,
    "engram_head_dim": 32,
    "engram_pad_token_id": 2,
    "engram_compressed_vocab_size": 896,
    "num_nextn_predict_layers": 3,
    "dspark_block_size": 5,
    "dspark_noise_token_id": NOISE_ID,
    "dspark_target_layer_ids": [7, 8, 9],
    "dspark_markov_rank": 16,
    "dspark_n_routed_experts": 8,
    "dspark_num_experts_per_tok": 2,
}


def tiny_config(quantised: bool = True) -> ModelConfig:
    """10 layers (5 encoder, 5 decoder), hidden 128, 16 experts, 3 draft layers, no image tower."""
    source: dict[str, Any] = {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "image_token_id": IMAGE_ID,
        "text_config": _TEXT,
    }
    if quantised:
        source["quantization_config"] = {
            "quant_method": "fp8",
            "expert_dtype": "fp4",
            "activation_scheme": "dynamic",
            "weight_block_size": [32, 32],
            "scale_fmt": "ue8m0",
        }
    return ModelConfig.from_dict(source)


# Standard deviations of what is not a matrix, and gains of the matrices: a matrix of k columns has
# standard deviation gain / sqrt(k), which multiplies the size of its input by the gain.
_STD = {
    "engram.embed.weight": 1.0,
    "embed.weight": 3.0,
    "attn_sink": 1.0,
    "gate.bias": 0.2,
    "gate.bias_vl": 0.2,
    "_base": 1.5,
    "_fn": 0.02,
}
_GAIN = {
    "wq_b.weight": 2.0,  # sharp attention: its logits get this standard deviation
    "head.weight": 1.3,
    "gate.weight": 2.0,
    "w1.weight": 2.0,  # into the clamp
    "w3.weight": 2.0,
    "w2.weight": 0.25,
    "confidence_head.proj.weight": 0.2,
}
_BIGRAM = 0.55  # size of the bigram distribution in the logits, which the drafter knows too
_SHOWN = 2.5  # how much the directions of the embedding that it reads stand out
_QUIET = 0.3  # of the output rows of tokens that should rarely be written


def tiny_state(seed: int = 0) -> tuple[ModelConfig, dict[str, Tensor], Any]:
    """(config, {official name: float32 tensor}, tokenizer). Values depend on seed and name only."""
    config = tiny_config()
    state = {w.name: _draw(seed, w.name, w.shape) for w in names.weights(config)}
    _share_bigrams(config, state, seed)
    tokenizer = tiny_tokenizer()
    quiet = [token for token in range(config.vocab_size) if _is_quiet(tokenizer, token)]
    for name in ("head.weight", "mtp.2.markov_head.head.weight"):
        state[name][quiet] *= _QUIET
    return config, state, tokenizer


def tiny_checkpoint(seed: int = 0, quantised: bool = True) -> MemoryCheckpoint:
    """The tiny model for `load`, equal to `Checkpoint.open(write_tiny(path, seed, quantised))`."""
    _, state, tokenizer = tiny_state(seed)
    return MemoryCheckpoint(tiny_config(quantised), state, tokenizer)


def write_tiny(path: str | os.PathLike, seed: int = 0, quantised: bool = True, **options) -> Path:
    """Write the tiny model as an official checkpoint folder; options as of `writer.write`."""
    config, state, tokenizer = tiny_state(seed)
    return write(path, config, state, tokenizer=tokenizer, quantised=quantised, **options)


def _draw(seed: int, name: str, shape: tuple[int, ...]) -> Tensor:
    """Random values of one weight. NumPy draws the same numbers on every machine."""
    rng = np.random.default_rng((seed, zlib.crc32(name.encode())))
    values = torch.from_numpy(rng.standard_normal(shape, dtype=np.float32))
    if name.endswith("norm.weight"):
        return 1 + 0.2 * values
    if name.endswith("_scale"):
        return 1 + 0.1 * values
    std = next((std for suffix, std in _STD.items() if name.endswith(suffix)), None)
    if std is None:
        gain = next((gain for suffix, gain in _GAIN.items() if name.endswith(suffix)), 1.0)
        std = gain * shape[-1] ** -0.5
    return std * values


def _share_bigrams(config: ModelConfig, state: dict[str, Tensor], seed: int) -> None:
    """Give model and drafter a common distribution of which token follows which.

    A few directions of the embedding, `seen` "r d", stand out and decide through `likes` "v r". The
    model applies both to its last hidden state, in which the embedding of the token still shows;
    the drafter's Markov head applies them to the embedding itself. Noise rows say nothing about
    what follows, and the drafter's own output is turned down beside its Markov head.
    """
    rank, width, vocab = config.dspark_markov_rank, config.hidden_size, config.vocab_size
    # In float64: LAPACK's and BLAS's float32 differ by machine, and so would every text of the model.
    seen = torch.linalg.qr(_draw(seed, "bigram.seen", (width, rank)).double())[0].T
    likes = _draw(seed, "bigram.likes", (vocab, rank)).double() * rank**0.5
    embed = state["embed.weight"].double()
    embed += (_SHOWN - 1) * (embed @ seen.T) @ seen
    noise = embed[config.dspark_noise_token_id]
    noise -= seen.T @ (seen @ noise)
    hidden = embed * (width**0.5 / embed.norm(dim=1, keepdim=True))  # as a norm would show it
    last = config.layer_name(config.draft_layers[-1])
    state["embed.weight"] = embed.float()
    state["head.weight"] = (state["head.weight"].double() + _BIGRAM * likes @ seen).float()
    state[f"{last}.markov_head.embed.weight"] = (hidden @ seen.T).float()
    state[f"{last}.markov_head.head.weight"] = (_BIGRAM * likes).float()
    state[f"{last}.norm.weight"] *= 0.3


def _is_quiet(tokenizer: Any, token: int) -> bool:
    """Special tokens and single bytes that are not printable ASCII."""
    text = tokenizer.decode([token], skip_special_tokens=True)
    return not text or (len(text) == 1 and not (text.isascii() and text.isprintable()))
