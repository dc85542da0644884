"""Replay slot: which rows of a prompt run where.

exact.py    every row that the model's own definition needs (default)
halo.py     only those that something read later depends on: the same numbers from fewer rows
bounded.py  a fixed number of rows, whatever the length and the depth: an approximation
"""

from deepinfer.slots.protocols import Prompt, ReplayPlan
from deepinfer.slots.registry import registry
from deepinfer.slots.replay.bounded import Bounded
from deepinfer.slots.replay.exact import Exact
from deepinfer.slots.replay.halo import Halo

register = registry("replay").register
__all__ = ["Bounded", "Exact", "Halo", "Prompt", "ReplayPlan", "register"]
