"""Sampler slot: one distribution per row, and the draw from it.

greedy.py   the most likely token, whatever the temperature
philox.py   counter-based draws, the same on every device (default)
distribution.py    logits to a distribution: mask, temperature, top-p, top-k
draw.py            a distribution to a token
"""

from deepinfer.slots.registry import registry

register = registry("sampler").register

from deepinfer.slots.sampler.distribution import distribution  # noqa: E402
from deepinfer.slots.sampler.draw import draw_by_weight  # noqa: E402
from deepinfer.slots.sampler.greedy import Greedy  # noqa: E402
from deepinfer.slots.sampler.philox import Philox  # noqa: E402

__all__ = ["Greedy", "Philox", "draw_by_weight", "distribution", "register"]
