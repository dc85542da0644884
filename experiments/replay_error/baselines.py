"""Policies to compare with. No engine should run them: they are what bounded replay has to beat."""

from __future__ import annotations

from deepinfer.config import ModelConfig
from deepinfer.slots.protocols import EngineInfo, Prompt, ReplayPlan
from deepinfer.slots.replay import Bounded


class Short(Bounded):
    """Bounded with any keep from 1 on, also below a window and its backtracking. keep=1 is no window at
    all: behind the cut a decoder layer sees the last prompt row and what follows it."""

    exact = False

    def start(self, info: EngineInfo) -> Short:
        return self


class _BehindHit:
    """What a policy may do with block KV that was found without its state KV."""

    version, exact, batch_invariant, on_device = 1, False, True, False

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def plan(self, prompt: Prompt, config: ModelConfig) -> ReplayPlan:
        at = max(self._begin(prompt, config), 0)
        none, floor = (0,) * config.num_layers, (at,) * config.num_layers
        why = f"from {at} on an empty window; block KV from there on is written anew"
        return ReplayPlan(at, at, floor, none, floor, exact=not at, why=why)

    def _begin(self, prompt: Prompt, config: ModelConfig) -> int:
        raise NotImplementedError


class NoReplay(_BehindHit):
    """The whole hit is taken over and nothing of it runs again: the rows behind it begin without a window."""

    def _begin(self, prompt: Prompt, config: ModelConfig) -> int:
        return prompt.hit


class PageGivenUp(_BehindHit):
    """The last page of the hit is given up and computed again, its block KV too, on an empty window.
    page: its tokens."""

    def __init__(self, page: int) -> None:
        self.page = page

    def __repr__(self) -> str:
        return f"PageGivenUp({self.page})"

    def _begin(self, prompt: Prompt, config: ModelConfig) -> int:
        return prompt.hit - self.page
