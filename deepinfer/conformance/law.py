"""What a law is, and the tools its statement is written with.

A law is a function of a Subject that raises at the first case that breaks it. Cases are tried from
the smallest up, so the case shown is the smallest of those tried.

    @law(LAWS, "the same call gives the same bits")
    def deterministic(s):
        for rows in (1, 2):
            with case(rows=rows):
                expect(torch.equal(a, b), "two calls differ")
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepinfer.conformance.origin import origin
from deepinfer.slots.protocols import EngineInfo
from deepinfer.slots.registry import Promises, start

CHANCE = 1e-6  # how rarely a chi-square law may refuse an object that keeps it


class Broken(Exception):
    """A law does not hold; the text is the case. error: what the object raised, if it did."""

    error: Exception | None = None


@dataclass(frozen=True)
class Law:
    """words: the law in one sentence. run: raises Broken, or returns why there is nothing to run.
    exact: it binds only objects that claim exact=True."""

    words: str
    run: Callable[[Subject], str | None]
    exact: bool = False


@dataclass(frozen=True)
class Subject:
    """The object under test with what it promises. options: what the caller of check added."""

    obj: Any
    promises: Promises
    info: EngineInfo
    options: dict[str, Any]

    def fresh(self) -> Any:
        """A started copy that has learned nothing yet."""
        return start(copy.deepcopy(self.obj), self.info)


def law(laws: list[Law], words: str, exact: bool = False) -> Callable:
    """Decorator that appends a function to a slot's laws."""

    def add(run: Callable[[Subject], str | None]) -> Callable[[Subject], str | None]:
        laws.append(Law(words, run, exact))
        return run

    return add


@contextmanager
def case(**what: Any) -> Iterator[None]:
    """Name the case in whatever breaks inside; an exception of the object counts as breaking."""
    told = ", ".join(f"{k.replace('_', ' ')} {v}" for k, v in what.items())
    try:
        yield
    except Broken as e:
        raise broken(f"{told}: {e}", e.error) from None
    except Exception as e:
        raise broken(f"{told}: raised {origin(e).words}", e) from e


def broken(words: str, error: Exception | None) -> Broken:
    """A Broken that remembers the object's own exception."""
    e = Broken(words)
    e.error = error
    return e


def expect(holds: Any, words: str) -> None:
    """Raise Broken(words) unless `holds`."""
    if not holds:
        raise Broken(words)


# ------------------------------------------------------------------------- comparing and watching


def tensors(x: Any, at: str = "") -> dict[str, Tensor]:
    """Every tensor inside records, tuples, lists and dicts, by a dotted name."""
    if isinstance(x, Tensor):
        return {at: x}
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        parts = {f.name: getattr(x, f.name) for f in dataclasses.fields(x) if hasattr(x, f.name)}
    elif isinstance(x, dict):
        parts = {str(k): v for k, v in x.items()}
    elif isinstance(x, (tuple, list)):
        parts = {str(i): v for i, v in enumerate(x)}
    else:
        return {}
    found: dict[str, Tensor] = {}
    for name, part in parts.items():
        found.update(tensors(part, f"{at}.{name}" if at else name))
    return found


@contextmanager
def untouched(**inputs: Any) -> Iterator[None]:
    """Break where a call changes one of its inputs in place."""
    held = {name: (t, t.clone()) for name, t in tensors(inputs).items()}
    yield
    for name, (now, before) in held.items():
        expect(same(now, before), f"the call changed its input {name}")


def same(a: Tensor, b: Tensor) -> bool:
    """Equal bit for bit, NaN equal to NaN."""
    return (
        a.shape == b.shape
        and a.dtype == b.dtype
        and torch.equal(a.nan_to_num(-7.25), b.nan_to_num(-7.25))
    )


def close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    """Equal up to `tolerance` relative to the largest number; integers and bools exactly."""
    if a.shape != b.shape:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    scale = max(1.0, a.abs().nan_to_num(0, 0, 0).max().item()) if a.numel() else 1.0
    return torch.allclose(a.double(), b.double(), rtol=0, atol=tolerance * scale, equal_nan=True)


def show(x: Tensor | list, most: int = 6) -> str:
    """A few numbers of a tensor, short enough for a report."""
    values = x.flatten().tolist() if isinstance(x, Tensor) else list(x)
    told = [f"{v:.4g}" if isinstance(v, float) else str(v) for v in values[:most]]
    return f"[{', '.join(told)}{', ...' if len(values) > most else ''}]"


def shaped(x: Any, shape: tuple[int, ...], name: str, dtype: torch.dtype | None = None) -> None:
    """Break unless x is a tensor of this shape (and dtype)."""
    expect(isinstance(x, Tensor), f"{name} is a {type(x).__name__}, not a tensor")
    expect(tuple(x.shape) == shape, f"{name} has shape {tuple(x.shape)}, it should be {shape}")
    expect(dtype is None or x.dtype == dtype, f"{name} has dtype {x.dtype}, it should be {dtype}")


# ---------------------------------------------------------------------------------- distributions


def chi_square(counts: Tensor, probs: Tensor) -> float:
    """How likely counts [v] this far from probs [v] are: the upper tail of Pearson's statistic.

    Cells that expect fewer than 5 are pooled. A count where the law has no probability gives 0.
    """
    counts, probs = counts.double(), probs.double()
    if (counts[probs <= 0] > 0).any():
        return 0.0
    expected = probs / probs.sum() * counts.sum()
    big = expected >= 5
    seen = torch.cat((counts[big], counts[~big].sum()[None]))
    want = torch.cat((expected[big], expected[~big].sum()[None]))
    seen, want = seen[want > 0], want[want > 0]
    if len(want) < 2:
        return 1.0
    statistic = ((seen - want) ** 2 / want).sum()
    free = torch.tensor((len(want) - 1) / 2.0, dtype=torch.float64)
    return torch.special.gammaincc(free, statistic / 2).item()


def follows(tokens: Tensor, probs: Tensor, what: str) -> None:
    """Break unless tokens [n] could be draws from probs [v]."""
    v = probs.shape[0]
    inside = (tokens >= 0) & (tokens < v)
    expect(inside.all(), f"{what}: token {tokens[~inside][:1].tolist()} is outside 0..{v - 1}")
    counts = tokens.bincount(minlength=v)
    chance = chi_square(counts, probs)
    expect(
        chance > CHANCE,
        f"{what}: of {len(tokens)} draws the shares are {show(counts / len(tokens))}, "
        f"the law is {show(probs)} (chi-square, chance {chance:.1g})",
    )


def generator(seed: int = 0) -> torch.Generator:
    """A CPU generator for the laws' own inputs."""
    return torch.Generator().manual_seed(seed)
