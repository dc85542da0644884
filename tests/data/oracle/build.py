"""Pack the expected numbers: python build.py SOURCE, see README.md for what SOURCE holds.

Weights and inputs are kept bit for bit. Outputs are kept as multiples of 2^-18 (an error of 1.9e-6
where the tests allow 1e-4), and long ones are thinned so that every row, column and layer stays
tested: of logits of 300 and 700 rows, row i keeps the columns i mod 4, i mod 4 + 4, ...
"""

import hashlib
import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parents[2]))
from support.oracle import HERE, SHARD, pack

STEP = 2.0**-18
THIN = 4  # columns of long logits
ROWS = torch.tensor([0, 1, 2, 7, 31, 64, 97, 127, 128])  # of the trace of 129 tokens


def thin_columns(x: torch.Tensor) -> torch.Tensor:
    """[t, v] -> [t, v/4]: the columns of row i that are i modulo 4."""
    t, v = x.shape
    columns = torch.arange(v).view(-1, THIN)
    return x.gather(1, columns[:, torch.arange(t) % THIN].T)


def narrow(x: torch.Tensor) -> torch.Tensor:
    """Integers in the smallest signed dtype that holds them; floats as they are."""
    if x.dtype == torch.bool or x.is_floating_point():
        return x
    for dtype in (torch.int8, torch.int16, torch.int32):
        if x.min() >= torch.iinfo(dtype).min and x.max() <= torch.iinfo(dtype).max:
            return x.to(dtype)
    return x


def save(name: str, tensors: dict[str, torch.Tensor]) -> None:
    tensors = {k: narrow(x).contiguous() for k, x in tensors.items()}
    outputs = [k for k, x in tensors.items() if x.dtype == torch.float32 and not k.endswith("/x")]
    steps = dict.fromkeys(outputs, STEP)
    packed = pack(tensors, steps)
    (HERE / f"{name}.xz").write_bytes(packed)
    print(f"{name}.xz {len(packed):,} bytes, {len(tensors)} tensors")


def logits(source: Path) -> None:
    found = load_file(source / "logits_fp32_noquant.safetensors")
    save("drafts", {k: x for k, x in found.items() if k.startswith("dspark/")})
    rows = {k: x for k, x in found.items() if not k.startswith("dspark/")}
    long = ("logits/300", "logits/700")
    save("logits", {k: thin_columns(x) if k in long else x for k, x in rows.items()})


def trace(source: Path) -> None:
    found = load_file(source / "trace_fp32_noquant.safetensors")
    by_row = ("streams/129", "attn/129", "ffn/129", "final/129", "dspark_feature/129")
    save("trace", {k: x[ROWS] if k.startswith(by_row) else x for k, x in found.items()})


MODULES = (  # what ../components.xz does not have
    *(f"attention/{layer}/out" for layer in (0, 2, 3, 6, 7, 8, 9)),
    *(f"attention/{layer}/topk" for layer in (2, 6, 8)),
    *(f"attention/{layer}/{what}" for layer in (2, 6) for what in ("compressed_kv", "index_keys")),
    "attention/candidates",
    "compressor/6/out",
    "moe/x",
    "moe/out",
    "engram/hash_masked",
)


def modules(source: Path) -> None:
    """Attention outputs keep every fourth of their 301 rows, the MoE a third of its 96."""
    found = load_file(source / "components.safetensors")
    long = [k for k in MODULES if k.startswith("attention/") and k.endswith("/out")]
    rows = dict.fromkeys(long, slice(3, None, 4))
    rows |= {k: slice(0, None, 3) for k in ("moe/x", "moe/out")}
    save("modules", {k: found[k][rows.get(k, slice(None))] for k in MODULES})


def stored_digest(source: Path) -> str:
    """sha256 over the FP8 and FP4 storage of every tensor, in the order of their names."""
    digest = hashlib.sha256()
    for name, x in sorted(load_file(source / "checkpoint_fp8" / SHARD).items()):
        digest.update(name.encode())
        digest.update(x.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def main(source: Path) -> None:
    bf16 = source / "checkpoint_bf16"
    for name in ("config.json", "tokenizer.json"):
        shutil.copyfile(bf16 / name, HERE / name)
    packed = pack(load_file(bf16 / SHARD))
    (HERE / "checkpoint.xz").write_bytes(packed)
    print(f"checkpoint.xz {len(packed):,} bytes")
    ids = json.loads((source / "prompts.json").read_text())
    (HERE / "prompts.json").write_text(json.dumps(ids, separators=(",", ":")))
    (HERE / "stored.sha256").write_text(stored_digest(source) + "\n")
    logits(source)
    trace(source)
    modules(source)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
