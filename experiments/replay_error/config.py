"""What is measured: sizes of every part, and the policies."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from deepinfer.config import ModelConfig
from deepinfer.slots.replay import Bounded, Halo
from experiments.replay_error.baselines import NoReplay, PageGivenUp, Short
from experiments.replay_error.stairs import Stairs


@dataclass(frozen=True)
class Sizes:
    """Passages and tokens of every part. apart: tokens between two draft blocks."""

    passages: int = 64
    prompt: int = 512
    continuation: int = 64
    hit: int = 384
    apart: int = 8
    law_passages: int = 1
    lengths: tuple[int, ...] = (
        256,
        512,
        1024,
        1920,
    )  # of longer ones there are no 64 of 24 modules
    first_prompt: int = 256
    turns: int = 5
    turn_tokens: int = 128
    free_prompt: int = 256
    free_tokens: int = 32
    cost_lengths: tuple[int, ...] = (512, 2048, 8192)
    cost_repeats: int = 3
    short_keeps: tuple[int, ...] = (1, 16, 64)  # in 64ths of a window
    steps: tuple[float, ...] = (0.1, 0.2, 0.4, 0.6, 1.0)  # of the way to the exact length
    later_steps: tuple[float, ...] = (0.2, 0.5)  # the same, at later cut layers
    batch: int = 8  # passages measured between two lines of progress

    def of(self, part: str) -> dict[str, object]:
        """The sizes that a part depends on, as JSON has them."""
        return {
            k: list(v) if isinstance(v, tuple) else v
            for k, v in asdict(self).items()
            if k in USED[part]
        }


_TEXTS = ("passages", "prompt", "continuation")
USED = {
    "keep": (*_TEXTS, "apart", "short_keeps", "steps", "later_steps"),
    "floors": _TEXTS,
    "sides": (*_TEXTS, "hit", "apart"),
    "turns": ("passages", "first_prompt", "turns", "turn_tokens", "continuation"),
    "cost": ("cost_lengths", "cost_repeats"),
    "law": ("law_passages", "prompt", "continuation"),
    "prose": (*_TEXTS, "apart"),
    "length": ("passages", "lengths", "continuation"),
    "free": ("passages", "free_prompt", "free_tokens"),
}


FULL = Sizes()
QUICK = Sizes(
    passages=9,
    prompt=448,
    continuation=16,
    hit=320,
    lengths=(256, 512),
    turns=2,
    free_tokens=8,
    cost_lengths=(512,),
    cost_repeats=1,
    short_keeps=(1, 64),
    steps=(0.2, 1.0),
    later_steps=(0.2, 1.0),
)
# For the tests: a prompt longer than the exact length of the tiny model.
TINY = Sizes(
    passages=9,
    prompt=96,
    continuation=12,
    hit=64,
    lengths=(64, 96),
    first_prompt=40,
    turns=2,
    turn_tokens=24,
    free_prompt=96,
    free_tokens=4,
    cost_lengths=(64,),
    cost_repeats=1,
    short_keeps=(1, 8),
    steps=(0.5, 1.0),
    later_steps=(1.0,),
    batch=5,
)


def depths(
    c: ModelConfig, steps: tuple[float, ...], later: tuple[float, ...] = ()
) -> dict[str, Bounded]:
    """Bounded by share of the way from a window to the exact length, with the least keep that an engine
    takes and the default: at the first decoder layer, and by `later` at those behind it. Named "n6 keep 76",
    n the layers whose window is cut."""
    first, window = c.first_decoder_layer, c.sliding_window
    least = c.ring_length
    out: dict[str, Bounded] = {}
    for layer in range(first, c.num_layers if later else first + 1):
        n = c.num_layers - layer
        exact = window + (n - 1) * (window - 1)
        shares = steps if layer == first else later
        keeps = {least, *(window + round(s * (n - 1) * (window - 1)) for s in shares)}
        keeps |= {Bounded().rows_kept(c)} if layer == first else set()
        for keep in sorted(k for k in keeps if least <= k <= max(exact, least)):
            out[f"n{n} keep {keep}"] = Bounded(keep=keep, layer=layer)
    return out


def boxes(c: ModelConfig, steps: tuple[float, ...]) -> list[int]:
    """Keeps that stairs are compared at: the default, and those of the first two steps."""
    found = [p.keep for p in depths(c, steps[:2]).values()]
    return sorted(k for k in found if k is not None and k >= Bounded().rows_kept(c))


def keep_policies(c: ModelConfig, sizes: Sizes) -> dict[str, object]:
    """Part keep: by keep and depth, both engines' cuts, stairs, and below what an engine takes."""
    short = sorted({max(s * c.sliding_window // 64, 1) for s in sizes.short_keeps})
    keeps = boxes(c, sizes.steps)
    return {
        **{f"short {k}": Short(keep=k) for k in short},
        **depths(c, sizes.steps, sizes.later_steps),
        **{f"vLLM {k}": Bounded(keep=k, whole_window=True) for k in keeps},
        **{f"stairs {k}": Stairs(k) for k in keeps},
        "halo": Halo(),
    }


def few_policies(c: ModelConfig) -> dict[str, object]:
    """By keep at the first decoder layer, and what they are compared with, for other texts."""
    return {"short 1": Short(keep=1), **depths(c, (0.2, 0.6)), **others(c)}


def length_policies(c: ModelConfig) -> dict[str, object]:
    return {"short 1": Short(keep=1), **dict(list(depths(c, (0.2,)).items())[1:]), **others(c)}


def free_policies(c: ModelConfig) -> dict[str, object]:
    return {"short 1": Short(keep=1), default(c): Bounded(), **others(c)}


def others(c: ModelConfig) -> dict[str, object]:
    """The other cut of the default, and the exact rebuild."""
    return {f"vLLM {Bounded().rows_kept(c)}": Bounded(whole_window=True), "halo": Halo()}


def default(c: ModelConfig) -> str:
    """The name of Bounded() among the policies by keep."""
    return f"n{c.num_layers - c.first_decoder_layer} keep {Bounded().rows_kept(c)}"


def side_policies(page: int) -> dict[str, object]:
    """Behind a hit without state KV, in pages of so many tokens."""
    return {
        "no replay": NoReplay(),
        "page given up": PageGivenUp(page),
        "encoder": Bounded(sides="encoder"),
        "decoder": Bounded(),
        "both": Bounded(sides="both"),
        "both, vLLM": Bounded(sides="both", whole_window=True),
        "both, short 1": Short(keep=1, sides="both"),
        "halo": Halo(),
    }


def turn_policies(page: int) -> dict[str, tuple[object, bool]]:
    """Of conversations, with whether each turn takes over pages that the turns before it left."""
    both = Bounded(sides="both")
    return {
        "chained": (both, True),
        "fresh": (both, False),
        "vLLM": (Bounded(sides="both", whole_window=True), True),
        "short 1": (Short(keep=1, sides="both"), True),
        "page given up": (PageGivenUp(page), True),
        "halo": (Halo(), True),
    }
