"""The tables of README.md, made from the stored results: a number there is a number of a run.

    python -m experiments.replay_error.findings            # writes them into README.md
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.replay_error.files import Part, read_all
from experiments.replay_error.figures import deepest, layers_of, rows

HERE = Path(__file__).resolve().parent
Parts = Mapping[str, Part]
Row = Mapping[str, Any]
NOISE = 1e-9  # what is below is rounding and differs between machines


def number(x: float | None, digits: int = 2) -> str:
    if x is None:
        return ""
    if 0 <= abs(x) < NOISE:
        return "< 1e-9"
    return f"{x:.{digits}g}" if abs(x) < 0.001 or abs(x) >= 1000 else f"{x:.{digits + 1}g}"


def interval(row: Row, column: str, scale: float = 1.0) -> str:
    """The value with its 95 % interval."""
    value, low, high = (row.get(f"{column}{end}") for end in ("", "_low", "_high"))
    if value is None:
        return ""
    if max(abs(x) for x in (value, low or 0, high or 0)) < NOISE:
        return "< 1e-9"
    if low is None:
        return number(scale * value)
    return f"{number(scale * value)} [{number(scale * low)}, {number(scale * high)}]"


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    cells = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(x) + " |" for x in cells)


ERRORS = ("KL mean [95 %]", "median", "p99", "maximum", "top-1 agreement", "perplexity, %")


def errors(row: Row) -> list[str]:
    return [
        interval(row, "kl"), number(row["kl_median"]), number(row["kl_p99"]), number(row["kl_max"]),
        f"{row['agreement']:.4f}", interval(_percent(row), "p"),
    ]  # fmt: skip


def share(x: float | None) -> str:
    return "" if x is None else f"{100 * x:.0f} %"


def keep(parts: Parts) -> str:
    """At the first decoder layer, other cuts, and floors."""
    n = layers_of(deepest(parts, "keep")[0])
    some = [r for r in rows(parts, "keep") if layers_of(r) in (0, n)]
    lines = [
        [f"`{r['policy']}`", *errors(r), share(r["rows_share"])]
        for r in sorted(some, key=lambda r: (r["keep"], str(r["policy"])))
    ]
    lines += [[f"floor: {r['policy']}", *errors(r), ""] for r in rows(parts, "floors")]
    return table(["policy", *ERRORS, "rows x layers"], lines)


def depth(parts: Parts) -> str:
    lines = [
        [str(layers_of(r)), str(r["keep"]), f"{r['windows']:.2f}", "" if r["depth"] is None else f"{r['depth']:.2f}"]
        + [interval(r, "kl"), number(r["kl_p99"]), number(r["kl_max"])]
        for r in rows(parts, "keep") if layers_of(r)
    ]  # fmt: skip
    head = ["n", "keep", "keep / W", "(keep - W) / ((n - 1)(W - 1))", "KL mean [95 %]", "p99", "maximum"]
    return table(head, lines)


def lengths(parts: Parts) -> str:
    found = rows(parts, "length")
    prompts = sorted({r["prompt"] for r in found})
    names = list(dict.fromkeys(r["policy"] for r in found))

    def cell(name: str, prompt: int, where: str) -> str:
        some = [r for r in rows(parts, "length", where) if (r["policy"], r["prompt"]) == (name, prompt)]
        if not some:
            return ""
        (row,) = some
        whole = row.get("keep") == prompt
        return "not cut" if whole else interval(row, "kl")

    lines = [[f"`{n}`", *(cell(n, p, "summary") for p in prompts)] for n in names]
    lines.append(["floor: fidelity 0", *(cell("fidelity 0", p, "floors summary") for p in prompts)])
    return table(["KL mean [95 %] behind a prompt of", *map(str, prompts)], lines)


def turns(parts: Parts) -> str:
    found, pairs = rows(parts, "turns"), rows(parts, "turns", "pairs")
    ways = list(dict.fromkeys(r["way"] for r in found))
    lines = []
    for k in sorted({r["turn"] for r in found}):
        by = {r["way"]: r for r in found if r["turn"] == k}
        (pair,) = [p for p in pairs if p["first"] == f"fresh turn {k}"]
        lines.append(
            [str(k), str(by[ways[0]]["prompt"]), *(interval(by[w], "kl") for w in ways)]
            + [number(by["chained"]["kl_p99"]), interval(pair, "difference")]
        )
    names = [f"{w}" for w in ways]
    return table(["turn", "prompt", *names, "chained, p99", "chained less fresh"], lines)


def sides(parts: Parts) -> str:
    lines = [
        [f"`{r['policy']}`", *errors(r), share(r["rows_share"])] for r in rows(parts, "sides")
    ]
    lines += [[f"floor: {r['policy']}", *errors(r), ""] for r in rows(parts, "floors", "summary sides")]
    return table(["policy", *ERRORS, "rows x layers"], lines)


def differences(parts: Parts) -> str:
    lines = [
        [f"`{r['first']}`", f"`{r['second']}`", interval(r, "difference"), interval(r, "ratio")]
        for part in ("keep", "sides") for r in rows(parts, part, "pairs")
    ]  # fmt: skip
    return table(["first", "second", "KL, second less first", "second / first"], lines)


def prose(parts: Parts) -> str:
    lines = [[f"`{r['policy']}`", *errors(r)] for r in rows(parts, "prose")]
    lines += [[f"floor: {r['policy']}", *errors(r)] for r in rows(parts, "prose", "floors summary")]
    return table(["policy", *ERRORS], lines)


def drafts(parts: Parts) -> str:
    n = layers_of(deepest(parts, "keep")[0])
    lines = [
        [part, f"`{r['policy']}`", interval(r, "length_change")]
        for part in ("keep", "sides", "prose") for r in rows(parts, part) if layers_of(r) in (0, n)
    ]  # fmt: skip
    return table(["part", "policy", "expected tokens of a step, less exact's"], lines)


def divergence(parts: Parts) -> str:
    found, lines = rows(parts, "free", "divergence"), []
    for name in dict.fromkeys(r["policy"] for r in found):
        for way in dict.fromkeys(r["way"] for r in found):
            some = [r for r in found if (r["policy"], r["way"]) == (name, way)]
            at = sorted(some[0]["tokens"] if r["diverged"] is None else r["diverged"] for r in some)
            same = sum(r["diverged"] is None for r in some)
            middle = at[(len(at) - 1) // 2]
            said = f"{middle}" if middle < some[0]["tokens"] else f"none in {middle}"
            lines.append([f"`{name}`", str(way), f"{same} of {len(some)}", said, str(at[0])])
    return table(["policy", "way", "texts without a difference", "median position", "earliest"], lines)


def seconds(parts: Parts) -> str:
    lines = [
        [
            f"{r['length']:,}", f"`{r['policy']}`", f"`{r['topk']}`", f"{1e3 * r['seconds'] / r['length']:.2f}",
            f"{r['speedup']:.2f}", f"{r['predicted_flops']:.2f}", f"{r['predicted_rows']:.2f}",
        ]
        for r in rows(parts, "cost", "seconds")
    ]  # fmt: skip
    head = ["prompt", "policy", "top-k", "CPU ms a token", "speedup", "by FLOPs", "by rows x layers"]
    return table(head, lines)


def where(parts: Parts) -> str:
    """CPU microseconds and kFLOP a prompt token by op, both sides together, at the longest prompt."""
    whole, lines = rows(parts, "cost", "parts"), []
    most = max(r["length"] for r in whole)
    for topk in dict.fromkeys(r["topk"] for r in whole):
        for op in dict.fromkeys(r["op"] for r in whole):
            cells = []
            for policy in ("exact", "compact"):
                key = (op, most, policy, topk)
                some = [r for r in whole if (r["op"], r["length"], r["policy"], r["topk"]) == key]
                cells.append([sum(r[c] for r in some) / most for c in ("seconds", "flops")])
            (t0, f0), (t1, f1) = cells
            lines.append(
                [f"`{topk}`", str(op), f"{1e6 * t0:.0f}", f"{1e6 * t1:.0f}", f"{t0 / t1:.2f}" if t1 else ""]
                + [f"{1e-3 * f0:,.0f}", f"{1e-3 * f1:,.0f}", f"{f0 / f1:.2f}" if f1 else ""]
            )
    us, kflop = f"exact, CPU us a token at {most:,}", "exact, kFLOP a token"
    return table(["top-k", "op", us, "compact", "ratio", kflop, "compact", "ratio"], lines)


def law(parts: Parts) -> str:
    lines = [
        [f"`{r['policy']}`", "" if r["depth"] is None else f"{r['depth']:.3f}", f"{r['kl_max']:.1e}"]
        for r in rows(parts, "law")
    ]
    return table(["policy", "(keep - W) / ((n - 1)(W - 1))", "KL, maximum of tokens, float64"], lines)


def one(parts: Parts, part: str, policy: str, where: str = "summary", **equal: object) -> Row:
    (row,) = rows(parts, part, where, policy=policy, **equal)
    return row


def found(parts: Parts) -> str:
    """The findings in words, their numbers from the results."""
    row = lambda name: one(parts, "keep", name)  # noqa: E731
    floor = lambda name: one(parts, "floors", name)  # noqa: E731
    side = lambda name: one(parts, "sides", name)  # noqa: E731
    default, vllm, wide = row("n6 keep 76"), row("vLLM"), row("n6 keep 127")
    (cuts,) = [p for p in rows(parts, "keep", "pairs") if p["second"] == "vLLM"]
    last = max(r["turn"] for r in rows(parts, "turns"))
    pairs = [p for p in rows(parts, "turns", "pairs") if p["first"] == f"fresh turn {last}"]
    turn = {r["way"]: r for r in rows(parts, "turns") if r["turn"] == last}
    both = {(r["topk"], r["policy"], r["length"]): r for r in rows(parts, "cost", "seconds")}
    lengths = sorted({n for *_, n in both})
    by_length = [one(parts, "length", "n6 keep 76", prompt=p) for p in parts["length"].facts["sizes"]["lengths"]]
    compact, other = ([both[k, "compact", n] for n in lengths] for k in ("partition", "packed_key"))
    ms = [f"{1e3 * r['seconds'] / r['length']:.2f}" for r in compact]
    whole, work, index, scores = (
        [
            sum(
                r[column] for r in rows(parts, "cost", "parts", topk="partition", length=lengths[-1], policy=policy)
                if not only or str(r["op"]).startswith("index")
            )
            for policy in ("exact", "compact")
        ]
        for only in (False, True) for column in ("seconds", "flops")
    )  # fmt: skip
    speedups, others = ([f"{r['speedup']:.2f}" for r in some] for some in (compact, other))
    predicted = [f"{r['predicted_flops']:.2f}" for r in compact]
    flops = [f"{1e-6 * r['flops'] / r['length']:.1f}" for r in compact]
    behind, counts = [format(r["prompt"], ",") for r in by_length], [format(n, ",") for n in lengths]
    english = one(parts, "prose", "n6 keep 76")
    lines = [
        f"**The default (keep 76) changes {floor('fidelity 0')['kl'] / default['kl']:.0f} times less than whether the "
        f"caches are rounded does**: KL {interval(default, 'kl')} beside {interval(floor('fidelity 0'), 'kl')} (fidelity "
        f"0) and {interval(floor('top-k halved'), 'kl')} (half the index). The likeliest token is the same for "
        f"{100 * default['agreement']:.1f} % of tokens, and perplexity changes by {interval(_percent(default), 'p')} %.",
        f"**Its tail is long.** Median {number(default['kl_median'])}, p99 {number(default['kl_p99'])}, maximum "
        f"{number(default['kl_max'])}: one token in some thousands changes more than half as much as the worst under "
        f"fidelity 0 ({number(floor('fidelity 0')['kl_max'])}). A mean alone does not show that.",
        f"**The error falls fast with keep.** With two windows (keep 127) its mean is {interval(wide, 'kl')}. That is "
        f"about the mean of prefilling the prompt in chunks of 100 in float32 ({interval(floor('chunks'), 'kl')}), which a "
        f"few flipped roundings make; of most tokens keep 127 changes more (medians {number(wide['kl_median'])} and "
        f"{number(floor('chunks')['kl_median'])}). From keep 190 on, "
        "40 % of the way to the exact length, it is in the noise of float32, where a rounding that flips decides the "
        "maximum; `halo` and the exact keep, which are exact in float64, are no better.",
        f"**Below one window it is another matter.** With a quarter of a window KL is {interval(row('short 16'), 'kl')}, "
        f"with none {interval(row('short 1'), 'kl')}, {row('short 1')['kl'] / floor('top-k halved')['kl']:.0f} times half the index.",
        f"**Where engines differ matters little.** With the first cut layer's window whole, as in vLLM, KL is "
        f"{interval(vllm, 'kl')}, {interval(cuts, 'ratio')} of DeepInfer's on the same tokens, at the same rows x layers.",
        "**The share of the way to the exact length is the better measure.** Over keep / W the curves of n = 2 to 6 lie "
        "apart, over (keep - W) / ((n - 1)(W - 1)) those of n = 3 to 6 lie within a factor of about two of each other; "
        "n = 2 falls more slowly. The exact length itself is a bound, not what this model needs: in float64 one row less "
        "changes nothing that is above rounding but for n = 2.",
        "**Next to the cut the window keys are off by a tenth; a window later by a hundredth**, about ten times less for "
        "every window, in whatever policy, and more in later layers.",
        f"**Length does not matter**: behind {_list(behind)} tokens KL is "
        f"{_list([number(r['kl']) for r in by_length])} for the same continuations, with intervals that overlap.",
        f"**Encoder side.** Replaying the last window of a hit changes KL by {interval(side('encoder'), 'kl')}, both sides "
        f"by {interval(side('both'), 'kl')}, no replay by {interval(side('no replay'), 'kl')}, and giving up a page and "
        f"computing it on an empty window by {interval(side('page given up'), 'kl')}.",
        f"**Over turns the error adds up**, since a page that a replay has written is read by all turns behind it. In turn "
        f"{last} KL is {interval(turn['chained'], 'kl')} with the conversation's own pages and {interval(turn['fresh'], 'kl')} "
        f"with exact ones, a difference of {interval(pairs[0], 'difference')} on the same tokens; rounding the caches "
        f"changes {interval(turn['fidelity 0'], 'kl')} there. Giving up the hit's last page and "
        f"computing it on an empty window is worse in every turn with a hit: {interval(turn['page given up'], 'kl')}.",
        f"**English**, which the model was not trained on: {interval(english, 'kl')} with the default.",
        f"**Drafts**: {interval(default, 'length_change')} expected tokens of a step with the default, "
        f"{interval(row('short 1'), 'length_change')} with no window.",
        f"**Cost.** With `compact` a prompt token costs {_list(flops)} MFLOP at {_list(counts)} tokens: the encoder and "
        "one projection, flat but for the scores of the index, which grow with the prompt. The speedup over exact is "
        f"{_list(speedups)} where FLOPs predict {_list(predicted)}. **The surplus is the index's**: at {counts[-1]} tokens "
        f"its ops take {100 * index[0] / whole[0]:.0f} % of exact's CPU time. They touch every entry for every row, also those "
        "that are hidden or no candidates, which the formula leaves out, as it does top-k; and three of the four parts of that are "
        f"the decoder's. All other ops together are {(whole[0] - index[0]) / (whole[1] - index[1]):.2f} times faster, as "
        f"FLOPs predict for them ({(work[0] - scores[0]) / (work[1] - scores[1]):.2f}). With the top-k by integer keys "
        f"the speedup is {_list(others)}. In CPU time compact takes {_list(ms)} ms a token at these lengths; "
        "what grows in it is the encoder's index.",
    ]
    return "\n".join(f"- {x}" for x in lines)


def _percent(row: Row) -> dict[str, float]:
    return {f"p{e}": 100 * (row[f"perplexity_ratio{e}"] - 1) for e in ("", "_low", "_high")}


def _list(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else words[0]


def facts(parts: Parts) -> str:
    f = parts["keep"].facts
    took = sum(p.took for p in parts.values())
    size = {k: v for name in ("sides", "prose", "length", "turns", "free") for k, v in parts[name].facts["sizes"].items()}
    said = parts["keep"].tables["summary"].title.split(" on ")[1]
    return (
        f"Weights `{f['weights']}`, {f['dtype']}, fidelity {f['settings']['fidelity']}, torch {f['torch']}, "
        f"{f['threads']} thread, {f['processor']}; the whole run took {took / 60:.0f} CPU minutes. Parts `keep` "
        f"and `floors`: {said}. Others: {size['side_passages']} of these passages behind a hit, "
        f"{size['prose_passages']} of English, {size['length_passages']} by length, "
        f"{size['turn_passages']} conversations, {size['free_passages']} free texts."
    )


BLOCKS: dict[str, Callable[[Parts], str]] = {
    "facts": facts, "found": found, "keep": keep, "differences": differences, "depth": depth, "law": law, "lengths": lengths,
    "turns": turns, "sides": sides, "prose": prose, "drafts": drafts, "divergence": divergence,
    "seconds": seconds, "where": where,
}  # fmt: skip


def filled(text: str, parts: Parts) -> str:
    """A README with every block made anew. ValueError for a name that is none."""

    def one(match: re.Match) -> str:
        name = match[1]
        if name not in BLOCKS:
            raise ValueError(f"README: no block {name!r}: {', '.join(BLOCKS)}")
        return f"<!-- begin {name} -->\n{BLOCKS[name](parts)}\n<!-- end {name} -->"

    return re.sub(r"<!-- begin (\w+) -->.*?<!-- end \1 -->", one, text, flags=re.S)


def main(arguments: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m experiments.replay_error.findings", description=__doc__)
    p.parse_args(arguments)
    readme, parts = HERE / "README.md", read_all(HERE / "results")
    readme.write_text(filled(readme.read_text("utf-8"), parts), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
