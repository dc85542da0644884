"""The findings on drafts, free text and costs in words; see words.py."""

from __future__ import annotations

from experiments.replay_error.claims import below, held, listed, one
from experiments.replay_error.figures import rows
from experiments.replay_error.readme_tables import Parts, Row, interval, same, whole


def drafts(parts: Parts) -> str:
    row, none = one(parts, "keep", "n6 keep 76"), one(parts, "keep", "short 1")
    held(
        row["length_change_low"] < 0 < row["length_change_high"],
        "the default may cost the drafter nothing",
    )
    held(below(none, "length_change", 0), "no window costs the drafter")
    return (
        f"**Drafts**: {interval(row, 'length_change')} expected tokens of a step with the default, "
        f"which may be nothing, {interval(none, 'length_change')} with no window."
    )


def free(parts: Parts) -> str:
    found = rows(parts, "free", "divergence")

    def texts(name: str, way: str = "greedy") -> Row:
        return same([r for r in found if (r["policy"], r["way"]) == (name, way)])

    default, rounded, halved, none = (
        texts(n) for n in ("n6 keep 76", "fidelity 0", "top-k halved", "short 1")
    )
    drawn = [texts(n, "seeded") for n in ("n6 keep 76", "fidelity 0")]
    held(
        default["share_low"] > max(rounded["share_high"], halved["share_high"]),
        "fewer texts change with the default",
    )
    held(
        none["share_high"] < min(rounded["share_low"], halved["share_low"]),
        "no window changes most texts",
    )
    held(all(r["share_high"] < 10 for r in drawn), "nearly all drawn texts change")
    return (
        f"**Free text.** {whole(default)} % of texts of {found[0]['tokens']} greedy tokens are "
        f"exact's to the end with the default, {whole(rounded)} % under fidelity 0, "
        f"{whole(halved)} % with half the index and {whole(none)} % with no window. Drawn with the "
        f"same random numbers nearly all go another way, {whole(drawn[0])} % do not with the "
        f"default and {whole(drawn[1])} % under fidelity 0: do not expect the same text, only one "
        "of nearly the same law."
    )


def cost(parts: Parts) -> str:
    both = {(r["topk"], r["policy"], r["length"]): r for r in rows(parts, "cost", "seconds")}
    compact, other = (
        [r for (t, p, _), r in both.items() if (t, p) == (k, "compact")]
        for k in ("partition", "packed_key")
    )
    counts = [f"{r['length']:,}" for r in compact]
    ms = [f"{1e3 * r['seconds'] / r['length']:.2f}" for r in compact]
    flops = [f"{1e-6 * r['flops'] / r['length']:.1f}" for r in compact]
    speedups, others = ([f"{r['speedup']:.2f}" for r in some] for some in (compact, other))
    predicted = [f"{r['predicted_flops']:.2f}" for r in compact]
    all_ops, work, index, scores = (
        [
            sum(
                r[column]
                for r in rows(parts, "cost", "parts", length=compact[-1]["length"], policy=policy)
                if not only or str(r["op"]).startswith("index")
            )
            for policy in ("exact", "compact")
        ]
        for only in (False, True)
        for column in ("seconds", "flops")
    )
    measured, formula = (
        (a[0] - b[0]) / (a[1] - b[1]) for a, b in ((all_ops, index), (work, scores))
    )
    held(abs(measured / formula - 1) < 0.15, "without the index the speedup is what FLOPs predict")
    held(
        compact[-1]["speedup"] > 1.15 * compact[-1]["predicted_flops"],
        "there is a surplus at the longest prompt",
    )
    return (
        f"**Cost.** With `compact` a prompt token costs {listed(flops)} MFLOP at {listed(counts)} "
        "tokens: the encoder and one projection, flat but for the scores of the index, which grow "
        f"with the prompt. The speedup over exact is {listed(speedups)} where FLOPs predict "
        f"{listed(predicted)}. **The surplus is the index's**: at {counts[-1]} tokens its ops take "
        f"{100 * index[0] / all_ops[0]:.0f} % of exact's CPU time. They touch every entry for "
        "every row, also those that are hidden or no candidates, which the formula leaves out, as "
        "it does top-k; and three of the four parts of that are the decoder's. All other ops "
        f"together are {measured:.2f} times faster, as FLOPs predict for them ({formula:.2f}). "
        f"With the top-k by integer keys the speedup is {listed(others)} at "
        f"{listed(counts[: len(others)])}. In CPU time compact takes {listed(ms)} ms a token at "
        "these lengths; what grows in it is the encoder's index."
    )
