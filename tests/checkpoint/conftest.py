"""A checkpoint of a few kilobytes with every kind of tensor, and the tools to damage it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from deepinfer.checkpoint import names
from deepinfer.checkpoint.tiny import tiny_config
from deepinfer.checkpoint.tiny_tokenizer import tiny_tokenizer
from deepinfer.checkpoint.writer import write
from deepinfer.config import ModelConfig
from deepinfer.model.engram_hash import table_rows


def micro_config() -> ModelConfig:
    """Four layers with every role, one draft layer, two small tables; sizes no tile divides."""
    config = tiny_config().replace(
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        head_dim=32,
        q_lora_rank=40,
        o_lora_rank=20,
        index_n_heads=3,
        compress_ratios=(0, 2, 1, 1, 0),
        kv_source_layer_ids=(1, 2),
        index_source_layer_ids=(1, 2, 3),
        candidate_source_layer_id=2,
        n_routed_experts=3,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        engram_layer_ids=(0, 2),
        engram_num_embeddings=(1, 1),
        engram_vocab_size=50,
        engram_max_ngram_size=3,
        num_nextn_predict_layers=1,
        dspark_target_layer_ids=(2, 3),
        dspark_n_routed_experts=2,
        dspark_num_experts_per_tok=1,
        dspark_markov_rank=4,
    )
    return config.replace(engram_num_embeddings=tuple(table_rows(config).values()))


def micro_state(config: ModelConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weights = [w for w in names.weights(config) if not names.is_unread(w.name)]
    return {w.name: torch.randn(w.shape, generator=generator) for w in weights}


class Damage:
    """A checkpoint folder that may be changed; each method changes one thing."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.index = folder / "model.safetensors.index.json"

    @property
    def shards(self) -> list[Path]:
        return sorted(self.folder.glob("*.safetensors"))

    def shard_of(self, name: str) -> Path:
        return self.folder / json.loads(self.index.read_text())["weight_map"][name]

    def config(self, section: str | None = None, **values) -> None:
        file = self.folder / "config.json"
        config = json.loads(file.read_text())
        (config if section is None else config[section]).update(values)
        file.write_text(json.dumps(config))

    def tensors(self, change, reindex: bool = True) -> None:
        """Apply `change(tensors)` to each shard's dict of tensors and write it back."""
        weight_map = {}
        for shard in self.shards:
            tensors = load_file(shard)
            change(tensors)
            save_file(tensors, shard)
            weight_map |= dict.fromkeys(tensors, shard.name)
        if reindex and self.index.exists():
            self.index.write_text(json.dumps({"weight_map": weight_map}))

    def tensor(self, name: str, change) -> None:
        """Replace one tensor by `change(tensor)`, or drop it when that is None."""

        def edit(tensors):
            if name in tensors:
                value = change(tensors.pop(name))
                if value is not None:
                    tensors[name] = value

        self.tensors(edit)

    def header(self, shard: Path, change) -> None:
        """Apply `change(header)` to a shard's JSON header and keep its payload."""
        data = shard.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        change(header)
        text = json.dumps(header).encode()
        shard.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


@pytest.fixture(scope="session")
def micro(tmp_path_factory):
    """(config, state, tokenizer, folder written from them in several shards). Do not change it."""
    config = micro_config()
    state, tokenizer = micro_state(config), tiny_tokenizer()
    folder = tmp_path_factory.mktemp("micro") / "checkpoint"
    write(folder, config, state, tokenizer=tokenizer, shard_bytes=100_000)
    return config, state, tokenizer, folder


@pytest.fixture
def damage(micro, tmp_path) -> Damage:
    folder = tmp_path / "checkpoint"
    shutil.copytree(micro[3], folder)
    return Damage(folder)
