"""Files that no writer makes, or that hide other contents: refused by name before any payload."""

import json
import logging
import os

import pytest
import safetensors

from deepinfer.checkpoint.reader import Checkpoint, CheckpointError
from deepinfer.config import ModelConfig

INDEX = "model.safetensors.index.json"
DEEP = "[" * 100_000 + "]" * 100_000
NAME = "norm.weight"


@pytest.fixture(autouse=True)
def no_payload(monkeypatch):
    def no(*args, **kwargs):
        raise AssertionError("payload was opened")

    monkeypatch.setattr(safetensors, "safe_open", no)


def refused(folder, file, *said):
    """Opening raises a CheckpointError that names the file and holds all of `said`."""
    with pytest.raises(CheckpointError) as refusal:
        Checkpoint.open(folder)
    text = str(refusal.value)
    for part in (str(file), *said):
        assert part in text, text


def rewrite(shard, change):
    """Apply `change(text)` to the text of a shard's header and keep its payload."""
    data = shard.read_bytes()
    length = int.from_bytes(data[:8], "little")
    text = change(data[8 : 8 + length].decode()).encode()
    shard.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def repeated(text, key, value="1"):
    """A JSON object's text with one more value of a key."""
    return text.rstrip()[:-1] + f", {json.dumps(key)}: {value}}}"


# -- keys that are there twice --------------------------------------------------------------------


def test_a_tensor_twice_in_a_header(damage):
    shard = damage.shard_of(NAME)
    first = json.loads(shard.read_bytes()[8 : 8 + int.from_bytes(shard.read_bytes()[:8], "little")])
    rewrite(shard, lambda text: repeated(text, NAME, json.dumps(first[NAME])))
    refused(damage.folder, shard, f"repeats the key '{NAME}'")


def test_a_field_twice_in_a_tensor_of_a_header(damage):
    shard = damage.shard_of(NAME)
    rewrite(shard, lambda text: text.replace('{"dtype"', '{"dtype":"F32","dtype"', 1))
    refused(damage.folder, shard, "repeats the key 'dtype'")


def test_a_tensor_twice_in_the_index(damage):
    weights = json.loads(damage.index.read_text())["weight_map"]
    text = repeated(json.dumps(weights), NAME, '"other.safetensors"')
    damage.index.write_text(f'{{"weight_map": {text}}}')
    refused(damage.folder, damage.index, f"repeats the key '{NAME}'")


def test_a_key_twice_in_the_config(damage):
    file = damage.folder / "config.json"
    for key in ("bos_token_id", "text_config"):
        intact = file.read_text()
        file.write_text(repeated(intact, key))
        refused(damage.folder, file, f"repeats the key {key!r}")
        with pytest.raises(ValueError, match="repeats the key"):
            ModelConfig.from_file(file)
        file.write_text(intact)


# -- what stands in the place of a file -----------------------------------------------------------


@pytest.mark.parametrize("what", ["folder", "pipe"])
@pytest.mark.parametrize("which", ["config.json", INDEX, "shard"])
def test_something_else_than_a_file(damage, which, what):
    file = damage.shard_of(NAME) if which == "shard" else damage.folder / which
    file.unlink()
    file.mkdir() if what == "folder" else os.mkfifo(file)
    refused(damage.folder, file, "file")


def test_an_index_that_leads_nowhere_is_not_passed_over(damage):
    damage.index.unlink()
    damage.index.symlink_to(damage.folder / "gone")
    refused(damage.folder, damage.index, "not found")


@pytest.mark.parametrize(
    "shard",
    ["", ".", "..", "../x", "a/b.safetensors", "/etc/passwd", "a\\b", "a\0b", "\ud800", "x" * 300]
    + ["\u00e9" * 200, 5, None, ["x.safetensors"], {}],
    ids=lambda shard: repr(shard)[:12],
)
def test_a_shard_that_is_no_plain_name(damage, shard):
    index = json.loads(damage.index.read_text())
    index["weight_map"][NAME] = shard
    damage.index.write_text(json.dumps(index))
    refused(damage.folder, damage.index, f"places tensor {NAME} in")


# -- JSON that is no checkpoint's -----------------------------------------------------------------


@pytest.mark.parametrize("deep", [DEEP, "[" * 100 + "]" * 100, '{"a":' * 90 + "1" + "}" * 90])
def test_deep_nesting(damage, deep):
    for file in (damage.index, damage.folder / "config.json"):
        intact = file.read_text()
        file.write_text(repeated(intact, "auto_map", deep))
        refused(damage.folder, file, "levels deep")
        file.write_text(intact)
    shard = damage.shard_of(NAME)
    rewrite(shard, lambda text: repeated(text, "deep", deep))
    refused(damage.folder, shard, "levels deep")


@pytest.mark.parametrize("metadata", ["text", 1, None, ["pt"], {"format": 1}, {"format": {}}])
def test_metadata_that_is_no_object_of_strings(damage, metadata):
    shard = damage.shard_of(NAME)
    damage.header(shard, lambda header: header.update(__metadata__=metadata))
    refused(damage.folder, shard, "__metadata__ is not an object of strings")


@pytest.mark.parametrize(
    "field,value",
    [
        ("data_offsets", [0.0, 64.0]),
        ("data_offsets", [False, 64]),
        ("data_offsets", [-64, 0]),
        ("data_offsets", [0, 32, 64]),
        ("data_offsets", {"0": 0, "64": 64}),
        ("data_offsets", 64),
        ("data_offsets", None),
        ("shape", [32.0]),
        ("shape", [True]),
        ("shape", [-32]),
        ("shape", "32"),
        ("shape", 32),
        ("dtype", ["BF16"]),
        ("dtype", None),
    ],
)
def test_a_field_of_another_type(damage, field, value):
    shard = damage.shard_of(NAME)
    damage.header(shard, lambda header: header[NAME].update({field: value}))
    refused(damage.folder, shard, f"tensor {NAME} has", repr(value))


@pytest.mark.parametrize("value", [None, 1, "F32", [], {}])
def test_a_tensor_that_is_no_object(damage, value):
    shard = damage.shard_of(NAME)
    damage.header(shard, lambda header: header.update({NAME: value}))
    refused(damage.folder, shard, f"tensor {NAME} has")


def test_a_header_in_another_encoding(damage):
    shard = damage.shard_of(NAME)
    data = shard.read_bytes()
    length = int.from_bytes(data[:8], "little")
    text = data[8 : 8 + length].decode().encode("utf-16")
    shard.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    refused(damage.folder, shard, "not a safetensors file")


def test_a_header_of_gigabytes_is_not_read(damage):
    shard = damage.shard_of(NAME)
    with open(shard, "r+b") as file:
        file.write((1 << 33).to_bytes(8, "little"))
        file.truncate(1 << 34)  # a sparse file
    refused(damage.folder, shard, "not a safetensors file")


# -- what loads, and is said ----------------------------------------------------------------------


def said(caplog, folder):
    caplog.clear()
    with caplog.at_level(logging.WARNING, "deepinfer"):
        Checkpoint.open(folder)
    return [record.getMessage() for record in caplog.records]


def test_a_wrong_total_and_a_stray_file_are_said(damage, caplog):
    assert said(caplog, damage.folder) == []
    index = json.loads(damage.index.read_text())
    held = sum(Checkpoint.open(damage.folder).nbytes.values())
    for total in (held - 1, "many"):
        damage.index.write_text(json.dumps(index | {"metadata": {"total_size": total}}))
        (message,) = said(caplog, damage.folder)
        assert repr(total) in message and str(held) in message and str(damage.index) in message
    for metadata in ({}, None, {"total_size": held}):
        damage.index.write_text(json.dumps(index | {"metadata": metadata}))
        assert said(caplog, damage.folder) == []
    (damage.folder / "stray.safetensors").write_bytes(b"anything")
    (message,) = said(caplog, damage.folder)
    assert "stray.safetensors" in message and str(damage.folder) in message
