"""Configs: ModelConfig (one field per official config.json key) and EngineConfig (how it is served).

model.py     ModelConfig and its sections        engine.py    EngineConfig, DeepInfer's variables
checks.py    types and rules                     io.py        the nested official config.json
release.py   the released config.json as data    base.py      checks when made, replace, diff
"""

from deepinfer.config.engine import EngineConfig
from deepinfer.config.model import (
    ModelConfig,
    QuantizationConfig,
    RopeParameters,
    RopeScaling,
    VisionConfig,
)

__all__ = [
    "EngineConfig",
    "ModelConfig",
    "QuantizationConfig",
    "RopeParameters",
    "RopeScaling",
    "VisionConfig",
]
