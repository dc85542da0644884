"""The parts of the measurement. Each is a function (engine, sizes, say) -> tables by name."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import deepinfer as di
from deepinfer.engine.engine import Engine
from deepinfer.engine.params import SamplingParams
from deepinfer.measure.replay.divergence import WAYS, first_difference
from deepinfer.measure.replay.report import ReplayReport
from deepinfer.measure.table import Table
from deepinfer.slots.replay import Bounded, Halo

from experiments.replay_error.baselines import PageGivenUp
from experiments.replay_error.config import Sizes, few_policies, keep_policies, length_policies, side_policies
from experiments.replay_error.cost import where_it_goes
from experiments.replay_error.floors import engines, floors
from experiments.replay_error.passages import Passages, last, passages
from experiments.replay_error.tables import first, pairs, stored
from experiments.replay_error.turns import Turns, turn_error

Say = Callable[[str], None]
Tables = dict[str, Table]
# Of the index: what engines choose on a CPU (NumPy's partition, for wide rows torch's top-k of the scores), and
# torch's on integer keys.
TOPKS = ("partition", "packed_key")
ALL_FLOORS = ("chunks", "fidelity 0", "fidelity 2", "top-k halved")


def measured(
    eng: Engine, texts: Passages, policies: Mapping[str, Any], prompt: int, sizes: Sizes, say: Say,
    what: str, **more: Any,
) -> ReplayReport:  # fmt: skip
    """`replay_error` in batches of passages, with a line of progress each."""

    def one(at: Passages) -> ReplayReport:
        return di.measure.replay_error(
            eng, at.ids, policies, prompt, sizes.continuation, groups=at.modules, apart=sizes.apart, **more
        )

    return _batches(one, texts, sizes, say, what)


def floored(
    eng: Engine, texts: Passages, prompt: int, sizes: Sizes, say: Say, names: Sequence[str], what: str
) -> ReplayReport:
    def one(at: Passages) -> ReplayReport:
        return floors(eng, at, prompt, sizes.continuation, names)

    return _batches(one, texts, sizes, say, what)


def _batches(one: Callable[[Passages], ReplayReport], texts: Passages, sizes: Sizes, say: Say, what: str):
    found = []
    for at in range(0, len(texts), sizes.batch):
        found.append(one(texts[at : at + sizes.batch]))
        say(f"{what}: {min(at + sizes.batch, len(texts))} of {len(texts)} passages")
    return ReplayReport.joined(found)


# -------------------------------------------------------------------------------------- the parts


def keep(eng: Engine, sizes: Sizes, say: Say) -> Tables:
    """Error against keep and depth, both engines' cuts, no window; layers, distance, accepted lengths."""
    texts = passages(eng, "heldout", sizes.prompt + sizes.continuation, sizes.passages)
    r = measured(eng, texts, keep_policies(eng.config, sizes), sizes.prompt, sizes, say, "keep")
    names = [n for n in r.policies if n.startswith(f"n{eng.config.num_layers - _cut(eng)} ")]
    compared = [*zip(names, names[1:]), (names[0], "short 1"), (_default(eng), "vLLM")]
    compared = [(a, b) for a, b in compared if a in r.policies and b in r.policies]
    return {**stored(r), "pairs": pairs(r, compared)}


def keep_floors(eng: Engine, sizes: Sizes, say: Say) -> Tables:
    """The floors of the part keep, and of the part sides, which has the first of its passages."""
    texts = passages(eng, "heldout", sizes.prompt + sizes.continuation, sizes.passages)
    r = floored(eng, texts, sizes.prompt, sizes, say, ALL_FLOORS, "floors")
    return {**stored(r), "summary sides": first(r, sizes.side_passages).summary()}


def prose(eng: Engine, sizes: Sizes, say: Say) -> Tables:
    """The second domain: English about Python."""
    texts = passages(eng, "prose", sizes.prompt + sizes.continuation, sizes.prose_passages)
    r = measured(eng, texts, few_policies(eng.config), sizes.prompt, sizes, say, "prose")
    f = floored(eng, texts, sizes.prompt, sizes, say, ("fidelity 0", "top-k halved"), "prose floors")
    return {**stored(r), **stored(f, "floors ")}


def length(eng: Engine, sizes: Sizes, say: Say) -> Tables:
    """The same continuations behind prompts of several lengths."""
    most = max(sizes.lengths) + sizes.continuation
    texts, out = passages(eng, "heldout", most, sizes.length_passages), {}
    for prompt in sizes.lengths:
        cut = last(texts, prompt + sizes.continuation, eng)
        policies = length_policies(eng.config)
        r = measured(eng, cut, policies, prompt, sizes, say, f"prompt {prompt}", drafter=False)
        both = {"summary": r.summary(), "passages": stored(r)["passages"]}
        if prompt <= sizes.floored_lengths:
            f = floored(eng, cut, prompt, sizes, say, ("fidelity 0",), f"prompt {prompt}, floor")
            both["floors summary"] = f.summary()
        for name, table in both.items():
            out.setdefault(name, []).extend(dict(prompt=prompt, **row) for row in table)
    return {name: Table(rows) for name, rows in out.items()}


def sides(eng: Engine, sizes: Sizes, say: Say) -> Tables:
    """Encoder side, decoder side and both, behind a hit of exact pages without state KV."""
    texts = passages(eng, "heldout", sizes.prompt + sizes.continuation, sizes.side_passages)
    policies = side_policies(eng.runtime.limits.page_size)
    r = measured(eng, texts, policies, sizes.prompt, sizes, say, "sides", hit=sizes.hit)
    compared = [("decoder", "both"), ("encoder", "both"), ("encoder", "page given up"), ("encoder", "no replay")]
    return {**stored(r), "pairs": pairs(r, compared)}


def turns(eng: Engine, sizes: Sizes, say: Say) -> Tables:
    """A conversation: each turn's pages stem from a replay."""
    shape = Turns.of(sizes.first_prompt, sizes.turns, sizes.turn_tokens, sizes.continuation)
    texts = passages(eng, "heldout", shape.tokens, sizes.turn_passages)
    both, given_up = Bounded(sides="both"), PageGivenUp(eng.runtime.limits.page_size)
    policies = {"chained": (both, True), "fresh": (both, False), "page given up": (given_up, True)}
    others = engines(eng, ("fidelity 0",))

    def one(at: Passages) -> ReplayReport:
        return turn_error(eng, at, shape, policies, others)

    r = _batches(one, texts, sizes, say, "turns")
    compared = [(f"fresh turn {k}", f"chained turn {k}") for k in range(sizes.turns)]
    found = {**stored(r), "pairs": pairs(r, compared)}
    by = found["summary"].rows
    for row in by:
        name, _, turn = row["policy"].partition(" turn ")
        row |= dict(way=name, turn=int(turn), prompt=shape.prompts[int(turn)])
    return {**found, "summary": Table(by, title="by way and turn")}


def free(eng: Engine, sizes: Sizes, say: Say) -> Tables:
    """Where generated text goes another way, greedy and with the same random numbers."""
    texts = passages(eng, "heldout", sizes.prompt + sizes.continuation, sizes.free_passages)
    prompts = [ids[: sizes.prompt] for ids in texts.ids]
    base = eng.with_(prefix_cache=False, num_snapshots=None)
    policies = few_policies(eng.config)
    names = [n for n in policies if n == _default(eng)] + [list(policies)[-1]]
    ways = {
        "exact": base, "fidelity 0": base.with_(fidelity=0),
        **{n: base.with_(replay=policies[n]) for n in names},
    }  # fmt: skip
    said = {}
    for name, engine in ways.items():
        with engine:
            for way, temperature in WAYS.items():
                params = [
                    SamplingParams(
                        temperature=temperature, max_tokens=sizes.free_tokens, seed=i, ignore_eos=True
                    )
                    for i in range(len(prompts))
                ]
                done = engine.generate(prompts, params, progress=False).raise_for_errors()
                said[name, way] = [c.token_ids for c in done]
        say(f"free text: {name}")
    rows = [
        dict(text=i, group=texts.modules[i], policy=name, way=way, tokens=sizes.free_tokens)
        | dict(diverged=first_difference(said["exact", way][i], said[name, way][i]))
        for name in ways if name != "exact" for way in WAYS for i in range(len(prompts))
    ]  # fmt: skip
    return {"divergence": Table(rows, title="output position of the first token that differs from exact's")}


def law(eng: Engine, sizes: Sizes, say: Say) -> Tables:
    """In float64: the exact keep changes nothing, one token less does, for every n."""
    double, c = type(eng).nano if _is_nano(eng) else type(eng).tiny, eng.config
    eng = double(dtype="float64")
    policies: dict[str, Any] = {"halo": Halo()}
    for at in range(_cut(eng), c.num_layers):
        exact = Bounded(layer=at).exact_keep(c)
        for keep in (exact - 1, exact):
            if keep >= c.sliding_window + c.max_draft + 1:
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
            some = {k: p for k, p in policies.items() if k == "compact" or (n <= 2048 and topk == TOPKS[0])}
            t = di.measure.replay_seconds(own, [ids], some, [n], sizes.cost_repeats, time.process_time)
            found["seconds"] += [dict(topk=topk, **row) for row in t]
            say(f"seconds at {n}, {topk}")
            parts = where_it_goes(own, ids, {"compact": policies["compact"]}, [n], sizes.cost_repeats)
            found["parts"] += [dict(topk=topk, **row) for row in parts]
            say(f"where they go at {n}, {topk}")
        own.close()
    titles = dict(seconds="CPU seconds of a prefill", parts="where the CPU seconds go, and FLOPs")
    return {name: Table(rows, title=titles[name]) for name, rows in found.items()}


PARTS: dict[str, Callable[[Engine, Sizes, Say], Tables]] = {
    "keep": keep, "floors": keep_floors, "sides": sides, "turns": turns, "cost": cost, "law": law,
    "length": length, "prose": prose, "free": free,
}  # fmt: skip
TIMED = ("cost",)  # whose numbers no two runs share


def _cut(eng: Engine) -> int:
    return eng.config.first_decoder_layer


def _default(eng: Engine) -> str:
    """The name of Bounded() among the policies by keep."""
    return f"n{eng.config.num_layers - _cut(eng)} keep {Bounded().rows_kept(eng.config)}"


def _is_nano(eng: Engine) -> bool:
    return eng.config.vocab_size == 4096
