"""Writing: what is written reads back, and a failure leaves nothing behind."""

import json
import math
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from deepinfer.checkpoint import names, writer
from deepinfer.checkpoint.formats import round_storage
from deepinfer.checkpoint.header import CheckpointError
from deepinfer.checkpoint.reader import Checkpoint
from deepinfer.checkpoint.writer import write


@pytest.mark.parametrize("quantised", [True, False])
def test_round_trip(micro, tmp_path, quantised):
    config, state, tokenizer, _ = micro
    folder = write(tmp_path / "a", config, state, tokenizer=tokenizer, quantised=quantised)
    checkpoint = Checkpoint.open(folder)
    assert (checkpoint.config.quantization is not None) == quantised
    assert checkpoint.config.replace(quantization=config.quantization) == config
    assert checkpoint.weights.keys() == state.keys()
    for name, weight in checkpoint.weights.items():
        expected = round_storage(state[name], weight.storage)
        assert torch.equal(checkpoint.read(name, torch.float32), expected)


def test_writing_what_was_read_changes_no_value(micro, tmp_path):
    """Bytes may change: a block whose largest value was rounded down may take half its scale."""
    config, _, tokenizer, folder = micro
    source = Checkpoint.open(folder)
    state = {name: source.read(name, torch.float32) for name in source.weights}
    again = Checkpoint.open(write(tmp_path / "b", config, state, tokenizer=tokenizer))
    for name, value in state.items():
        assert torch.equal(again.read(name, torch.float32), value), name


def test_writing_twice_gives_the_same_bytes(micro, tmp_path):
    config, state, tokenizer, folder = micro
    again = write(tmp_path / "b", config, state, tokenizer=tokenizer, shard_bytes=100_000)
    files = {f.name: f.read_bytes() for f in folder.iterdir()}
    assert {f.name: f.read_bytes() for f in again.iterdir()} == files


@pytest.mark.skipif(os.name != "posix", reason="modes are of POSIX")
@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_files_have_the_mode_of_ordinary_files(micro, tmp_path, umask):
    config, state, tokenizer, _ = micro
    before = os.umask(umask)
    try:
        folder = write(tmp_path / "b", config, state, tokenizer=tokenizer)
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o777 == 0o777 & ~umask
    files = {file.name: file.stat().st_mode & 0o777 for file in folder.iterdir()}
    assert len(files) >= 5 and set(files.values()) == {0o666 & ~umask}


def test_index_and_shards(micro):
    config, _, _, folder = micro
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    expected = names.tensors(config)
    assert index["weight_map"].keys() == {tensor.name for tensor in expected}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected)
    count = len(set(index["weight_map"].values()))
    assert f"model-00001-of-{count:05d}.safetensors" in index["weight_map"].values()
    for name, shard in index["weight_map"].items():  # scales beside their data
        if name.endswith(".scale"):
            assert index["weight_map"][name.removesuffix(".scale") + ".weight"] == shard
    with safe_open(folder / f"model-00001-of-{count:05d}.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


@given(st.integers(1, 400_000))
@settings(max_examples=30, deadline=None)
def test_shards_keep_their_limit(limit):
    weights = [names.Weight(f"w{n}", (n * 97 % 5000, 32), "bf16", "norms") for n in range(60)]
    shards = writer._shards(weights, limit)
    assert [w for shard in shards for w in shard] == weights
    size = [sum(t.nbytes for w in shard for t in w.stored()) for shard in shards]
    assert all(s <= limit or len(shard) == 1 for s, shard in zip(size, shards))
    first = [sum(t.nbytes for t in shard[0].stored()) for shard in shards]
    assert all(s + f > limit for s, f in zip(size, first[1:]))  # no shard ends early


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", ["norm.weight", "mtp.0.ffn.experts.1.w2.weight"])
def test_a_weight_that_is_not_finite_is_not_written(micro, tmp_path, value, name):
    config, state, tokenizer, _ = micro
    wrong = state | {name: state[name] * value}
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        write(tmp_path / "a", config, wrong, tokenizer=tokenizer)
    assert not list(tmp_path.iterdir())


def test_a_failure_in_the_middle_leaves_the_old_checkpoint(micro, tmp_path, monkeypatch):
    config, state, tokenizer, _ = micro
    folder = write(tmp_path / "a", config, state, tokenizer=tokenizer)
    before = {f.name: f.read_bytes() for f in folder.iterdir()}

    def fail(*args):
        raise OSError("disk full")

    monkeypatch.setattr(writer, "_dump", fail)
    with pytest.raises(OSError, match="disk full"):
        write(folder, config, state, tokenizer=tokenizer, overwrite=True)
    assert {f.name: f.read_bytes() for f in folder.iterdir()} == before
    assert [f.name for f in tmp_path.iterdir()] == ["a"]


def test_an_existing_folder_is_not_overwritten(micro, tmp_path):
    config, state, tokenizer, _ = micro
    folder = tmp_path / "a"
    folder.mkdir()
    write(folder, config, state, tokenizer=tokenizer)  # an empty one may be filled
    (folder / "mine.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="overwrite=True"):
        write(folder, config, state, tokenizer=tokenizer)
    assert (folder / "mine.txt").exists()
    write(folder, config, state, tokenizer=tokenizer, overwrite=True)
    assert not (folder / "mine.txt").exists() and [f.name for f in tmp_path.iterdir()] == ["a"]


def test_the_image_tower_is_written_when_it_is_given(micro, tmp_path):
    config, state, tokenizer, _ = micro
    from deepinfer.config import VisionConfig

    vision = VisionConfig(
        num_hidden_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        intermediate_size=8,
        patch_size=2,
        rope_theta=10000,
        downsample_ratio=3,
        max_image_tokens=64,
        min_pixels=16,
    )
    config = config.replace(vision=vision)
    tower = {w.name: torch.ones(w.shape) for w in names.weights(config) if w.component == "vision"}
    checkpoint = Checkpoint.open(write(tmp_path / "a", config, state | tower, tokenizer=tokenizer))
    assert checkpoint.unread.keys() == tower.keys()
    assert checkpoint.nbytes["vision"] == sum(2 * math.prod(t.shape) for t in tower.values())
    without = Checkpoint.open(write(tmp_path / "b", config, state, tokenizer=tokenizer))
    assert not without.unread


def test_views_of_one_tensor_are_written(micro, tmp_path):
    """Experts taken out of a stack share memory; safetensors alone refuses such tensors."""
    config, state, tokenizer, _ = micro
    shared = torch.randn(2, 32).to(torch.bfloat16)
    state = state | {"layers.0.attn_norm.weight": shared[0], "layers.0.ffn_norm.weight": shared[1]}
    checkpoint = Checkpoint.open(write(tmp_path / "a", config, state, tokenizer=tokenizer))
    assert torch.equal(checkpoint.read("layers.0.ffn_norm.weight"), shared[1])
