"""The header of one safetensors file: what it holds, read without touching the payload."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepinfer.config.io import parse_json
from deepinfer.config.wording import printable, shown

__all__ = ["CheckpointError", "Entry", "read_header"]

# bits per element of every dtype code of the safetensors format that a shard may name
_BITS = {"BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4}
_BITS |= {"U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32}
_BITS |= {"U64": 64, "I64": 64, "F64": 64}
_LONGEST = 100_000_000  # bytes of a header; the safetensors format allows no more


class CheckpointError(ValueError):
    """A checkpoint that can't be used; the message names file and tensor and says what to do.

    Names come from the files, so control characters are escaped and a long message is cut.
    """

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor in one file. name: without a `model.` prefix; stored_name: as the file has it."""

    name: str
    stored_name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def read_header(path: Path, most: int = _LONGEST) -> list[Entry]:
    """The tensors of a safetensors file, in the order of its header.

    most: bytes of a header that are read; a longer one is refused before it is parsed.
    CheckpointError when the file is missing, cut short, or something else than safetensors.
    """
    try:
        if path.exists() and not path.is_file():  # a folder, or a pipe that would wait for ever
            raise CheckpointError(f"{path}: is not a file; a shard is a safetensors file")
        size = path.stat().st_size
        with open(path, "rb") as file:
            start = file.read(8)
            length = int.from_bytes(start, "little")
            readable = len(start) == 8 and 2 <= length <= min(size - 8, _LONGEST)
            if readable and length > most:
                raise CheckpointError(
                    f"{path}: has a header of {length:,} bytes; the tensors that config.json "
                    f"describes need at most {most:,}: use the config.json that came with it"
                )
            text = file.read(length) if readable else start + file.read(56)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: shard not found; download it, or fix the index") from None
    except OSError as error:
        raise CheckpointError(f"{path}: can't be read ({error.strerror})") from None
    if not readable:
        raise CheckpointError(f"{path}: {_what_it_is(text, size)}")
    try:
        header = parse_json(text.decode("utf-8"))
        if not isinstance(header, dict):
            raise ValueError("its header is not a JSON object")
        _check_metadata(header.pop("__metadata__", {}))
    except ValueError as error:
        raise CheckpointError(
            f"{path}: not a safetensors file ({error}); download it again"
        ) from None
    entries = [_entry(path, name, value) for name, value in header.items()]
    ends = [tuple(value["data_offsets"]) for value in header.values()]
    _check_extent(path, entries, ends, payload=size - 8 - length)
    return entries


def _what_it_is(start: bytes, size: int) -> str:
    beginning = start.lstrip().lower()
    if beginning.startswith(b"version https://git-lfs"):
        return "is a Git LFS pointer, not the shard; fetch it with `git lfs pull`"
    if beginning.startswith((b"<!doctype", b"<html", b"<?xml")):
        return "is an HTML page, not a shard; the download was answered by a web page"
    if size < 8:
        return f"has {size} bytes; a safetensors file has at least 10; download it again"
    return (
        f"is cut short inside its header, or not a safetensors file ({size} bytes, beginning with "
        f"{start[:8]!r}); download it again"
    )


def _check_metadata(metadata: Any) -> None:
    strings = isinstance(metadata, dict) and all(isinstance(v, str) for v in metadata.values())
    if not strings:
        raise ValueError("its __metadata__ is not an object of strings")


def _entry(path: Path, name: str, value: Any) -> Entry:
    fields = value if isinstance(value, dict) else {}
    dtype, shape, offsets = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not (isinstance(dtype, str) and _sizes(shape) and _sizes(offsets) and len(offsets) == 2):
        raise CheckpointError(
            f"{path}: not a safetensors file (tensor {name} has dtype {shown(dtype)}, "
            f"shape {shown(shape)} and data_offsets {shown(offsets)}; expected a name, a list of integers >= 0 and two "
            "integers >= 0); download it again"
        )
    shape, (begin, end) = tuple(shape), offsets
    if dtype not in _BITS:
        raise CheckpointError(
            f"{path}: tensor {name} has dtype {shown(dtype)}, which safetensors does not define; "
            "convert it with the tool that wrote it"
        )
    if (end - begin) * 8 != math.prod(shape) * _BITS[dtype]:
        raise CheckpointError(
            f"{path}: tensor {name} of {dtype} {list(shape)} is given {end - begin} bytes; the "
            "header is damaged: download the file again"
        )
    return Entry(name.removeprefix("model."), name, path, dtype, shape, end - begin)


def _sizes(value: Any) -> bool:
    """Whether it is a short list of integers >= 0 that fit 64 bits."""
    if not isinstance(value, list) or len(value) > 64:
        return False
    return all(type(item) is int and 0 <= item < 2**63 for item in value)


def _check_extent(path: Path, entries: list[Entry], ends: list[tuple], payload: int) -> None:
    """Tensors lie one behind the other and end where the file ends."""
    at = 0
    for begin, end in sorted(ends):
        if begin != at:
            raise CheckpointError(
                f"{path}: its tensors overlap or leave a gap at byte {at} of the payload; "
                "download it again"
            )
        at = end
    if at > payload:
        last = next(e for e, (_, end) in zip(entries, ends) if end > payload)
        raise CheckpointError(
            f"{path}: is cut short: its header promises {at} bytes of tensors, the file has "
            f"{payload} (tensor {last.stored_name} is not complete); download it again"
        )
    if at < payload:
        raise CheckpointError(
            f"{path}: has {payload - at} bytes behind its last tensor; download it again"
        )
