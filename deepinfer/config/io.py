"""Reading and writing the nested official config.json as a ModelConfig."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepinfer.config.model import ModelConfig, QuantizationConfig, RopeScaling, VisionConfig
from deepinfer.config.wording import shown

__all__ = ["model_from_dict", "model_to_dict", "parse_json", "read_json"]

ARCHITECTURES = ["DeepseekV41ForCausalLM"]
MODEL_TYPES = {
    "": "deepseek_v41",
    "text_config": "deepseek_v41_text",
    "vision_config": "deepseek_v41_vision",
}

_TOP_FIELDS = ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id", "dtype")
# read with a default; written only where they differ from it
_OPTIONAL = {"initializer_range", "use_cache", "index_k_source_layer_ids", "use_fp4_sparse_kv"}
_OPTIONAL |= {"hc_shifted", "dspark_target_attn_input", "gate_temp"}
_NOT_TEXT = {*_TOP_FIELDS, "vision", "quantization", "extra"}
_GROUPS = {"engram_layer_ids": "engram_", "num_nextn_predict_layers": "dspark_"}
# written by Hugging Face tools and read by nobody who runs the model
_HARMLESS = {"transformers_version", "torch_dtype", "auto_map", "_name_or_path", "model_type"}
_HARMLESS |= {"architectures", "return_dict", "output_attentions", "output_hidden_states"}
# repeated inside text_config by some writers; must say what the top level says
_REPEATED = {"bos_token_id", "eos_token_id", "pad_token_id", "dtype"}
_DEEPEST = 64  # levels of objects and lists in a file; no file of a checkpoint has ten
_TOO_DEEP = f"more than {_DEEPEST} levels deep; download it again"


def read_json(path: Path) -> dict[str, Any]:
    """One JSON object from a file; ValueError says what the file is instead."""
    if path.exists() and not path.is_file():  # a folder fails to open, a pipe would wait for ever
        kind = "a folder" if path.is_dir() else "no regular file"
        raise ValueError(f"is {kind}; expected a JSON file")
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{path}: not found; a checkpoint folder holds config.json, tokenizer.json and "
            "*.safetensors files"
        ) from None
    except UnicodeDecodeError:
        raise ValueError("is not a text file; download it again") from None
    start = text.lstrip()[:64].lower()
    if start.startswith("version https://git-lfs"):
        raise ValueError("is a Git LFS pointer, not the file; fetch it with `git lfs pull`")
    if start.startswith("<"):
        raise ValueError("is an HTML page, not JSON; the download was answered by a web page")
    value = parse_json(text)
    if not isinstance(value, dict):
        raise ValueError(f"holds a {type(value).__name__}, not an object of keys")
    return value


def parse_json(text: str) -> Any:
    """Any JSON value; ValueError for text that is none, nested too deeply, or repeats a key.

    Readers differ in which value of a repeated key they take, so none is taken.
    """
    try:
        value = json.loads(text, object_pairs_hook=_unique_keys)
        _check_depth(value)
    except json.JSONDecodeError as error:
        raise ValueError(f"is not valid JSON ({error}); download it again") from None
    except RecursionError:
        raise ValueError(f"nests objects or lists {_TOO_DEEP}") from None
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        key = next(key for key, count in counts.items() if count > 1)
        raise ValueError(f"repeats the key {shown(key)}, so its value is unclear; keep one of them")
    return unique


def _check_depth(value: Any) -> None:
    """ValueError where what reads, compares or writes the value could run out of stack."""
    level, depth = [value], 0
    while level := [part for part in level if isinstance(part, (dict, list))]:
        depth += 1
        if depth > _DEEPEST:
            raise ValueError(f"nests objects or lists {_TOO_DEEP}")
        parts = (whole.values() if isinstance(whole, dict) else whole for whole in level)
        level = list(itertools.chain.from_iterable(parts))


def model_from_dict(cls: type[ModelConfig], source: Mapping[str, Any]) -> ModelConfig:
    """See ModelConfig.from_dict."""
    text = _section(source, "text_config")
    if text is None:
        raise ValueError(
            "text_config is missing; expected the nested official config.json with text_config, "
            f"vision_config and quantization_config; found the keys {sorted(source)[:12]}"
        )
    vision = _section(source, "vision_config")
    quantization = _section(source, "quantization_config")
    _check_identity(source, text, vision)
    values = _top_values(source, text)
    values |= _text_values(text)
    if vision is not None:
        values["vision"] = _nested(VisionConfig, vision, "vision_config")
    if quantization is not None:
        fmt = quantization.get("fmt", "e4m3")
        if fmt != "e4m3":
            raise ValueError(f"quantization_config.fmt: found {fmt!r}; allowed: 'e4m3'")
        values["quantization"] = _nested(QuantizationConfig, quantization, "quantization_config")
    config = cls(**values)
    return config.replace(extra=_leftover(source, model_to_dict(config)))


def _section(source: Mapping, key: str) -> Mapping | None:
    value = source.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"{key}: found a {type(value).__name__}; allowed: an object of keys")
    return value


def _check_identity(source: Mapping, text: Mapping, vision: Mapping | None) -> None:
    if source.get("architectures") not in (ARCHITECTURES, tuple(ARCHITECTURES)):
        found = shown(source.get("architectures"))
        raise ValueError(f"architectures: found {found}; allowed: {ARCHITECTURES}")
    for section, where in (("", source), ("text_config", text), ("vision_config", vision)):
        expected = MODEL_TYPES[section]
        found = expected if where is None else where.get("model_type", expected)
        if found != expected or (section == "" and "model_type" not in source):
            found = source.get("model_type") if section == "" else found
            name = f"{section}.model_type" if section else "model_type"
            raise ValueError(f"{name}: found {shown(found)}; allowed: {expected!r}")


def _top_values(source: Mapping, text: Mapping) -> dict[str, Any]:
    sections = {"text_config", "vision_config", "quantization_config", "tie_word_embeddings"}
    known = {*_TOP_FIELDS, *sections}
    _refuse_unknown(source, known, "")
    if source.get("tie_word_embeddings", False) is not False:
        found = source["tie_word_embeddings"]
        raise ValueError(f"tie_word_embeddings: found {shown(found)}; allowed: false")
    missing = [key for key in _TOP_FIELDS if key not in source]
    if missing:
        raise ValueError(f"{missing[0]} is missing from the top level of the config")
    for key in _REPEATED & text.keys():
        if text[key] != source[key]:
            raise ValueError(
                f"text_config.{key}: found {shown(text[key])}; allowed: {shown(source[key])}, "
                f"the value of {key} at the top level"
            )
    return {key: source[key] for key in _TOP_FIELDS}


def _text_values(text: Mapping) -> dict[str, Any]:
    names = [f.name for f in dataclasses.fields(ModelConfig) if f.name not in _NOT_TEXT]
    _refuse_unknown(text, {*names, *_REPEATED}, "text_config")
    for name in names:
        if name in text or name in _OPTIONAL:
            continue
        switch = next((s for s, group in _GROUPS.items() if name.startswith(group)), None)
        if name in _GROUPS or (switch and not text.get(switch)):
            continue  # no Engram, or no drafter
        raise ValueError(f"text_config.{name} is missing")
    values = {name: text[name] for name in names if name in text}
    scaling = values.get("rope_scaling")
    if isinstance(scaling, Mapping):
        scaling = dict(scaling)
        kind = scaling.pop("type", scaling.get("rope_type"))  # older spelling of rope_type
        if scaling.setdefault("rope_type", kind) != kind:
            raise ValueError(
                f"text_config.rope_scaling.type: found {shown(kind)}; allowed: "
                f"{scaling['rope_type']!r}, the value of rope_type"
            )
        values["rope_scaling"] = _nested(RopeScaling, scaling, "text_config.rope_scaling")
    return values


def _nested(cls, source: Mapping, section: str):
    names = [f.name for f in dataclasses.fields(cls)]
    extra = {"fmt"} if cls is QuantizationConfig else set()
    _refuse_unknown(source, {*names, *extra}, section)
    required = [f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING]
    if cls is QuantizationConfig:
        required = names
    for name in required:
        if name not in source:
            raise ValueError(f"{section}.{name} is missing")
    return cls(**{name: source[name] for name in names if name in source})


def _refuse_unknown(source: Mapping, known: set[str], section: str) -> None:
    for key in source:
        if key in known or key in _HARMLESS:
            continue
        close = difflib.get_close_matches(str(key), known, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        name = f"{section}.{key}" if section else key
        raise ValueError(
            f"{name}: unknown key with value {shown(source[key])}{hint}; every key may change what the "
            "model computes, so an unknown one is not ignored: remove it if it changes nothing"
        )


# -- writing ----------------------------------------------------------------------------------


def model_to_dict(config: ModelConfig) -> dict[str, Any]:
    """See ModelConfig.to_dict."""
    text: dict[str, Any] = {"model_type": MODEL_TYPES["text_config"]}
    for field in dataclasses.fields(ModelConfig):
        value = getattr(config, field.name)
        is_default = field.name in _OPTIONAL and value == field.default
        if field.name not in _NOT_TEXT and not is_default:
            text[field.name] = _plain(value)
    result: dict[str, Any] = {"architectures": list(ARCHITECTURES), "model_type": MODEL_TYPES[""]}
    result |= {name: getattr(config, name) for name in _TOP_FIELDS}
    result |= {"tie_word_embeddings": False, "text_config": text}
    if config.vision is not None:
        vision = {"model_type": MODEL_TYPES["vision_config"]}
        result["vision_config"] = vision | _plain(config.vision)
    if config.quantization is not None:
        result["quantization_config"] = _plain(config.quantization)
    for path, value in config.extra:
        *sections, key = path.split("/")
        target = result
        for section in sections:
            target = target.get(section) or {}
        # a repeated key follows the field, which may have been replaced since it was read
        repeated = sections == ["text_config"] and key in _REPEATED
        target.setdefault(key, getattr(config, key) if repeated else json.loads(value))
    return result


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return list(value) if isinstance(value, tuple) else value


def _leftover(source: Mapping, written: Mapping, path: str = "") -> tuple[tuple[str, str], ...]:
    """Keys of the source that writing would lose: (path, JSON value)."""
    found: list[tuple[str, str]] = []
    for key, value in source.items():
        if key not in written:
            found.append((path + key, json.dumps(value)))
        elif isinstance(value, Mapping):
            found.extend(_leftover(value, written[key], f"{path}{key}/"))
    return tuple(found)
