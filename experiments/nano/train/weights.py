"""The weights at the start of training, and their way from the model back to the official names."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepinfer.checkpoint import names
from deepinfer.checkpoint.formats import round_storage
from deepinfer.checkpoint.loader import load
from deepinfer.checkpoint.memory import MemoryCheckpoint
from deepinfer.checkpoint.writer import write
from deepinfer.config import ModelConfig
from deepinfer.model.stack import Model

_EXPERT = re.compile(r"(.*\.experts\.)(\d+)\.(w[123]\.weight)")

# Standard deviations of what is not 1 / sqrt(columns). Output projections start small, so that a
# fresh layer hardly changes the streams; hc_*_fn sees 4 x 224 values of unit size.
_STD = {
    "engram.embed.weight": 0.02,
    "markov_head.embed.weight": 0.1,
    "markov_head.head.weight": 0.02,
    "confidence_head.proj.weight": 0.0,
    "embed.weight": 0.25,
    "head.weight": 0.02,
    "gate.weight": 0.02,
    "wo_b.weight": 0.02,
    "w2.weight": 0.02,
    "wgate.weight": 0.02,
    "gate.bias": 0.0,
    "gate.bias_vl": 0.0,
}
_ONES = ("norm.weight", "q_weight", "k_weight")
_MUON = ("wq_a", "wq_b", "wkv", "wk", "wgate", "wo_a", "wo_b", "w1", "w2", "w3", "main_proj")


def initial(config: ModelConfig, seed: int) -> dict[str, Tensor]:
    """{official name: float32}; a weight's values depend on seed and name only."""
    return {w.name: _initial(config, w.name, w.shape, seed) for w in names.weights(config)}


def _initial(config: ModelConfig, name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    if name.endswith(_ONES):
        return torch.ones(shape)
    if name.endswith("attn_sink"):
        return torch.ones(shape)  # at 0 they stay unused
    if name.endswith("_scale"):
        return torch.full(shape, 0.1)
    if name.endswith("_base"):
        return _mixing_base(config, name)
    std = next((std for suffix, std in _STD.items() if name.endswith(suffix)), shape[-1] ** -0.5)
    rng = np.random.default_rng((seed, zlib.crc32(name.encode())))
    return torch.from_numpy(rng.standard_normal(shape, dtype=np.float32)) * std


def _mixing_base(config: ModelConfig, name: str) -> Tensor:
    """A site reads one stream, by layer number, writes to all, mixes little: the published hint."""
    m = config.hc_mult
    layer = int(re.search(r"\.(\d+)\.", name)[1])
    pre = torch.full((m,), -3.0)
    pre[layer % m] = 3.0
    comb = torch.full((m, m), -3.0).fill_diagonal_(3.0)
    return torch.cat([pre, torch.zeros(m), comb.flatten()])


def is_matrix(name: str) -> bool:
    """True for the weights that Muon takes: projections and experts."""
    parts = name.split(".")
    return parts[-1] == "weight" and parts[-2] in _MUON


def model_from(
    config: ModelConfig,
    state: Mapping[str, Tensor],
    tokenizer: Any,
    dtype: torch.dtype,
    device: torch.device | str,
) -> Model:
    """A Model that holds `state`, unrounded but for dtype."""
    plain = MemoryCheckpoint(config.replace(quantization=None), state, tokenizer)
    model = model_of(plain, dtype, device)
    model.config = config  # says how its weights will be stored, which `rounding` asks
    return model


def model_of(checkpoint: Any, dtype: torch.dtype, device: torch.device | str) -> Model:
    """A Model loaded from an opened checkpoint."""
    with torch.device("meta"):
        model = Model(checkpoint.config)
    load(model, checkpoint, dtype=dtype, device=torch.device(device))
    return model


def official(config: ModelConfig, held: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The model's named weights (experts stacked) under their official names, on the CPU."""
    out = {}
    for w in names.weights(config):
        if w.name in held:
            out[w.name] = held[w.name]
        elif match := _EXPERT.fullmatch(w.name):
            stacked = held.get(match[1] + match[3])
            if stacked is not None:
                out[w.name] = stacked[int(match[2])]
    return {name: x.detach().float().cpu() for name, x in out.items()}


def finished(model: Model, masters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """{the model's weight name: FP32 weight} when a stage is over, unrounded where it was trained;
    the model takes no gradients any more."""
    model.requires_grad_(False)
    return {**{n: p.detach() for n, p in model.named_parameters()}, **masters}


def stacked(config: ModelConfig, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state of official names as the model holds it, experts stacked: `official` backwards."""
    out: dict[str, Any] = {}
    for w in names.weights(config):
        if match := _EXPERT.fullmatch(w.name):
            out.setdefault(match[1] + match[3], []).append(state[w.name])
        else:
            out[w.name] = state[w.name]
    return {name: torch.stack(x) if isinstance(x, list) else x for name, x in out.items()}


def storages(config: ModelConfig) -> dict[str, str]:
    """{the model's weight name: how the checkpoint stores it}."""
    return {_EXPERT.sub(r"\1\3", w.name): w.storage for w in names.weights(config)}


def rounding(config: ModelConfig):
    """rounding(name, master) -> the values that reading the stored weight back would give."""
    kind = storages(config)
    return lambda name, master: round_storage(master, kind[name])


def write_both(
    folder: str | Path, config: ModelConfig, state: Mapping[str, Tensor], tokenizer: Any
) -> None:
    """folder/unquantised: BF16; folder/stored: the same values in FP8 and FP4, which follow from
    the former alone. Either is an official checkpoint."""
    kept = {
        w.name: state[w.name] if w.storage == "f32" else round_storage(state[w.name], "bf16")
        for w in names.weights(config)
    }
    for name, quantised in (("stored", True), ("unquantised", False)):
        write(
            Path(folder) / name,
            config,
            kept,
            tokenizer=tokenizer,
            quantised=quantised,
            overwrite=True,
        )
