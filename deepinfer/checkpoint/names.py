"""The official tensors of any ModelConfig: name, shape, dtype, scales and component.

`weights(config)` lists what the model reads (one entry per weight, its logical shape);
`tensors(config)` lists what lies on disk (packed data and scale tensors). Both are in the order in
which the writer stores them. Source: the released checkpoint's names and storage; for the released
config this gives its 96,085 tensors and 510,286,023,000 payload bytes.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from itertools import count, takewhile

from deepinfer.config import ModelConfig, VisionConfig

__all__ = [
    "BLOCK",
    "DTYPE_BYTES",
    "Stored",
    "Weight",
    "expert_names",
    "is_unread",
    "scale_name",
    "stacked_name",
    "tensors",
    "weights",
]

BLOCK = 32  # rows and columns that share one scale in FP8 tiles, columns in FP4 and table rows

# safetensors dtype codes -> bytes per element
DTYPE_BYTES = {"F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "BF16": 2, "F32": 4}

_UNREAD = ("vision.", "aligner.", "image_start", "image_end", "image_newline")


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of a checkpoint file; `weight` is the name of the weight that it belongs to."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    weight: str

    @property
    def nbytes(self) -> int:
        """Payload bytes."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Weight:
    """One weight of the model.

    storage: `fp8` (32x32 tiles), `table` (FP8, scales per row), `fp4`, `bf16` or `f32`.
    component: embedding, norms, mhc, attention, router, shared_experts, experts, engram, drafter,
    vision. placement: `experts` (divided over expert-parallel ranks), `table` (n-gram table, may be
    sharded) or `replicated`. layer: its layer id (draft layers behind the backbone's) or None.
    """

    name: str
    shape: tuple[int, ...]
    storage: str
    component: str
    placement: str = "replicated"
    layer: int | None = None

    @property
    def parameters(self) -> int:
        """Elements, scales not counted."""
        return math.prod(self.shape)

    @property
    def wide(self) -> bool:
        """Whether it stays float32 (float64 in a float64 model) whatever the model's dtype."""
        return self.storage == "f32"

    def stored(self) -> tuple[Stored, ...]:
        """The tensors that hold it: one, or data and scales."""
        name, shape = self.name, self.shape
        if self.storage in ("bf16", "f32"):
            code = "BF16" if self.storage == "bf16" else "F32"
            return (Stored(name, shape, code, name),)
        rows, columns = shape
        blocks = -(-columns // BLOCK)
        if self.storage == "fp8":
            scale = (-(-rows // BLOCK), blocks)
        else:
            scale = (rows, blocks)
        data = (rows, columns // 2) if self.storage == "fp4" else shape
        code = "I8" if self.storage == "fp4" else "F8_E4M3"
        return (
            Stored(name, data, code, name),
            Stored(scale_name(name), scale, "F8_E8M0", name),
        )


def scale_name(name: str) -> str:
    """`layers.0.attn.wkv.weight` -> `layers.0.attn.wkv.scale`."""
    return name.removesuffix(".weight") + ".scale"


def stacked_name(name: str) -> tuple[str, int] | None:
    """The module parameter that stacks a routed expert's weight, and the expert's place in it.

    >>> stacked_name("layers.0.ffn.experts.7.w1.weight")
    ('layers.0.ffn.experts.w1', 7)
    """
    prefix, found, rest = name.partition(".experts.")
    if not found:
        return None
    expert, matrix, _ = rest.split(".")
    return f"{prefix}.experts.{matrix}", int(expert)


def expert_names(
    known: Container[str], prefix: str, matrix: str, experts: Iterable[int] | None = None
) -> list[str]:
    """Names of the routed experts' matrices below `prefix` (`layers.3.ffn.experts`), all of those
    in `known` or the ones asked for. KeyError when there are none."""
    pattern = f"{prefix}.{{}}.{matrix}.weight"
    if experts is None:
        experts = takewhile(lambda expert: pattern.format(expert) in known, count())
    found = [pattern.format(expert) for expert in experts]
    if not found or any(name not in known for name in found):
        raise KeyError(f"{pattern.format('*')}: the checkpoint has no such experts")
    return found


def is_unread(name: str) -> bool:
    """Whether a tensor belongs to the image tower, which this version recognises and leaves."""
    return name.startswith(_UNREAD)


def tensors(config: ModelConfig) -> list[Stored]:
    """Every tensor of the official checkpoint; quantised when the config has a quantization."""
    return [stored for weight in weights(config) for stored in weight.stored()]


def weights(config: ModelConfig) -> list[Weight]:
    """Every weight of the model, as stored; BF16 instead of FP8 and FP4 without quantization."""
    found = list(_weights(config))
    if config.quantization is None:
        unquantised = {"fp8": "bf16", "table": "bf16", "fp4": "bf16"}
        found = [
            Weight(
                w.name,
                w.shape,
                unquantised.get(w.storage, w.storage),
                w.component,
                w.placement,
                w.layer,
            )
            for w in found
        ]
    return found


def _weights(c: ModelConfig) -> Iterator[Weight]:
    yield Weight("embed.weight", (c.vocab_size, c.hidden_size), "bf16", "embedding")
    yield Weight("head.weight", (c.vocab_size, c.hidden_size), "bf16", "embedding")
    yield Weight("norm.weight", (c.hidden_size,), "bf16", "norms")
    if c.vision is not None and c.has_vision:
        yield from _vision(c.vision, c.hidden_size)
    for layer in range(c.num_layers):
        yield from _block(c, layer)
    for layer in c.draft_layers:
        for w in (*_block(c, layer), *_draft_extras(c, layer)):
            yield Weight(w.name, w.shape, w.storage, "drafter", w.placement, layer)


def _block(c: ModelConfig, layer: int) -> Iterator[Weight]:
    prefix = c.layer_name(layer)
    d = c.hidden_size
    yield Weight(f"{prefix}.attn_norm.weight", (d,), "bf16", "norms", layer=layer)
    yield Weight(f"{prefix}.ffn_norm.weight", (d,), "bf16", "norms", layer=layer)
    mixes = (2 + c.hc_mult) * c.hc_mult
    for site in ("attn", "ffn"):
        for part, shape in (("fn", (mixes, c.hc_mult * d)), ("base", (mixes,)), ("scale", (3,))):
            yield Weight(f"{prefix}.hc_{site}_{part}", shape, "f32", "mhc", layer=layer)
    yield from _attention(c, layer, f"{prefix}.attn")
    if layer in c.engram_layer_ids:
        yield from _engram(c, layer, f"{prefix}.engram")
    yield from _experts(c, layer, f"{prefix}.ffn")


def _attention(c: ModelConfig, layer: int, prefix: str) -> Iterator[Weight]:
    d, heads, group = c.hidden_size, c.num_attention_heads, c.o_groups * c.o_lora_rank
    names = [
        ("attn_sink", (heads,), "f32"),
        ("wq_a.weight", (c.q_lora_rank, d), "fp8"),
        ("q_norm.weight", (c.q_lora_rank,), "bf16"),
        ("wq_b.weight", (heads * c.head_dim, c.q_lora_rank), "fp8"),
        ("wkv.weight", (c.head_dim, d), "fp8"),
        ("kv_norm.weight", (c.head_dim,), "bf16"),
        ("wo_a.weight", (group, heads * c.head_dim // c.o_groups), "fp8"),
        ("wo_b.weight", (d, group), "fp8"),
    ]
    if layer in c.kv_source_layer_ids:
        names.append(("compressor.wkv.weight", (c.head_dim, d), "bf16"))
        if c.ratio(layer) > 1:  # a single token needs no gate
            names.append(("compressor.wgate.weight", (c.head_dim, d), "bf16"))
        names.append(("compressor.norm.weight", (c.head_dim,), "bf16"))
    if layer in c.index_source_layer_ids:
        queries = c.index_n_heads * c.index_head_dim
        names.append(("indexer.wq_b.weight", (queries, c.q_lora_rank), "fp8"))
        names.append(("indexer.weights_proj.weight", (c.index_n_heads, d), "bf16"))
    if layer in c.kv_source_layer_ids:
        names.append(("indexer.wk.weight", (c.index_head_dim, c.head_dim), "bf16"))
        names.append(("indexer.k_norm.weight", (c.index_head_dim,), "bf16"))
    for name, shape, storage in names:
        yield Weight(f"{prefix}.{name}", shape, storage, "attention", layer=layer)


def _engram(c: ModelConfig, layer: int, prefix: str) -> Iterator[Weight]:
    rows = c.engram_num_embeddings[c.engram_layer_ids.index(layer)]
    read = c.engram_columns * c.engram_head_dim
    streams = (c.hc_mult, c.hidden_size)
    table = (rows, c.engram_head_dim)
    yield Weight(f"{prefix}.embed.weight", table, "table", "engram", "table", layer)
    kv = ((c.hc_mult + 1) * c.hidden_size, read)
    yield Weight(f"{prefix}.wkv.weight", kv, "fp8", "engram", layer=layer)
    yield Weight(f"{prefix}.q_weight", streams, "bf16", "engram", layer=layer)
    yield Weight(f"{prefix}.k_weight", streams, "bf16", "engram", layer=layer)


def _experts(c: ModelConfig, layer: int, prefix: str) -> Iterator[Weight]:
    d, inner, number = c.hidden_size, c.moe_intermediate_size, c.num_experts(layer)
    yield Weight(f"{prefix}.gate.weight", (number, d), "bf16", "router", layer=layer)
    yield Weight(f"{prefix}.gate.bias", (number,), "f32", "router", layer=layer)
    yield Weight(f"{prefix}.gate.bias_vl", (number,), "f32", "router", layer=layer)
    shapes = (("w1", (inner, d)), ("w2", (d, inner)), ("w3", (inner, d)))
    for matrix, shape in shapes:
        name = f"{prefix}.shared_experts.{matrix}.weight"
        yield Weight(name, shape, "fp8", "shared_experts", layer=layer)
    for expert in range(number):
        for matrix, shape in shapes:
            name = f"{prefix}.experts.{expert}.{matrix}.weight"
            yield Weight(name, shape, "fp4", "experts", "experts", layer)


def _draft_extras(c: ModelConfig, layer: int) -> Iterator[Weight]:
    """What only the first draft layer (main_*) or the last one (heads) has."""
    prefix, d = c.layer_name(layer), c.hidden_size
    if layer == c.draft_layers[0]:
        main = (d, len(c.dspark_target_layer_ids) * d)
        yield Weight(f"{prefix}.main_proj.weight", main, "fp8", "drafter")
        yield Weight(f"{prefix}.main_norm.weight", (d,), "bf16", "drafter")
    if layer == c.draft_layers[-1]:
        rank, markov = c.dspark_markov_rank, f"{prefix}.markov_head"
        yield Weight(f"{prefix}.norm.weight", (d,), "bf16", "drafter")
        yield Weight(f"{markov}.embed.weight", (c.vocab_size, rank), "bf16", "drafter")
        yield Weight(f"{markov}.head.weight", (c.vocab_size, rank), "bf16", "drafter")
        proj = f"{prefix}.confidence_head.proj.weight"
        yield Weight(proj, (1, d + rank), "bf16", "drafter")


def _vision(v: VisionConfig, d: int) -> Iterator[Weight]:
    width, inner = v.hidden_size, v.intermediate_size
    names: list[tuple[str, tuple[int, ...]]] = [
        ("image_start", (d,)),
        ("image_end", (d,)),
        ("image_newline", (d,)),
        ("vision.patch_embed.proj.weight", (width, 3 * v.patch_size**2)),
        ("vision.patch_embed.proj.bias", (width,)),
    ]
    for block in range(v.num_hidden_layers):
        prefix = f"vision.blocks.{block}"
        names += [
            (f"{prefix}.norm1.weight", (width,)),
            (f"{prefix}.attn.wqkv.weight", (3 * width, width)),
            (f"{prefix}.attn.wqkv.bias", (3 * width,)),
            (f"{prefix}.attn.wo.weight", (width, width)),
            (f"{prefix}.attn.wo.bias", (width,)),
            (f"{prefix}.norm2.weight", (width,)),
            (f"{prefix}.mlp.w1.weight", (2 * inner, width)),
            (f"{prefix}.mlp.w2.weight", (width, inner)),
        ]
    cell = width * v.downsample_ratio**2
    names += [
        ("vision.norm.weight", (width,)),
        ("aligner.w1.weight", (d, cell)),
        ("aligner.w1.bias", (d,)),
        ("aligner.w2.weight", (d, d)),
        ("aligner.w2.bias", (d,)),
    ]
    for name, shape in names:
        yield Weight(name, shape, "bf16", "vision")
