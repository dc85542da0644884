"""Opening: from what a user names (a checkpoint folder, a seed) to weights, settings and slots."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from deepinfer.config import EngineConfig
from deepinfer.engine import weights
from deepinfer.engine.settings import placement, split_settings
from deepinfer.engine.sizing import cache_bytes
from deepinfer.slots import registry
from deepinfer.slots.protocols import SLOTS

Opened = tuple[weights.Weights, EngineConfig, dict[str, Any]]  # what an Engine is made of
REMEDY = "Use a smaller dtype, keep_quantised=True, a smaller cache or a device with more memory."


def from_folder(find: Callable[[], Path], source: str, given: Any) -> Opened:
    """The official checkpoint in the folder that `find` names, asked once the settings are known to
    be good. Raises MemoryError, with bytes by component, before memory is taken."""
    from deepinfer.checkpoint.reader import Checkpoint

    config, slots = split_settings(given)
    device, dtype = placement(config)
    slots = {name: registry.resolve(name, slots[name]) for name in SLOTS}
    checkpoint = Checkpoint.open(find())
    parts = weights.weight_bytes(checkpoint.config, dtype, config.keep_quantised)
    parts |= cache_bytes(checkpoint.config, config, slots, dtype, device)
    weights.require(f"{source} in {dtype}", parts, device, REMEDY)
    loaded = weights.from_checkpoint(
        checkpoint, dtype=dtype, device=device, source=source, keep_quantised=config.keep_quantised
    )
    return loaded, config, slots


def from_seed(seed: int, given: Any) -> Opened:
    """The tiny model with random weights."""
    from deepinfer.checkpoint.memory import MemoryCheckpoint
    from deepinfer.checkpoint.tiny import tiny_state

    config, slots = split_settings(given)
    device, dtype = placement(config)
    loaded = weights.from_checkpoint(
        MemoryCheckpoint(*tiny_state(seed)),
        dtype=dtype,
        device=device,
        source=f"tiny(seed={seed})",
        keep_quantised=config.keep_quantised,
    )
    return loaded, config, slots
