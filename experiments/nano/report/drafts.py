"""The drafter at work: texts continued by the engine, and what each verification step accepted.

A mean over steps needs care at both ends. The first token comes from the prompt's own step and has
no draft. A text is written a few tokens longer than it is counted, so that the last counted step is
whole; one that ends in eos loses its last step, for nobody knows what it would have accepted. A
step across the end of the counted text counts by the part of its tokens inside it, so that the mean
is tokens / steps of that text whichever way the end falls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import deepinfer as di
from deepinfer.engine.engine import Engine
from deepinfer.engine.step.speculation import pending_draft
from deepinfer.measure.bootstrap import Estimate
from experiments.nano.report.findings import Finding
from experiments.nano.report.intervals import aligned, over_modules, ratio
from experiments.nano.report.parallel import each
from experiments.nano.report.study import Study
from experiments.nano.report.texts import Document, modules

GRAM = 8  # tokens: text repeats itself where so many in a row come a second time


@dataclass(frozen=True)
class Step:
    """start: output position of its first token; emitted: accepted drafts and the token after them;
    confidence: of each drafted position."""

    start: int
    emitted: int
    confidence: tuple[float, ...]


@dataclass(frozen=True)
class Written:
    """A continued text. tokens: what is counted of it; steps: those that drafted; prompt: what it
    continues, without bos."""

    module: str
    tokens: tuple[int, ...]
    steps: tuple[Step, ...]
    prompt: tuple[int, ...] = ()


# ------------------------------------------------------------------------------------- contexts


def contexts(docs: Sequence[Document], count: int, prompt: int) -> list[tuple[str, list[int]]]:
    """(module, ids) of `count` prompts without bos, the same number a module as far as they go.

    Each ends somewhere else in its module: at evenly spaced places of the module's tokens, never
    across files, and holds at most `prompt` tokens, at least a quarter of that where the file does.
    Fewer than `count` where a module is too short for its share of different ones.
    """
    names = modules([d for d in docs if len(d.ids) > 1])
    out: list[tuple[str, list[int]]] = []
    for i, module in enumerate(names):
        share = count // len(names) + (i < count % len(names))
        files = [d.ids for d in docs if d.module == module and len(d.ids) > 1]
        total = sum(map(len, files))
        for k in range(share):
            at, file = (k + 1) * total // (share + 1), 0
            while at >= len(files[file]):
                at, file = at - len(files[file]), file + 1
            ids = files[file]
            stop = min(max(at, prompt // 4, 1), len(ids) - 1)
            one = (module, list(ids[max(0, stop - prompt) : stop]))
            if one not in out:  # the same text twice would count twice
                out.append(one)
    return out


# -------------------------------------------------------------------------------------- writing


def write(
    eng: Engine,
    prompts: Sequence[tuple[str, list[int]]],
    tokens: int,
    temperature: float,
    jobs: int = 1,
) -> list[Written]:
    """Continue every (module, ids) by `tokens` tokens, in full batches. A prompt's seed is its
    number."""
    numbered = [(i, module, ids) for i, (module, ids) in enumerate(prompts)]
    size = eng.settings.max_num_seqs
    groups = [numbered[i : i + size] for i in range(0, len(numbered), size)]
    found = each(lambda group: write_batch(eng, group, tokens, temperature), groups, jobs)
    return [w for group in found for w in group]


def write_batch(
    eng: Engine, prompts: Sequence[tuple[int, str, list[int]]], tokens: int, temperature: float
) -> list[Written]:
    """Continue every (seed, module, ids). Step by step, so that the confidences that a request
    holds can be read before its draft is verified."""
    bos, eos, most = eng.config.bos_token_id, eng.config.eos_token_id, eng.config.max_draft
    numbers = {
        eng.add([bos, *ids], max_tokens=tokens + most, temperature=temperature, seed=seed): i
        for i, (seed, _, ids) in enumerate(prompts)
    }
    steps: dict[int, list[Step]] = {r: [] for r in numbers}
    out: list[Written | None] = [None] * len(prompts)
    while eng.unfinished:
        before = {r.id: (len(r.output), pending_draft(r)) for r in eng.requests.values()}
        done = {c.index: c for c in eng.step()}
        after = {r.id: len(r.output) for r in eng.requests.values()}
        after |= {i: len(c.token_ids) for i, c in done.items()}
        for request, (start, draft) in before.items():
            if draft is not None and after[request] > start:
                steps[request].append(Step(start, after[request] - start, draft.confidence))
        for request, c in done.items():
            if c.error is not None:
                raise RuntimeError(f"context {prompts[numbers[request]][0]}: {c.error}")
            _, module, prompt = prompts[numbers[request]]
            all_steps = steps[request]
            if c.token_ids[-1] == eos and all_steps:
                all_steps.pop()
            end = all_steps[-1].start + all_steps[-1].emitted if all_steps else 0
            counted = c.token_ids[: min(tokens, end)]
            kept = tuple(s for s in all_steps if s.start < tokens)
            out[numbers[request]] = Written(module, counted, kept, tuple(prompt))
    return [w for w in out if w is not None]


def drafting(eng: Engine, rule: str = "match") -> Engine:
    """The engine with its whole draft verified at every step."""
    return eng.with_(verifier=di.verifier.Fixed(eng.config.max_draft, rule=rule))


# ----------------------------------------------------------------------------------- repetition


def repeat_cut(tokens: Sequence[int], n: int = GRAM) -> int:
    """Where the text begins to repeat itself: the start of the first n-gram that occurs for the
    second time (occurrences may overlap); its length where none does."""
    seen: set[tuple[int, ...]] = set()
    for start in range(len(tokens) - n + 1):
        gram = tuple(tokens[start : start + n])
        if gram in seen:
            return start
        seen.add(gram)
    return len(tokens)


def distinct_share(tokens: Sequence[int], n: int = GRAM) -> float:
    """Different n-grams / n-grams; 1 for a text of fewer than n tokens."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


def prompt_cut(prompt: Sequence[int], tokens: Sequence[int], n: int = GRAM) -> int:
    """Where the text begins to repeat its prompt: the start of its first n-gram that stands in the
    prompt; its length where none does."""
    known = {tuple(prompt[i : i + n]) for i in range(len(prompt) - n + 1)}
    starts = range(len(tokens) - n + 1)
    return next((i for i in starts if tuple(tokens[i : i + n]) in known), len(tokens))


def prompt_share(prompt: Sequence[int], tokens: Sequence[int], n: int = GRAM) -> float:
    """n-grams of the text that stand in its prompt / its n-grams; 0 for a text of fewer than n."""
    known = {tuple(prompt[i : i + n]) for i in range(len(prompt) - n + 1)}
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return sum(gram in known for gram in grams) / len(grams) if grams else 0.0


# ----------------------------------------------------------------------------------- statistics


def weights(steps: Sequence[Step], stop: int) -> list[float]:
    """Of each step: the part of its tokens that lie before output position `stop`."""
    return [max(0, min(s.start + s.emitted, stop) - s.start) / s.emitted for s in steps]


def tokens_and_steps(written: Sequence[Written], stops: Sequence[int]) -> dict[str, list[float]]:
    """module -> [tokens, steps] of each text before its stop; their ratio is the mean accepted."""
    found: dict[str, list[float]] = {}
    for w, stop in zip(written, stops, strict=True):
        row = found.setdefault(w.module, [0.0, 0.0])
        part = weights(w.steps, stop)
        row[0] += sum(p * s.emitted for p, s in zip(part, w.steps))
        row[1] += sum(part)
    return found


def accepted(written: Sequence[Written], cut: bool = True) -> Estimate:
    """Mean tokens a step, bonus included; cut: of each text until it repeats itself."""
    stops = [repeat_cut(w.tokens) if cut else len(w.tokens) for w in written]
    return accepted_before(written, stops)


def accepted_before(written: Sequence[Written], stops: Sequence[int]) -> Estimate:
    """Mean tokens a step of each text before its stop; None where no step counts."""
    totals = {m: x for m, x in tokens_and_steps(written, stops).items() if x[1]}
    return over_modules(aligned(totals), ratio) if totals else Estimate(None)


def conditional(written: Sequence[Written], stops: Sequence[int], n: int) -> list[float | None]:
    """P(draft k accepted | those before it were), k = 1..n; None where none came so far."""
    reached = [0.0] * (n + 1)
    for w, stop in zip(written, stops, strict=True):
        for part, s in zip(weights(w.steps, stop), w.steps):
            for k in range(s.emitted):
                reached[k] += part
    return [b / a if a else None for a, b in zip(reached, reached[1:])]


def outcomes(written: Sequence[Written]) -> tuple[Tensor, Tensor]:
    """(confidence [s, n], accepted [s, n] bool: draft k and all before it) of every whole step."""
    steps = [s for w in written for s in w.steps]
    n = len(steps[0].confidence) if steps else 0
    confidence = torch.tensor([s.confidence for s in steps], dtype=torch.float64)
    confidence = confidence.view(len(steps), n)
    emitted = torch.tensor([s.emitted for s in steps]).view(-1, 1)
    return confidence, torch.arange(n) < emitted - 1


# -------------------------------------------------------------------------------------- section


@dataclass(frozen=True)
class Runs:
    """What was written, at temperature 0 and 1, on held-out and dev contexts."""

    greedy: list[Written]
    sampled: list[Written]


def run(eng: Engine, docs: Sequence[Document], study: Study) -> Runs:
    prompts = contexts(docs, study.sizes.contexts, study.sizes.prompt)
    with drafting(eng) as greedy, drafting(eng, "rejection") as sampled:
        return Runs(
            write(greedy, prompts, study.sizes.written, 0.0, study.jobs),
            write(sampled, prompts, study.sizes.written, 1.0, study.jobs),
        )


def findings(study: Study, runs: Runs) -> Iterator[Finding]:
    yield lengths(study, runs)
    yield by_distinctness(study, runs.greedy)
    yield by_position(study, runs)


def lengths(study: Study, runs: Runs) -> Finding:
    def own(w: Written) -> int:
        return repeat_cut(w.tokens)

    def both(w: Written) -> int:
        return min(own(w), prompt_cut(w.prompt, w.tokens))

    def whole(w: Written) -> int:
        return len(w.tokens)

    rows = [
        _length("temperature 0, until it repeats itself", runs.greedy, own),
        _length("temperature 0, until it repeats itself or its prompt", runs.greedy, both),
        _length("temperature 0, whole text", runs.greedy, whole),
        _length("temperature 1, rejection", runs.sampled, whole),
    ]
    s, n, found = study.sizes, study.stored.config.max_draft, len(runs.greedy)
    short = "" if found == s.contexts else f" ({s.contexts} were asked for; the texts have no more)"
    says = (
        f"Tokens a verification step emits (accepted drafts and one more) with {n} drafts, over "
        f"{found} held-out contexts{short} of up to {s.prompt} tokens, {s.written} tokens written "
        f"for each. The headline is the first row: each text up to the place where {GRAM} of its "
        "tokens in a row come the second time, because text that repeats itself is easy to draft. "
        f"repeats: texts that do; distinct: mean share of different {GRAM}-grams, whole texts; "
        f"in_prompt: mean share of the {GRAM}-grams counted that stand in the prompt already."
    )
    return Finding("drafts.accepted", says, study.table(rows, "accepted tokens a step"))


def _length(name: str, written: Sequence[Written], stop: Callable[[Written], int]) -> dict:
    """A row: the texts, each up to its stop."""
    stops = [stop(w) for w in written]
    e, total = accepted_before(written, stops), tokens_and_steps(written, stops).values()
    shares = [prompt_share(w.prompt, w.tokens[:end]) for w, end in zip(written, stops)]
    return dict(
        text=name,
        contexts=len(written),
        tokens=round(sum(t for t, _ in total)),
        steps=sum(s for _, s in total),
        accepted=e.value,
        low=e.low,
        high=e.high,
        repeats=sum(repeat_cut(w.tokens) < len(w.tokens) for w in written),
        distinct=_mean([distinct_share(w.tokens) for w in written]),
        in_prompt=_mean(shares),
    )


def by_distinctness(study: Study, written: Sequence[Written]) -> Finding:
    edges, rows = (0.0, 0.5, 0.8, 0.95, 1.0), []
    for a, b in zip(edges, (*edges[1:], 2.0)):
        texts = [w for w in written if a <= distinct_share(w.tokens) < b]
        name = f"{a:g} to {b:g}" if b <= 1 else "1 (none repeats)"
        e = accepted(texts, cut=False) if texts else Estimate(None)
        rows.append(
            dict(
                distinct=name,
                contexts=len(texts),
                steps=sum(len(w.steps) for w in texts),
                accepted=e.value,
                low=e.low,
                high=e.high,
            )
        )
    says = (
        f"The same at temperature 0, whole texts, by the share of different {GRAM}-grams: how much "
        "repetition flatters the figure."
    )
    return Finding("drafts.distinct", says, study.table(rows, "accepted tokens by distinctness"))


def by_position(study: Study, runs: Runs) -> Finding:
    n, rows = study.stored.config.max_draft, []
    for name, written, cut in (
        ("temperature 0, until it repeats itself", runs.greedy, True),
        ("temperature 0, whole text", runs.greedy, False),
        ("temperature 1, rejection", runs.sampled, False),
    ):
        stops = [repeat_cut(w.tokens) if cut else len(w.tokens) for w in written]
        each = conditional(written, stops, n)
        rows.append(dict(text=name) | {f"draft {k + 1}": p for k, p in enumerate(each)})
    says = "How often draft k is accepted where all before it were."
    return Finding("drafts.conditional", says, study.table(rows, "conditional acceptance"))


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
