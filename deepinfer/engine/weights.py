"""Weights: what engines share, and how a checkpoint folder or a seed becomes that."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from deepinfer.checkpoint import names
from deepinfer.checkpoint.loader import load
from deepinfer.checkpoint.tokenizer import additions, copy_of, digest, engine_copy
from deepinfer.config import EngineConfig, ModelConfig
from deepinfer.config.io import read_json
from deepinfer.engine.settings import placement, split_settings, start_slots
from deepinfer.engine.sizing import cache_bytes
from deepinfer.engine.weight_edits import WeightEdits
from deepinfer.kernels.quantised import Quantised
from deepinfer.model.stack import Model
from deepinfer.slots import registry
from deepinfer.slots.protocols import SLOTS

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SAMPLED = 1 << 20  # bytes hashed at each end of a file too large to hash whole
WHOLE = 64 << 20


@dataclass(frozen=True)
class Weights:
    """Shared by an engine and everything `with_` makes of it.

    tokenizer: the engines' own; nobody outside changes it. loaded: the identity of what was loaded
    (see `fingerprint`); source: a folder, 'nano' or 'tiny(seed=0)'. edits: notices weights that are
    changed in place.
    """

    model: Model
    tokenizer: Tokenizer | None
    loaded: str
    source: str
    edits: WeightEdits = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "edits", WeightEdits(self.model, self.loaded))

    @property
    def fingerprint(self) -> str:
        """`loaded`, with `+edited` behind it if weights were changed since."""
        return self.edits.fingerprint

    @functools.cached_property
    def tokenizer_copy(self) -> Tokenizer:
        """What a user is given: whatever is done to it changes no engine."""
        return copy_of(self.tokenizer)

    @functools.cached_property
    def tokenizer_note(self) -> str:
        """What the tokenizer adds to the released layout ('normalizer Lowercase'), or ''."""
        return "" if self.tokenizer is None else ", ".join(additions(self.tokenizer))

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes held, by component (attention, experts, engram, drafter, ...)."""
        total: Counter[str] = Counter()
        held: dict[str, Any] = dict(self.model.named_parameters())
        for name, module in self.model.named_modules():
            weight = getattr(module, "weight", None)
            if isinstance(weight, Quantised):
                held[f"{name}.weight"] = weight
        component = {w.name: w.component for w in names.weights(self.config)}
        for name, x in held.items():
            size = x.nbytes if isinstance(x, Quantised) else x.numel() * x.element_size()
            stacked = "drafter" if name.startswith("mtp.") else "experts"
            total[component.get(name, stacked)] += size
        return dict(total)


def from_checkpoint(
    checkpoint: Any,
    *,
    dtype: torch.dtype,
    device: torch.device,
    source: str,
    keep_quantised: bool = False,
    verify: bool = False,
) -> Weights:
    """Load an opened checkpoint (on disk or in memory) into a new model. verify: see
    `weights_digest`."""
    with torch.device("meta"):
        model = Model(checkpoint.config)
    load(model, checkpoint, dtype=dtype, device=device, keep_quantised=keep_quantised)
    tokenizer = tokenizer_of(checkpoint, source)
    return Weights(model, tokenizer, fingerprint(checkpoint, verify), source)


def tokenizer_of(checkpoint: Any, source: str = "the checkpoint") -> Tokenizer | None:
    """A copy of the checkpoint's tokenizer that neither cuts nor pads; None without one."""
    found = checkpoint.tokenizer
    return None if found is None else engine_copy(found, source)


def fingerprint(checkpoint: Any, verify: bool = False) -> str:
    """Identity of what was loaded, the same for the same bytes wherever they lie.

    `weights_digest`, then 8 hex digits of the tokenizer ('none' without one), then `+sampled` if a
    file was too large to read whole and verify is False.
    """
    if checkpoint.path is None:
        tokenizer = checkpoint.tokenizer
        content = None if tokenizer is None else json.loads(tokenizer.to_str())
    else:
        file = checkpoint.tokenizer_path
        content = None if file is None else read_json(file)
    large = any(file.stat().st_size > WHOLE for file in _files(checkpoint))
    sampled = "+sampled" if large and not verify else ""
    return f"{weights_digest(checkpoint, verify)}-{digest(content)}{sampled}"


def weights_digest(checkpoint: Any, verify: bool = False) -> str:
    """16 hex digits of config and weights. verify: every byte is read; otherwise a file over 64 MiB
    counts by its size, its first and its last MiB."""
    found = hashlib.sha256()
    found.update(repr(sorted(checkpoint.config.to_dict().items(), key=str)).encode())
    if checkpoint.path is None:
        for name in sorted(checkpoint.state):
            tensor = checkpoint.state[name].detach().contiguous()
            found.update(name.encode())
            found.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    for file in _files(checkpoint):
        found.update(file.name.encode())
        found.update(file_digest(file, verify))
    return found.hexdigest()[:16]


def _files(checkpoint: Any) -> list[Path]:
    entries = {} if checkpoint.path is None else checkpoint.entries
    return sorted({Path(entry.file) for entry in entries.values()})


def file_digest(path: Path, verify: bool = False) -> bytes:
    size = path.stat().st_size
    found = hashlib.sha256(str(size).encode())
    with path.open("rb") as f:
        if size <= WHOLE or verify:
            while part := f.read(1 << 24):
                found.update(part)
        else:
            found.update(f.read(SAMPLED))
            f.seek(-SAMPLED, os.SEEK_END)
            found.update(f.read(SAMPLED))
    return found.digest()


# ------------------------------------------------------------------------------------- what fits


def weight_bytes(
    config: ModelConfig, dtype: torch.dtype, keep_quantised: bool = False
) -> dict[str, int]:
    """Bytes by component of the text model's weights held in `dtype` (FP32 ones stay FP32, quantised
    ones as stored with keep_quantised)."""
    total: Counter[str] = Counter()
    for w in names.weights(config):
        if names.is_unread(w.name):
            continue
        stored = w.stored()
        if keep_quantised and len(stored) > 1:  # values and scales
            total[w.component] += sum(s.nbytes for s in stored)
        else:
            wide = torch.promote_types(dtype, torch.float32) if w.wide else dtype
            total[w.component] += w.parameters * wide.itemsize
    return dict(total)


def available_bytes(device: torch.device) -> int | None:
    """Free memory of a device, None where it cannot be asked."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type != "cpu":
        return None
    try:
        with open("/proc/meminfo") as f:
            for line in f:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def require(what: str, parts: dict[str, int], device: torch.device, remedy: str) -> None:
    """Raise MemoryError, with bytes by component, when `parts` do not fit; nothing was taken yet."""
    free, need = available_bytes(device), sum(parts.values())
    if free is None or need <= free:
        return
    listed = "\n".join(f"  {name:<20} {size:>20,} B" for name, size in parts.items())
    raise MemoryError(
        f"{what} needs {need:,} bytes on {device}, {free:,} are free; nothing was loaded.\n{listed}\n{remedy}"
    )


Opened = tuple[Weights, EngineConfig, dict[str, Any]]  # what an Engine is made of


# what a MemoryError at loading advises
REMEDY = "Use a smaller dtype, keep_quantised=True, a smaller cache or a device with more memory."


def from_folder(find: Callable[[], Path], source: str, given: Any, verify: bool = False) -> Opened:
    """The official checkpoint in the folder that `find` names, asked once the settings are known to
    be good. Raises MemoryError, with bytes by component, before memory is taken. verify: see
    `weights_digest`."""
    from deepinfer.checkpoint.reader import Checkpoint

    config, slots = split_settings(given)
    device, dtype = placement(config)
    slots = {name: registry.resolve(name, slots[name]) for name in SLOTS}
    checkpoint = Checkpoint.open(find())
    parts = weight_bytes(checkpoint.config, dtype, config.keep_quantised)
    # started for this model, since what a slot takes can depend on it; the engine starts its own
    started = start_slots(checkpoint.config, device, dtype, config, slots)
    parts |= cache_bytes(checkpoint.config, config, started, dtype, device)
    require(f"{source} in {dtype}", parts, device, REMEDY)
    loaded = from_checkpoint(
        checkpoint,
        dtype=dtype,
        device=device,
        source=source,
        keep_quantised=config.keep_quantised,
        verify=verify,
    )
    return loaded, config, slots


def from_seed(seed: int, given: Any) -> Opened:
    """The tiny model with random weights."""
    from deepinfer.checkpoint.memory import MemoryCheckpoint
    from deepinfer.checkpoint.tiny import tiny_state

    config, slots = split_settings(given)
    device, dtype = placement(config)
    loaded = from_checkpoint(
        MemoryCheckpoint(*tiny_state(seed)),
        dtype=dtype,
        device=device,
        source=f"tiny(seed={seed})",
        keep_quantised=config.keep_quantised,
    )
    return loaded, config, slots
