"""compare: how far one engine's numbers are from another's, with intervals over prompts.

    di.compare(exact, bounded, prompts)                        # a Comparison; show it in a cell
    di.compare(exact, {"dense": dense, "bounded": bounded}, prompts).table()

Teacher-forced: both engines are fed prompt and a's greedy continuation, the same ids row by row,
so that one early difference does not make all later rows incomparable. Free-running: b continues by
itself, greedily, and the first token that differs is reported with a's margin there.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deepinfer.measure.comparison import Comparison, Pair, pair

if TYPE_CHECKING:
    from deepinfer.engine.engine import Engine, Prompts


def compare(
    a: Engine,
    b: Engine | Mapping[str, Engine],
    prompts: Prompts,
    continuation: int = 64,
) -> Comparison:
    """Compare engine b, or a dict of named engines, with engine a.

    prompts: as for generate (text is encoded by a). continuation: most tokens of a's greedy
    continuation, which the end-of-sequence token ends; 0 compares the prompts alone. Row p of a
    sequence is what an engine says after its token p; rows that a replay policy dropped in either
    engine are counted and left out.

    What runs are copies of the engines (`with_()`), so their counters, prefix caches, requests and
    seeds are as before, and a closed engine can be compared too. An open trace of an engine sees
    its copy, and what it edits counts. A copy has a KV cache of its own while this runs
    (`eng.memory` says how large; max_num_seqs or num_pages make it smaller), and it is freed here.

    Raises TypeError for what is no Engine; ValueError where vocabularies differ, a prompt is bad or
    an engine is too short for prompt and continuation; ArithmeticError for logits not finite.
    """
    engines = named(a, b)
    if isinstance(continuation, bool) or not isinstance(continuation, int) or continuation < 0:
        raise ValueError(
            f"continuation={continuation!r}: tokens to continue each prompt by, 0 or more"
        )
    ids = encoded(a, prompts)
    copies = {name: copy_of(e) for name, e in {"a": a, **engines}.items()}
    clocks = {name: Clock(e) for name, e in copies.items()}
    try:
        pairs = measured(clocks, ids, continuation)
    finally:  # an interrupt or a fault leaves no cache behind
        for engine in copies.values():
            engine.close()
    return Comparison(a, engines, tuple(map(tuple, ids)), pairs, clocks)


def copy_of(engine: Engine) -> Engine:
    """An engine with the same weights, slots and settings, seen and edited by the same traces."""
    copy = engine.with_()
    copy._traces = engine._traces
    return copy


# -------------------------------------------------------------------------------- running both


@dataclass
class Clock:
    """An engine with the seconds it worked: generating tokens, and running forced rows."""

    engine: Engine
    tokens: int = 0
    token_seconds: float = 0.0
    rows: int = 0
    row_seconds: float = 0.0

    def now(self) -> float:
        if self.engine.model.device.type == "cuda":
            torch.cuda.synchronize(self.engine.model.device)
        return time.perf_counter()


def measured(
    clocks: dict[str, Clock], ids: list[list[int]], continuation: int
) -> dict[str, tuple[Pair, ...]]:
    """The prompts in every engine beside those in 'a'."""
    others = [name for name in clocks if name != "a"]
    texts = {"a": greedy(clocks["a"], ids, [continuation] * len(ids))}
    for name in others:
        texts[name] = greedy(clocks[name], ids, [len(t) for t in texts["a"]])
    pairs: dict[str, list[Pair]] = {name: [] for name in others}
    for i, prompt in enumerate(ids):
        after = texts["a"][i]
        fed = [*prompt, *after[:-1]]
        ours = forced(clocks["a"], fed, len(prompt), i)
        for name in others:
            theirs = forced(clocks[name], fed, len(prompt), i)
            pairs[name].append(pair(ours, theirs, len(prompt), after, texts[name][i]))
    return {name: tuple(p) for name, p in pairs.items()}


def named(a: Engine, b: Engine | Mapping[str, Engine]) -> dict[str, Engine]:
    """b as a dict of engines that can be compared with a."""
    from deepinfer.engine.engine import Engine

    engines = dict(b) if isinstance(b, Mapping) else {"b": b}
    if not engines:
        raise ValueError("compare: b is an empty dict: give an engine, or engines by name")
    for name, engine in {"the first": a, **engines}.items():
        if not isinstance(engine, Engine):
            raise TypeError(
                f"compare: {name!r} is {type(engine).__name__}: want an Engine, or a dict of them"
            )
    if "a" in engines:
        raise ValueError("compare: the name 'a' means the first engine: give this one another")
    for name, engine in engines.items():
        if engine.config.vocab_size != a.config.vocab_size:
            raise ValueError(
                f"compare: {name!r} has {engine.config.vocab_size} tokens in its vocabulary, a has "
                f"{a.config.vocab_size}: their logits have no common axis"
            )
        mine, its = a._shared.tokenizer, engine._shared.tokenizer
        if mine is not its and mine is not None and its is not None:
            if mine.get_vocab() != its.get_vocab():
                raise ValueError(
                    f"compare: {name!r} and a give different texts to the same token ids: "
                    "logits of different vocabularies can't be compared"
                )
    return engines


def encoded(a: Engine, prompts: Prompts) -> list[list[int]]:
    """Token ids of every prompt. ValueError names the one that is bad."""
    from deepinfer.engine.text import encode_prompt, prompt_list

    out = []
    for i, prompt in enumerate(prompt_list(prompts)[0]):
        try:
            out.append(encode_prompt(a, prompt))
        except ValueError as error:
            raise ValueError(f"compare: prompt {i}: {error}") from None
    if not out:
        raise ValueError("compare: no prompts: give at least one")
    return out


def greedy(clock: Clock, ids: list[list[int]], lengths: list[int]) -> list[tuple[int, ...]]:
    """Greedy continuations of at most `lengths` tokens."""
    from deepinfer.engine.sampling_params import SamplingParams

    wanted = [i for i, n in enumerate(lengths) if n]
    out: list[tuple[int, ...]] = [()] * len(ids)
    if not wanted:
        return out
    clock.engine.logits(ids[wanted[0]][:1])  # what the first call sets up is not timed
    start = clock.now()
    params = [SamplingParams(temperature=0.0, max_tokens=lengths[i]) for i in wanted]
    done = clock.engine.generate([ids[i] for i in wanted], params, progress=False)
    done.raise_for_errors()
    clock.token_seconds += clock.now() - start
    for i, completion in zip(wanted, done, strict=True):
        out[i] = completion.token_ids
    clock.tokens += sum(map(len, out))
    return out


def forced(clock: Clock, ids: list[int], prompt: int, i: int) -> Tensor:
    """[t, v] teacher-forced logits; NaN in dropped rows alone."""
    start = clock.now()
    logits = clock.engine.logits(ids, prompt=prompt)
    clock.row_seconds += clock.now() - start
    clock.rows += len(ids)
    bad = ~logits.isfinite().all(-1) & ~logits.isnan().all(-1)
    if bad.any():
        row = int(bad.nonzero()[0])
        raise ArithmeticError(
            f"compare: logits of prompt {i}, position {row} are not finite in {clock.engine!r}"
        )
    return logits
