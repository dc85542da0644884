"""Requests while they live in the engine, and what comes back: Completion and Completions.

    waiting <-> running -> finished ('stop' | 'length' | 'abort' | 'error' | 'timeout' | 'preempted')
A running request that is preempted waits again and is computed again; what it emitted stays emitted.
A bad request costs that request only: it finishes with an error and its batch mates go on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from deepinfer.engine.completion import TokenStep
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.slots.protocols import Prompt, ReplayPlan

if TYPE_CHECKING:
    from deepinfer.cache.page_keys import ImageSpan
    from deepinfer.engine.prefix.admission import Admission


@dataclass(slots=True)
class PrefixState:
    """What the prefix cache knows of a request. salt, images: parts of its keys; keys: of its first
    full pages; adopted, registered: pages that it took over, that it and the cache have registered;
    exact: nothing of it was computed on an approximate window; edited: a trace has changed values;
    window_from: of each layer the lowest position with window rows; cut, uncut: lowest position of
    its prompt's cut (0: none), how many of the first layers are not cut; cached_tokens: tokens that it
    did not compute when it began first, None before; generation: of the cache when it began; cold:
    (prompt, plan) of the replay policy with nothing cached; matched: (state of the cache, answer) of
    the last `PrefixCacheManager.match`. branch, goal, stride, tail: where it leaves snapshots (see `snapshot_policy`): the end of the pages that others
    had, of its prefill, what lies between spare ones, its tail."""

    salt: str | None = None
    images: tuple[ImageSpan, ...] = ()
    keys: list[bytes] = field(default_factory=list)
    adopted: int = 0
    registered: int = 0
    exact: bool = True
    edited: bool = False
    window_from: tuple[int, ...] = ()
    cut: int = 0
    uncut: int = 0
    cached_tokens: int | None = None
    generation: int = 0
    cold: tuple[Prompt, ReplayPlan] | None = None
    matched: tuple[Any, Admission] | None = None
    branch: int = 0
    goal: int = 0
    stride: int = 0
    tail: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class InFlightTokens:
    """What a step that is on its way does to a request if every draft is accepted: rows before its
    last token that it computes, tokens that it gives (0: it ends inside a prompt). written: where
    the positions end whose keys it writes."""

    step: int
    rows: int
    tokens: int
    written: int


@dataclass(eq=False, repr=False)
class Request:
    """One sequence: prompt and output, and how far its keys are stored.

    num_computed: positions whose keys are computed and valid, by all that is committed;
    num_tokens: tokens that are committed. in_flight: what the steps in flight add, oldest first. A scheduler goes by the optimistic
    counters `optimistic_computed` and `optimistic_tokens`, which count those as if every draft were accepted; where no
    step is on its way they are `num_computed` and `num_tokens`.
    preemptions: how often it was preempted; deadline: on the monotonic clock, in seconds, or None.
    """

    id: int
    prompt: list[int]
    params: SamplingParams
    seed: int
    plan: ReplayPlan | None = None
    status: str = "waiting"
    finish_reason: str | None = None
    error: Exception | None = None
    output: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[dict[int, float]] = field(default_factory=list)
    prompt_logprobs: list[float | None] = field(default_factory=list)
    steps: list[TokenStep] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    state_id: int = 0
    num_computed: int = 0
    in_flight: tuple[InFlightTokens, ...] = ()
    draft: Any = None
    grammar: Any = None  # its state; `compiled` makes another one
    compiled: Any = None
    preemptions: int = 0
    deadline: float | None = None
    prefix: PrefixState = field(default_factory=PrefixState)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def max_length(self) -> int:
        """Tokens that it can become."""
        return len(self.prompt) + self.params.max_tokens

    @property
    def optimistic_tokens(self) -> int:
        """Tokens, with those on their way as if every draft were accepted, as far as they count."""
        if not self.in_flight:
            return self.num_tokens
        return min(self.num_tokens + sum(a.tokens for a in self.in_flight), self.max_length)

    @property
    def optimistic_computed(self) -> int:
        """Positions that are or will be computed, counted as `optimistic_tokens` is: all but the last token
        behind a step that emits. Equal to `optimistic_tokens` where no row is left to run, because the last
        token is surely on its way: each step that emits gives one at least."""
        emitting = sum(a.tokens > 0 for a in self.in_flight)
        if not emitting:
            return self.num_computed + sum(a.rows for a in self.in_flight)
        return (
            self.optimistic_tokens
            if self.num_tokens + emitting >= self.max_length
            else self.optimistic_tokens - 1
        )

    @optimistic_computed.setter
    def optimistic_computed(self, positions: int) -> None:
        self.num_computed = positions

    @property
    def decoding(self) -> bool:
        """Whether all but the last output token is computed: its next row is a decode row. Anything
        else, an output that has to be computed again too, runs as prefill rows."""
        return (
            self.optimistic_tokens > len(self.prompt)
            and self.optimistic_computed == self.optimistic_tokens - 1
        )

    @property
    def prefilling(self) -> bool:
        """Whether prefill rows are left to run."""
        return self.optimistic_computed < self.optimistic_tokens and not self.decoding

    def awaits(self, step: int) -> bool:
        """Whether what this step gives is for the request as it is: it has not finished or given
        way since the step was launched."""
        return self.status == "running" and any(a.step == step for a in self.in_flight)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of prompt tokens are asked and not complete."""
        return self.params.prompt_logprobs and len(self.prompt_logprobs) < len(self.prompt)

    @property
    def finished(self) -> bool:
        return self.status == "finished"

    def __repr__(self) -> str:
        end = f" ({self.finish_reason})" if self.finished else ""
        return (
            f"Request({self.id}, {len(self.prompt)} prompt + {len(self.output)} output tokens, "
            f"{self.optimistic_computed} computed, {self.status}{end})"
        )

    def token_slice(self, start: int, stop: int) -> list[int]:
        """Tokens start..stop-1 of prompt + output."""
        n = len(self.prompt)
        return self.prompt[start:stop] + self.output[max(start - n, 0) : max(stop - n, 0)]

    def restart(self) -> None:
        """Nothing of it is computed any more: its rows run again. The plan stays, so the same rows are
        dropped; of what it emitted nothing changes."""
        self.num_computed = self.prefix.adopted = self.prefix.registered = 0
        self.in_flight, self.draft = (), None
        if self.wants_prompt_logprobs:
            self.prompt_logprobs.clear()

    def repair(self) -> bool:
        """After an interrupt in the middle of a commit: lists of one length again, and at least the
        last token's row left to run. False where its rows have to run again from the first."""
        emitted = min(len(self.output), len(self.logprobs), len(self.steps))
        if self.params.top_logprobs:
            emitted = min(emitted, len(self.top_logprobs))
        for values in (self.output, self.logprobs, self.steps, self.top_logprobs):
            del values[emitted:]
        self.num_computed = min(self.num_computed, self.num_tokens - 1)
        told = len(self.prompt_logprobs) == self.num_computed + 1
        return told or not self.num_computed or not self.wants_prompt_logprobs

    def finish(self, reason: str, error: Exception | None = None) -> None:
        self.status, self.finish_reason, self.error = "finished", reason, error
        self.in_flight = ()
