"""Several processes over documents: each a fork with one thread, so results hang on neither.

On a CPU a model this small gains little from threads inside an operation and all from one document
a core.
"""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

Item = TypeVar("Item")
Found = TypeVar("Found")

_function: Callable | None = None  # what this worker runs; set in forks alone


def each(function: Callable[[Item], Found], items: Sequence[Item], jobs: int = 1) -> list[Found]:
    """[function(x) for x in items] on `jobs` forks of this process, in order.

    A fork sees everything this process holds (engines, open traces), so function may be a closure.
    What it changes stays there. Raises ValueError where torch runs several threads, which do not
    survive a fork, and what function raises.
    """
    if jobs == 1 or len(items) < 2:
        return [function(item) for item in items]
    if torch.get_num_threads() > 1:
        raise ValueError(f"{jobs} jobs of {torch.get_num_threads()} threads: use one thread each")
    forks = multiprocessing.get_context("fork")
    with forks.Pool(min(jobs, len(items)), _start, (function,)) as pool:
        return [pickle.loads(found) for found in pool.imap(_run, items)]


def _start(function: Callable) -> None:
    global _function
    _function = function
    torch.set_num_threads(1)


def _run(item: object) -> bytes:
    assert _function is not None
    return pickle.dumps(_function(item))  # as bytes: shared memory for tensors may be small
