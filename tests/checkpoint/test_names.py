"""Official names: the published counts, the layout of a checkpoint that others made, placement."""

import gzip
from collections import Counter
from pathlib import Path

import pytest

from deepinfer.checkpoint import names
from deepinfer.config import ModelConfig
from deepinfer.config.release import released_config

LAYOUT = Path(__file__).parent / "data" / "stored_layout.txt.gz"
CONFIG = Path(__file__).parents[1] / "data" / "oracle" / "config.json"


@pytest.fixture(scope="module")
def release():
    return names.weights(ModelConfig.v41_flash())


def test_released_counts(release):
    """Published: 96,085 tensors, 510,286,023,000 bytes, 763,205,315,794 parameters."""
    stored = [tensor for weight in release for tensor in weight.stored()]
    assert len(stored) == len({tensor.name for tensor in stored}) == 96_085
    assert sum(tensor.nbytes for tensor in stored) == 510_286_023_000
    assert sum(weight.parameters for weight in release) == 763_205_315_794


def test_released_counts_by_component(release):
    """Published parts: 266 tensors of the image tower, 798 per draft block and 7 beside them."""
    count = Counter()
    for weight in release:
        count[weight.component] += len(weight.stored())
    assert count["vision"] == 266 and count["drafter"] == 3 * 798 + 7 and count["engram"] == 12
    assert count["experts"] == 40 * 384 * 3 * 2
    block = Counter(w.layer for w in release for _ in w.stored() if w.component != "engram")
    assert block[0] == block[3] == 2334 and block[41] == 798
    drafter = sum(w.parameters for w in release if w.component == "drafter")
    assert round(drafter / 1e9, 2) == 14.23


def test_released_bytes_with_experts_in_fp8(release):
    """A public repack with 32x32 FP8 experts has 772,004,202,840 bytes."""
    total = 0
    for weight in release:
        if weight.storage == "fp4":
            tile = names.Weight(weight.name, weight.shape, "fp8", weight.component)
            total += sum(tensor.nbytes for tensor in tile.stored())
        else:
            total += sum(tensor.nbytes for tensor in weight.stored())
    assert total == 772_004_202_840


def test_layout_of_a_checkpoint_that_others_made():
    config = ModelConfig.from_file(CONFIG)
    quantised = config.replace(quantization=ModelConfig.v41_flash().quantization)
    mine = [f"{s.name} {s.dtype} {'x'.join(map(str, s.shape))}" for s in names.tensors(quantised)]
    theirs = gzip.decompress(LAYOUT.read_bytes()).decode().split("\n")
    assert sorted(mine) == [line for line in theirs if line]


def test_without_quantisation_there_are_no_scales():
    source = released_config()
    del source["quantization_config"]
    plain = names.tensors(ModelConfig.from_dict(source))
    assert {tensor.dtype for tensor in plain} == {"BF16", "F32"}
    assert not [tensor.name for tensor in plain if tensor.name.endswith(".scale")]
    full = names.tensors(ModelConfig.v41_flash())
    assert {t.name for t in plain} == {t.name for t in full if not t.name.endswith(".scale")}


def test_what_stays_float32(release):
    wide = {w.name.split(".", 2)[-1] for w in release if w.wide}
    sites = {f"hc_{site}_{part}" for site in ("attn", "ffn") for part in ("fn", "base", "scale")}
    assert wide == sites | {"attn.attn_sink", "ffn.gate.bias", "ffn.gate.bias_vl"}


def test_placement(release):
    places = Counter((w.placement, w.component) for w in release)
    assert places["experts", "experts"] == 40 * 384 * 3
    assert places["experts", "drafter"] == 3 * 128 * 3
    assert places["table", "engram"] == 2
    assert not [key for key in places if key[0] == "replicated" and key[1] == "experts"]


def test_names_of_scales_stacks_and_experts():
    assert names.scale_name("layers.0.attn.wkv.weight") == "layers.0.attn.wkv.scale"
    assert names.stacked_name("mtp.1.ffn.experts.0.w3.weight") == ("mtp.1.ffn.experts.w3", 0)
    assert names.stacked_name("layers.0.ffn.shared_experts.w3.weight") is None
    known = {f"a.experts.{e}.w1.weight" for e in range(12)}
    assert names.expert_names(known, "a.experts", "w1")[11] == "a.experts.11.w1.weight"
    assert names.expert_names(known, "a.experts", "w1", [3]) == ["a.experts.3.w1.weight"]
    for wrong in (("b.experts", "w1", None), ("a.experts", "w1", [12]), ("a.experts", "w1", [])):
        with pytest.raises(KeyError, match="no such experts"):
            names.expert_names(known, *wrong)
