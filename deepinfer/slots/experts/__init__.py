"""Experts slot: who computes which row.

local.py    every expert on this device (default)
"""

from deepinfer.slots.experts.local import Local
from deepinfer.slots.registry import registry

register = registry("experts").register
__all__ = ["Local", "register"]
