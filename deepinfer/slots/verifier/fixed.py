"""Fixed: the same number of drafts for every sequence and step."""

from __future__ import annotations

import copy
import warnings
from typing import TYPE_CHECKING, Any

import torch

from deepinfer.slots.protocols import EngineInfo
from deepinfer.slots.registry import registry
from deepinfer.slots.settings import shown
from deepinfer.slots.verifier.base import RULES, BaseVerifier

if TYPE_CHECKING:
    from torch import Tensor

RELEASED_BLOCK = 5  # dspark_block_size of the released configuration


@registry("verifier").register("fixed")
class Fixed(BaseVerifier):
    """Verify the first n drafts of each sequence; None = all that the drafter proposes.

    Confidences are not looked at. Under a budget below b * (1 + n) every sequence gives up its
    deepest draft before any gives up a shallower one.
    """

    def __init__(self, n: int | None = None, *, rule: str = "match") -> None:
        if n is not None and (isinstance(n, bool) or not isinstance(n, int) or n < 0):
            raise ValueError(
                f"Fixed(n={n!r}): n must be an integer >= 0, or None for the whole draft"
            )
        if rule not in RULES:
            raise ValueError(f"Fixed(rule={rule!r}): the rules are {', '.join(RULES)}")
        self.n = n
        self.rule = rule
        self.max_draft = RELEASED_BLOCK if n is None else n

    def __repr__(self) -> str:
        return shown(self, "n")

    def start(self, info: EngineInfo) -> Any:
        """Raises ValueError if n is more than the model's drafter proposes. `Fixed()` takes what
        the drafter proposes, and warns if the model has no drafter."""
        most = info.config.max_draft
        if self.n is None and not most:
            warnings.warn(
                f"verifier {self!r}: this model has no drafter, so nothing is drafted; "
                "verifier='off' says the same",
                stacklevel=2,
            )
        if self.n is not None and self.n > most:
            raise ValueError(
                f"Fixed({self.n}): this model drafts at most {most} tokens a step; "
                f"use Fixed({most})"
            )
        own = copy.deepcopy(self)
        own.max_draft = most if self.n is None else self.n
        return own

    def allocate(self, fresh: Tensor, budget: int) -> Tensor:
        b, n = fresh.shape
        there = (fresh[:, : min(n, self.max_draft)] > 0).long().cumprod(-1)
        if not there.numel():
            return torch.ones(b, dtype=torch.long, device=fresh.device)
        before = (there.t().flatten().cumsum(0) - 1).view(-1, b).t()  # drafts ahead, depth-major
        return 1 + ((there > 0) & (before < budget - b)).sum(-1)
