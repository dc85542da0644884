"""Expected numbers from implementations that are not ours: how they are stored and read.

The numbers lie in tests/data/oracle (see its README). A packed file is one xz stream:
    8 bytes   length of the header, little endian
    header    JSON [[name, dtype, shape, step], ...]; step is null for bit-exact tensors, otherwise
              the tensor is stored as the nearest multiples of step, as integers
    payload   per width in bytes, the first bytes of all its tensors, then the second ones, ...
Floats are turned left by one bit first: the sign goes to the mantissa, and one byte plane holds
whole exponents, which is the only part of random weights that can be compressed.
"""

from __future__ import annotations

import functools
import json
import lzma
import shutil
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

HERE = Path(__file__).parents[1] / "data" / "oracle"
LENGTHS = (1, 5, 127, 128, 129, 300, 700)
NUMBERS = ("logits", "drafts", "trace", "modules")
SHARD = "model-00001-of-00001.safetensors"
_FLOATS = ("bfloat16", "float32")
_XZ = [{"id": lzma.FILTER_LZMA2, "preset": 9, "lc": 0, "lp": 0, "pb": 0}]  # bytes without context


def pack(tensors: dict[str, Tensor], steps: dict[str, float] | None = None) -> bytes:
    """{name: tensor} -> bytes of a packed file. steps: {name: step} of those to be rounded."""
    steps = steps or {}
    header, planes = [], {}
    for name, x in tensors.items():
        step = steps.get(name)
        header.append([name, str(x.dtype).removeprefix("torch."), list(x.shape), step])
        stored = x if step is None else (x.double() / step).round().to(torch.int32)
        raw = stored.contiguous().view(torch.uint8).numpy().reshape(-1, stored.element_size())
        width = raw.shape[1]
        if step is None and header[-1][1] in _FLOATS:
            raw = _turn(raw, 1)
        planes.setdefault(width, []).append(raw)
    text = json.dumps(header, separators=(",", ":")).encode()
    payload = [np.concatenate(planes[width]).T.tobytes() for width in sorted(planes)]
    whole = len(text).to_bytes(8, "little") + text + b"".join(payload)
    return lzma.compress(whole, lzma.FORMAT_XZ, filters=_XZ)


def unpack(packed: bytes) -> dict[str, Tensor]:
    """The tensors of a packed file, in their dtypes and their order."""
    whole = lzma.decompress(packed)
    size = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + size])
    counts: dict[int, int] = {}
    for entry in header:
        counts[_width(entry)] = counts.get(_width(entry), 0) + int(np.prod(entry[2]))
    payload, place, left = {}, 8 + size, {}
    for width in sorted(counts):
        flat = np.frombuffer(whole, np.uint8, counts[width] * width, place)
        payload[width], left[width] = np.ascontiguousarray(flat.reshape(width, -1).T), 0
        place += flat.size
    out = {}
    for entry in header:
        (name, dtype, shape, step), width = entry, _width(entry)
        n, at = int(np.prod(shape)), left[width]
        left[width] += n
        raw = payload[width][at : at + n]
        if step is None and dtype in _FLOATS:
            raw = _turn(raw, -1)
        stored = torch.int32 if step is not None else getattr(torch, dtype)
        x = torch.from_numpy(np.ascontiguousarray(raw).reshape(-1).copy()).view(stored).view(shape)
        out[name] = x if step is None else (x.double() * step).to(getattr(torch, dtype))
    return out


def _width(entry) -> int:
    return 4 if entry[3] is not None else getattr(torch, entry[1]).itemsize


def _turn(raw: np.ndarray, by: int) -> np.ndarray:
    """Rotate little-endian words of 2 or 4 bytes by one bit, left (1) or right (-1)."""
    bits = 8 * raw.shape[1]
    words = np.ascontiguousarray(raw).view(f"<u{raw.shape[1]}")[:, 0]
    a, b = (1, bits - 1) if by > 0 else (bits - 1, 1)
    turned = (words << words.dtype.type(a)) | (words >> words.dtype.type(b))
    return turned.view(np.uint8).reshape(-1, raw.shape[1])


@functools.cache
def numbers(name: str) -> dict[str, Tensor]:
    """A packed file of expected numbers by its stem: one of NUMBERS, or "components", those of
    the pure ops. Do not change the tensors."""
    folder = HERE.parent if name == "components" else HERE
    return unpack((folder / f"{name}.xz").read_bytes())


@functools.cache
def prompts() -> dict[int, list[int]]:
    """Token ids by prompt length."""
    found = json.loads((HERE / "prompts.json").read_text())
    return {int(n): ids for n, ids in found.items()}


def weights() -> dict[str, Tensor]:
    """The checkpoint's tensors under their official names, bfloat16 and float32, bit for bit."""
    return unpack((HERE / "checkpoint.xz").read_bytes())


def write_checkpoint(folder: Path) -> Path:
    """Unpack the checkpoint into `folder` in the official layout."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "tokenizer.json"):
        shutil.copyfile(HERE / name, folder / name)
    state = weights()
    save_file(state, folder / SHARD, metadata={"format": "pt"})
    size = sum(x.nbytes for x in state.values())
    index = {"metadata": {"total_size": size}, "weight_map": dict.fromkeys(state, SHARD)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


if __name__ == "__main__":
    import sys

    if len(sys.argv) != 2:
        sys.exit(
            "usage: python tests/support/oracle.py FOLDER    (unpacks the checkpoint of the numbers)"
        )
    print(write_checkpoint(Path(sys.argv[1])))
