"""Sampler slot: one distribution per row, and the draw from it.

greedy.py   the most likely token, whatever the temperature
philox.py   counter-based draws, the same on every device (default)
distribution.py    logits to a distribution: mask, temperature, top-p, top-k
draw.py            a distribution to a token
"""

from deepinfer.slots.registry import registry
from deepinfer.slots.sampler.distribution import distribution
from deepinfer.slots.sampler.draw import draw_by_weight
from deepinfer.slots.sampler.greedy import Greedy
from deepinfer.slots.sampler.philox import Philox

register = registry("sampler").register
__all__ = ["Greedy", "Philox", "draw_by_weight", "distribution", "register"]
