"""Reading a checkpoint folder in the official layout: everything is checked before it is used.

`Checkpoint.open` reads config, tokenizer, index and the headers of all shards, and refuses what
does not fit: no payload byte has been read by then. `read` maps a tensor from its file when asked.
"""

from __future__ import annotations

import logging
import os
import reprlib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepinfer.checkpoint import names
from deepinfer.checkpoint.generation import check_generation
from deepinfer.checkpoint.header import CheckpointError, Entry, read_header
from deepinfer.checkpoint.names import Stored, Weight, scale_name
from deepinfer.checkpoint.tokenizer import read_tokenizer
from deepinfer.config import ModelConfig
from deepinfer.config.io import read_json
from deepinfer.config.wording import printable
from deepinfer.kernels.quantised import Quantised
from deepinfer.model import engram_hash

__all__ = ["Checkpoint", "CheckpointError"]

INDEX = "model.safetensors.index.json"
_FLOATS = ("BF16", "F32")  # either is read for a float weight; both widen exactly
_KINDS = {"fp8": "fp8", "table": "fp8", "fp4": "fp4"}
_HEADER, _A_TENSOR = 1 << 20, 512  # bytes of a header: what it may hold beside tensors, and of one
_AT_ONCE = 1 << 22  # parameters of experts widened in one go: small ones are many calls, one by one


class Checkpoint:
    """An opened checkpoint.

    config: ModelConfig; path: its folder; tokenizer_path: its tokenizer.json or None; tokenizer:
    what that file holds; entries: {name: Entry} of the tensors that are read; unread: those of the
    image tower; weights: {name: Weight}; token_map: "v" int64 classes for the n-gram memory, or
    None without one.
    """

    def __init__(
        self,
        path: Path,
        config: ModelConfig,
        entries: dict[str, Entry],
        unread: dict[str, Entry],
        token_map: Tensor | None,
        tokenizer: Any = None,
    ):
        self.path = path
        self.config = config
        self.entries = entries
        self.unread = unread
        self.token_map = token_map
        self.tokenizer = tokenizer
        self.weights = {w.name: w for w in names.weights(config) if not names.is_unread(w.name)}
        files = {entry.file for entry in (*entries.values(), *unread.values())}
        self._sizes = {file: file.stat().st_size for file in files}
        self._open_files: dict[Path, Any] = {}

    @classmethod
    def open(cls, path: str | os.PathLike) -> Checkpoint:
        """Open and check a folder. CheckpointError names file, tensor and remedy."""
        path = Path(path)
        if not path.is_dir():
            raise CheckpointError(
                f"{path}: not a folder; a checkpoint is a folder with config.json, tokenizer.json "
                "and *.safetensors files"
            )
        try:
            config = ModelConfig.from_file(path)
            engram_hash.check_rows(config)
        except (ValueError, OSError) as error:
            raise CheckpointError(_with_file(error, path / "config.json")) from None
        most = _HEADER + _A_TENSOR * _tensor_count(config)
        found = _entries(path, most)
        entries = {name: entry for name, entry in found.items() if not names.is_unread(name)}
        _check_against(config, entries, path)
        unread = {name: entry for name, entry in found.items() if name not in entries}
        file = path / "tokenizer.json"
        tokenizer = read_tokenizer(file) if os.path.lexists(file) else None
        check_generation(path, config, tokenizer)
        classes = _token_map(config, path, tokenizer)
        return cls(path, config, entries, unread, classes, tokenizer)

    @property
    def tokenizer_path(self) -> Path | None:
        """The folder's tokenizer.json, None when it has none."""
        file = self.path / "tokenizer.json"
        return file if file.is_file() else None

    @property
    def nbytes(self) -> dict[str, int]:
        """Payload bytes on disk by component."""
        total: Counter[str] = Counter()
        for weight in self.weights.values():
            for stored in weight.stored():
                total[weight.component] += self.entries[stored.name].nbytes
        if self.unread:
            total["vision"] += sum(entry.nbytes for entry in self.unread.values())
        return dict(total)

    # -- payload -----------------------------------------------------------------------------

    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor | Quantised:
        """One weight by its official name (without `model.`).

        dtype None: as stored, a float tensor or a Quantised; otherwise a tensor of that dtype. The
        data is mapped from the file, not copied, where no conversion is needed. KeyError for an
        unknown name, CheckpointError for values that are not finite.
        """
        weight = self._weight(name)
        if weight.storage not in _KINDS:
            value = self._tensor(name)
            if not bool(torch.isfinite(value).all()):
                raise self._damaged(name, "holds NaN or infinity")
            return value if dtype is None else value.to(dtype)
        value = self._quantised(weight, self._tensor(name), self._tensor(scale_name(name)))
        return value if dtype is None else value.dequantise(dtype)

    def read_experts(
        self,
        prefix: str,
        matrix: str,
        dtype: torch.dtype | None = None,
        experts: Iterable[int] | None = None,
    ) -> Tensor | Quantised:
        """The routed experts' matrices of a layer, stacked "e n k".

        prefix: `layers.3.ffn.experts`; matrix: `w1`, `w2` or `w3`; experts: their ids (all).
        """
        parts = names.expert_names(self.weights, prefix, matrix, experts)
        first = self._weight(parts[0])
        if first.storage in _KINDS and dtype is None:
            return self._codes(parts)
        stacked = torch.empty(len(parts), *first.shape, dtype=dtype or self.read(parts[0]).dtype)
        many = max(1, _AT_ONCE // first.parameters) if first.storage in _KINDS else 1
        for start in range(0, len(parts), many):
            group = parts[start : start + many]
            if len(group) > 1:
                stacked[start : start + many] = self._codes(group).dequantise(stacked.dtype)
            else:
                stacked[start] = self.read(group[0], stacked.dtype)
        return stacked

    def _codes(self, parts: list[str]) -> Quantised:
        """Matrices of one shape, stacked as they are stored."""
        data = torch.stack([self._tensor(part) for part in parts])
        scales = [self._tensor(scale_name(part)).view(torch.uint8) for part in parts]
        try:
            return self._quantised(self._weight(parts[0]), data, torch.stack(scales))
        except CheckpointError:
            for part in parts:  # which of them it is
                self.read(part)
            raise

    def _quantised(self, weight: Weight, data: Tensor, scale: Tensor) -> Quantised:
        kind = _KINDS[weight.storage]
        # a table is only looked into row by row: scanning 98 GB here would read it all
        if weight.storage == "fp8" and bool(((data.view(torch.uint8) & 127) == 127).any()):
            raise self._damaged(weight.name, "holds E4M3 codes that are NaN")
        try:
            return Quantised(data, scale, kind)
        except ValueError as error:
            raise self._damaged(scale_name(weight.name), str(error)) from None

    def _damaged(self, name: str, what: str) -> CheckpointError:
        file = self.entries[name].file
        return CheckpointError(f"{file}: tensor {name} {what}; download the file again")

    def _weight(self, name: str) -> Weight:
        if name not in self.weights:
            raise KeyError(f"{name}: the checkpoint at {self.path} has no weight of this name")
        return self.weights[name]

    def _tensor(self, name: str) -> Tensor:
        entry = self.entries[name]
        self._check_size(entry.file)
        try:
            if entry.file not in self._open_files:
                from safetensors import safe_open

                self._open_files[entry.file] = safe_open(str(entry.file), "pt")
            return self._open_files[entry.file].get_tensor(entry.stored_name)
        except Exception as error:  # SafetensorError, OSError: the file is another one by now
            raise self._damaged(name, f"can't be read any more ({error})") from None

    def _check_size(self, file: Path) -> None:
        """A mapped file that was cut short would end the process when it is read."""
        expected = self._sizes[file]
        try:
            found = f"{size} bytes" if (size := file.stat().st_size) != expected else None
        except OSError as error:
            found = f"it can't be read ({error.strerror})"
        if found is not None:
            raise CheckpointError(
                f"{file}: was changed after it was opened: expected {expected} bytes, found "
                f"{found}; download it again and open the checkpoint anew"
            )

    def __repr__(self) -> str:
        size = sum(self.nbytes.values())
        return f"Checkpoint({str(self.path)!r}, {len(self.entries)} tensors, {size:,} bytes)"


# -- checks by header -----------------------------------------------------------------------------


def _with_file(error: Exception, file: Path) -> str:
    text = str(error)
    return text if text.startswith(str(file)) else f"{file}: {text}"


def _tensor_count(config: ModelConfig) -> int:
    """At least as many tensors as the config describes, without listing them."""
    layers, drafts = config.num_layers, config.num_nextn_predict_layers
    experts = layers * config.n_routed_experts + drafts * config.dspark_n_routed_experts
    vision = config.vision.num_hidden_layers if config.vision is not None else 0
    return 6 * experts + 100 * (layers + drafts) + 20 * vision + 100


def _entries(path: Path, most: int) -> dict[str, Entry]:
    """Every tensor of the folder by its name, checked against the index where there is one."""
    index = path / INDEX
    if os.path.lexists(index):  # what stands there must be an index: it is never passed over
        return _indexed(path, index, most)
    shards = sorted(path.glob("*.safetensors"))
    if len(shards) != 1:
        raise CheckpointError(
            f"{path}: has {len(shards)} *.safetensors files and no {INDEX}; without an index "
            "exactly one file is expected: download the index"
        )
    return _unique(read_header(shards[0], most), {})


def _indexed(path: Path, index: Path, most: int) -> dict[str, Entry]:
    try:
        content = read_json(index)
    except (ValueError, OSError) as error:
        raise CheckpointError(_with_file(error, index)) from None
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: has no weight_map of tensor names to files")
    for name, shard in weight_map.items():
        if not _plain_name(shard):
            raise CheckpointError(
                f"{index}: places tensor {name} in {reprlib.repr(shard)}; expected the plain name "
                "of a file in the same folder: download the index again"
            )
    shards = sorted(set(weight_map.values()))
    found: dict[str, Entry] = {}
    for shard in shards:
        for entry in read_header(path / shard, most):
            listed = weight_map.get(entry.stored_name)
            if listed != shard:
                place = "does not list it" if listed is None else f"places it in {listed}"
                raise CheckpointError(
                    f"{entry.file}: holds tensor {entry.stored_name}, but {INDEX} {place}; shards "
                    "and index are of different downloads: fetch them together"
                )
            _unique([entry], found)
    held = {entry.stored_name for entry in found.values()}
    for name, shard in weight_map.items():
        if name not in held:
            raise CheckpointError(
                f"{path / shard}: lacks tensor {name}, which {INDEX} places in it; shards and "
                "index are of different downloads: fetch them together"
            )
    _warn_of_leftovers(path, content.get("metadata"), found)
    return found


def _plain_name(shard: Any) -> bool:
    """Whether it names a file inside a folder on every system; 255 bytes is the longest name."""
    if not isinstance(shard, str) or shard in ("", ".", "..") or set(shard) & set("/\\\0"):
        return False
    return len(shard.encode("utf-8", "replace")) <= 255 and shard.isprintable()


def _warn_of_leftovers(path: Path, metadata: Any, found: dict[str, Entry]) -> None:
    """Say what an index leaves unclear without a doubt about any tensor; other tools write such."""
    log = logging.getLogger("deepinfer")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    held = sum(entry.nbytes for entry in found.values())
    if total is not None and total != held:
        log.warning(
            "%s: metadata.total_size is %s, the shards hold %d bytes of tensors",
            printable(str(path / INDEX)),
            reprlib.repr(total),
            held,
        )
    used = {entry.file.name for entry in found.values()}
    stray = sorted(file.name for file in path.glob("*.safetensors") if file.name not in used)
    if stray:
        log.warning(
            "%s: not read, because %s does not name them: %s",
            printable(str(path)),
            INDEX,
            printable(", ".join(stray)),
        )


def _unique(entries: list[Entry], found: dict[str, Entry]) -> dict[str, Entry]:
    for entry in entries:
        other = found.setdefault(entry.name, entry)
        if other is not entry:
            raise CheckpointError(
                f"{entry.file}: tensor {entry.stored_name} is also stored as {other.stored_name} "
                f"in {other.file.name}; keep one of them"
            )
    return found


def _check_against(config: ModelConfig, entries: dict[str, Entry], path: Path) -> None:
    """Names, dtypes and shapes against the config; the first difference is refused."""
    expected = {s.name: s for s in names.tensors(config) if not names.is_unread(s.name)}
    unknown = [entry for name, entry in entries.items() if name not in expected]
    if unknown:
        raise CheckpointError(_unknown_text(unknown, config))
    missing = [stored for name, stored in expected.items() if name not in entries]
    if missing:
        raise CheckpointError(_missing_text(missing, path))
    for name, stored in expected.items():
        _check_entry(entries[name], stored, config)


def _unknown_text(unknown: list[Entry], config: ModelConfig) -> str:
    entry = unknown[0]
    more = f" (and {len(unknown) - 1} more)" if len(unknown) > 1 else ""
    reason = "config.json describes no such tensor"
    if entry.name.endswith(".scale") and config.quantization is None:
        reason = "config.json has no quantization_config, so nothing has a scale"
    return (
        f"{entry.file}: unknown tensor {entry.stored_name}{more}: {reason}; nothing is ignored, "
        "so use the config.json that came with these files"
    )


def _missing_text(missing: list[Stored], path: Path) -> str:
    first = missing[0]
    more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
    scale = f", the scale of {first.weight}" if first.name != first.weight else ""
    return (
        f"{path}: tensor {first.name}{scale} is missing{more}; the model would run with a hole: "
        "download the checkpoint again, or use the config.json that came with it"
    )


def _check_entry(entry: Entry, stored: Stored, config: ModelConfig) -> None:
    allowed = _FLOATS if stored.dtype in _FLOATS else (stored.dtype,)
    where = f"{entry.file}: tensor {entry.stored_name}"
    if entry.dtype not in allowed:
        quantised = "has" if config.quantization else "has no"
        raise CheckpointError(
            f"{where} has dtype {entry.dtype}; expected {' or '.join(allowed)} (config.json "
            f"{quantised} quantization_config); convert it, or use its own config.json"
        )
    if entry.shape == stored.shape:
        return
    hint = "use the config.json that came with it"
    if stored.dtype == "F8_E8M0":
        hint = f"a scale of {stored.weight} covers a block of {names.BLOCK}; others are not read"
    elif ".engram.embed." in entry.name:
        hint = "its rows must be the sum of the hash's primes, or it answers for other n-grams"
    raise CheckpointError(
        f"{where} has shape {list(entry.shape)}; expected {list(stored.shape)}; {hint}"
    )


def _token_map(config: ModelConfig, path: Path, tokenizer: Any) -> Tensor | None:
    """The classes of the tokenizer's tokens, checked against the config."""
    if not config.engram_layer_ids:
        return None
    file = path / "tokenizer.json"
    if tokenizer is None:
        raise CheckpointError(
            f"{file}: not found; the n-gram memory's rows are named by the tokenizer, so the "
            "model can't be used without its own tokenizer.json"
        )
    try:
        classes = engram_hash.token_map(tokenizer)
        engram_hash.check_map(config, classes)
    except Exception as error:  # tokenizers raises bare Exception for what it can't decode
        raise CheckpointError(f"{file}: {error}") from None
    return classes
