"""Halo: the exact rebuild. A layer runs the rows that a later one looks back to, and no others."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from deepinfer.slots.protocols import Prompt, ReplayPlan
from deepinfer.slots.registry import registry
from deepinfer.slots.settings import shown

if TYPE_CHECKING:
    from deepinfer.config import ModelConfig


@registry("replay").register("halo")
class Halo:
    """Exact numbers from fewer rows: the row set shrinks from layer to layer.

    What is read after the prompt: the last row's logits, the last window + backtracking positions
    of every layer's window and of the drafter's context, and the block KV behind the hit. A row of
    the window needs the window - 1 rows below it of the layer before, so layer l runs from

        key[last] = length - (window + backtracking)
        key[l]    = key[l + 1] - (window - 1)     and, at a KV source, no later than the first group
                                                  of which a token is behind the hit

    Without a hit every row enters the KV sources, and rows are saved behind the last of them only;
    behind a hit without state KV also before, from the token ids below the hit, whose block KV is
    read and not written. Source: the V4.1 technical report's argument that an exact rebuild costs
    layers x window rows, which `Bounded` does not pay.
    """

    version: ClassVar[int] = 1
    exact: ClassVar[bool] = True
    batch_invariant: ClassVar[bool] = True
    on_device: ClassVar[bool] = False

    def __repr__(self) -> str:
        return shown(self)

    def plan(self, prompt: Prompt, config: ModelConfig) -> ReplayPlan:
        length, layers = prompt.length, config.num_layers
        if prompt.wants_all_logits:
            none = (0,) * layers
            why = "all rows: log-probabilities of the whole prompt are asked"
            return ReplayPlan(0, 0, none, none, none, True, why)
        hit = min(prompt.hit, max(length - 1, 0))
        state = state_of(prompt, first_keys(length, hit, config), hit)
        if hit <= config.sliding_window and not state:
            hit = 0  # so short a hit saves no row of any layer's window
        key = first_keys(length, hit, config)
        start = max(min(key[0], hit), state)
        # Below `start` a window is what state KV brought, and empty where there was none.
        below = 0 if start == state else start
        floor = tuple(k if k >= start else below for k in key)
        end = max(length - config.ring_length, 0)
        return ReplayPlan(
            start=start,
            write_from=hit,
            kv_from=floor,
            rows_from=(*floor[1:], max(end, floor[-1])),
            floor=floor,
            exact=True,
            why=self._why(key, start, hit, state),
        )

    def _why(self, key: tuple[int, ...], start: int, hit: int, state_at: int) -> str:
        last = f"the last layer runs from {max(key[-1], start)}"
        if not hit:
            return f"all rows enter the last KV source; {last}"
        have = f"block KV is available below {hit}, state KV up to {state_at}"
        return f"from {start}: {have}; {last}"


def state_of(prompt: Prompt, key: tuple[int, ...], hit: int) -> int:
    """Largest position <= hit with the state KV of every layer whose window is needed below it."""
    places = {min(prompt.state_at, hit), *(at for at, _ in prompt.states if at <= hit)}
    for at in sorted(places, reverse=True):
        layers = max((i + 1 for i, lowest in enumerate(key) if lowest < at), default=0)
        if prompt.state_for(layers, at) == at:
            return at
    return 0


def first_keys(length: int, hit: int, config: ModelConfig) -> tuple[int, ...]:
    """Per layer the lowest position whose window key has to be exact (0 = all of them)."""
    window = config.sliding_window
    key = [max(length - config.ring_length, 0)]
    for layer in reversed(range(config.num_layers)):
        if layer < config.num_layers - 1:
            key.insert(0, key[0] - (window - 1))
        if layer in config.kv_source_layers:
            ratio = config.ratio(layer)
            key[0] = min(key[0], hit // ratio * ratio)
        key[0] = max(key[0], 0)
    return tuple(key)
