"""The findings in words. Numbers are computed from the results, and what a sentence claims about them is
asserted: other results that say something else stop here, and the sentence has to be written anew."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.replay_error.figures import deepest, layers_of, rows
from experiments.replay_error.readme_tables import Parts, Row, against_floors, interval, number, percent, same


def held(so: bool, claim: str) -> None:
    """AssertionError where the results do not say what the page claims."""
    if not so:
        raise AssertionError(f"the results do not say that {claim}: write that finding anew (words.py)")


def one(parts: Parts, part: str, policy: str, where: str = "summary", **equal: object) -> Row:
    (row,) = rows(parts, part, where, policy=policy, **equal)
    return row


def pair(parts: Parts, part: str, first: str, second: str) -> Row:
    found = [*rows(parts, part, "pairs", first=first, second=second)] if part else [
        r for r in against_floors(parts) if (r["first"], r["second"]) == (first, second)
    ]  # fmt: skip
    (row,) = found
    return row


def below(row: Row, column: str, bound: float) -> bool:
    """Whether the whole interval lies below a number."""
    return row[f"{column}_high"] < bound


def above(row: Row, column: str, bound: float) -> bool:
    return row[f"{column}_low"] > bound


def listed(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else words[0]


# ------------------------------------------------------------------------------------- the findings


def default(parts: Parts) -> str:
    row, rounded, half = one(parts, "keep", "n6 keep 76"), *(one(parts, "floors", f) for f in ("fidelity 0", "top-k halved"))
    ratio = pair(parts, "", "n6 keep 76", "fidelity 0")
    held(above(ratio, "ratio", 1), "the default changes less than whether the caches are rounded")
    held(row["perplexity_ratio_low"] < 1 < row["perplexity_ratio_high"], "perplexity may change by nothing")
    return (
        f"**The default (keep 76) changes {interval(ratio, 'ratio')} times less than whether the caches are rounded "
        f"does**: KL {interval(row, 'kl')} beside {interval(rounded, 'kl')} (fidelity 0) and {interval(half, 'kl')} "
        f"(half the index). The likeliest token is the same for {100 * row['agreement']:.1f} % of tokens, and perplexity "
        f"changes by {interval(percent(row), 'p')} %, which may be nothing."
    )


def tail(parts: Parts) -> str:
    row, rounded = one(parts, "keep", "n6 keep 76"), one(parts, "floors", "fidelity 0")
    share, middle = (row[c] / rounded[c] for c in ("kl_max", "kl_median"))
    held(share > 5 * middle, "the default's tail is longer than that of fidelity 0")
    tokens = len(rows(parts, "keep", "texts")) * parts["keep"].facts["sizes"]["continuation"]
    return (
        f"**Its tail is long.** Median {number(row['kl_median'])}, p99 {number(row['kl_p99'])}, maximum "
        f"{number(row['kl_max'])}: of the median under fidelity 0 that is {100 * middle:.1g} %, of the worst of {tokens:,} "
        f"tokens ({number(rounded['kl_max'])}) {100 * share:.0f} %. A mean alone does not show that."
    )


def with_keep(parts: Parts) -> str:
    row, chunks = one(parts, "keep", "n6 keep 127"), one(parts, "floors", "chunks")
    ratio = pair(parts, "", "n6 keep 127", "chunks")
    held(ratio["ratio_low"] < 1 < ratio["ratio_high"], "keep 127 and chunks are alike in the mean")
    held(row["kl_median"] > 10 * chunks["kl_median"], "keep 127 changes most tokens more than chunks do")
    exact = [one(parts, "keep", n)["kl"] for n in ("halo", "n6 keep 379")]
    most = max(one(parts, "keep", n)["kl"] for n in ("n6 keep 190", "n6 keep 253"))
    held(most < 10 * max(exact), "from keep 190 on the error is that of exact policies in float32")
    return (
        f"**The error falls fast with keep.** With two windows (keep 127) its mean is {interval(row, 'kl')}. Prefilling "
        f"the prompt in chunks of 100 in float32 has {interval(chunks, 'kl')}, {interval(ratio, 'ratio')} of it, which a few "
        f"flipped roundings make; of most tokens keep 127 changes more (medians {number(row['kl_median'])} and "
        f"{number(chunks['kl_median'])}). From keep 190 on, 40 % of the way to the exact length, it is in the noise of "
        "float32, where a rounding that flips decides the maximum; `halo` and the exact keep, which are exact in float64, "
        "are there too."
    )


def no_window(parts: Parts) -> str:
    ratio = pair(parts, "", "top-k halved", "short 1")
    held(above(ratio, "ratio", 3), "no window changes far more than half the index")
    return (
        "**Below one window it is another matter.** With a quarter of a window KL is "
        f"{interval(one(parts, 'keep', 'short 16'), 'kl')}, with none {interval(one(parts, 'keep', 'short 1'), 'kl')}, "
        f"{interval(ratio, 'ratio')} times half the index."
    )


def cuts(parts: Parts) -> str:
    """Where engines differ."""
    found = {k: pair(parts, "keep", f"n6 keep {k}", f"vLLM {k}") for k in (76, 96, 127)}
    held(all(below(r, "ratio", 1) for r in found.values()), "vLLM's cut errs less than DeepInfer's at every keep")
    more = pair(parts, "keep", "n6 keep 76", "n6 keep 96")
    held(more["ratio"] < found[76]["ratio_low"], "twenty rows more do more than the cut at the default")
    return (
        "**Where engines differ matters, at the default less than twenty rows do.** With the first cut layer's window whole, as in "
        f"vLLM, KL is {interval(found[76], 'ratio')} of DeepInfer's on the same tokens, at the same rows x layers (keep 96 in place "
        f"of 76: {interval(more, 'ratio')}). The more is kept, the more it matters: {interval(found[96], 'ratio')} and "
        f"{interval(found[127], 'ratio')} with keep 96 and 127."
    )


def stairs(parts: Parts) -> str:
    keeps = (76, 96, 127)
    box, vllm = ({k: pair(parts, "keep", f"{first} {k}", f"stairs {k}") for k in keeps} for first in ("n6 keep", "vLLM"))
    held(all(below(r, "ratio", 1) for r in box.values()), "stairs err less than boxes")
    held(below(vllm[127], "ratio", 1), "stairs err less than vLLM's box at keep 127")
    held(all(vllm[k]["ratio_high"] > 1 for k in (76, 96)), "they may not at 76 and 96")
    return (
        "**Rows are worth more in the lower decoder layers.** `stairs` run fewer rows in each layer than in the one below it, "
        "and exactly as many rows x layers as a box. They have "
        f"{listed([interval(r, 'ratio') for r in box.values()])} of the box's error on the same tokens at keep "
        f"{listed([str(k) for k in keeps])}. Part of that is the first cut layer, whose window is whole in them: of vLLM's box, "
        f"where it is too, they have {listed([interval(r, 'ratio') for r in vllm.values()])}, and only the last of these intervals "
        "lies below 1."
    )


def shares(parts: Parts) -> str:
    """Over keep / W, and over the share of the way to the exact length."""
    by: dict[int, Row] = {}
    for r in rows(parts, "keep"):
        if layers_of(r) > 1 and r["depth"] is not None and abs(r["depth"] - 0.2) < 0.02:
            by[layers_of(r)] = r
    alike = [by[n]["kl"] for n in (3, 4, 5, 6)]
    factor, slow = max(alike) / min(alike), by[2]["kl"] / max(alike)
    two = {layers_of(r): r["kl"] for r in rows(parts, "keep", keep=127) if layers_of(r)}
    apart = two[6] / two[3]
    held(apart > 3 * factor, "the share puts the curves closer together than keep / W")
    held(slow > 1, "n = 2 falls more slowly")
    law = {r["policy"]: r["kl_max"] for r in rows(parts, "law")}
    held(all(v < 1e-12 for k, v in law.items() if k != "n2 keep 126") and law["n2 keep 126"] > 1e-10, "one row less shows")
    return (
        f"**The share of the way to the exact length is the better measure.** With two windows n = 6 errs {apart:.0f} times as "
        f"much as n = 3. At a fifth of the way the means of n = 3 to 6 lie within a factor of {factor:.1f}; that of n = 2 is "
        f"{slow:.1f} times the largest of them. The exact length itself is a bound, not what this model needs: in float64 "
        "one row less changes nothing that is above rounding but for n = 2."
    )


def keys(parts: Parts) -> str:
    """Window keys by distance and layer."""
    main = [r["policy"] for r in deepest(parts, "keep")]
    window = 64

    def bins(part: str, policy: str) -> dict[int, float]:
        return {r["distance"]: r["rel_l2"] for r in rows(parts, part, "distance", policy=policy)}

    mine, wide, floor = bins("keep", main[1]), bins("keep", main[3]), bins("floors", "fidelity 0")
    first = [bins("keep", n)[0] for n in ("short 1", *main)]
    layers = [r["rel_l2"] for r in rows(parts, "keep", "layers", policy=main[1])]
    held(mine[0] > 2 * floor[0] and mine[window] < floor[window] / 2, "keys at the cut are worse than unrounded ones, later not")
    held(max(first) < 1.1 * min(first), "the keys at the cut are alike whatever is kept")
    held(max(layers) == layers[-1] and min(x for x in layers if x) == layers[1], "the last layer is worst, the second best")
    return (
        f"**Next to the cut the window keys are off by {100 * min(first):.0f} to {100 * max(first):.0f} %, whatever is kept** (relative "
        f"L2, the first quarter of a window); a window later by {100 * mine[window]:.2g} % (keep 76) and two windows later by "
        f"{100 * wide[2 * window]:.2g} % (keep 127). Without rounding the caches (fidelity 0) they are off by {100 * floor[0]:.2g} and "
        f"{100 * floor[window]:.2g} % in the first two places. It is least in the second cut layer and largest in the last one."
    )


def length(parts: Parts) -> str:
    prompts = parts["length"].facts["sizes"]["lengths"]
    by = [one(parts, "length", "n6 keep 76", prompt=p) for p in prompts]
    ratios = [pair(parts, "length", f"n6 keep 76 behind {prompts[0]}", f"n6 keep 76 behind {p}") for p in prompts[1:]]
    floors = [pair(parts, "length", f"n6 keep 76 behind {p}", f"fidelity 0 behind {p}") for p in prompts]
    held(all(r["ratio_low"] < 1 < r["ratio_high"] for r in ratios), "no length differs from the first one")
    held(all(above(r, "ratio", 1) for r in floors), "at every length rounding the caches changes more")
    said, first = [f"{p:,}" for p in prompts], f"{prompts[0]:,}"
    return (
        f"**No effect of length is seen**: behind {listed(said)} tokens KL is {listed([interval(r, 'kl') for r in by])} for the "
        f"same continuations. Over that behind {first} tokens it is {listed([interval(r, 'ratio') for r in ratios])}: all "
        f"intervals hold 1. Rounding the caches changes {listed([interval(r, 'ratio') for r in floors])} times as much there."
    )


def sides(parts: Parts) -> str:
    side = lambda name: interval(one(parts, "sides", name), "kl")  # noqa: E731
    none, given = (pair(parts, "sides", "encoder", n) for n in ("no replay", "page given up"))
    held(above(none, "ratio", 1) and above(given, "ratio", 1), "the encoder side's replay is worth it")
    return (
        f"**Encoder side.** Replaying the last window of a hit changes KL by {side('encoder')}, both sides by {side('both')}. No "
        f"replay costs {interval(none, 'ratio')} times as much as the encoder side ({side('no replay')}), and giving up a page "
        f"and computing it on an empty window {interval(given, 'ratio')} times ({side('page given up')})."
    )


def turns(parts: Parts) -> str:
    found, last = rows(parts, "turns"), max(r["turn"] for r in rows(parts, "turns"))
    turn = {r["way"]: r for r in found if r["turn"] == last}
    more = [pair(parts, "turns", f"fresh turn {k}", f"chained turn {k}") for k in range(last + 1)]
    given = [pair(parts, "turns", f"chained turn {k}", f"page given up turn {k}") for k in range(1, last + 1)]
    floor = pair(parts, "turns", f"chained turn {last}", f"fidelity 0 turn {last}")
    held(all(above(r, "difference", 0) for r in more[2:]), "errors of turns add up")
    held(above(more[last], "difference", more[2]["difference"]), "more in the last turn than in turn 2")
    held(all(above(r, "difference", 0) for r in given), "giving up a page is worse in every turn with a hit")
    held(above(floor, "ratio", 1), "in the last turn rounding the caches still changes more")
    return (
        "**Over turns the error adds up**, since a page that a replay has written is read by all turns behind it. In turn "
        f"{last} KL is {interval(turn['chained'], 'kl')} with the conversation's own pages and {interval(turn['fresh'], 'kl')} with "
        f"exact ones, a difference of {interval(more[last], 'difference')} on the same tokens (in turn 2: "
        f"{interval(more[2], 'difference')}); rounding the caches changes "
        f"{interval(turn['fidelity 0'], 'kl')} there, {interval(floor, 'ratio')} times as much. Giving up the hit's last page and "
        f"computing it on an empty window is worse in every turn with a hit: {interval(turn['page given up'], 'kl')} in the last."
    )


def english(parts: Parts) -> str:
    row, python = one(parts, "prose", "n6 keep 76"), one(parts, "keep", "n6 keep 76")
    ratio = pair(parts, "prose", "n6 keep 76", "fidelity 0")
    held(row["kl_low"] < python["kl_high"] and python["kl_low"] < row["kl_high"], "English and Python overlap")
    held(above(ratio, "ratio", 1), "on English too rounding the caches changes more")
    return (
        f"**English**, which the model was not trained on: {interval(row, 'kl')} with the default, an interval that overlaps "
        f"that of Python. Rounding the caches changes {interval(ratio, 'ratio')} times as much."
    )


def drafts(parts: Parts) -> str:
    row, none = one(parts, "keep", "n6 keep 76"), one(parts, "keep", "short 1")
    held(row["length_change_low"] < 0 < row["length_change_high"], "the default may cost the drafter nothing")
    held(below(none, "length_change", 0), "no window costs the drafter")
    return (
        f"**Drafts**: {interval(row, 'length_change')} expected tokens of a step with the default, which may be nothing, "
        f"{interval(none, 'length_change')} with no window."
    )


def free(parts: Parts) -> str:
    found = rows(parts, "free", "divergence")
    texts = lambda name, way: same([r for r in found if (r["policy"], r["way"]) == (name, way)])  # noqa: E731
    default, rounded, halved, none = (texts(n, "greedy") for n in ("n6 keep 76", "fidelity 0", "top-k halved", "short 1"))
    held(default["share_low"] > max(rounded["share_high"], halved["share_high"]), "fewer texts change with the default")
    held(below(none, "share", rounded["share_low"]), "no window changes most texts")
    return (
        f"**Free text.** Of {found[0]['tokens']} greedy tokens behind a prompt, {interval(default, 'share')} % of texts are exact's to "
        f"the end with the default, {interval(rounded, 'share')} % under fidelity 0, {interval(halved, 'share')} % with half the index "
        f"and {interval(none, 'share')} % with no window."
    )


def cost(parts: Parts) -> str:
    both = {(r["topk"], r["policy"], r["length"]): r for r in rows(parts, "cost", "seconds")}
    compact, other = ([r for (t, p, _), r in both.items() if (t, p) == (k, "compact")] for k in ("partition", "packed_key"))
    counts = [f"{r['length']:,}" for r in compact]
    ms = [f"{1e3 * r['seconds'] / r['length']:.2f}" for r in compact]
    flops = [f"{1e-6 * r['flops'] / r['length']:.1f}" for r in compact]
    speedups, others = ([f"{r['speedup']:.2f}" for r in some] for some in (compact, other))
    predicted = [f"{r['predicted_flops']:.2f}" for r in compact]
    whole, work, index, scores = (
        [
            sum(
                r[column] for r in rows(parts, "cost", "parts", length=compact[-1]["length"], policy=policy)
                if not only or str(r["op"]).startswith("index")
            )
            for policy in ("exact", "compact")
        ]
        for only in (False, True) for column in ("seconds", "flops")
    )  # fmt: skip
    measured, formula = ((a[0] - b[0]) / (a[1] - b[1]) for a, b in ((whole, index), (work, scores)))
    held(abs(measured / formula - 1) < 0.15, "without the index the speedup is what FLOPs predict")
    held(compact[-1]["speedup"] > 1.15 * compact[-1]["predicted_flops"], "there is a surplus at the longest prompt")
    return (
        f"**Cost.** With `compact` a prompt token costs {listed(flops)} MFLOP at {listed(counts)} tokens: the encoder and one "
        "projection, flat but for the scores of the index, which grow with the prompt. The speedup over exact is "
        f"{listed(speedups)} where FLOPs predict {listed(predicted)}. **The surplus is the index's**: at {counts[-1]} tokens its "
        f"ops take {100 * index[0] / whole[0]:.0f} % of exact's CPU time. They touch every entry for every row, also those that "
        "are hidden or no candidates, which the formula leaves out, as it does top-k; and three of the four parts of that are "
        f"the decoder's. All other ops together are {measured:.2f} times faster, as FLOPs predict for them ({formula:.2f}). With "
        f"the top-k by integer keys the speedup is {listed(others)} at {listed(counts[: len(others)])}. In CPU time compact takes "
        f"{listed(ms)} ms a token at these lengths; what grows in it is the encoder's index."
    )


FINDINGS = (
    default, tail, with_keep, no_window, cuts, stairs, shares, keys, length, sides, turns, english, drafts, free, cost,
)  # fmt: skip


def found(parts: Parts) -> str:
    """All findings. AssertionError where the results do not bear one out."""
    return "\n".join(f"- {f(parts)}" for f in FINDINGS)
