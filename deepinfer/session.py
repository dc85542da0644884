"""For tutorials: numbers and verdicts that hold on any machine.

`notebook` is the one setting of this process that an Engine reads when it is made and no device or
dtype was asked for. An engine that exists keeps what it was made with.
"""

from dataclasses import dataclass

from deepinfer.display.numbers import fmt

__all__ = ["default_dtype", "default_seed", "fmt", "notebook", "verdict"]


@dataclass
class _Settings:
    dtype: str | None = None
    seed: int | None = None


_settings = _Settings()


def notebook(seed: int = 0, *, dtype: str | None = "float64", threads: int = 1) -> None:
    """Make what this process computes repeatable on any machine, and say what was set.

    CPU engines made from here on compute in `dtype` (float64: the differences between instruction
    sets stay below what is printed) with `seed`, on `threads` threads. Engines on an accelerator
    and engines that were asked for a dtype are not touched; no global random state is. With
    `dtype=None` engines take the library's default again.

    Progress bars are hidden where the environment says `DI_DISPLAY=test`.
    """
    if dtype not in (None, "float32", "bfloat16", "float64"):
        raise ValueError(f"dtype={dtype!r}: 'float64', 'float32', 'bfloat16' or None")
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise TypeError(f"seed must be an int, got {type(seed).__name__}")
    import torch

    torch.set_num_threads(threads)
    _settings.dtype, _settings.seed = dtype, seed
    print(f"CPU engines: {dtype or 'default dtype'}, threads {threads}, seed {seed}")


def default_dtype() -> str | None:
    """The dtype of a CPU engine not asked for one; None where `notebook` was not called."""
    return _settings.dtype


def default_seed() -> int | None:
    """The seed of an engine not asked for one; None where `notebook` was not called."""
    return _settings.seed


def verdict(ok: object, claim: str) -> None:
    """Print `ok: claim`, or raise AssertionError with the claim. The tolerance lives in the cell.

    >>> verdict(abs(0.1 + 0.2 - 0.3) < 1e-9, "sums agree to 1e-9")
    ok: sums agree to 1e-9
    """
    if not bool(ok):
        raise AssertionError(f"does not hold: {claim}")
    print(f"ok: {claim}")
