"""What a config may hold: types and rules, each refused with key, value found and what is allowed.

Source of the model's rules: the released loader's own checks and the layer-sharing rules of the
DeepSeek-V4.1 reference implementation.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from typing import Any

from deepinfer.config.release import released_config
from deepinfer.config.wording import shown

__all__ = ["RULES", "check_types", "latest_source"]

TIMES = 64  # a count may be so many times that of the release
MOST_EXPERTS = 200_000  # the release has 15,744
MOST_PRIMES = 4_608  # the release has 48; 96 times, found in a fraction of a second

_TOP = {"bos_token_id", "eos_token_id", "pad_token_id", "image_token_id", "dtype"}
_NESTED = {"RopeScaling", "VisionConfig", "QuantizationConfig"}
_WORDS = {
    "int": "an integer of at most 64 bits",
    "float": "a finite number",
    "bool": "true or false",
    "str": "a string",
    "tuple[int, ...]": "a list of integers of at most 64 bits",
    "Mapping[str, str]": "a mapping of op names to implementation names",
}


def _refuse(config: Any, key: str, allowed: str) -> None:
    section = getattr(config, "_section", "")
    top = section == "text_config" and key in _TOP
    name = key if top else f"{section}.{key}"
    raise ValueError(f"{name}: found {shown(getattr(config, key))}; allowed: {allowed}")


def _is_int(value: Any) -> bool:
    number = isinstance(value, int) and not isinstance(value, bool)
    return number and -(2**63) <= value < 2**64  # what a tensor or a seed can hold


def _is_float(value: Any) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and abs(value) <= sys.float_info.max  # exact for integers; False for NaN


_TYPES: dict[str, Callable[[Any], bool]] = {
    "int": _is_int,
    "float": _is_float,
    "bool": lambda value: isinstance(value, bool),
    "str": lambda value: isinstance(value, str),
    "tuple[int, ...]": lambda value: isinstance(value, tuple) and all(map(_is_int, value)),
    "Mapping[str, str]": lambda value: (
        isinstance(value, Mapping)
        and all(isinstance(part, str) for pair in value.items() for part in pair)
    ),
}


def check_types(config: Any, section: str) -> None:
    """Check each field against its annotation; lists become tuples, numbers become floats."""
    for field in dataclasses.fields(config):
        kind = field.type.removesuffix(" | None")
        value = getattr(config, field.name)
        if field.name == "extra" or kind == "Any" or (value is None and kind != field.type):
            continue
        if kind in _NESTED:
            if type(value).__name__ != kind:
                _refuse(config, field.name, f"a {kind} or None")
            continue
        if isinstance(value, list) and kind == "tuple[int, ...]":
            value = tuple(value)
        if not _TYPES[kind](value):
            none = " or null" if kind != field.type else ""
            _refuse(config, field.name, _WORDS[kind] + none)
        checked: Any = value
        object.__setattr__(config, field.name, float(checked) if kind == "float" else checked)


def latest_source(config: Any, sources: tuple[int, ...], layer: int) -> int | None:
    """The last source at or before a layer; None for a window-only layer or when there is none."""
    if config.ratio(layer) == 0:
        return None
    return max((source for source in sources if source <= layer), default=None)


# -- small checks -------------------------------------------------------------------------------


def _at_least(config: Any, minimum: int, *keys: str) -> None:
    for key in keys:
        value = getattr(config, key)
        if value is not None and value < minimum:
            _refuse(config, key, f"{minimum} or more")


def _positive(config: Any, *keys: str) -> None:
    for key in keys:
        if not getattr(config, key) > 0:
            _refuse(config, key, "a number > 0")


def _exactly(config: Any, **allowed: Any) -> None:
    for key, value in allowed.items():
        if getattr(config, key) != value:
            _refuse(config, key, f"{value!r} (nothing else is defined for this model)")


def _layer_list(config: Any, key: str, stop: int) -> None:
    value = getattr(config, key)
    ascending = all(a < b for a, b in zip(value, value[1:]))
    if not ascending or any(not 0 <= layer < stop for layer in value):
        _refuse(config, key, f"ascending layer ids without repeats, each in 0..{stop - 1}")


# -- the model ----------------------------------------------------------------------------------


def check_model(config: Any) -> None:
    """Every rule of ModelConfig, in the order of the config's sections."""
    for rule in (
        _bounds,
        _sizes,
        _token_ids,
        _experts,
        _ratios,
        _sources,
        _candidates,
        _engram,
        _drafter,
    ):
        rule(config)


def _bounds(config: Any) -> None:
    """Every count at most 64 times the release's, so that nothing is enumerated for ever.

    Counts that multiply are bounded together: tensors of experts and primes of n-gram tables.
    """
    _at_most(config, released_config()["text_config"], "dspark_noise_token_id")
    layers, drafts = config.num_hidden_layers, config.num_nextn_predict_layers
    experts = layers * config.n_routed_experts + drafts * config.dspark_n_routed_experts
    if experts > MOST_EXPERTS:
        text = f"at most {MOST_EXPERTS:,} experts in all layers together, not {experts:,}"
        _refuse(config, "n_routed_experts", text)
    for key in ("engram_layer_ids", "compress_ratios", "kv_source_layer_ids"):
        if len(getattr(config, key)) > layers + max(drafts, 0):
            _refuse(config, key, f"at most one entry for each of {layers + drafts} layers")
    primes = len(config.engram_layer_ids) * config.engram_n_heads
    primes *= max(config.engram_max_ngram_size - 1, 1)
    if primes > MOST_PRIMES:
        text = f"at most {MOST_PRIMES:,} hash functions in all tables together, not {primes:,}"
        _refuse(config, "engram_n_heads", text)


def _at_most(config: Any, release: Mapping[str, Any], *ids: str) -> None:
    """No integer above TIMES times the release's, except token ids."""
    for key, value in release.items():
        if isinstance(value, bool) or not hasattr(config, key) or key in ids:
            continue
        if isinstance(value, int) and not key.endswith("_token_id"):
            limit = TIMES * max(value, 1)
            if (getattr(config, key) or 0) > limit:
                _refuse(config, key, f"at most {limit:,}, {TIMES} times the release's {value:,}")
    rows = getattr(config, "engram_num_embeddings", ())
    if rows and max(rows) > TIMES * max(release["engram_num_embeddings"]):
        limit = TIMES * max(release["engram_num_embeddings"])
        _refuse(config, "engram_num_embeddings", f"at most {limit:,} rows a table")


def _sizes(config: Any) -> None:
    _at_least(config, 1, "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    _at_least(config, 1, "head_dim", "q_lora_rank", "o_lora_rank", "o_groups", "index_n_heads")
    _at_least(config, 1, "index_head_dim", "index_topk", "sliding_window", "hc_mult")
    _at_least(config, 1, "hc_sinkhorn_iters", "max_position_embeddings")
    _positive(config, "swiglu_limit", "rms_norm_eps", "hc_eps", "rope_theta")
    _positive(config, "compress_rope_theta", "routed_scaling_factor")
    _exactly(config, num_key_value_heads=1, hidden_act="silu", attention_bias=False)
    _exactly(config, attention_dropout=0.0, tie_word_embeddings=False, n_shared_experts=1)
    _exactly(config, scoring_func="sqrtsoftplus", topk_method="noaux_tc", norm_topk_prob=True)
    _exactly(config, hc_shifted=True, dspark_target_attn_input=True, gate_temp=1.0)
    if config.dtype not in ("bfloat16", "float32"):
        _refuse(config, "dtype", "'bfloat16' or 'float32'")
    if config.num_attention_heads % config.o_groups:
        heads = config.num_attention_heads
        _refuse(config, "o_groups", f"a divisor of num_attention_heads = {heads}")
    rope_limit = min(config.head_dim, config.index_head_dim)
    if config.qk_rope_head_dim % 2 or not 0 < config.qk_rope_head_dim <= rope_limit:
        limit = f"an even number in 2..{rope_limit}, the smaller of head_dim and index_head_dim"
        _refuse(config, "qk_rope_head_dim", limit)
    for key in ("head_dim", "index_head_dim"):
        if getattr(config, key) % 32:
            _refuse(config, key, "a multiple of 32, the block of the cache formats")


def _token_ids(config: Any) -> None:
    keys = ["bos_token_id", "eos_token_id", "pad_token_id", "image_token_id"]
    keys += ["engram_pad_token_id", "dspark_noise_token_id"]
    for key in keys:
        if not 0 <= getattr(config, key) < config.vocab_size:
            _refuse(config, key, f"a token id in 0..{config.vocab_size - 1}")


def _experts(config: Any) -> None:
    pairs = [("num_experts_per_tok", "n_routed_experts")]
    pairs += [("dspark_num_experts_per_tok", "dspark_n_routed_experts")]
    _at_least(config, 1, "moe_intermediate_size", *(key for _, key in pairs))
    for chosen, experts in pairs:
        count = getattr(config, experts)
        if not 1 <= getattr(config, chosen) <= count:
            _refuse(config, chosen, f"1..{count}, at most {experts}")
    if config.quantization is not None:
        for key in ("hidden_size", "moe_intermediate_size"):
            if getattr(config, key) % 32:
                _refuse(config, key, "a multiple of 32, the block of the FP4 expert scales")


def _ratios(config: Any) -> None:
    _at_least(config, 0, "num_nextn_predict_layers")
    layers, drafts = config.num_hidden_layers, config.num_nextn_predict_layers
    ratios = config.compress_ratios
    if len(ratios) != layers + drafts:
        _refuse(
            config,
            "compress_ratios",
            f"{layers + drafts} entries (num_hidden_layers {layers} + num_nextn_predict_layers "
            f"{drafts}); found {len(ratios)}",
        )
    if any(ratio not in (0, 1, 2) for ratio in ratios):
        _refuse(config, "compress_ratios", "0 (window only), 1 or 2 for each layer")
    if any(ratios[layers:]):
        text = f"0 for the last {drafts} entries: draft layers have their window only"
        _refuse(config, "compress_ratios", text)


def _sources(config: Any) -> None:
    layers, ratios = config.num_hidden_layers, config.compress_ratios
    for key in ("kv_source_layer_ids", "index_source_layer_ids"):
        _layer_list(config, key, layers)
        for layer in getattr(config, key):
            if ratios[layer] == 0:
                _refuse(config, key, f"compressed layers only; layer {layer} has ratio 0")
    extra = set(config.kv_source_layer_ids) - set(config.index_source_layer_ids)
    if extra:
        _refuse(
            config,
            "index_source_layer_ids",
            f"a list that holds every KV source; {sorted(extra)} of kv_source_layer_ids missing",
        )
    if config.index_k_source_layer_ids not in (None, config.kv_source_layer_ids):
        text = f"absent, or equal to kv_source_layer_ids {list(config.kv_source_layer_ids)}"
        _refuse(config, "index_k_source_layer_ids", text)
    for layer in range(layers):
        source = config.kv_source(layer)
        if ratios[layer] and (source is None or ratios[source] != ratios[layer]):
            found = "none" if source is None else f"layer {source} of ratio {ratios[source]}"
            _refuse(
                config,
                "kv_source_layer_ids",
                f"for each compressed layer a source of its ratio at or before it; layer {layer} "
                f"of ratio {ratios[layer]} has {found}",
            )


def _candidates(config: Any) -> None:
    _at_least(config, 1, "candidate_topk_blocks", "candidate_block_size")
    source = config.candidate_source_layer_id
    if source is None:
        return
    if source not in config.kv_source_layer_ids:
        allowed = f"one of kv_source_layer_ids {list(config.kv_source_layer_ids)}, or null"
        _refuse(config, "candidate_source_layer_id", allowed)
    if config.candidate_topk_blocks * config.candidate_block_size < config.index_topk:
        _refuse(
            config,
            "candidate_topk_blocks",
            f"enough blocks of candidate_block_size {config.candidate_block_size} to hold "
            f"index_topk {config.index_topk} entries",
        )


def _engram(config: Any) -> None:
    _layer_list(config, "engram_layer_ids", config.num_hidden_layers)
    if len(config.engram_num_embeddings) != len(config.engram_layer_ids):
        count = f"one table size for each of engram_layer_ids {list(config.engram_layer_ids)}"
        _refuse(config, "engram_num_embeddings", count)
    _at_least(config, 2, "engram_max_ngram_size")
    _at_least(config, 1, "engram_n_heads", "engram_head_dim", "engram_vocab_size")
    _at_least(config, 1, "engram_compressed_vocab_size")
    if config.engram_layer_ids and config.engram_compressed_vocab_size > config.vocab_size:
        limit = f"at most vocab_size {config.vocab_size}"
        _refuse(config, "engram_compressed_vocab_size", limit)
    if config.quantization is not None and config.engram_head_dim % 32:
        _refuse(config, "engram_head_dim", "a multiple of 32, the block of the table's scales")


def _drafter(config: Any) -> None:
    _layer_list(config, "dspark_target_layer_ids", config.num_hidden_layers)
    _at_least(config, 1, "dspark_block_size", "dspark_markov_rank")
    if config.num_nextn_predict_layers and not config.dspark_target_layer_ids:
        text = "at least one layer id when num_nextn_predict_layers is above 0"
        _refuse(config, "dspark_target_layer_ids", text)


# -- the other configs --------------------------------------------------------------------------


def _check_scaling(config: Any) -> None:
    _at_most(config, released_config()["text_config"]["rope_scaling"])
    _exactly(config, rope_type="yarn")
    _at_least(config, 1, "original_max_position_embeddings", "factor")
    _positive(config, "beta_fast", "beta_slow")


def _check_vision(config: Any) -> None:
    _at_most(config, released_config()["vision_config"])
    _at_least(config, 0, "num_hidden_layers")
    _at_least(config, 1, "hidden_size", "num_attention_heads", "intermediate_size", "patch_size")
    _at_least(config, 1, "downsample_ratio", "max_image_tokens", "min_pixels")
    _positive(config, "rope_theta")
    if config.max_wh_ratio is not None:
        _positive(config, "max_wh_ratio")
    if config.hidden_size % (4 * config.num_attention_heads):
        _refuse(
            config,
            "hidden_size",
            f"num_attention_heads {config.num_attention_heads} times a head size that is a "
            "multiple of 4 (two-dimensional rotary embedding)",
        )


def _check_quantization(config: Any) -> None:
    _exactly(config, quant_method="fp8", expert_dtype="fp4", activation_scheme="dynamic")
    _exactly(config, weight_block_size=(32, 32), scale_fmt="ue8m0")


def _check_engine(config: Any) -> None:
    if config.dtype not in (None, "float32", "bfloat16", "float64"):
        _refuse(config, "dtype", "None, 'float32', 'bfloat16' or 'float64'")
    if config.fidelity not in (0, 1, 2):
        text = "0 (no rounding), 1 (the model's cache roundings) or 2 (activations as well)"
        _refuse(config, "fidelity", text)
    _at_least(config, 1, "max_model_len", "max_num_seqs", "max_num_batched_tokens", "max_context")
    _at_least(config, 1, "page_size", "num_pages")
    _at_least(config, 0, "num_snapshots")
    if config.num_snapshots is not None and not config.prefix_cache:
        _refuse(
            config, "num_snapshots", "left out without prefix_cache=True, whose places it counts"
        )
    if not 0 <= config.seed < 2**64:
        _refuse(config, "seed", "an integer in 0..2**64-1")


RULES: dict[str, Callable[[Any], None]] = {
    "ModelConfig": check_model,
    "RopeScaling": _check_scaling,
    "VisionConfig": _check_vision,
    "QuantizationConfig": _check_quantization,
    "EngineConfig": _check_engine,
}
