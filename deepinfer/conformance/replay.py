"""The laws of a replay policy."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

from torch import Tensor

from deepinfer.config import ModelConfig
from deepinfer.conformance import prompt_run
from deepinfer.conformance.law import Law, Subject, case, expect, law
from deepinfer.conformance.small import small_config
from deepinfer.slots.protocols import Prompt, ReplayPlan

LAWS: list[Law] = []


def prompts(config: ModelConfig) -> Iterator[Prompt]:
    """Prompts from the shortest up: lengths and hits around multiples of the window; state KV of
    all layers, and further up of the encoder alone, as cut prompts leave it."""
    w, half, whole = config.sliding_window, config.first_decoder_layer, config.num_layers
    lengths = sorted({1, 2, w - 1, w, w + 1, 2 * w, 3 * w + 1, 8 * w, 20 * w + 3})
    for length in lengths:
        hits = sorted(
            {
                h
                for h in (0, 1, w, w + 1, 2 * w, length // 2, length - w, length - 1)
                if 0 <= h < length
            }
        )
        for hit in hits:
            for state in sorted({0, max(hit - w, 0), hit}):
                for every in (False, True):
                    yield Prompt(length, hit, state, every)
                above = tuple((at, half) for at in (hit, hit - w // 2) if at > state)
                if above and half < whole:
                    yield Prompt(length, hit, state, states=(*above, (state, whole)))


def shown(prompt: Prompt) -> dict[str, object]:
    """A prompt in the words of a failing case."""
    words: dict[str, object] = {n: getattr(prompt, n) for n in ("length", "hit", "state_at")}
    return words | ({"states": prompt.states} if prompt.states else {})


def models(s: Subject) -> tuple[tuple[str, ModelConfig], ...]:
    return ("small", s.info.config), ("V4.1-Flash", ModelConfig.v41_flash())


def plans(s: Subject) -> Iterator[tuple[dict, Prompt, ModelConfig, ReplayPlan | None]]:
    """(words, prompt, config, plan); plan None: a prompt that wants all logits was refused."""
    for name, config in models(s):
        policy = s.fresh()
        for prompt in prompts(config):
            words = dict(model=name, **shown(prompt))
            if prompt.wants_all_logits:
                words["all_logits"] = "wanted"
            with case(**words):
                try:
                    plan = policy.plan(prompt, config)
                except ValueError:
                    if not prompt.wants_all_logits:
                        raise
                    plan = None
                else:
                    expect(
                        isinstance(plan, ReplayPlan), f"plan returned {plan!r}: want a ReplayPlan"
                    )
            yield words, prompt, config, plan


@law(LAWS, "every plan is valid: lengths, write_from, and rows that only ever leave")
def valid(s: Subject) -> None:
    for words, prompt, config, plan in plans(s):
        with case(**words):
            if plan is not None:
                plan.validate(prompt, config.num_layers)
                numbers = (plan.start, plan.write_from, *plan.kv_from, *plan.rows_from, *plan.floor)
                expect(all(type(x) is int for x in numbers), "a plan holds host integers only")
                expect(min(numbers) >= 0, f"a number of the plan is negative: {min(numbers)}")
                expect(
                    isinstance(plan.why, str) and plan.why,
                    "why is empty: say in words what was decided",
                )


@law(LAWS, "block KV is complete: each position was found or is projected by every KV source")
def complete(s: Subject) -> None:
    for words, prompt, config, plan in plans(s):
        if plan is None:
            continue
        with case(**words):
            expect(
                plan.start <= prompt.hit,
                f"starts at {plan.start}: {prompt.hit}..{plan.start - 1} is in no cache",
            )
            for layer in config.kv_source_layers:
                enter = max(plan.start, plan.rows_from[layer - 1] if layer else 0)
                expect(
                    enter <= plan.write_from,
                    f"KV source {layer} writes from {plan.write_from}, "
                    f"but rows enter it from {enter} only",
                )


@law(LAWS, "a hit no longer than the window is not adopted without its state KV")
def short_hit(s: Subject) -> None:
    for words, prompt, config, plan in plans(s):
        state = prompt.state_at or prompt.states
        if plan is None or prompt.hit > config.sliding_window or state:
            continue
        with case(**words):
            expect(
                plan.start == 0 and plan.write_from == 0,
                f"start {plan.start}, write_from {plan.write_from}",
            )


@law(LAWS, "behind a prompt a window and the backtracking are left, for the drafter too")
def left(s: Subject) -> None:
    """A policy may be sized when it starts, so the plans are those for the engine's own model."""
    config = s.info.config
    window, back = config.sliding_window, config.backtracking
    for words, prompt, model, plan in plans(s):
        lowest = left_from(prompt.length, config)
        if plan is None or model is not config or prompt.hit > lowest:
            continue  # no engine takes over so long a hit
        why = (
            f"needed from {lowest} on: a window of {window} and backtracking of {back} (the drafts "
            f"of a step and one) behind {prompt.length} tokens"
        )
        with case(**words):
            layer = max(range(config.num_layers), key=plan.floor.__getitem__)
            expect(
                plan.floor[layer] <= lowest,
                f"layer {layer} has no window keys below {plan.floor[layer]}, {why}",
            )
            expect(
                plan.rows_from[-1] <= lowest,
                f"the drafter has no context below {plan.rows_from[-1]}, {why}",
            )


def left_from(length: int, config: ModelConfig) -> int:
    """The lowest position that decoding behind a prompt of so many tokens may look back to, where a
    verification was rolled back, in every layer's window and in the drafter's context."""
    return max(length - config.ring_length, 0)


@law(LAWS, "where all logits are wanted no row is dropped, or the prompt is refused (ValueError)")
def all_logits(s: Subject) -> None:
    for words, prompt, config, plan in plans(s):
        if plan is None or not prompt.wants_all_logits:
            continue
        with case(**words):
            lowest = max(plan.start, *plan.rows_from)
            expect(lowest == 0, f"rows below {lowest} have no logits")


@law(LAWS, "plan is a pure function of prompt and config")
def pure(s: Subject) -> None:
    name, config = models(s)[0]
    every = list(prompts(config))
    forward, backward = s.fresh(), s.fresh()
    held = copy.deepcopy(getattr(forward, "__dict__", {}))
    first = [_plan(forward, p, config) for p in every]
    second = [_plan(backward, p, config) for p in reversed(every)][::-1]
    for prompt, a, b in zip(every, first, second):
        with case(model=name, **shown(prompt)):
            expect(a == b, f"after other prompts the plan is another: {a} and {b}")
    with case(model=name, prompts=len(every)):
        expect(
            repr(held) == repr(getattr(forward, "__dict__", {})),
            "planning changed the policy's settings",
        )


def _plan(policy, prompt: Prompt, config: ModelConfig):
    try:
        return policy.plan(prompt, config)
    except ValueError as e:
        return str(e)


@law(LAWS, "a plan that claims exact=True drops nothing that is visible")
def exact_plans(s: Subject) -> None:
    for words, prompt, config, plan in plans(s):
        if plan is None or not plan.exact:
            continue
        with case(**words):
            _drops_nothing(prompt, config, plan)


@law(LAWS, "every plan of an exact policy is exact", exact=True)
def exact_policy(s: Subject) -> None:
    for words, _, _, plan in plans(s):
        with case(**words):
            expect(
                plan is None or plan.exact,
                f"the policy claims exact=True, this plan does not: {plan and plan.why}",
            )


def _drops_nothing(prompt: Prompt, config: ModelConfig, plan: ReplayPlan) -> None:
    """Compare with the lowest rows that later rows, and the drafts and tokens after, look back to.

    A row of layer l sees the window keys of positions p - w + 1..p, which are projected from the
    rows that enter layer l; an entry of block KV is projected from the whole group of rows that it
    closes, at a KV source. Below start nothing runs: what is seen there has to be state KV.
    """
    w, length = config.sliding_window, prompt.length
    whole = plan.start == min(prompt.state_at, prompt.length - 1)
    out = 0 if prompt.wants_all_logits else length - 1  # rows whose logits are needed
    at_hand = 0  # windows below it are
    for layer in reversed(range(config.num_layers)):
        there = whole or prompt.state_for(layer + 1, plan.start) == plan.start
        at_hand = plan.start if there else 0
        out = max(out, at_hand)
        expect(
            plan.rows_from[layer] <= out,
            f"layer {layer} drops rows below {plan.rows_from[layer]}, "
            f"later layers see those from {out}",
        )
        seen = max(out - w + 1, 0)
        expect(
            plan.floor[layer] <= seen,
            f"layer {layer} hides window positions below {plan.floor[layer]}",
        )
        enter = min(seen, left_from(length, config))
        if layer in config.kv_source_layers:
            ratio = config.ratio(layer)
            enter = min(enter, plan.write_from // ratio * ratio)
        enter = max(enter, at_hand)
        expect(
            plan.kv_from[layer] <= enter,
            f"layer {layer} does not write window keys below {plan.kv_from[layer]}, "
            f"those from {enter} are seen",
        )
        out = enter
    expect(
        plan.start <= max(out, at_hand),
        f"starts at {plan.start}: the windows before it are available at {prompt.state_at} only, "
        f"and rows from {out} are seen",
    )


OTHER_MODEL = "the numbers are those of the small model, and another config was given"


def run_prompts(s: Subject, look: Callable[[Prompt, Tensor], None]) -> str | None:
    """Run prompts by the policy's plans, and look at what each leaves: the logits of its last row,
    of the drafts and of rows behind it. Returns why nothing is run where another model was given.
    """
    if s.info.config != small_config():
        return OTHER_MODEL
    policy = s.fresh()
    for prompt in prompt_run.cases():
        with case(**shown(prompt)):
            look(prompt, prompt_run.logits(prompt, policy.plan(prompt, s.info.config)))
    return None


@law(LAWS, "no row reads a window that was never written")
def written(s: Subject) -> str | None:
    def look(_: Prompt, logits: Tensor) -> None:
        expect(
            logits.isfinite().all(),
            "logits or drafts behind the prompt are not finite, where what was never written is "
            "NaN",
        )

    return run_prompts(s, look)


@law(LAWS, "an exact policy's prompt leaves the logits and drafts that all rows leave", exact=True)
def same_numbers(s: Subject) -> str | None:
    def look(prompt: Prompt, logits: Tensor) -> None:
        apart = float((logits - prompt_run.full_logits(prompt.length)).abs().max())
        expect(  # NaN is not below anything
            apart < 1e-9,
            f"logits of the last row, of drafts and of rows behind it differ by {apart:.2g}",
        )

    return run_prompts(s, look)
