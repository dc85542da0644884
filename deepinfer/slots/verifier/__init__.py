"""Verifier slot: how many drafts to verify, and which to keep.

base.py     acceptance by 'match' or 'rejection', and defaults to inherit
off.py      no speculation (default)         fixed.py    the same number of drafts every step
cost.py     the cost of a step by its rows, which a verifier may weigh its budget against
"""

from deepinfer.slots.registry import registry
from deepinfer.slots.verifier.base import BaseVerifier
from deepinfer.slots.verifier.cost import CostCurve
from deepinfer.slots.verifier.fixed import Fixed
from deepinfer.slots.verifier.off import Off

register = registry("verifier").register
__all__ = ["BaseVerifier", "CostCurve", "Fixed", "Off", "register"]
