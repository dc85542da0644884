"""Sizes: published cache bytes, weights per device, the inspection report."""

import json

import pytest

from deepinfer.checkpoint import names
from deepinfer.checkpoint.inspection import inspect
from deepinfer.checkpoint.reader import CheckpointError
from deepinfer.checkpoint.sizes import cache_sizes, device_bytes, memory_table, record_bytes
from deepinfer.config import ModelConfig

RELEASE = ModelConfig.v41_flash()


def test_published_cache_sizes():
    sizes = cache_sizes(RELEASE)
    assert sizes["window_record"] == 528 and sizes["entry_record"] == 288
    assert sizes["index_record"] == 68 and sizes["block_kv_per_token"] == 890
    assert sizes["encoder_windows"] == 1_415_040
    rings = ("encoder_windows", "decoder_windows", "draft_windows")
    assert sum(sizes[ring] for ring in rings) == 3_042_336
    assert sizes["compressor_state"] == 86_016
    assert cache_sizes(RELEASE.replace(use_fp4_sparse_kv=False))["entry_record"] == 528


def test_records_agree_with_the_kernels():
    from deepinfer.kernels.formats import packed_bytes

    for format in ("mxfp8", "nvfp4", "mxfp4"):
        for dim in (32, 64, 512):
            assert record_bytes(format, dim) == packed_bytes(format, dim)


def test_memory_table_of_the_release():
    table = {row["component"]: row for row in memory_table(RELEASE).rows}
    assert table["total"]["tensors"] == 96_085
    assert table["total"]["disk"] == table["total"]["ep1"] == 510_286_023_000
    assert table["total"]["parameters"] == 763_205_315_794
    for row in table.values():
        assert row["ep1"] >= row["ep8"] >= row["ep64"] > 0
    assert table["experts"]["ep64"] * 64 == table["experts"]["disk"]
    assert table["engram"]["ep64"] == table["engram"]["disk"]
    # one routed expert: 18.8 MB; a layer's 384: 7.2 GB
    assert round(table["experts"]["disk"] / 40 / 384 / 1e6, 1) == 18.8
    assert round(table["experts"]["disk"] / 40 / 1e9, 1) == 7.2


def test_sharded_tables_are_divided():
    weights = names.weights(RELEASE)
    whole, parts = device_bytes(weights, 8), device_bytes(weights, 8, shard_tables=True)
    tables = sum(t.nbytes for w in weights if w.placement == "table" for t in w.stored())
    rows = [w.shape[0] for w in weights if w.placement == "table"]
    assert whole - parts == tables - sum(-(-r // 8) for r in rows) * (256 + 8)


def test_the_fullest_rank_counts():
    """384 experts on 7 ranks: one rank has 55, not 54.86."""
    weights = [w for w in names.weights(RELEASE) if w.component == "experts" and w.layer == 0]
    one = device_bytes(weights, 384)
    assert device_bytes(weights, 7) == 55 * one and device_bytes(weights, 1) == 384 * one
    assert device_bytes(weights, 1000) == one
    with pytest.raises(ValueError, match="ep = 0"):
        device_bytes(weights, 0)


def test_widened_weights():
    weights = names.weights(RELEASE)
    total = sum(w.parameters for w in weights)
    wide = sum(w.parameters for w in weights if w.wide)
    assert device_bytes(weights, 1, itemsize=2) == 2 * total + 2 * wide
    assert device_bytes(weights, 1, itemsize=8) == 8 * total


def test_inspection_of_a_folder(micro):
    config, _, _, folder = micro
    report = inspect(folder)
    assert report.config == config and "shapes fit the config" in report.checked
    data = json.loads(report.to_json())
    assert data["weights"][-1]["disk"] == sum(t.nbytes for t in names.tensors(config))
    assert {row["cache"]: row["bytes"] for row in data["cache"]} == cache_sizes(config)
    assert ModelConfig.from_dict(data["config"]) == config
    assert "window, 2 full, reindex, draft" in repr(report)


def test_inspection_checks_weights_where_there_are_any(damage):
    damage.tensor("norm.weight", lambda x: None)
    with pytest.raises(CheckpointError, match="norm.weight"):
        inspect(damage.folder)
    for shard in damage.shards:
        shard.unlink()
    damage.index.unlink()
    assert inspect(damage.folder).checked == inspect(damage.folder / "config.json").checked


def test_inspection_of_nothing(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        inspect(tmp_path / "nowhere")


def test_inspection_of_the_release():
    text = repr(inspect())
    assert "510,286,023,000" in text and "20 encoder, 20 decoder" in text
