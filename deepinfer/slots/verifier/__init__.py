"""Verifier slot: how many drafts to verify, and which to keep.

base.py     acceptance by 'match' or 'rejection', and defaults to inherit
off.py      no speculation (default)         fixed.py    the same number of drafts every step
cost.py     the cost of a step by its rows, which a verifier may weigh its budget against
"""

from deepinfer.slots.registry import registry

register = registry("verifier").register

from deepinfer.slots.verifier.base import BaseVerifier  # noqa: E402
from deepinfer.slots.verifier.cost import CostCurve  # noqa: E402
from deepinfer.slots.verifier.fixed import Fixed  # noqa: E402
from deepinfer.slots.verifier.off import Off  # noqa: E402

__all__ = ["BaseVerifier", "CostCurve", "Fixed", "Off", "register"]
