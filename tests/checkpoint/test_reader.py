"""Reading: what is accepted, and every way in which a folder is refused before it is read."""

import json
import shutil

import pytest
import safetensors
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from deepinfer.checkpoint import names
from deepinfer.checkpoint.formats import quantise, round_storage
from deepinfer.checkpoint.header import read_header
from deepinfer.checkpoint.reader import Checkpoint, CheckpointError
from deepinfer.kernels.quantised import Quantised

EXPERT = "layers.1.ffn.experts.0.w1"
TABLE = "layers.2.engram.embed"


def refused(folder, *said):
    """Opening raises a CheckpointError (a ValueError) that holds all of `said`."""
    with pytest.raises(CheckpointError) as refusal:
        Checkpoint.open(folder)
    text = str(refusal.value)
    assert isinstance(refusal.value, ValueError)
    for part in said:
        assert str(part) in text, text
    return text


# -- what is accepted -----------------------------------------------------------------------------


def test_reads_what_was_written(micro):
    config, state, _, folder = micro
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.config == config and checkpoint.tokenizer_path == folder / "tokenizer.json"
    assert len(list(folder.glob("*.safetensors"))) > 2
    for weight in names.weights(config):
        value = checkpoint.read(weight.name, torch.float32)
        assert torch.equal(value, round_storage(state[weight.name], weight.storage)), weight.name
        stored = checkpoint.read(weight.name)
        assert isinstance(stored, Quantised) == (weight.storage in ("fp8", "table", "fp4"))
    assert sum(checkpoint.nbytes.values()) == sum(t.nbytes for t in names.tensors(config))
    assert checkpoint.nbytes["drafter"] > 0 and "vision" not in checkpoint.nbytes


def test_stacked_experts_equal_the_single_ones(micro):
    checkpoint = Checkpoint.open(micro[3])
    prefix = "mtp.0.ffn.experts"
    for matrix in ("w1", "w2", "w3"):
        single = [f"{prefix}.{e}.{matrix}.weight" for e in range(2)]
        stacked = checkpoint.read_experts(prefix, matrix)
        assert isinstance(stacked, Quantised) and stacked.kind == "fp4"
        wide = checkpoint.read_experts(prefix, matrix, torch.float64)
        assert torch.equal(stacked.dequantise(torch.float64), wide)
        for expert, name in enumerate(single):
            assert torch.equal(wide[expert], checkpoint.read(name, torch.float64))
            assert bool(wide[expert].abs().max() > 0)  # expert 0 as well
    last = checkpoint.read_experts(prefix, "w1", torch.float32, experts=[1])
    assert torch.equal(last[0], checkpoint.read(f"{prefix}.1.w1.weight", torch.float32))


def test_nothing_is_read_before_all_is_checked(micro, monkeypatch):
    def no(*args, **kwargs):
        raise AssertionError("payload was opened")

    monkeypatch.setattr(safetensors, "safe_open", no)
    checkpoint = Checkpoint.open(micro[3])
    with pytest.raises(AssertionError, match="payload"):
        checkpoint.read("norm.weight")


def test_one_file_without_an_index_and_a_model_prefix(micro, tmp_path):
    folder = tmp_path / "one"
    shutil.copytree(micro[3], folder)
    (folder / "model.safetensors.index.json").unlink()
    merged = {}
    for shard in sorted(folder.glob("*.safetensors")):
        merged |= {f"model.{name}": value.clone() for name, value in load_file(shard).items()}
        shard.unlink()
    save_file(merged, folder / "weights.safetensors")
    one, many = Checkpoint.open(folder), Checkpoint.open(micro[3])
    assert one.entries.keys() == many.entries.keys()
    assert torch.equal(one.read("norm.weight"), many.read("norm.weight"))


def test_float_weights_may_be_stored_in_either_width(damage, micro):
    damage.tensor("layers.0.hc_attn_fn", lambda x: x.to(torch.bfloat16))
    damage.tensor("norm.weight", lambda x: x.to(torch.float32))
    checkpoint = Checkpoint.open(damage.folder)
    assert checkpoint.read("layers.0.hc_attn_fn").dtype == torch.bfloat16
    original = Checkpoint.open(micro[3]).read("norm.weight")
    assert torch.equal(checkpoint.read("norm.weight"), original.float())


def test_the_image_tower_is_recognised_and_left(damage):
    extra = ("vision.norm.weight", "aligner.w1.bias", "image_start", "model.vision.x.weight")
    first = damage.shards[0]

    def add(tensors):
        if "embed.weight" in tensors:
            tensors |= {name: torch.zeros(3) for name in extra}

    damage.tensors(add)
    checkpoint = Checkpoint.open(damage.folder)
    assert checkpoint.unread.keys() == {name.removeprefix("model.") for name in extra}
    assert checkpoint.unread["image_start"].file == first
    assert checkpoint.nbytes["vision"] == 4 * 12
    with pytest.raises(KeyError, match="image_start"):
        checkpoint.read("image_start")


def test_unknown_names_are_refused_by_name(micro):
    checkpoint = Checkpoint.open(micro[3])
    for wrong in ("layers.9.attn_norm.weight", f"{EXPERT}.scale", "model.norm.weight"):
        with pytest.raises(KeyError, match=wrong.replace(".", r"\.")):
            checkpoint.read(wrong)
    with pytest.raises(KeyError, match="no such experts"):
        checkpoint.read_experts("layers.0.ffn.experts", "w4")


# -- files ----------------------------------------------------------------------------------------


def test_not_a_folder(tmp_path):
    refused(tmp_path / "nowhere", "nowhere", "not a folder")


def test_no_config(damage):
    (damage.folder / "config.json").unlink()
    refused(damage.folder, "config.json", "not found")


def test_a_truncated_shard(damage):
    shard = damage.shard_of("head.weight")
    shard.write_bytes(shard.read_bytes()[:-10])
    last = max(load_header(damage, shard).items(), key=lambda item: item[1]["data_offsets"][1])[0]
    refused(damage.folder, shard, "cut short", last, "download it again")


def load_header(damage, shard):
    header = {}
    intact = shard.read_bytes()
    damage.header(shard, header.update)
    shard.write_bytes(intact)
    return {name: value for name, value in header.items() if name != "__metadata__"}


@pytest.mark.parametrize("size", [0, 5, 40])
def test_a_shard_cut_inside_its_header(damage, size):
    shard = damage.shards[1]
    shard.write_bytes(shard.read_bytes()[:size])
    refused(damage.folder, shard, "download it again")


@pytest.mark.parametrize(
    "content,said",
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n", "git lfs pull"),
        (b"<!DOCTYPE html><html><body>404</body></html>", "HTML page"),
        (b"\n<html>", "HTML page"),
        (b"PK\x03\x04" + bytes(100), "not a safetensors file"),
    ],
)
def test_something_else_than_a_shard(damage, content, said):
    shard = damage.shards[0]
    shard.write_bytes(content)
    refused(damage.folder, shard, said)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors.index.json", "tokenizer.json"])
@pytest.mark.parametrize(
    "content,said",
    [(b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"), (b"<html>", "HTML page")],
)
def test_a_pointer_or_a_page_in_place_of_a_json_file(damage, file, content, said):
    (damage.folder / file).write_bytes(content)
    refused(damage.folder, damage.folder / file, said)


def test_a_missing_shard(damage):
    shard = damage.shard_of("head.weight")
    shard.unlink()
    refused(damage.folder, shard, "shard not found")


def test_no_index_for_several_shards(damage):
    damage.index.unlink()
    refused(damage.folder, f"{len(damage.shards)} *.safetensors files", "index")


def test_no_shards_at_all(damage):
    for shard in damage.shards:
        shard.unlink()
    damage.index.unlink()
    refused(damage.folder, "0 *.safetensors files")


def test_a_damaged_header(damage):
    shard = damage.shard_of("norm.weight")
    intact = shard.read_bytes()
    first = min(load_header(damage, shard).items(), key=lambda item: item[1]["data_offsets"])[0]
    cases = [
        (lambda h: h["norm.weight"].update(dtype="F7"), ("norm.weight", "'F7'")),
        (lambda h: h["norm.weight"].update(shape=[31]), ("norm.weight", "header is damaged")),
        (lambda h: h["norm.weight"].update(shape="wide"), ("not a safetensors file",)),
        (lambda h: h["norm.weight"].pop("data_offsets"), ("not a safetensors file",)),
        (lambda h: h.pop(first), ("leave a gap",)),
    ]
    for change, said in cases:
        shard.write_bytes(intact)
        damage.header(shard, change)
        refused(damage.folder, shard, *said)
    shard.write_bytes(intact + b"\0\0")
    refused(damage.folder, shard, "2 bytes behind its last tensor")


@given(st.binary(max_size=200), st.booleans())
def test_any_bytes_are_refused_with_their_file(tmp_path_factory, content, framed):
    file = tmp_path_factory.mktemp("bytes") / "x.safetensors"
    file.write_bytes((len(content).to_bytes(8, "little") if framed else b"") + content)
    with pytest.raises(CheckpointError, match="x.safetensors"):
        read_header(file)


# -- index ----------------------------------------------------------------------------------------


def test_a_tensor_in_the_wrong_shard(damage):
    index = json.loads(damage.index.read_text())
    other = next(s.name for s in damage.shards if s.name != index["weight_map"]["head.weight"])
    index["weight_map"]["head.weight"] = other
    damage.index.write_text(json.dumps(index))
    refused(damage.folder, "head.weight", other, "different downloads")


def test_a_tensor_that_the_index_does_not_list(damage):
    index = json.loads(damage.index.read_text())
    shard = index["weight_map"].pop("head.weight")
    damage.index.write_text(json.dumps(index))
    refused(damage.folder, shard, "head.weight", "does not list it")


def test_a_tensor_that_its_shard_lacks(damage):
    def drop(tensors):
        tensors.pop("norm.weight", None)

    shard = damage.shard_of("norm.weight")
    damage.tensors(drop, reindex=False)
    refused(damage.folder, shard, "lacks tensor norm.weight")


@pytest.mark.parametrize("weight_map", [None, {}, [], {"norm.weight": "../x.safetensors"}])
def test_a_wrong_index(damage, weight_map):
    damage.index.write_text(json.dumps({"weight_map": weight_map}))
    refused(damage.folder, damage.index)


def test_the_same_tensor_under_two_names(damage):
    def double(tensors):
        if "norm.weight" in tensors:
            tensors["model.norm.weight"] = tensors["norm.weight"].clone()

    damage.tensors(double)
    refused(damage.folder, "norm.weight", "model.norm.weight", "keep one")


# -- tensors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["norm.weight", f"{EXPERT}.weight", "mtp.0.confidence_head.proj.weight", f"{TABLE}.weight"],
)
def test_a_missing_tensor(damage, name):
    damage.tensor(name, lambda x: None)
    refused(damage.folder, damage.folder, name, "missing")


@pytest.mark.parametrize("name", [EXPERT, "layers.0.attn.wkv", TABLE, "mtp.0.main_proj"])
def test_a_missing_scale(damage, name):
    damage.tensor(f"{name}.scale", lambda x: None)
    refused(damage.folder, f"{name}.scale", f"the scale of {name}.weight")


@pytest.mark.parametrize(
    "name",
    ["layers.0.attn.q_head_norm.weight", "layers.4.attn_norm.weight", "hc_head_fn", "norm.scale"],
)
def test_an_unknown_tensor(damage, name):
    shard = damage.shard_of("embed.weight")

    def add(tensors):
        if "embed.weight" in tensors:
            tensors[name] = torch.zeros(2)

    damage.tensors(add)
    refused(damage.folder, shard, name, "unknown tensor")


@pytest.mark.parametrize(
    "name,change,expected",
    [
        ("norm.weight", lambda x: x.to(torch.int64), "BF16 or F32"),
        ("norm.weight", lambda x: x.to(torch.float16), "BF16 or F32"),
        ("layers.0.attn.attn_sink", lambda x: x.to(torch.float64), "BF16 or F32"),
        ("layers.0.attn.wkv.weight", lambda x: x.float(), "F8_E4M3"),
        ("layers.0.attn.wkv.weight", lambda x: x.view(torch.float8_e5m2), "F8_E4M3"),
        ("layers.0.attn.wkv.scale", lambda x: x.view(torch.uint8), "F8_E8M0"),
        ("layers.0.attn.wkv.scale", lambda x: x.float(), "F8_E8M0"),
        (f"{EXPERT}.weight", lambda x: x.view(torch.uint8), "I8"),
        (f"{EXPERT}.weight", lambda x: x.to(torch.bfloat16), "I8"),
        (f"{TABLE}.weight", lambda x: x.view(torch.int8), "F8_E4M3"),
    ],
)
def test_a_wrong_dtype(damage, name, change, expected):
    shard = damage.shard_of(name)
    damage.tensor(name, change)
    refused(damage.folder, shard, name, f"expected {expected}")


@pytest.mark.parametrize(
    "name,change",
    [
        ("norm.weight", lambda x: x[:-1].clone()),
        ("layers.0.attn.wkv.weight", lambda x: x.T.contiguous()[:, :3].clone()),
        (f"{EXPERT}.weight", lambda x: x[:, :-1].clone()),
        ("layers.0.hc_attn_scale", lambda x: x[None].clone()),
    ],
)
def test_a_wrong_shape(damage, name, change):
    shard = damage.shard_of(name)
    damage.tensor(name, change)
    refused(damage.folder, shard, name, "has shape", "expected")


def test_scales_of_other_blocks(damage):
    """Tiles of 128x128, and an expert in FP8 tiles where FP4 is described."""
    for name in ("layers.0.attn.wo_b", EXPERT):
        scale = f"{name}.scale"
        text_shard = damage.shard_of(scale)
        intact = text_shard.read_bytes()
        damage.tensor(scale, lambda x: x[:1, :1].clone())
        refused(damage.folder, text_shard, scale, f"a scale of {name}.weight covers a block of 32")
        text_shard.write_bytes(intact)


def test_an_expert_in_fp8(damage):
    """A bundle of mixed formats: one expert in FP8, the config says FP4."""
    wide = quantise(torch.ones(32, 32), "fp8")
    damage.tensor(f"{EXPERT}.weight", lambda x: wide.data.view(torch.float8_e4m3fn))
    damage.tensor(f"{EXPERT}.scale", lambda x: wide.scale.view(torch.float8_e8m0fnu))
    refused(damage.folder, f"{EXPERT}.weight", "F8_E4M3", "expected I8")


def test_quantised_tensors_without_a_quantization_config(damage):
    config = json.loads((damage.folder / "config.json").read_text())
    del config["quantization_config"]
    (damage.folder / "config.json").write_text(json.dumps(config))
    refused(damage.folder, ".scale", "no quantization_config")


def test_float_tensors_with_a_quantization_config(micro, tmp_path):
    from deepinfer.checkpoint.writer import write

    config, state, tokenizer, _ = micro
    folder = write(tmp_path / "plain", config, state, tokenizer=tokenizer, quantised=False)
    assert Checkpoint.open(folder).config.quantization is None
    shutil.copy(micro[3] / "config.json", folder / "config.json")
    refused(folder, ".scale", "missing")


# -- the n-gram memory ----------------------------------------------------------------------------


def test_table_rows_that_are_not_the_sum_of_the_primes(damage):
    name = f"{TABLE}.weight"
    shard = damage.shard_of(name)
    damage.tensor(name, lambda x: x[:-1].clone())
    damage.tensor(f"{TABLE}.scale", lambda x: x[:-1].clone())
    refused(damage.folder, shard, name, "sum of the hash's primes")


@pytest.mark.parametrize(
    "values",
    [{"engram_vocab_size": 54}, {"engram_n_heads": 1}, {"engram_num_embeddings": [1, 2]}],
)
def test_config_whose_primes_do_not_give_its_rows(damage, values):
    """The tables were made from 53 on, the first prime from 50 up; from 54 up they are others."""
    damage.config("text_config", **values)
    refused(damage.folder, "config.json", "engram_num_embeddings", "primes")


def test_no_tokenizer(damage):
    (damage.folder / "tokenizer.json").unlink()
    refused(damage.folder, "tokenizer.json", "named by the tokenizer")


def test_another_tokenizer(damage):
    """One entry's spelling is enough: it falls into the class of another."""
    file = damage.folder / "tokenizer.json"
    data = json.loads(file.read_text())
    vocab = data["model"]["vocab"]
    assert "Ġthe" in vocab
    vocab["ĠTHE"] = vocab.pop("}")
    file.write_text(json.dumps(data))
    refused(damage.folder, file, "classes of spelling", "engram_compressed_vocab_size")


def test_a_tokenizer_smaller_than_the_vocabulary(damage):
    file = damage.folder / "tokenizer.json"
    data = json.loads(file.read_text())
    data["added_tokens"] = data["added_tokens"][:-1]
    file.write_text(json.dumps(data))
    damage.config("text_config", engram_compressed_vocab_size=895)
    refused(damage.folder, file, "1023 tokens", "vocab_size 1024")


def test_a_tokenizer_that_can_not_be_parsed(damage):
    (damage.folder / "tokenizer.json").write_text("{}")
    refused(damage.folder, "tokenizer.json")


# -- values ---------------------------------------------------------------------------------------


def nan(x):
    x = x.clone()
    x.flatten()[-1] = torch.nan
    return x


def byte(value):
    def change(x):
        raw = x.clone().view(torch.uint8)
        raw.flatten()[-1] = value
        return raw.view(x.dtype)

    return change


@pytest.mark.parametrize(
    "stored,change,weight",
    [
        ("norm.weight", nan, "norm.weight"),
        ("layers.0.hc_attn_base", nan, "layers.0.hc_attn_base"),
        ("layers.0.attn.wkv.scale", byte(255), "layers.0.attn.wkv.weight"),
        ("layers.0.attn.wkv.weight", byte(127), "layers.0.attn.wkv.weight"),
        (f"{EXPERT}.scale", byte(255), f"{EXPERT}.weight"),
    ],
)
def test_values_that_are_not_finite(damage, stored, change, weight):
    shard = damage.shard_of(stored)
    damage.tensor(stored, change)
    checkpoint = Checkpoint.open(damage.folder)
    with pytest.raises(CheckpointError) as refusal:
        checkpoint.read(weight)
    assert str(shard) in str(refusal.value) and stored in str(refusal.value)


def test_a_damaged_expert_is_found_in_the_stack(damage):
    second = EXPERT.replace("experts.0", "experts.1")
    damage.tensor(f"{second}.scale", byte(255))
    checkpoint = Checkpoint.open(damage.folder)
    for dtype in (None, torch.float32):
        with pytest.raises(CheckpointError, match=rf"{second}\.scale .*255"):
            checkpoint.read_experts("layers.1.ffn.experts", "w1", dtype)
