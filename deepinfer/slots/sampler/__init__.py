"""Sampler slot: one law per row, and the draw from it.

greedy.py   the most likely token, whatever the temperature
philox.py   counter-based draws, the same on every device (default)
law.py      logits to a law: mask, temperature, top-p, top-k      draw.py   a law to a token
"""

from deepinfer.slots.registry import registry

register = registry("sampler").register

from deepinfer.slots.sampler.distribution import law  # noqa: E402
from deepinfer.slots.sampler.draw import draw_by_weight  # noqa: E402
from deepinfer.slots.sampler.greedy import Greedy  # noqa: E402
from deepinfer.slots.sampler.philox import Philox  # noqa: E402

__all__ = ["Greedy", "Philox", "draw_by_weight", "law", "register"]
