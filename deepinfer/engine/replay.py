"""ReplayPlanner: asks the replay policy of one engine for plans and checks each of them."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from deepinfer.slots.protocols import Prompt, ReplayPlan

if TYPE_CHECKING:
    from deepinfer.config import ModelConfig
    from deepinfer.slots.protocols import Replay


class ReplayPlanner:
    """policy: the engine's copy of its replay slot; config: of the model."""

    def __init__(self, policy: Replay, config: ModelConfig) -> None:
        self.policy, self.config = policy, config
        self._warned = False

    def __repr__(self) -> str:
        return repr(self.policy)

    @property
    def exact(self) -> bool:
        """Whether the policy promises that its plans change no number."""
        return self.policy.exact

    def plan(self, prompt: Prompt) -> ReplayPlan:
        """The policy's plan for a prompt. Raises TypeError if the policy returns anything else, and
        ValueError if the plan breaks a law of `ReplayPlan.validate` or the policy's own promise."""
        c, policy = self.config, self.policy
        plan = policy.plan(prompt, c)
        if not isinstance(plan, ReplayPlan):
            raise TypeError(f"replay {policy!r}.plan returned {plan!r}: want a ReplayPlan")
        if policy.exact and not plan.exact:
            raise ValueError(
                f"replay {policy!r} promises to be exact and made a plan that is not "
                f"({plan.why}): set exact = False in its class"
            )
        try:
            plan.validate(prompt, c.num_layers, c.kv_source_layer_ids)
        except ValueError as error:
            raise ValueError(f"replay {policy!r}, {prompt}: {error}") from None
        self._warn_of_few_rows(prompt, plan)
        return plan

    def _warn_of_few_rows(self, prompt: Prompt, plan: ReplayPlan) -> None:
        """Warn once if a plan leaves fewer rows than decoding may look back to. `Bounded` refuses
        such a setting when it starts; another policy may not."""
        needs = self.config.ring_length
        left = prompt.length - max(*plan.floor, plan.rows_from[-1])
        if self._warned or left >= min(needs, prompt.length):
            return
        self._warned = True
        warnings.warn(
            f"replay {self.policy!r} leaves {left} rows at the end of a prompt of {prompt.length}; "
            f"decoding looks back up to {needs} (the window and backtracking of this model), so the "
            "windows behind the prompt are short: di.check(policy, config=eng.config) shows where",
            stacklevel=3,
        )


def first_cut(plan: ReplayPlan) -> tuple[int, int]:
    """(lowest position of a cut, number of first layers above every cut) of the plan of a prompt of
    which nothing is cached; (0, all layers) if the plan cuts nothing."""
    floors = [f for f in plan.floor if f]
    uncut = next((i for i, f in enumerate(plan.floor) if f), len(plan.floor))
    return min(floors, default=0), uncut
