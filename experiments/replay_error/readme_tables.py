"""The generated tables of README.md and TABLES.md: every number in them is a number of a run.

    python -m experiments.replay_error.readme_tables

A table stands between `<!-- begin NAME -->` and `<!-- end NAME -->`; text outside is not touched.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from deepinfer.measure.bootstrap import over_groups
from experiments.replay_error.figures import FLOORS, Parts, Row, deepest, layers_of, rows
from experiments.replay_error.files import read, read_all
from experiments.replay_error.tables import pairs

HERE = Path(__file__).resolve().parent
PAGES = ("README.md", "TABLES.md")
NOISE = 1e-9  # what is below is rounding and differs between machines


def number(x: float | None, digits: int = 2) -> str:
    if x is None:
        return ""
    if 0 <= abs(x) < NOISE:
        return "< 1e-9"
    if abs(x) >= 1000:
        return f"{float(f'{x:.{digits}g}'):,.0f}"
    return f"{x:.{digits}g}" if abs(x) < 0.001 else f"{x:.{digits + 1}g}"


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
        interval(row, "kl"),
        number(row["kl_median"]),
        number(row["kl_p99"]),
        number(row["kl_max"]),
        f"{row['agreement']:.4f}",
        interval(percent(row), "p"),
    ]


def share(x: float | None) -> str:
    return "" if x is None else f"{100 * x:.0f} %"


def keep(parts: Parts) -> str:
    """At the first decoder layer, other cuts, stairs, and floors."""
    n = layers_of(deepest(parts, "keep")[0])
    words = ("vLLM", "stairs", "halo")

    def place(r: Row) -> tuple[int, int]:
        word = str(r["policy"]).split()[0]
        return (1 + words.index(word) if word in words else 0, r["keep"])

    some = sorted((r for r in rows(parts, "keep") if layers_of(r) in (0, n)), key=place)
    lines = [[f"`{r['policy']}`", *errors(r), share(r["rows_share"])] for r in some]
    lines += [[f"floor: {r['policy']}", *errors(r), ""] for r in rows(parts, "floors")]
    return table(["policy", *ERRORS, "rows x layers"], lines)


def headline(parts: Parts) -> str:
    """The few rows that a reader needs first."""
    shown = ("short 1", "short 16", "n6 keep 76", "vLLM 76", "n6 keep 127", "n6 keep 190", "halo")
    by = {r["policy"]: r for r in rows(parts, "keep")}
    lines = [_short(f"`{name}`", by[name]) for name in shown if name in by]
    lines += [_short(f"floor: {r['policy']}", r) for r in rows(parts, "floors")]
    return table(["policy", "KL mean [95 %]", "p99", "maximum", "rows x layers"], lines)


def _short(name: str, row: Row) -> list[str]:
    numbers = [interval(row, "kl"), number(row["kl_p99"]), number(row["kl_max"])]
    return [name, *numbers, share(row.get("rows_share"))]


def depth(parts: Parts) -> str:
    lines = [
        [str(layers_of(r)), str(r["keep"]), f"{r['windows']:.2f}"]
        + ["" if r["depth"] is None else f"{r['depth']:.2f}"]
        + [interval(r, "kl"), number(r["kl_p99"]), number(r["kl_max"])]
        for r in rows(parts, "keep")
        if layers_of(r)
    ]
    head = [
        "n",
        "keep",
        "keep / W",
        "(keep - W) / ((n - 1)(W - 1))",
        "KL mean [95 %]",
        "p99",
        "maximum",
    ]
    return table(head, lines)


def lengths(parts: Parts) -> str:
    found, floors = rows(parts, "length"), rows(parts, "length", "floors summary")
    prompts = sorted({r["prompt"] for r in found})
    lines = []
    for some, words in ((found, "`{}`"), (floors, "floor: {}")):
        for name in dict.fromkeys(r["policy"] for r in some):
            by = {r["prompt"]: r for r in some if r["policy"] == name}
            lines.append([words.format(name), *(interval(by[p], "kl") for p in prompts)])
    return table(["KL mean [95 %] behind a prompt of", *(f"{p:,}" for p in prompts)], lines)


def lengths_pairs(parts: Parts) -> str:
    return paired(rows(parts, "length", "pairs"))


def turns(parts: Parts) -> str:
    found = rows(parts, "turns")
    numbers = sorted({r["turn"] for r in found})
    lines = []
    for way in dict.fromkeys(r["way"] for r in found):
        by = {r["turn"]: r for r in found if r["way"] == way}
        name = f"floor: {way}" if way in FLOORS else f"`{way}`"
        lines.append([name, *(interval(by[k], "kl") for k in numbers)])
    by = {r["turn"]: r for r in found if r["way"] == "chained"}
    lines.append(["`chained`, p99", *(number(by[k]["kl_p99"]) for k in numbers)])
    heads = [f"turn {k}, prompt {by[k]['prompt']}" for k in numbers]
    return table(["KL mean [95 %]", *heads], sorted(lines, key=lambda x: x[0].startswith("floor")))


def turns_pairs(parts: Parts) -> str:
    """Differences on the same tokens, a row a pair of ways."""
    by: dict[tuple[str, str], dict[int, Row]] = {}
    for r in rows(parts, "turns", "pairs"):
        (a, k), (b, _) = (str(r[w]).rsplit(" turn ", 1) for w in ("first", "second"))
        by.setdefault((a, b), {})[int(k)] = r
    lines = [
        [f"`{b}` less `{a}`", *(interval(r, "difference") for r in x.values())]
        for (a, b), x in by.items()
    ]
    return table(["KL", *(f"turn {k}" for k in next(iter(by.values())))], lines)


def sides(parts: Parts) -> str:
    lines = [[f"`{r['policy']}`", *errors(r), share(r["rows_share"])] for r in rows(parts, "sides")]
    lines += [[f"floor: {r['policy']}", *errors(r), ""] for r in rows(parts, "floors")]
    return table(["policy", *ERRORS, "rows x layers"], lines)


def paired(pairs: Sequence[Row]) -> str:
    lines = [
        [f"`{r['first']}`", f"`{r['second']}`", interval(r, "difference"), interval(r, "ratio")]
        for r in pairs
    ]
    return table(["first", "second", "KL, second less first", "second / first"], lines)


def differences(parts: Parts) -> str:
    return paired(
        [*against_floors(parts), *rows(parts, "keep", "pairs"), *rows(parts, "sides", "pairs")]
    )


def against_floors(parts: Parts) -> list[Row]:
    """Policies and floors on the same tokens. ValueError if the two parts have different texts."""
    a, b = (parts[part].tables for part in ("keep", "floors"))
    if a["texts"].rows != b["texts"].rows:
        raise ValueError(
            "the parts keep and floors are of other texts: measure both with the same sizes"
        )
    main = [r["policy"] for r in deepest(parts, "keep")]
    default, wide = main[1], main[3]
    which = [(default, f) for f in ("fidelity 0", "top-k halved")] + [
        (wide, "chunks"),
        ("top-k halved", "short 1"),
    ]
    return list(pairs([*a["passages"], *b["passages"]], which))


def prose(parts: Parts) -> str:
    lines = [[f"`{r['policy']}`", *errors(r)] for r in rows(parts, "prose")]
    lines += [[f"floor: {r['policy']}", *errors(r)] for r in rows(parts, "prose", "floors summary")]
    return table(["policy", *ERRORS], lines)


def drafts(parts: Parts) -> str:
    n = layers_of(deepest(parts, "keep")[0])
    lines = [
        [part, f"`{r['policy']}`", interval(r, "length_change")]
        for part in ("keep", "sides", "prose")
        for r in rows(parts, part)
        if layers_of(r) in (0, n)
    ]
    return table(["part", "policy", "expected tokens of a step, less exact's"], lines)


def divergence(parts: Parts) -> str:
    found, lines = rows(parts, "free", "divergence"), []
    names = list(dict.fromkeys(r["policy"] for r in found))
    for name in sorted(names, key=lambda n: n in FLOORS):
        for way in dict.fromkeys(r["way"] for r in found):
            some = [r for r in found if (r["policy"], r["way"]) == (name, way)]
            at = sorted(r["tokens"] if r["diverged"] is None else r["diverged"] for r in some)
            most, middle = some[0]["tokens"], at[(len(at) - 1) // 2]
            said = f"{middle}" if middle < most else f"none in {most}"
            shown = f"floor: {name}" if name in FLOORS else f"`{name}`"
            first = str(at[0]) if at[0] < most else f"none in {most}"
            lines.append([shown, str(way), whole(same(some)), said, first])
    return table(
        ["policy", "way", "texts without a difference, % [95 %]", "median position", "earliest"],
        lines,
    )


def whole(row: Row) -> str:
    """A share in whole percent with its interval, which shares of 0 and 100 % do not have."""
    low = (
        ""
        if row["share_low"] == row["share_high"]
        else f" [{row['share_low']:.0f}, {row['share_high']:.0f}]"
    )
    return f"{row['share']:.0f}{low}"


def same(some: Sequence[Row]) -> Row:
    """The share of texts that equal exact's to the end, in %, with its interval over modules."""
    each: dict[str, list[float]] = {}
    for r in some:
        sums = each.setdefault(str(r["group"]), [0.0, 0.0])
        sums[0] += 100 * (r["diverged"] is None)
        sums[1] += 1
    e = over_groups([each[g] for g in sorted(each)], lambda x: x[..., 0] / x[..., 1])
    return dict(share=e.value, share_low=e.low, share_high=e.high)


def seconds(parts: Parts) -> str:
    lines = [
        [
            f"{r['length']:,}",
            f"`{r['policy']}`",
            f"`{r['topk']}`",
            f"{1e3 * r['seconds'] / r['length']:.2f}",
            f"{r['speedup']:.2f}",
            f"{r['predicted_flops']:.2f}",
            f"{r['predicted_rows']:.2f}",
        ]
        for r in rows(parts, "cost", "seconds")
    ]
    head = [
        "prompt",
        "policy",
        "top-k",
        "CPU ms a token",
        "speedup",
        "by FLOPs",
        "by rows x layers",
    ]
    return table(head, lines)


def where(parts: Parts) -> str:
    """CPU microseconds and kFLOP a prompt token by op, both sides, at the longest prompt."""
    whole, lines = rows(parts, "cost", "parts"), []
    most = max(r["length"] for r in whole)
    for op in dict.fromkeys(r["op"] for r in whole):
        cells = []
        for policy in ("exact", "compact"):
            some = [r for r in whole if (r["op"], r["length"], r["policy"]) == (op, most, policy)]
            cells.append([sum(r[c] for r in some) / most for c in ("seconds", "flops")])
        (t0, f0), (t1, f1) = cells
        lines.append(
            [str(op), f"{1e6 * t0:.0f}", f"{1e6 * t1:.0f}", f"{t0 / t1:.2f}" if t1 else ""]
            + [f"{1e-3 * f0:,.0f}", f"{1e-3 * f1:,.0f}", f"{f0 / f1:.2f}" if f1 else ""]
        )
    us, kflop = f"exact, CPU us a token at {most:,}", "exact, kFLOP a token"
    return table(["op", us, "compact", "ratio", kflop, "compact", "ratio"], lines)


def law(parts: Parts) -> str:
    lines = [
        [
            f"`{r['policy']}`",
            "" if r["depth"] is None else f"{r['depth']:.3f}",
            f"{r['kl_max']:.1e}",
        ]
        for r in rows(parts, "law")
    ]
    return table(
        ["policy", "(keep - W) / ((n - 1)(W - 1))", "KL, maximum of tokens, float64"], lines
    )


def percent(row: Row) -> dict[str, float]:
    """The change of the perplexity as p, in %."""
    return {f"p{e}": 100 * (row[f"perplexity_ratio{e}"] - 1) for e in ("", "_low", "_high")}


def texts(parts: Parts, part: str) -> dict[int, str]:
    """The passages of a part: number -> group."""
    held = parts[part].tables
    return {r["text"]: r["group"] for r in held.get("texts", held.get("divergence", ()))}


def facts(parts: Parts) -> str:
    f = parts["keep"].facts
    took = sum(p.took for p in parts.values())
    said = [
        f"`{name}` {len(t)} of {len(set(t.values()))}"
        for name in parts
        if (t := texts(parts, name))
    ]
    return (
        f"Weights `{f['weights']}`, {f['dtype']}, fidelity {f['settings']['fidelity']}, torch "
        f"{f['torch']}, {f['threads']} thread, {f['processor']}, commit `{f['commit'][:12]}`; the "
        f"whole run took {took / 60:.0f} CPU minutes. Passages of modules (of help topics in "
        f"`prose`): {', '.join(said)}."
    )


def accelerator(folder: Path = HERE / "results" / "accelerator") -> str:
    """Seconds on an accelerator, from the file of that command."""
    part = read(folder / "accelerator.json")
    lines = [
        [
            f"{r['length']:,}",
            r["dtype"],
            f"`{r['policy']}`",
            f"{1e3 * r['seconds']:.0f}",
            f"{1e3 * r['fastest']:.0f}",
            f"{r['speedup']:.2f}",
            f"{r['predicted_flops']:.2f}",
        ]
        for r in part.tables["seconds"]
    ]
    head = ["prompt", "dtype", "policy", "ms", "least", "speedup", "by FLOPs"]
    f, title = part.facts, part.tables["seconds"].title
    said = f"{f['device']}, torch {f['torch']}, commit `{str(f['commit'])[:12]}`; {title}."
    return f"{said}\n\n{table(head, lines)}"


BLOCKS: dict[str, Callable[[Parts], str]] = {
    f.__name__: f
    for f in (facts, headline, keep, differences, depth, law, lengths, lengths_pairs, turns)
    + (turns_pairs, sides, prose, drafts, divergence, seconds, where)
} | {"accelerator": lambda _: accelerator()}


def filled(text: str, parts: Parts) -> str:
    """A page with every table made anew. ValueError for a table whose name is unknown."""

    def one(match: re.Match) -> str:
        name = match[1]
        if name not in BLOCKS:
            raise ValueError(f"no table is named {name!r}; known: {', '.join(BLOCKS)}")
        return f"<!-- begin {name} -->\n{BLOCKS[name](parts)}\n<!-- end {name} -->"

    return re.sub(r"<!-- begin (\w+) -->.*?<!-- end \1 -->", one, text, flags=re.S)


def main(arguments: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(
        prog="python -m experiments.replay_error.readme_tables",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.parse_args(arguments)
    parts = read_all(HERE / "results")
    for page in (HERE / name for name in PAGES):
        page.write_text(filled(page.read_text("utf-8"), parts), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
