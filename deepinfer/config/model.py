"""ModelConfig: one field per official config.json key.

A frozen keyword-only dataclass: a value that the model definition does not allow is refused when
the object is made, naming the key, what was found and what is allowed. Importing this module
imports neither torch nor numpy.

Source of the keys and rules: the released config.json, the DeepSeek-V4.1 technical report and the
released reference implementation.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from deepinfer.config import checks
from deepinfer.config.base import Config
from deepinfer.config.release import released_config
from deepinfer.config.wording import printable


@dataclass(frozen=True, kw_only=True)
class RopeScaling(Config):
    """YaRN of the compressed layers: `text_config.rope_scaling`. No amplitude scaling in V4.1."""

    _section: ClassVar[str] = "text_config.rope_scaling"

    rope_type: str = "yarn"
    factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    original_max_position_embeddings: int


@dataclass(frozen=True, kw_only=True)
class RopeParameters:
    """The rotary embedding of one layer: `dim` rotated channels, base `theta`, YaRN or None."""

    dim: int
    theta: float
    scaling: RopeScaling | None


@dataclass(frozen=True, kw_only=True)
class VisionConfig(Config):
    """`vision_config`: the image tower. num_hidden_layers 0 means that there is no tower."""

    _section: ClassVar[str] = "vision_config"

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    patch_size: int
    rope_theta: float
    downsample_ratio: int
    max_image_tokens: int
    min_pixels: int
    max_wh_ratio: float | None = None


@dataclass(frozen=True, kw_only=True)
class QuantizationConfig(Config):
    """`quantization_config`: the released storage, FP8 in 32x32 tiles and FP4 experts."""

    _section: ClassVar[str] = "quantization_config"

    quant_method: str = "fp8"
    expert_dtype: str = "fp4"
    activation_scheme: str = "dynamic"
    weight_block_size: tuple[int, ...] = (32, 32)
    scale_fmt: str = "ue8m0"


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Config):
    """The architecture of one DeepSeek-V4.1 model, every official key under its official name.

    Layers are numbered 0..num_layers-1 (backbone), then the draft layers (checkpoint names
    `mtp.0`, `mtp.1`, ...), as `compress_ratios` numbers them.

    >>> config = ModelConfig.v41_flash()
    >>> config.first_decoder_layer, config.kv_source(17), config.role(24)
    (20, 14, 'reindex')
    """

    _section: ClassVar[str] = "text_config"

    # top level of config.json
    bos_token_id: int = 0
    eos_token_id: int = 1
    pad_token_id: int = 2
    image_token_id: int
    dtype: str = "bfloat16"
    # text_config: sizes
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int = 1
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    hidden_act: str = "silu"
    swiglu_limit: float
    rms_norm_eps: float
    attention_bias: bool = False
    attention_dropout: float = 0.0
    tie_word_embeddings: bool = False
    max_position_embeddings: int
    # positions and windows
    rope_theta: float
    compress_rope_theta: float
    rope_scaling: RopeScaling | None
    sliding_window: int
    # experts
    n_routed_experts: int
    n_shared_experts: int = 1
    num_experts_per_tok: int
    moe_intermediate_size: int
    scoring_func: str = "sqrtsoftplus"
    topk_method: str = "noaux_tc"
    norm_topk_prob: bool = True
    routed_scaling_factor: float
    # compressed sparse attention: one ratio per layer, draft layers last (0: window only)
    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int | None
    candidate_topk_blocks: int
    candidate_block_size: int
    # manifold-constrained hyper-connections
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    # n-gram memory (no layer ids: none)
    engram_layer_ids: tuple[int, ...] = ()
    engram_num_embeddings: tuple[int, ...] = ()  # rows of each layer's table
    engram_max_ngram_size: int = 4
    engram_vocab_size: int = 16_000_000
    engram_n_heads: int = 8
    engram_head_dim: int = 256
    engram_pad_token_id: int = 2
    engram_compressed_vocab_size: int = 1
    # block drafter (num_nextn_predict_layers 0: none)
    num_nextn_predict_layers: int = 0
    dspark_block_size: int = 5
    dspark_noise_token_id: int = 0
    dspark_target_layer_ids: tuple[int, ...] = ()
    dspark_markov_rank: int = 256
    dspark_n_routed_experts: int = 128
    dspark_num_experts_per_tok: int = 3
    # read with a default by the reference; absent from the released file
    initializer_range: float = 0.02
    use_cache: bool = True
    index_k_source_layer_ids: tuple[int, ...] | None = None
    use_fp4_sparse_kv: bool = True
    hc_shifted: bool = True
    dspark_target_attn_input: bool = True
    gate_temp: float = 1.0
    vision: VisionConfig | None = None
    quantization: QuantizationConfig | None = None
    # harmless keys of the file this config was read from, kept for `to_dict`
    extra: tuple[tuple[str, str], ...] = dataclasses.field(default=(), compare=False, repr=False)

    def __repr__(self) -> str:
        from deepinfer.display.config import model_config_text

        return model_config_text(self)

    def _repr_html_(self) -> str:
        from deepinfer.display.config import model_config_html

        return model_config_html(self)

    # -- reading and writing ---------------------------------------------------------------------

    @classmethod
    def from_dict(cls, source: Mapping[str, Any]) -> ModelConfig:
        """From the nested official config. ValueError names a missing, unknown or wrong key."""
        from deepinfer.config.io import model_from_dict

        return model_from_dict(cls, source)

    @classmethod
    def from_file(cls, path: str | os.PathLike) -> ModelConfig:
        """From a config.json, or from a folder that holds one."""
        from deepinfer.config.io import read_json

        path = Path(path)
        path = path / "config.json" if path.is_dir() else path
        try:
            return cls.from_dict(read_json(path))
        except ValueError as error:
            raise ValueError(printable(f"{path}: {error}")) from None

    @classmethod
    def v41_flash(cls) -> ModelConfig:
        """The released DeepSeek-V4.1-Flash (763 B parameters), without its checkpoint."""
        return cls.from_dict(released_config())

    def to_dict(self) -> dict[str, Any]:
        """The nested official config; equal to the one that this was read from."""
        from deepinfer.config.io import model_to_dict

        return model_to_dict(self)

    # -- layers ----------------------------------------------------------------------------------

    @property
    def num_layers(self) -> int:
        """Backbone layers."""
        return self.num_hidden_layers

    @property
    def draft_layers(self) -> range:
        """Layer ids of the draft layers, behind the backbone's."""
        return range(self.num_layers, self.num_layers + self.num_nextn_predict_layers)

    @property
    def first_decoder_layer(self) -> int:
        """First layer of ratio 1 (num_layers when there is none: all layers are encoder)."""
        ratios = self.compress_ratios[: self.num_layers]
        return ratios.index(1) if 1 in ratios else self.num_layers

    @property
    def encoder_layers(self) -> range:
        """Layers that run on every prompt token."""
        return range(self.first_decoder_layer)

    @property
    def decoder_layers(self) -> range:
        """Backbone layers from the first ratio-1 layer on."""
        return range(self.first_decoder_layer, self.num_layers)

    def layer_name(self, layer: int) -> str:
        """Prefix of a layer's tensors: `layers.3`, or `mtp.0` for the first draft layer."""
        self._check_layer(layer)
        is_draft = layer >= self.num_layers
        return f"mtp.{layer - self.num_layers}" if is_draft else f"layers.{layer}"

    def _check_layer(self, layer: int) -> None:
        if not 0 <= layer < len(self.compress_ratios):
            raise IndexError(
                f"layer {layer}: this model has layers 0..{len(self.compress_ratios) - 1} "
                f"({self.num_layers} backbone, {self.num_nextn_predict_layers} draft)"
            )

    def ratio(self, layer: int) -> int:
        """Tokens per compressed entry; 0 for a layer that has its window only."""
        self._check_layer(layer)
        return self.compress_ratios[layer]

    @property
    def kv_source_layers(self) -> tuple[int, ...]:
        """Layers that write block KV and index keys."""
        return self.kv_source_layer_ids

    @property
    def index_source_layers(self) -> tuple[int, ...]:
        """Layers that select compressed entries for themselves and those behind them."""
        return self.index_source_layer_ids

    def kv_source(self, layer: int) -> int | None:
        """The layer whose block KV `layer` reads; None for a window-only layer."""
        return checks.latest_source(self, self.kv_source_layer_ids, layer)

    def index_source(self, layer: int) -> int | None:
        """The layer whose selection `layer` uses; None for a window-only layer."""
        return checks.latest_source(self, self.index_source_layer_ids, layer)

    def uses_candidates(self, layer: int) -> bool:
        """Whether an index source scores only the candidate blocks of an earlier layer."""
        source = self.candidate_source_layer_id
        if source is None or layer <= source or layer not in self.index_source_layer_ids:
            return False
        return self.kv_source(layer) == self.kv_source(source)

    def role(self, layer: int) -> str:
        """`window`, `full` (KV and index source), `reindex` (index source), `reuse` or `draft`."""
        if layer in self.draft_layers:
            return "draft"
        if self.ratio(layer) == 0:
            return "window"
        if layer in self.kv_source_layer_ids:
            return "full"
        return "reindex" if layer in self.index_source_layer_ids else "reuse"

    @property
    def roles(self) -> tuple[str, ...]:
        """The role of every layer, draft layers last."""
        return tuple(self.role(layer) for layer in range(len(self.compress_ratios)))

    def rope(self, layer: int) -> RopeParameters:
        """Rotary parameters: compressed layers use the long-range theta and YaRN."""
        compressed = self.ratio(layer) > 0
        return RopeParameters(
            dim=self.qk_rope_head_dim,
            theta=self.compress_rope_theta if compressed else self.rope_theta,
            scaling=self.rope_scaling if compressed else None,
        )

    def num_experts(self, layer: int) -> int:
        """Routed experts of a layer."""
        draft = layer in self.draft_layers
        return self.dspark_n_routed_experts if draft else self.n_routed_experts

    def top_k(self, layer: int) -> int:
        """Routed experts chosen per token in a layer."""
        draft = layer in self.draft_layers
        return self.dspark_num_experts_per_tok if draft else self.num_experts_per_tok

    # -- sizes that follow -----------------------------------------------------------------------

    @property
    def has_vision(self) -> bool:
        """Whether there is an image tower."""
        return self.vision is not None and self.vision.num_hidden_layers > 0

    @property
    def max_draft(self) -> int:
        """Most tokens drafted for one step; 0 without a drafter."""
        return self.dspark_block_size if self.num_nextn_predict_layers else 0

    @property
    def backtracking(self) -> int:
        """Tokens that a verification may step back, at most: the drafts of a step and one."""
        return self.max_draft + 1

    @property
    def ring_length(self) -> int:
        """Records of a window ring: the window and the backtracking. So many tokens at the end of a
        sequence decoding may look back to."""
        return self.sliding_window + self.backtracking

    @property
    def engram_columns(self) -> int:
        """Table rows read per token and Engram layer: n-gram sizes 2..max times heads."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads
