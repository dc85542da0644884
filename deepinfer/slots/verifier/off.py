"""Off: one row a sequence, no speculation."""

from __future__ import annotations

from deepinfer.slots.registry import registry
from deepinfer.slots.settings import shown
from deepinfer.slots.verifier.base import BaseVerifier


@registry("verifier").register("off")
class Off(BaseVerifier):
    """Nothing is drafted; each step emits the target's own draw."""

    max_draft = 0

    def __repr__(self) -> str:
        return shown(self)
