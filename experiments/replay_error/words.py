"""The findings in words. Numbers are computed from the results, and what a sentence claims about
them is asserted: results that say something else stop here, and the sentence is to be written anew.
"""

from __future__ import annotations

from experiments.replay_error.claims import above, below, held, listed, of_keep, one, pair
from experiments.replay_error.cost_words import cost, drafts, free
from experiments.replay_error.figures import deepest, rows
from experiments.replay_error.readme_tables import Parts, interval, number, percent


def default(parts: Parts) -> str:
    row, rounded, half = (
        one(parts, "keep", "n6 keep 76"),
        *(one(parts, "floors", f) for f in ("fidelity 0", "top-k halved")),
    )
    ratio = pair(parts, "", "n6 keep 76", "fidelity 0")
    held(above(ratio, "ratio", 1), "the default changes less than whether the caches are rounded")
    held(
        row["perplexity_ratio_low"] < 1 < row["perplexity_ratio_high"],
        "perplexity may change by nothing",
    )
    return (
        f"**The default (keep 76) changes {interval(ratio, 'ratio')} times less than whether the "
        f"caches are rounded does**: KL {interval(row, 'kl')} beside {interval(rounded, 'kl')} "
        f"(fidelity 0) and {interval(half, 'kl')} (half the index). The likeliest token is the "
        f"same for {100 * row['agreement']:.1f} % of tokens, and perplexity changes by "
        f"{interval(percent(row), 'p')} %, which may be nothing."
    )


def tail(parts: Parts) -> str:
    row, rounded = one(parts, "keep", "n6 keep 76"), one(parts, "floors", "fidelity 0")
    share, middle = (row[c] / rounded[c] for c in ("kl_max", "kl_median"))
    held(share > 5 * middle, "the default's tail is longer than that of fidelity 0")
    tokens = len(rows(parts, "keep", "texts")) * parts["keep"].facts["sizes"]["continuation"]
    return (
        f"**Its tail is long.** Median {number(row['kl_median'])}, p99 {number(row['kl_p99'])}, "
        f"maximum {number(row['kl_max'])}: of the median under fidelity 0 that is "
        f"{100 * middle:.1g} %, of the worst of {tokens:,} tokens ({number(rounded['kl_max'])}) "
        f"{100 * share:.0f} %. A mean alone does not show that."
    )


def with_keep(parts: Parts) -> str:
    row, chunks = one(parts, "keep", "n6 keep 127"), one(parts, "floors", "chunks")
    ratio = pair(parts, "", "n6 keep 127", "chunks")
    held(ratio["ratio_low"] < 1 < ratio["ratio_high"], "keep 127 and chunks are alike in the mean")
    held(
        row["kl_median"] > 10 * chunks["kl_median"],
        "keep 127 changes most tokens more than chunks do",
    )
    exact = [one(parts, "keep", n)["kl"] for n in ("halo", "n6 keep 379")]
    most = max(one(parts, "keep", n)["kl"] for n in ("n6 keep 190", "n6 keep 253"))
    held(most < 10 * max(exact), "from keep 190 on the error is that of exact policies in float32")
    return (
        "**The error falls fast with keep.** With two windows (keep 127) its mean is "
        f"{interval(row, 'kl')}. Prefilling the prompt in chunks of 100 in float32 has "
        f"{interval(chunks, 'kl')}, {interval(ratio, 'ratio')} of it, which a few flipped "
        f"roundings make; of most tokens keep 127 changes more (medians {number(row['kl_median'])} "
        f"and {number(chunks['kl_median'])}). From keep 190 on, 40 % of the way to the exact "
        "length, it is in the noise of float32, where a rounding that flips decides the maximum; "
        "`halo` and the exact keep, which are exact in float64, are there too."
    )


def no_window(parts: Parts) -> str:
    ratio = pair(parts, "", "top-k halved", "short 1")
    held(above(ratio, "ratio", 3), "no window changes far more than half the index")
    return (
        "**Below one window it is another matter.** With a quarter of a window KL is "
        f"{interval(one(parts, 'keep', 'short 16'), 'kl')}, with none "
        f"{interval(one(parts, 'keep', 'short 1'), 'kl')}, {interval(ratio, 'ratio')} times half "
        "the index."
    )


def cuts(parts: Parts) -> str:
    """Where engines differ."""
    found = {k: pair(parts, "keep", f"n6 keep {k}", f"vLLM {k}") for k in (76, 96, 127)}
    held(
        all(below(r, "ratio", 1) for r in found.values()),
        "vLLM's cut errs less than DeepInfer's at every keep",
    )
    held(
        below(found[127], "ratio", found[76]["ratio_low"]), "it matters more at keep 127 than at 76"
    )
    more = pair(parts, "keep", "n6 keep 76", "n6 keep 96")
    held(
        below(more, "ratio", found[76]["ratio_low"]),
        "twenty rows more do more than the cut at the default",
    )
    return (
        "**Where engines differ matters, at the default less than twenty rows more.** With the "
        f"first cut layer's window whole, as in vLLM, KL is {interval(found[76], 'ratio')} of "
        "DeepInfer's on the same tokens, at the same rows x layers (keep 96 in place of 76: "
        f"{interval(more, 'ratio')}). With more kept it matters more: "
        f"{interval(found[96], 'ratio')} and {interval(found[127], 'ratio')} with keep 96 and 127."
    )


def stairs(parts: Parts) -> str:
    keeps = (76, 96, 127)
    box, vllm = (
        {k: pair(parts, "keep", f"{first} {k}", f"stairs {k}") for k in keeps}
        for first in ("n6 keep", "vLLM")
    )
    held(all(below(r, "ratio", 1) for r in box.values()), "stairs err less than boxes")
    held(below(vllm[127], "ratio", 1), "stairs err less than vLLM's box at keep 127")
    held(all(vllm[k]["ratio_high"] > 1 for k in (76, 96)), "they may not at 76 and 96")
    return (
        "**Rows are worth more in the lower decoder layers.** `stairs` run fewer rows in each "
        "layer than in the one below it, and exactly as many rows x layers as a box. They have "
        f"{listed([interval(r, 'ratio') for r in box.values()])} of the box's error on the same "
        f"tokens at keep {listed([str(k) for k in keeps])}. Part of that is the first cut layer, "
        "whose window is whole in them: of vLLM's box, where it is too, they have "
        f"{listed([interval(r, 'ratio') for r in vllm.values()])}, and only the last of these "
        "intervals lies below 1."
    )


def shares(parts: Parts) -> str:
    """Over keep / W, and over the share of the way to the exact length."""
    fifth = ["n6 keep 127", "n5 keep 114", "n4 keep 102", "n3 keep 89"]
    means = [one(parts, "keep", n)["kl"] for n in fifth]
    windows, half = (
        of_keep(parts, "n3 keep 127", "n6 keep 127"),
        of_keep(parts, "n3 keep 127", "n2 keep 96"),
    )
    held(
        above(windows, "ratio", 2 * max(means) / min(means)),
        "the share puts the curves closer than keep / W",
    )
    held(above(half, "ratio", 1), "n = 2 falls more slowly")
    law = {r["policy"]: r["kl_max"] for r in rows(parts, "law")}
    held(
        all(v < 1e-12 for k, v in law.items() if k != "n2 keep 126"),
        "one row less changes nothing for n > 2",
    )
    held(law["n2 keep 126"] > 1e-10, "one row less shows for n = 2")
    return (
        "**The share of the way to the exact length is the better measure.** With two windows n = "
        f"6 errs {interval(windows, 'ratio')} times as much as n = 3. At a fifth of the way the "
        f"means of n = 3 to 6 lie within a factor of {max(means) / min(means):.1f}. n = 2 falls "
        f"more slowly: halfway it errs {interval(half, 'ratio')} times as much as n = 3. The exact "
        "length itself is a bound, not what this model needs: in float64 one row less changes "
        "nothing that is above rounding but for n = 2."
    )


def keys(parts: Parts) -> str:
    """Window keys by distance and layer."""
    main = [r["policy"] for r in deepest(parts, "keep")]
    window = 64

    def bins(part: str, policy: str) -> dict[int, float]:
        return {r["distance"]: r["rel_l2"] for r in rows(parts, part, "distance", policy=policy)}

    mine, wide, floor = bins("keep", main[1]), bins("keep", main[3]), bins("floors", "fidelity 0")
    first = [bins("keep", n)[0] for n in ("short 1", *main)]
    layers = [r for r in rows(parts, "keep", "layers", policy=main[1]) if r["rel_l2"]]
    held(
        mine[0] > 2 * floor[0] and mine[window] < floor[window] / 2,
        "keys at the cut are worse than unrounded ones, later not",
    )
    held(max(first) < 1.1 * min(first), "the keys at the cut are alike whatever is kept")
    held(
        all(r["rel_l2_high"] < layers[-1]["rel_l2_low"] for r in layers[:-1]),
        "the last layer is worst",
    )
    held(
        all(r["rel_l2_low"] > layers[0]["rel_l2_high"] for r in layers[1:]),
        "the second cut layer is best",
    )
    return (
        f"**Next to the cut the window keys are off by {100 * min(first):.0f} to "
        f"{100 * max(first):.0f} %, whatever is kept** (relative L2, the first quarter of a "
        f"window); a window later by {100 * mine[window]:.2g} % (keep 76) and two windows later by "
        f"{100 * wide[2 * window]:.2g} % (keep 127). Without rounding the caches (fidelity 0) they "
        f"are off by {100 * floor[0]:.2g} and {100 * floor[window]:.2g} % in the first two places. "
        "By layer it is least in the second cut layer and largest in the last one."
    )


def length(parts: Parts) -> str:
    prompts = parts["length"].facts["sizes"]["lengths"]
    by = [one(parts, "length", "n6 keep 76", prompt=p) for p in prompts]
    ratios, rounded = (
        [pair(parts, "length", f"{n} behind {prompts[0]}", f"{n} behind {p}") for p in prompts[1:]]
        for n in ("n6 keep 76", "fidelity 0")
    )
    floors = [
        pair(parts, "length", f"n6 keep 76 behind {p}", f"fidelity 0 behind {p}") for p in prompts
    ]
    held(
        all(r["ratio_low"] < 1 < r["ratio_high"] for r in ratios[:-1]),
        "the lengths between differ by nothing that is seen",
    )
    held(below(ratios[-1], "ratio", 1), "behind the longest prompt it is less")
    held(all(above(r, "ratio", 1) for r in rounded), "rounding changes more behind a longer prompt")
    held(
        all(above(r, "ratio", 1) for r in floors),
        "at every length rounding the caches changes more",
    )
    said, first, last = [f"{p:,}" for p in prompts], f"{prompts[0]:,}", f"{prompts[-1]:,}"
    return (
        f"**A longer prompt does not make it worse**: behind {listed(said)} tokens KL is "
        f"{listed([interval(r, 'kl') for r in by])} for the same continuations. Behind {last} it "
        f"is {interval(ratios[-1], 'ratio')} of that behind {first}, a little less; between them "
        "no difference is seen. What rounding the caches changes grows in the meantime, "
        f"{interval(rounded[-1], 'ratio')} times, from {interval(floors[0], 'ratio')} to "
        f"{interval(floors[-1], 'ratio')} times the default's."
    )


def sides(parts: Parts) -> str:
    side = lambda name: interval(one(parts, "sides", name), "kl")  # noqa: E731
    none, given = (pair(parts, "sides", "encoder", n) for n in ("no replay", "page given up"))
    held(
        above(none, "ratio", 1) and above(given, "ratio", 1),
        "the encoder side's replay is worth it",
    )
    return (
        f"**Encoder side.** Replaying the last window of a hit changes KL by {side('encoder')}, "
        f"both sides by {side('both')}. No replay costs {interval(none, 'ratio')} times as much as "
        f"the encoder side ({side('no replay')}), and giving up a page and computing it on an "
        f"empty window {interval(given, 'ratio')} times ({side('page given up')})."
    )


def turns(parts: Parts) -> str:
    found, last = rows(parts, "turns"), max(r["turn"] for r in rows(parts, "turns"))
    turn = {r["way"]: r for r in found if r["turn"] == last}
    more = [pair(parts, "turns", f"fresh turn {k}", f"chained turn {k}") for k in range(last + 1)]
    given = [
        pair(parts, "turns", f"chained turn {k}", f"page given up turn {k}")
        for k in range(1, last + 1)
    ]
    floor = pair(parts, "turns", f"chained turn {last}", f"fidelity 0 turn {last}")
    held(all(above(r, "difference", 0) for r in more[2:]), "errors of turns add up")
    held(
        above(more[last], "difference", more[2]["difference"]),
        "more in the last turn than in turn 2",
    )
    held(
        all(above(r, "difference", 0) for r in given),
        "giving up a page is worse in every turn with a hit",
    )
    held(above(floor, "ratio", 1), "in the last turn rounding the caches still changes more")
    return (
        "**Over turns the error adds up**, since a page that a replay has written is read by all "
        f"turns behind it. In turn {last} KL is {interval(turn['chained'], 'kl')} with the "
        f"conversation's own pages and {interval(turn['fresh'], 'kl')} with exact ones, a "
        f"difference of {interval(more[last], 'difference')} on the same tokens (in turn 2: "
        f"{interval(more[2], 'difference')}); rounding the caches changes "
        f"{interval(turn['fidelity 0'], 'kl')} there, {interval(floor, 'ratio')} times as much. "
        "Giving up the hit's last page and computing it on an empty window is worse in every turn "
        f"with a hit: {interval(turn['page given up'], 'kl')} in the last."
    )


def english(parts: Parts) -> str:
    row, python = one(parts, "prose", "n6 keep 76"), one(parts, "keep", "n6 keep 76")
    ratio, vllm = pair(parts, "prose", "n6 keep 76", "fidelity 0"), one(parts, "prose", "vLLM 76")
    held(
        row["kl_low"] < python["kl_high"] and python["kl_low"] < row["kl_high"],
        "English and Python overlap",
    )
    held(above(ratio, "ratio", 1), "on English too rounding the caches changes more")
    held(vllm["kl_high"] < row["kl_low"], "on English vLLM's cut errs less")
    return (
        f"**English**, which the model was not trained on: {interval(row, 'kl')} with the default, "
        "an interval that overlaps that of Python. Rounding the caches changes "
        f"{interval(ratio, 'ratio')} times as much. vLLM's cut errs less here too: "
        f"{interval(vllm, 'kl')}."
    )


FINDINGS = (
    default,
    tail,
    with_keep,
    no_window,
    cuts,
    stairs,
    shares,
    keys,
    length,
    sides,
    turns,
    english,
    drafts,
    free,
    cost,
)


def found(parts: Parts) -> str:
    """All findings. AssertionError where the results do not bear one out."""
    return "\n".join(f"- {f(parts)}" for f in FINDINGS)
