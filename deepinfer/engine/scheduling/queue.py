"""RequestQueue: the requests that wait, in order. A request is taken out of the middle in O(1)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, MutableSequence
from itertools import islice
from typing import Any

from deepinfer.engine.request import Request


class RequestQueue(MutableSequence[Request]):
    """A sequence with the methods of a list and of a deque, in which a request stands once.

    O(1): `append`, `appendleft`, `popleft`, `pop`, `remove`, `in`, `len`, [0] and [-1]. Any other
    index, and `insert`, cost its distance from the nearer end. Adding a request that is already
    there moves it; assigning one to an index lets two change places.
    """

    def __init__(self, requests: Iterable[Request] = ()) -> None:
        self._held: OrderedDict[Request, None] = OrderedDict.fromkeys(requests)

    def __repr__(self) -> str:
        return f"RequestQueue({[r.id for r in self]})"

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._held)

    def __reversed__(self) -> Iterator[Request]:
        return reversed(self._held)

    def __contains__(self, request: object) -> bool:
        return isinstance(request, Request) and request in self._held

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Iterable):
            return NotImplemented
        return list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return list(self)[index]
        return self._at(index)

    def __setitem__(self, index: Any, value: Any) -> None:
        held = list(self)
        if not isinstance(index, slice) and value in self:  # two requests change places
            held[held.index(value)] = held[index]
        held[index] = value
        self._held = OrderedDict.fromkeys(held)

    def __delitem__(self, index: Any) -> None:
        for request in self[index] if isinstance(index, slice) else [self._at(index)]:
            del self._held[request]

    def _at(self, index: int) -> Request:
        """The request at an index, counted from the nearer end. Raises IndexError."""
        size = len(self)
        index += size if index < 0 else 0
        if not 0 <= index < size:
            raise IndexError(f"index {index} of a queue of {size} requests")
        if index <= size // 2:
            return next(islice(self._held, index, None))
        return next(islice(reversed(self._held), size - 1 - index, None))

    def insert(self, index: int, value: Request) -> None:
        """Put a request before the one at `index`."""
        self._held.pop(value, None)
        size = len(self)
        index = min(max(index + size if index < 0 else index, 0), size)
        near_front = index <= size // 2
        some = self._held if near_front else reversed(self._held)
        between = list(islice(some, index if near_front else size - index))
        self._held[value] = None
        for request in (value, *reversed(between)):  # those between it and the nearer end pass it
            self._held.move_to_end(request, last=not near_front)

    def append(self, value: Request) -> None:
        """Put a request last."""
        self._held[value] = None
        self._held.move_to_end(value)

    def appendleft(self, value: Request) -> None:
        """Put a request first."""
        self._held[value] = None
        self._held.move_to_end(value, last=False)

    def popleft(self) -> Request:
        """Take the first request out. Raises IndexError if there is none."""
        return self.pop(0)

    def pop(self, index: int = -1) -> Request:
        """Take the request at an index out. Raises IndexError if there is none."""
        request = self._at(index)
        del self._held[request]
        return request

    def remove(self, value: Request) -> None:
        """Take a request out. Raises ValueError if it is not there."""
        if value not in self:
            raise ValueError(f"{value!r} is not in the queue")
        del self._held[value]
