"""Replay slot: which rows of a prompt run where.

exact.py    every row that the model's own definition needs (default)
"""

from deepinfer.slots.registry import registry

register = registry("replay").register

from deepinfer.slots.replay.exact import Exact  # noqa: E402

__all__ = ["Exact", "register"]
