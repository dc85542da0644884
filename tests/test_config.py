"""ModelConfig and EngineConfig: the released values, round trips, and every refusal."""

import copy
import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.config import EngineConfig, ModelConfig, RopeScaling, VisionConfig
from deepinfer.config.release import released_config
from deepinfer.model.rope import yarn_range

RELEASE = ModelConfig.v41_flash()
OPTIONAL = {"initializer_range", "use_cache", "model_type"}


def changed(section, **values):
    """The released nested config with some keys of a section replaced."""
    source = released_config()
    target = source if section is None else source[section]
    target.update(values)
    return source


# -- reading and writing --------------------------------------------------------------------------


def test_released_config_round_trips():
    assert RELEASE.to_dict() == released_config()
    assert ModelConfig.from_dict(RELEASE.to_dict()) == RELEASE


def test_file_and_folder(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(released_config()))
    assert ModelConfig.from_file(file) == ModelConfig.from_file(str(tmp_path)) == RELEASE


def test_harmless_keys_are_kept_and_do_not_count():
    source = changed(None, transformers_version="5.18.0", torch_dtype="bfloat16")
    source["text_config"] |= {"pad_token_id": 2, "dtype": "bfloat16"}
    source["text_config"]["rope_scaling"]["type"] = "yarn"
    source["text_config"]["index_k_source_layer_ids"] = [2, 8, 14, 20]
    source["quantization_config"]["fmt"] = "e4m3"
    config = ModelConfig.from_dict(source)
    assert config.to_dict() == source
    without = config.replace(index_k_source_layer_ids=None)
    assert without == RELEASE and hash(without) == hash(RELEASE) and not without.diff(RELEASE)


def test_a_replaced_field_wins_over_the_key_of_the_file():
    source = changed("text_config", use_cache=True, initializer_range=0.02, pad_token_id=2)
    config = ModelConfig.from_dict(source).replace(
        use_cache=False, initializer_range=0.5, pad_token_id=3, rope_scaling=None
    )
    again = ModelConfig.from_dict(config.to_dict())
    assert again == config and again.initializer_range == 0.5 and again.pad_token_id == 3


@given(
    st.integers(1, 6),
    st.sampled_from([1, 2, 4]),
    st.integers(0, 2),
    st.floats(1e-20, 1e-3),
    st.booleans(),
)
@settings(max_examples=30, deadline=None)
def test_any_valid_config_round_trips(encoder, groups, drafts, eps, tables):
    ratios = (0, *[2] * encoder, *[1] * encoder, *[0] * drafts)
    config = RELEASE.replace(
        num_hidden_layers=1 + 2 * encoder,
        compress_ratios=ratios,
        num_nextn_predict_layers=drafts,
        kv_source_layer_ids=(1, 1 + encoder),
        index_source_layer_ids=(1, 1 + encoder),
        candidate_source_layer_id=1 + encoder,
        dspark_target_layer_ids=(encoder,) if drafts else (),
        engram_layer_ids=(1,) if tables else (),
        engram_num_embeddings=(384006168,) if tables else (),
        rms_norm_eps=eps,
        o_groups=groups,
        vision=None,
    )
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert config.first_decoder_layer == 1 + encoder
    assert {config.kv_source(layer) for layer in config.decoder_layers} == {1 + encoder}


def test_without_memory_and_drafter_their_keys_may_be_absent():
    source = released_config()
    text = source["text_config"]
    text["num_nextn_predict_layers"], text["compress_ratios"] = 0, text["compress_ratios"][:40]
    for key in [key for key in text if key.startswith(("engram_", "dspark_"))]:
        del text[key]
    config = ModelConfig.from_dict(source)
    assert config.engram_layer_ids == () and config.max_draft == 0 and not list(config.draft_layers)


def test_import_needs_no_torch():
    code = "import sys; from deepinfer.config import ModelConfig; ModelConfig.v41_flash()"
    code += "; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr


# -- what follows from the keys -------------------------------------------------------------------


def test_roles_of_the_release():
    """The published role table: KV sources, reindexing layers, and who reads whom."""
    roles = RELEASE.roles
    assert [i for i, role in enumerate(roles) if role == "window"] == [0, 1]
    assert [i for i, role in enumerate(roles) if role == "full"] == [2, 8, 14, 20]
    assert [i for i, role in enumerate(roles) if role == "reindex"] == [24, 28, 32, 36]
    assert [i for i, role in enumerate(roles) if role == "draft"] == [40, 41, 42]
    assert RELEASE.first_decoder_layer == 20 and len(RELEASE.decoder_layers) == 20
    assert [RELEASE.kv_source(i) for i in (0, 7, 19, 39, 42)] == [None, 2, 14, 20, None]
    assert [RELEASE.index_source(i) for i in (1, 7, 23, 31, 39)] == [None, 2, 20, 28, 36]
    assert [i for i in range(43) if RELEASE.uses_candidates(i)] == [24, 28, 32, 36]
    assert RELEASE.layer_name(39) == "layers.39" and RELEASE.layer_name(41) == "mtp.1"
    assert (RELEASE.num_experts(39), RELEASE.top_k(39)) == (384, 6)
    assert (RELEASE.num_experts(40), RELEASE.top_k(40)) == (128, 3)
    assert (RELEASE.ring_length, RELEASE.engram_columns) == (134, 24)


def test_rope_of_the_release():
    plain, long = RELEASE.rope(0), RELEASE.rope(2)
    assert (plain.theta, plain.scaling) == (10000.0, None)
    assert (long.theta, long.scaling, long.dim) == (160000.0, RELEASE.rope_scaling, 64)
    assert RELEASE.rope(42) == plain
    scaled = long.scaling
    bounds = yarn_range(
        long.theta,
        long.dim,
        scaled.original_max_position_embeddings,
        scaled.beta_fast,
        scaled.beta_slow,
    )
    assert bounds == (15, 25)


@pytest.mark.parametrize("layer", [-1, 43])
def test_layers_are_range_checked(layer):
    with pytest.raises(IndexError, match="0..42"):
        RELEASE.ratio(layer)


def test_without_a_decoder_every_layer_is_encoder():
    config = RELEASE.replace(
        compress_ratios=(0, 0, *[2] * 38, 0, 0, 0),
        kv_source_layer_ids=(2,),
        index_source_layer_ids=(2, 24),
        candidate_source_layer_id=None,
    )
    assert config.first_decoder_layer == 40 and not list(config.decoder_layers)
    assert not config.uses_candidates(24)


def test_diff_names_what_differs():
    other = RELEASE.replace(index_topk=256)
    assert RELEASE.diff(other) == {"index_topk": (512, 256)} and not RELEASE.diff(RELEASE)
    with pytest.raises(TypeError, match="EngineConfig"):
        RELEASE.diff(EngineConfig())


# -- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [k for k in released_config()["text_config"] if k not in OPTIONAL])
def test_a_missing_text_key_is_named(key):
    source = released_config()
    del source["text_config"][key]
    if key in ("engram_layer_ids", "num_nextn_predict_layers"):
        # absent means none, and then what belongs to it does not fit
        with pytest.raises(ValueError, match="engram_num_embeddings|compress_ratios"):
            ModelConfig.from_dict(source)
        return
    with pytest.raises(ValueError, match=f"text_config.{key} is missing"):
        ModelConfig.from_dict(source)


@pytest.mark.parametrize(
    "section,key",
    [
        ("vision_config", "patch_size"),
        ("quantization_config", "scale_fmt"),
        (None, "image_token_id"),
        (None, "text_config"),
        (None, "model_type"),
        (None, "architectures"),
    ],
)
def test_a_missing_key_elsewhere_is_named(section, key):
    source = released_config()
    del (source if section is None else source[section])[key]
    with pytest.raises(ValueError, match=key):
        ModelConfig.from_dict(source)


@pytest.mark.parametrize("section", [None, "text_config", "vision_config", "quantization_config"])
def test_an_unknown_key_is_refused_by_name(section):
    with pytest.raises(ValueError, match="use_qnorm: unknown key with value True"):
        ModelConfig.from_dict(changed(section, use_qnorm=True))


def test_a_misspelt_key_gets_a_suggestion():
    with pytest.raises(ValueError, match="did you mean 'index_topk'"):
        ModelConfig.from_dict(changed("text_config", index_top_k=512))


WRONG = [
    ("vocab_size", "129280", "an integer"),
    ("hidden_size", True, "an integer"),
    ("hidden_size", 0, "1 or more"),
    ("rms_norm_eps", float("nan"), "a finite number"),
    ("rms_norm_eps", 0.0, "> 0"),
    ("swiglu_limit", None, "a finite number"),
    ("kv_source_layer_ids", [2, "8"], "a list of integers"),
    ("use_cache", 1, "true or false"),
    ("num_key_value_heads", 2, "1 "),
    ("hidden_act", "gelu", "'silu'"),
    ("scoring_func", "sigmoid", "'sqrtsoftplus'"),
    ("topk_method", "greedy", "'noaux_tc'"),
    ("norm_topk_prob", False, "True"),
    ("attention_bias", True, "False"),
    ("attention_dropout", 0.1, "0.0"),
    ("tie_word_embeddings", True, "False"),
    ("n_shared_experts", 2, "1 "),
    ("hc_shifted", False, "True"),
    ("gate_temp", 0.5, "1.0"),
    ("dspark_target_attn_input", False, "True"),
    ("o_groups", 7, "a divisor of num_attention_heads = 64"),
    ("qk_rope_head_dim", 63, "even number in 2..128"),
    ("qk_rope_head_dim", 256, "even number in 2..128"),
    ("head_dim", 520, "a multiple of 32"),
    ("index_head_dim", 100, "a multiple of 32"),
    ("num_experts_per_tok", 385, "1..384"),
    ("num_experts_per_tok", 0, "1..384"),
    ("dspark_num_experts_per_tok", 129, "1..128"),
    ("moe_intermediate_size", 2300, "a multiple of 32"),
    ("compress_ratios", [0, 0] + 18 * [2] + 20 * [1], "43 entries"),
    ("compress_ratios", [0, 0] + 18 * [2] + 20 * [1] + [0, 0, 1], "0 for the last 3"),
    ("compress_ratios", [0, 0] + 18 * [4] + 20 * [1] + 3 * [0], "0 .window only., 1 or 2"),
    ("kv_source_layer_ids", [2, 8, 14], "layer 20 of ratio 1 has layer 14 of ratio 2"),
    ("kv_source_layer_ids", [8, 14, 20], "layer 2 of ratio 2 has none"),
    ("kv_source_layer_ids", [0, 2, 8, 14, 20], "layer 0 has ratio 0"),
    ("kv_source_layer_ids", [8, 2, 14, 20], "ascending"),
    ("kv_source_layer_ids", [2, 8, 14, 20, 40], "0..39"),
    ("index_source_layer_ids", [2, 8, 14, 24], r"\[20\] of kv_source_layer_ids missing"),
    ("index_k_source_layer_ids", [2, 20], "equal to kv_source_layer_ids"),
    ("candidate_source_layer_id", 24, r"one of kv_source_layer_ids"),
    ("candidate_topk_blocks", 63, "enough blocks of candidate_block_size 8 to hold index_topk 512"),
    ("candidate_block_size", 0, "1 or more"),
    ("engram_num_embeddings", [384006168], "one table size for each"),
    ("engram_layer_ids", [14, 1], "ascending"),
    ("engram_max_ngram_size", 1, "2 or more"),
    ("engram_head_dim", 100, "a multiple of 32"),
    ("engram_compressed_vocab_size", 129281, "at most vocab_size"),
    ("engram_pad_token_id", 129280, "a token id in 0..129279"),
    ("dspark_noise_token_id", -1, "a token id in 0..129279"),
    ("dspark_target_layer_ids", [], "at least one layer id"),
    ("dspark_target_layer_ids", [38, 40], "0..39"),
    ("dspark_block_size", 0, "1 or more"),
]


@pytest.mark.parametrize("key,value,allowed", WRONG, ids=[f"{w[0]}={w[1]}"[:50] for w in WRONG])
def test_a_wrong_value_is_refused_with_key_value_and_what_is_allowed(key, value, allowed):
    with pytest.raises(ValueError, match=allowed) as refusal:
        ModelConfig.from_dict(changed("text_config", **{key: value}))
    found = list(value) if isinstance(value, list) else value
    text = str(refusal.value)
    assert f"text_config.{key}: found" in text
    assert repr(found) in text or repr(tuple(found) if isinstance(found, list) else found) in text


@pytest.mark.parametrize(
    "section,values,said",
    [
        (None, {"architectures": ["LlamaForCausalLM"]}, "architectures: found"),
        (None, {"architectures": 2 * ["DeepseekV41ForCausalLM"]}, "architectures: found"),
        (None, {"model_type": "deepseek_v4"}, "model_type: found 'deepseek_v4'"),
        (None, {"dtype": "float16"}, "dtype: found 'float16'"),
        (None, {"tie_word_embeddings": True}, "tie_word_embeddings: found True"),
        (None, {"image_token_id": 129280}, "image_token_id: found 129280"),
        (None, {"text_config": 3}, "text_config: found a int"),
        ("text_config", {"pad_token_id": 7}, "text_config.pad_token_id: found 7"),
        ("text_config", {"model_type": "deepseek_v4_text"}, "text_config.model_type"),
        ("quantization_config", {"expert_dtype": "fp8"}, "quantization_config.expert_dtype"),
        ("quantization_config", {"weight_block_size": [128, 128]}, "weight_block_size"),
        ("quantization_config", {"fmt": "e5m2"}, "quantization_config.fmt: found 'e5m2'"),
        ("vision_config", {"num_attention_heads": 3}, "vision_config.hidden_size: found 1024"),
        ("vision_config", {"num_hidden_layers": -1}, "vision_config.num_hidden_layers: found -1"),
    ],
)
def test_wrong_values_of_the_other_sections(section, values, said):
    with pytest.raises(ValueError) as refusal:
        ModelConfig.from_dict(changed(section, **values))
    assert said in str(refusal.value)


@pytest.mark.parametrize(
    "scaling,said",
    [
        ({"rope_type": "linear"}, "rope_type: found 'linear'"),
        ({"type": "linear"}, "rope_scaling.type: found 'linear'"),
        ({"factor": 0.5}, "factor: found 0.5"),
        ({"mscale": 1.0}, "mscale: unknown key"),
        ({"original_max_position_embeddings": None}, "max_position_embeddings: found None"),
    ],
)
def test_wrong_rope_scaling(scaling, said):
    source = released_config()
    source["text_config"]["rope_scaling"] |= scaling
    with pytest.raises(ValueError) as refusal:
        ModelConfig.from_dict(source)
    assert said in str(refusal.value)


@pytest.mark.parametrize(
    "content,said",
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "git lfs pull"),
        (b"<!DOCTYPE html><html></html>", "HTML page"),
        (b"{", "not valid JSON"),
        (b"[1]", "holds a list"),
        (b"\xff\xfe\x00", "not a text file"),
    ],
)
def test_a_file_that_is_no_config(tmp_path, content, said):
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=said) as refusal:
        ModelConfig.from_file(tmp_path)
    assert str(file) in str(refusal.value)


def test_no_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="config.json"):
        ModelConfig.from_file(tmp_path)


def test_a_wrong_nested_object_is_refused():
    with pytest.raises(ValueError, match="vision: found"):
        RELEASE.replace(vision=RopeScaling(factor=2.0, original_max_position_embeddings=64))
    assert isinstance(RELEASE.vision, VisionConfig) and RELEASE.has_vision
    assert not RELEASE.replace(vision=RELEASE.vision.replace(num_hidden_layers=0)).has_vision


# -- EngineConfig ---------------------------------------------------------------------------------


def test_engine_config_defaults_diff_and_json():
    base = EngineConfig()
    other = base.replace(fidelity=0, kernels={"linear": "reference"})
    assert base.diff(other) == {
        "fidelity": (1, 0),
        "kernels": (None, {"linear": "reference"}),
    }
    assert EngineConfig(**json.loads(other.to_json())) == other
    assert len({base, EngineConfig(), other}) == 2


def test_engine_config_takes_torch_dtypes_and_its_own_copy_of_kernels():
    torch = pytest.importorskip("torch")
    mapping = {"linear": "reference"}
    config = EngineConfig(dtype=torch.float64, device=torch.device("cpu"), kernels=mapping)
    mapping["linear"] = "other"
    assert (config.dtype, config.device) == ("float64", "cpu")
    assert config.kernels == {"linear": "reference"} and copy.copy(config) == config


@pytest.mark.parametrize(
    "values,said",
    [
        ({"fidelity": 3}, "fidelity: found 3"),
        ({"dtype": "float16"}, "dtype: found 'float16'"),
        ({"max_num_seqs": 0}, "max_num_seqs: found 0"),
        ({"page_size": 1.5}, "page_size: found 1.5"),
        ({"num_pages": True}, "num_pages: found True"),
        ({"seed": -1}, "seed: found -1"),
        ({"seed": 2**64}, "seed: found"),
        ({"prefix_cache": None}, "prefix_cache: found None"),
        ({"kernels": {"linear": 3}}, "kernels: found"),
        ({"kernels": ["linear"]}, "kernels: found"),
    ],
)
def test_engine_config_refusals(values, said):
    with pytest.raises(ValueError) as refusal:
        EngineConfig(**values)
    assert said in str(refusal.value) and "allowed" in str(refusal.value)
