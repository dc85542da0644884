"""The parts of the measurement. Each is a function (engine, sizes, say) -> tables by name."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import deepinfer as di
from deepinfer.engine.engine import Engine
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.measure.replay.divergence import WAYS, first_difference
from deepinfer.measure.replay.report import ReplayReport
from deepinfer.slots.replay import Bounded, Halo
from deepinfer.tables.table import Table
from experiments.replay_error.config import (
    Sizes,
    boxes,
    default,
    few_policies,
    free_policies,
    keep_policies,
    length_policies,
    side_policies,
    turn_policies,
)
from experiments.replay_error.cost import where_it_goes
from experiments.replay_error.floors import CHUNK, engines, floors
from experiments.replay_error.passages import Passages, last, passages
from experiments.replay_error.tables import brief, pairs, stored, texts_of
from experiments.replay_error.turns import Turns, turn_error

Say = Callable[[str], None]
Tables = dict[str, Table]
# Of the index: what engines choose on a CPU (NumPy's partition, for wide rows torch's top-k of the scores), and
# torch's on integer keys.
TOPKS = ("partition", "packed_key")
FLOORS = ("chunks", "fidelity 0", "fidelity 2", "top-k halved")


def measured(
    eng: Engine,
    texts: Passages,
    policies: Mapping[str, Any],
    prompt: int,
    sizes: Sizes,
    say: Say,
    what: str,
    **more: Any,
) -> ReplayReport:
    """`replay_error` in batches of passages, with a line of progress each."""

    def one(at: Passages) -> ReplayReport:
        return di.measure.replay_error(
            eng,
            at.ids,
            policies,
            prompt,
            sizes.continuation,
            groups=at.modules,
            apart=sizes.apart,
            **more,
        )

    return _batches(one, texts, sizes, say, what)


def floored(
    eng: Engine,
    texts: Passages,
    prompt: int,
    sizes: Sizes,
    say: Say,
    what: str,
    also: Mapping[str, Any] | None = None,
) -> ReplayReport:
    """All floors, and policies from the same exact pass."""

    def one(at: Passages) -> ReplayReport:
        return floors(eng, at, prompt, sizes.continuation, FLOORS, also)

    return _batches(one, texts, sizes, say, what)


def _batches(
    one: Callable[[Passages], ReplayReport], texts: Passages, sizes: Sizes, say: Say, what: str
):
    found = []
    for at in range(0, len(texts), sizes.batch):
        found.append(one(texts[at : at + sizes.batch]))
        say(f"{what}: {min(at + sizes.batch, len(texts))} of {len(texts)} passages")
    return ReplayReport.joined(found)


# -------------------------------------------------------------------------------------- the parts


def keep(eng: Engine, sizes: Sizes, say: Say) -> Tables:
    """Error against keep and depth, both engines' cuts, stairs, no window; layers, distance, drafts."""
    texts = passages(eng, "heldout", sizes.prompt + sizes.continuation, sizes.passages)
    r = measured(eng, texts, keep_policies(eng.config, sizes), sizes.prompt, sizes, say, "keep")
    n = eng.config.num_layers - eng.config.first_decoder_layer
    names = [name for name in r.policies if name.startswith(f"n{n} ")]
    compared = [*zip(names, names[1:]), (names[0], "short 1")]
    for k in boxes(eng.config, sizes.steps):
        box = next(name for name in names if name.endswith(f" keep {k}"))
        compared += [(box, f"vLLM {k}"), (box, f"stairs {k}"), (f"vLLM {k}", f"stairs {k}")]
    return {**stored(r), "texts": texts_of(r), "pairs": pairs(brief(r), compared)}


def keep_floors(eng: Engine, sizes: Sizes, say: Say) -> Tables:
    """The floors of the parts keep and sides, on the same passages."""
    texts = passages(eng, "heldout", sizes.prompt + sizes.continuation, sizes.passages)
    r = floored(eng, texts, sizes.prompt, sizes, say, "floors")
    return {**stored(r), "texts": texts_of(r)}


def prose(eng: Engine, sizes: Sizes, say: Say) -> Tables:
    """The second domain: English about Python."""
    texts = passages(eng, "prose", sizes.prompt + sizes.continuation, sizes.passages)
    r = measured(eng, texts, few_policies(eng.config), sizes.prompt, sizes, say, "prose")
    f = floored(eng, texts, sizes.prompt, sizes, say, "prose floors")
    both = [*brief(r), *brief(f)]
    compared = [(default(eng.config), name) for name in ("fidelity 0", "top-k halved")]
    return {
        **{k: t for k, t in stored(r).items() if k != "passages"},
        "floors summary": f.summary(),
        "texts": texts_of(r),
        "pairs": pairs(both, compared),
    }


def length(eng: Engine, sizes: Sizes, say: Say) -> Tables:
    """The same continuations behind prompts of several lengths."""
    most = max(sizes.lengths) + sizes.continuation
    texts, out, each = passages(eng, "heldout", most, sizes.passages), {}, []
    for prompt in sizes.lengths:
        cut, policies = last(texts, prompt + sizes.continuation, eng), length_policies(eng.config)
        r = floored(eng, cut, prompt, sizes, say, f"prompt {prompt}", policies)
        for row in r.summary():
            where = "floors summary" if row["policy"] in FLOORS else "summary"
            out.setdefault(where, []).append(dict(prompt=prompt, **row))
        out.setdefault("texts", []).extend(dict(prompt=prompt, **row) for row in texts_of(r))
        each += [row | dict(policy=f"{row['policy']} behind {prompt}") for row in brief(r)]
    one, names = sizes.lengths[0], (default(eng.config), "fidelity 0")
    compared = [(f"{n} behind {one}", f"{n} behind {p}") for n in names for p in sizes.lengths[1:]]
    compared += [(f"{names[0]} behind {p}", f"{names[1]} behind {p}") for p in sizes.lengths]
    return {name: Table(rows) for name, rows in out.items()} | {"pairs": pairs(each, compared)}


def sides(eng: Engine, sizes: Sizes, say: Say) -> Tables:
    """Encoder side, decoder side and both, behind a hit of exact pages without state KV."""
    texts = passages(eng, "heldout", sizes.prompt + sizes.continuation, sizes.passages)
    policies = side_policies(eng.runtime.limits.page_size)
    r = measured(eng, texts, policies, sizes.prompt, sizes, say, "sides", hit=sizes.hit)
    compared = [
        ("decoder", "both"),
        ("encoder", "both"),
        ("encoder", "page given up"),
        ("encoder", "no replay"),
    ]
    compared += [("no replay", "page given up"), ("both", "both, vLLM"), ("both", "both, short 1")]
    return {**stored(r), "texts": texts_of(r), "pairs": pairs(brief(r), compared)}


def turns(eng: Engine, sizes: Sizes, say: Say) -> Tables:
    """A conversation: each turn's pages stem from a replay."""
    shape = Turns.of(sizes.first_prompt, sizes.turns, sizes.turn_tokens, sizes.continuation)
    texts = passages(eng, "heldout", shape.tokens, sizes.passages)
    policies = turn_policies(eng.runtime.limits.page_size)

    def one(at: Passages) -> ReplayReport:
        return turn_error(eng, at, shape, policies, FLOORS)

    r = _batches(one, texts, sizes, say, "turns")
    against = [
        ("fresh", "chained"),
        ("chained", "page given up"),
        ("chained", "fidelity 0"),
        ("chained", "vLLM"),
    ]
    compared = [(f"{a} turn {k}", f"{b} turn {k}") for a, b in against for k in range(sizes.turns)]
    by = r.summary().rows
    for row in by:
        name, _, turn = row["policy"].partition(" turn ")
        row |= dict(way=name, turn=int(turn), prompt=shape.prompts[int(turn)])
    summary = Table(by, title="by way and turn")
    return {"summary": summary, "texts": texts_of(r), "pairs": pairs(brief(r), compared)}


def free(eng: Engine, sizes: Sizes, say: Say) -> Tables:
    """Where generated text goes another way, greedy and with the same random numbers."""
    texts = passages(eng, "heldout", sizes.free_prompt, sizes.passages)
    base = eng.with_(prefix_cache=False, num_snapshots=None, max_num_seqs=32)
    made = {
        "exact": base,
        **{n: base.with_(replay=p) for n, p in free_policies(eng.config).items()},
        "chunks": base.with_(max_num_batched_tokens=CHUNK),
        **engines(base, FLOORS),
    }
    said = {}
    for name, engine in made.items():
        with engine:
            for way, temperature in WAYS.items():
                params = [
                    SamplingParams(
                        temperature=temperature,
                        max_tokens=sizes.free_tokens,
                        seed=i,
                        ignore_eos=True,
                    )
                    for i in range(len(texts))
                ]
                done = engine.generate(texts.ids, params, progress=False).raise_for_errors()
                said[name, way] = [c.token_ids for c in done]
        say(f"free text: {name}")
    rows = [
        dict(text=i, group=texts.modules[i], policy=name, way=way, tokens=sizes.free_tokens)
        | dict(diverged=first_difference(said["exact", way][i], said[name, way][i]))
        for name in made
        if name != "exact"
        for way in WAYS
        for i in range(len(texts))
    ]
    return {
        "divergence": Table(
            rows, title="output position of the first token that differs from exact's"
        )
    }


def law(eng: Engine, sizes: Sizes, say: Say) -> Tables:
    """In float64: the exact keep changes nothing, one token less does, for every n."""
    double, c = type(eng).nano if _is_nano(eng) else type(eng).tiny, eng.config
    eng = double(dtype="float64")
    policies: dict[str, Any] = {"halo": Halo()}
    for at in range(c.first_decoder_layer, c.num_layers):
        exact = Bounded(layer=at).exact_keep(c)
        for keep in (exact - 1, exact):
            if keep >= c.ring_length:
                policies[f"n{c.num_layers - at} keep {keep}"] = Bounded(keep=keep, layer=at)
    texts = passages(eng, "heldout", sizes.prompt + sizes.continuation, sizes.law_passages)
    r = measured(eng, texts, policies, sizes.prompt, sizes, say, "law", drafter=False)
    return {"summary": r.summary(), "plans": r.plans}


def cost(eng: Engine, sizes: Sizes, say: Say) -> Tables:
    """Rows x layers, FLOPs and CPU seconds by prompt length."""
    most = max(sizes.cost_lengths) + 1
    text = [i for t in di.data.heldout(None) for i in eng.encode(t, bos=False)][: most - 1]
    ids = [eng.config.bos_token_id, *text]
    policies = {"compact": Bounded(), "mask": Bounded(mode="mask"), "halo": Halo()}
    found: dict[str, list] = {"seconds": [], "parts": []}
    for topk in TOPKS:
        own = eng.with_(kernels=None if topk == "partition" else dict(topk=topk))
        for n in sizes.cost_lengths:
            if topk != TOPKS[0] and n > 2048:
                continue  # half a minute a run
            some = {
                k: p
                for k, p in policies.items()
                if k == "compact" or (n <= 2048 and topk == TOPKS[0])
            }
            t = di.measure.replay_seconds(
                own, [ids], some, [n], sizes.cost_repeats, time.process_time
            )
            found["seconds"] += [dict(topk=topk, **row) for row in t]
            say(f"seconds at {n}, {topk}")
            if topk == TOPKS[0]:
                parts = where_it_goes(
                    own, ids, {"compact": policies["compact"]}, [n], sizes.cost_repeats
                )
                found["parts"] += [dict(topk=topk, **row) for row in parts]
                say(f"where they go at {n}, {topk}")
        own.close()
    titles = dict(
        seconds=f"CPU seconds of a prefill, median of {sizes.cost_repeats} runs",
        parts=f"where the CPU seconds of a prefill go, the least of {sizes.cost_repeats} runs; and FLOPs",
    )
    return {name: Table(rows, title=titles[name]) for name, rows in found.items()}


PARTS: dict[str, Callable[[Engine, Sizes, Say], Tables]] = {
    "keep": keep,
    "floors": keep_floors,
    "sides": sides,
    "turns": turns,
    "law": law,
    "prose": prose,
    "length": length,
    "free": free,
    "cost": cost,
}
TIMED = ("cost",)  # whose numbers no two runs share


def _is_nano(eng: Engine) -> bool:
    return eng.config.vocab_size == 4096
