"""How an engine is made: its slots and settings as keywords, and where its weights go."""

from __future__ import annotations

import copy
import dataclasses
import difflib
from typing import Any, TypedDict

import torch

from deepinfer.config import EngineConfig, ModelConfig
from deepinfer.engine.keywords import NEAR
from deepinfer.engine.scheduling import scheduler
from deepinfer.session import default_dtype, default_seed
from deepinfer.slots import registry
from deepinfer.slots.protocols import SLOTS, EngineInfo

DEFAULT_SLOTS = {
    "attention": "csa2",
    "experts": "local",
    "verifier": "off",
    "replay": "exact",
    "sampler": "philox",
    "grammar": "none",
}
DEFAULTS: dict[str, Any] = {
    **DEFAULT_SLOTS,
    **{f.name: f.default for f in dataclasses.fields(EngineConfig)},
}


class Changes(TypedDict, total=False):
    """Slots and settings that `with_` can change."""

    attention: Any
    experts: Any
    verifier: Any
    replay: Any
    sampler: Any
    grammar: Any
    fidelity: int
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int | None
    max_context: int | None
    page_size: int | None
    num_pages: int | None
    prefix_cache: bool
    num_snapshots: int | None
    overlap: bool
    batch_invariant: bool
    kernels: dict[str, str] | None
    scheduler: Any
    seed: int
    packed_cache: bool | None


class Settings(Changes, total=False):
    """Everything an engine can be made with."""

    device: str
    dtype: Any
    keep_quantised: bool


def split_settings(
    given: Any, base: EngineConfig | None = None, slots: dict[str, Any] | None = None
) -> tuple[EngineConfig, dict[str, Any]]:
    """(EngineConfig, slots) from keywords over a base. Raises TypeError, with the nearest name, for an
    unknown keyword."""
    fields = {f.name for f in dataclasses.fields(EngineConfig)}
    for name in given:
        if name not in fields and name not in SLOTS:
            close = difflib.get_close_matches(name, [*fields, *SLOTS], 1, NEAR)
            hint = (
                f"did you mean {close[0]!r}?"
                if close
                else f"slots: {', '.join(SLOTS)}; settings: {', '.join(sorted(fields))}"
            )
            raise TypeError(f"an engine has no slot or setting {name!r}: {hint}")
    settings = {k: v for k, v in given.items() if k in fields}
    if not isinstance(settings.get("scheduler", ""), str):  # so that no two engines share one
        settings["scheduler"] = copy.copy(scheduler.resolve(settings["scheduler"]))
    if given.get("prefix_cache") is False:  # and what belongs to it
        settings.setdefault("num_snapshots", None)
    if base is None:
        if default_seed() is not None:
            settings.setdefault("seed", default_seed())
        config = EngineConfig(**settings)
    else:
        config = dataclasses.replace(base, **settings)
    chosen = {**(slots or DEFAULT_SLOTS), **{k: v for k, v in given.items() if k in SLOTS}}
    return config, chosen


def start_slots(
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    settings: EngineConfig,
    slots: dict[str, Any],
) -> dict[str, Any]:
    """An engine's own copies of the slot objects. ValueError for one that does not fit the model."""
    info = EngineInfo(
        config=config,
        device=device,
        dtype=dtype,
        max_num_seqs=settings.max_num_seqs,
        seed=settings.seed,
    )
    return {name: registry.start(slots[name], info) for name in SLOTS}


def require_invariant(slots: dict[str, Any], device: torch.device) -> None:
    """Raises ValueError naming the slots that do not promise bits independent of the batch, or a device
    whose matrix library does not keep them (on an H200 float32 log-probabilities differed)."""
    if device.type != "cpu":
        raise ValueError(
            f"batch_invariant=True holds on the CPU only so far, this engine is on {device}: leave it out there"
        )
    without = [n for n in SLOTS if not registry.promises(slots[n], n).batch_invariant]
    if without:
        named = ", ".join(f"{n}={slots[n]!r}" for n in without)
        raise ValueError(
            f"batch_invariant=True needs it of every slot; {named} does not promise it: set "
            "batch_invariant = True on the class where it holds (di.check tests it), or leave it out"
        )


def placement(config: EngineConfig) -> tuple[torch.device, torch.dtype]:
    """(device, dtype) of an engine's weights. Raises ValueError for a device that is not there."""
    name = config.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ValueError(
            f"device={config.device!r}: not a device of an engine; allowed: 'auto', 'cpu', 'cuda', "
            "'cuda:1' and so on"
        )
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"device={config.device!r}: torch {torch.__version__} sees no CUDA device; use device='cpu'"
        )
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise ValueError(f"device={config.device!r}: torch sees {count} CUDA devices, from cuda:0")
    dtype = config.dtype or ((default_dtype() or "float32") if device.type == "cpu" else "bfloat16")
    return device, getattr(torch, dtype)
