"""Attention slot: which keys a row looks at, and the look.

csa2.py     window + the indexer's top-k compressed entries (default, the model's own)
dense.py    window + every visible compressed entry
"""

from deepinfer.slots.attention.csa2 import CSA2
from deepinfer.slots.attention.dense import Dense
from deepinfer.slots.protocols import Selected
from deepinfer.slots.registry import registry

register = registry("attention").register
__all__ = ["CSA2", "Dense", "Selected", "register"]
