"""Where free-running text goes another way under a replay policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from deepinfer.engine.provenance import of_engine
from deepinfer.measure.replay.error import Keeps, policies
from deepinfer.measure.replay.texts import Texts, check_count
from deepinfer.tables.table import Table

if TYPE_CHECKING:
    from deepinfer.engine.engine import Engine, Prompts

WAYS = {"greedy": 0.0, "seeded": 1.0}  # temperatures


def replay_divergence(
    eng: Engine,
    texts: Prompts,
    keeps: Keeps,
    prompt: int,
    max_tokens: int,
    *,
    groups: Sequence[Any] | None = None,
    seed: int = 0,
) -> Table:
    """Generate behind the first `prompt` tokens of each text with `exact` and with each policy.

    Greedily, and at temperature 1 with the same random numbers (seed + the text's number) in both.
    One row a text, policy and way: diverged: output position of the first token that differs, None
    where all `tokens` of exact's text are the same. keeps: as of `replay_error`. The prefix cache
    is off. Costs one generation a policy and way.

    Raises ValueError as `replay_error` does, and what `generate` raises.
    """
    from deepinfer.engine.sampling_params import SamplingParams

    check_count("replay_divergence", "max_tokens", max_tokens)
    found = Texts.of(eng, texts, prompt, max_tokens, groups, "replay_divergence")
    base = eng.with_(prefix_cache=False, num_snapshots=None)
    named = policies(eng, keeps, "replay_divergence")
    engines = {
        "exact": base.with_(replay="exact"),
        **{name: base.with_(replay=e.slots["replay"]) for name, e in named.items()},
    }
    said: dict[tuple[str, str], list[tuple[int, ...]]] = {}
    prompts = [list(ids[:prompt]) for ids in found.ids]
    for name, engine in engines.items():
        with engine:
            for way, temperature in WAYS.items():
                params = [
                    SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed + i)
                    for i in range(len(prompts))
                ]
                done = engine.generate(prompts, params, progress=False).raise_for_errors()
                said[name, way] = [c.token_ids for c in done]
    rows = [
        found.label(i)
        | dict(policy=name, way=way, tokens=len(said["exact", way][i]))
        | dict(diverged=first_difference(said["exact", way][i], said[name, way][i]))
        for name in engines
        if name != "exact"
        for way in WAYS
        for i in range(len(found))
    ]
    facts = of_engine(eng) | found.facts | dict(sampling_seed=seed)
    facts["policies"] = {name: repr(e.slots["replay"]) for name, e in engines.items()}
    return Table(rows, title="first token that differs from exact's text", provenance=facts)


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Position of the first token that differs, the end of the shorter one counting as a token."""
    for k, (x, y) in enumerate(zip([*a, -1], [*b, -1])):
        if x != y:
            return k
    return None
