"""Admission: how a waiting request would begin with what the prefix cache has."""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer.slots.protocols import ReplayPlan


@dataclass(frozen=True, slots=True)
class Admission:
    """pages: those that the request takes over; plan: which of its rows run; layers: number of first
    layers whose window rows a snapshot at plan.start gives, 0 if none is needed; exact: whether all
    that it takes over is; found: tokens in the pages that were found, with a snapshot or not.

    It holds no page and no snapshot: adopt it before the cache changes."""

    pages: tuple[int, ...]
    plan: ReplayPlan
    layers: int = 0
    exact: bool = True
    found: int = 0
