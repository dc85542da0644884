"""Writing the official layout: config, tokenizer, shards and index, or nothing at all.

A checkpoint is written into a temporary folder beside its destination and renamed when it is
complete, so that a reader never sees half of one.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepinfer.checkpoint import names
from deepinfer.checkpoint.formats import quantise
from deepinfer.checkpoint.header import CheckpointError
from deepinfer.checkpoint.memory import check_state
from deepinfer.config import ModelConfig, QuantizationConfig

__all__ = ["write"]

SHARD_BYTES = 5_000_000_000  # shards are closed before they grow beyond this many payload bytes


def write(
    path: str | os.PathLike,
    config: ModelConfig,
    state: Mapping[str, Tensor],
    *,
    tokenizer: Any = None,
    quantised: bool | None = None,
    shard_bytes: int = SHARD_BYTES,
    overwrite: bool = False,
) -> Path:
    """Write `state` {official name: float tensor} of `config` as a checkpoint folder.

    quantised: FP8 and FP4 storage (True), BF16 (False), or as the config says (None). tokenizer: a
    `tokenizers.Tokenizer`, or None to write none. A weight larger than shard_bytes gets a shard of
    its own. Returns the folder. FileExistsError when it exists and is not empty (unless
    overwrite), CheckpointError when state and config do not fit each other.
    """
    path = Path(path)
    if quantised is not None:
        config = config.replace(quantization=QuantizationConfig() if quantised else None)
    check_state(config, state)
    if path.exists() and not overwrite and (not path.is_dir() or any(path.iterdir())):
        raise FileExistsError(f"{path} exists; choose another folder or pass overwrite=True")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        _write_files(temporary, config, state, tokenizer, shard_bytes)
        _put_in_place(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return path


def _put_in_place(temporary: Path, path: Path) -> None:
    """Rename a complete folder to its name; one that is replaced is gone only after that."""
    mask = os.umask(0)
    os.umask(mask)
    temporary.chmod(0o777 & ~mask)  # mkdtemp made it private, and safetensors its files
    for file in temporary.iterdir():
        file.chmod(0o666 & ~mask)
    if not path.exists():
        temporary.rename(path)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{path.name}-old-", dir=path.parent))
    path.rename(old / path.name)
    try:
        temporary.rename(path)
    except OSError:
        (old / path.name).rename(path)
        raise
    finally:
        shutil.rmtree(old, ignore_errors=True)


def _write_files(
    folder: Path, config: ModelConfig, state: Mapping[str, Tensor], tokenizer: Any, limit: int
) -> None:
    weights = names.weights(config)
    if not config.has_vision or "vision.norm.weight" not in state:
        weights = [weight for weight in weights if not names.is_unread(weight.name)]
    plan = _shards(weights, limit)
    total, weight_map = 0, {}
    for number, shard in enumerate(plan, 1):
        file = f"model-{number:05d}-of-{len(plan):05d}.safetensors"
        tensors = dict(pair for weight in shard for pair in _stored(weight, state[weight.name]))
        _save(tensors, folder / file)
        total += sum(tensor.nbytes for tensor in tensors.values())
        weight_map |= dict.fromkeys(tensors, file)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    _dump(folder / "model.safetensors.index.json", index)
    _dump(folder / "config.json", config.to_dict())
    if tokenizer is not None:
        tokenizer.save(str(folder / "tokenizer.json"))
        _dump(folder / "tokenizer_config.json", _tokenizer_config(config, tokenizer))


def _shards(weights: list[names.Weight], limit: int) -> list[list[names.Weight]]:
    """Weights in order, cut into runs of at most `limit` payload bytes."""
    shards: list[list[names.Weight]] = [[]]
    size = 0
    for weight in weights:
        nbytes = sum(stored.nbytes for stored in weight.stored())
        if shards[-1] and size + nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(weight)
        size += nbytes
    return shards


def _stored(weight: names.Weight, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The tensors of one weight as they go into the file."""
    value = value.detach().cpu()
    if weight.storage in ("bf16", "f32"):
        dtype = torch.bfloat16 if weight.storage == "bf16" else torch.float32
        stored = value.to(dtype)
        if not bool(torch.isfinite(stored).all()):
            raise CheckpointError(f"{weight.name} holds NaN or infinity; it was not written")
        # a clone, because safetensors refuses tensors that share memory
        yield weight.name, stored.contiguous().clone() if stored is value else stored.contiguous()
        return
    try:
        quantised = quantise(value, weight.storage)
    except ValueError as error:
        raise CheckpointError(f"{weight.name}: {error}; it was not written") from None
    data = torch.int8 if quantised.kind == "fp4" else torch.float8_e4m3fn
    yield weight.name, quantised.data.view(data)
    yield names.scale_name(weight.name), quantised.scale.view(torch.float8_e8m0fnu)


def _save(tensors: dict[str, Tensor], file: Path) -> None:
    from safetensors.torch import save_file

    save_file(tensors, str(file), metadata={"format": "pt"})
    with open(file, "rb") as written:
        os.fsync(written.fileno())  # the rename must not become visible before the bytes


def _dump(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _tokenizer_config(config: ModelConfig, tokenizer: Any) -> dict[str, Any]:
    named = {"bos_token": config.bos_token_id, "eos_token": config.eos_token_id}
    named["pad_token"] = config.pad_token_id
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{name: tokenizer.id_to_token(token) for name, token in named.items()},
        "add_bos_token": False,
        "model_max_length": config.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
    }
