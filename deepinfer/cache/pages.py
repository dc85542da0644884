"""Pools of numbers: pages of block KV and slots of state KV. Number 0 of each is reserved.

A pool hands out numbers, it does not know what is stored under them. Number 0 means 'none': writes
that must go nowhere land there, and padding rows point at it.
"""

from __future__ import annotations

from collections import deque


class Pool:
    """First-in first-out free list over 1..size. Freed numbers are reused last, which keeps stale
    reads visible in tests. Invariant: free + held = size, each number in exactly one of them."""

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.size = size
        self._free: deque[int] = deque(range(1, size + 1))
        self._held: set[int] = set()

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, n: int) -> list[int]:
        """n numbers. Raises RuntimeError when fewer are free; ask `free` first."""
        if n > len(self._free):
            raise RuntimeError(f"{n} {self.name} asked, {len(self._free)} of {self.size} free")
        out = [self._free.popleft() for _ in range(n)]
        self._held.update(out)
        return out

    def give(self, numbers: list[int]) -> None:
        """Return numbers. Raises RuntimeError naming one that is not held (freed twice)."""
        for number in numbers:
            if number not in self._held:
                raise RuntimeError(f"{self.name} {number} is given back but is not held")
            self._held.remove(number)
            self._free.append(number)
