"""The findings in the README of the replay experiment: the stored results support each of them.

A function takes the results, asserts what the finding claims and returns the numbers it quotes.
"""

import dataclasses
import re

import pytest

from deepinfer.tables.table import Table
from experiments.replay_error.figures import deepest, rows
from experiments.replay_error.files import read_all
from experiments.replay_error.readme_tables import (
    HERE,
    against_floors,
    interval,
    number,
    percent,
    same,
    whole,
)
from experiments.replay_error.tables import pairs

DEFAULT, WIDE = "n6 keep 76", "n6 keep 127"
KEEPS = (76, 96, 127)


def one(parts, part, policy, table="summary", **equal):
    (row,) = rows(parts, part, table, policy=policy, **equal)
    return row


def kl(parts, part, policy, **equal):
    return interval(one(parts, part, policy, **equal), "kl")


def pair(parts, part, first, second):
    """Two policies of a part on the same tokens; part floors: a policy and a floor."""
    found = against_floors(parts) if part == "floors" else rows(parts, part, "pairs")
    (row,) = [r for r in found if (r["first"], r["second"]) == (first, second)]
    return row


def ratios(found):
    return [interval(r, "ratio") for r in found]


def default(parts):
    row, ratio = one(parts, "keep", DEFAULT), pair(parts, "floors", DEFAULT, "fidelity 0")
    assert ratio["ratio_low"] > 1
    assert row["perplexity_ratio_low"] < 1 < row["perplexity_ratio_high"]
    floors = [kl(parts, "floors", f) for f in ("fidelity 0", "top-k halved")]
    more = [f"{100 * row['agreement']:.1f} %", f"{interval(percent(row), 'p')} %"]
    return [interval(row, "kl"), *floors, f"{interval(ratio, 'ratio')} times", *more]


def tail(parts):
    row, floor = one(parts, "keep", DEFAULT), one(parts, "floors", "fidelity 0")
    share, middle = (row[c] / floor[c] for c in ("kl_max", "kl_median"))
    assert share > 5 * middle
    tokens = len(rows(parts, "keep", "texts")) * parts["keep"].facts["sizes"]["continuation"]
    numbers = [number(row[c]) for c in ("kl_median", "kl_p99", "kl_max")]
    shares = [f"{100 * middle:.1g} % of the median", f"{100 * share:.0f} % of its maximum"]
    return [*numbers, *shares, f"{number(floor['kl_max'])}, of {tokens:,} tokens"]


def with_keep(parts):
    ratio = pair(parts, "floors", WIDE, "chunks")
    assert ratio["ratio_low"] < 1 < ratio["ratio_high"]
    exact = max(one(parts, "keep", n)["kl"] for n in ("halo", "n6 keep 379"))
    assert all(one(parts, "keep", f"n6 keep {k}")["kl"] < 10 * exact for k in (190, 253))
    return [kl(parts, "keep", WIDE), kl(parts, "floors", "chunks")]


def no_window(parts):
    ratio = pair(parts, "floors", "top-k halved", "short 1")
    assert ratio["ratio_low"] > 3
    assert one(parts, "keep", "short 16")["kl"] > 100 * one(parts, "keep", DEFAULT)["kl"]
    return [kl(parts, "keep", "short 16"), kl(parts, "keep", "short 1"), *ratios([ratio])]


def cuts(parts):
    found = [pair(parts, "keep", f"n6 keep {k}", f"vLLM {k}") for k in KEEPS]
    more = pair(parts, "keep", DEFAULT, "n6 keep 96")
    assert all(r["ratio_high"] < 1 for r in found)
    assert more["ratio_high"] < found[0]["ratio_low"]
    return ratios([*found, more])


def stairs(parts):
    box = [pair(parts, "keep", f"n6 keep {k}", f"stairs {k}") for k in KEEPS]
    vllm = [pair(parts, "keep", f"vLLM {k}", f"stairs {k}") for k in KEEPS]
    assert all(r["ratio_high"] < 1 for r in (*box, vllm[2]))
    assert all(r["ratio_high"] > 1 for r in vllm[:2])
    return ratios([*box, vllm[2]])


def shares(parts):
    """By keep / W, and by the share of the way to the exact length."""
    fifth = [
        one(parts, "keep", f"n{n} keep {k}")["kl"]
        for n, k in ((6, 127), (5, 114), (4, 102), (3, 89))
    ]
    each = parts["keep"].tables["passages"]
    windows, half = pairs(each, [("n3 keep 127", WIDE), ("n3 keep 127", "n2 keep 96")])
    apart = max(fifth) / min(fifth)
    assert windows["ratio_low"] > 2 * apart and half["ratio_low"] > 1
    law = {r["policy"]: r["kl_max"] for r in rows(parts, "law")}
    assert max(v for k, v in law.items() if k != "n2 keep 126") < 1e-12
    assert law["n2 keep 126"] > 1e-10
    return [*ratios([windows, half]), f"a factor of {apart:.1f}"]


def keys(parts):
    main = [r["policy"] for r in deepest(parts, "keep")]

    def off(part, policy):
        found = rows(parts, part, "distance", policy=policy)
        return {r["distance"]: 100 * r["rel_l2"] for r in found}

    mine, wide, floor = off("keep", DEFAULT), off("keep", WIDE), off("floors", "fidelity 0")
    first = [off("keep", n)[0] for n in ("short 1", *main)]
    layers = [r for r in rows(parts, "keep", "layers", policy=DEFAULT) if r["rel_l2"]]
    assert mine[0] > 2 * floor[0] and mine[64] < floor[64] / 2 and max(first) < 1.1 * min(first)
    assert all(r["rel_l2_high"] < layers[-1]["rel_l2_low"] for r in layers[:-1])
    assert all(r["rel_l2_low"] > layers[0]["rel_l2_high"] for r in layers[1:])
    later = [f"{mine[64]:.2g} % (keep 76)", f"{wide[128]:.2g} % (keep 127)"]
    return [
        f"{min(first):.0f} to {max(first):.0f} %",
        *later,
        f"{floor[0]:.2g} and {floor[64]:.2g} %",
    ]


def length(parts):
    prompts = parts["length"].facts["sizes"]["lengths"]
    mine, rounded = (
        [pair(parts, "length", f"{n} behind {prompts[0]}", f"{n} behind {p}") for p in prompts[1:]]
        for n in (DEFAULT, "fidelity 0")
    )
    assert (
        all(r["ratio_low"] < 1 < r["ratio_high"] for r in mine[:-1]) and mine[-1]["ratio_high"] < 1
    )
    assert all(r["ratio_low"] > 1 for r in rounded)
    by = [kl(parts, "length", DEFAULT, prompt=p) for p in prompts]
    return [*by, *ratios([mine[-1], rounded[-1]])]


def sides(parts):
    found = [pair(parts, "sides", "encoder", n) for n in ("no replay", "page given up")]
    assert all(r["ratio_low"] > 1 for r in found)
    return [kl(parts, "sides", "encoder"), kl(parts, "sides", "both"), *ratios(found)]


def turns(parts):
    last = max(r["turn"] for r in rows(parts, "turns"))
    turn = {r["way"]: interval(r, "kl") for r in rows(parts, "turns", turn=last)}
    more = [pair(parts, "turns", f"fresh turn {k}", f"chained turn {k}") for k in range(last + 1)]
    assert all(r["difference_low"] > 0 for r in more[2:])
    assert more[last]["difference_low"] > more[2]["difference"]
    for k in range(1, last + 1):
        page = pair(parts, "turns", f"chained turn {k}", f"page given up turn {k}")
        assert page["difference_low"] > 0
    floor = pair(parts, "turns", f"chained turn {last}", f"fidelity 0 turn {last}")
    assert floor["ratio_low"] > 1
    apart = [interval(more[k], "difference") for k in (last, 2)]
    return [turn["chained"], turn["fresh"], *apart, *ratios([floor])]


def english(parts):
    row, python = one(parts, "prose", DEFAULT), one(parts, "keep", DEFAULT)
    ratio = pair(parts, "prose", DEFAULT, "fidelity 0")
    assert row["kl_low"] < python["kl_high"] and python["kl_low"] < row["kl_high"]
    assert ratio["ratio_low"] > 1 and one(parts, "prose", "vLLM 76")["kl_high"] < row["kl_low"]
    return [interval(row, "kl"), *ratios([ratio]), kl(parts, "prose", "vLLM 76")]


def drafts(parts):
    row, none = one(parts, "keep", DEFAULT), one(parts, "keep", "short 1")
    assert row["length_change_low"] < 0 < row["length_change_high"]
    assert none["length_change_high"] < 0
    return [interval(r, "length_change") for r in (row, none)]


def generated(parts):
    def texts(name, way="greedy"):
        return same(rows(parts, "free", "divergence", policy=name, way=way))

    mine, rounded, half, none = map(texts, (DEFAULT, "fidelity 0", "top-k halved", "short 1"))
    sampled = [texts(n, "seeded") for n in (DEFAULT, "fidelity 0")]
    assert mine["share_low"] > max(rounded["share_high"], half["share_high"])
    assert none["share_high"] < min(rounded["share_low"], half["share_low"])
    assert sampled[0]["share_high"] < 10 and sampled[1]["share"] == 0
    return [f"{whole(r)} %" for r in (mine, rounded, half, none, sampled[0])]


def cost(parts):
    found = rows(parts, "cost", "seconds", policy="compact")
    fast, other = ([r for r in found if r["topk"] == k] for k in ("partition", "packed_key"))
    ops = rows(parts, "cost", "parts", length=fast[-1]["length"])

    def total(policy, column, index=(True, False)):
        some = [r for r in ops if r["policy"] == policy and r["op"].startswith("index") in index]
        return sum(r[column] for r in some)

    measured, formula = (
        total("exact", c, (False,)) / total("compact", c, (False,)) for c in ("seconds", "flops")
    )
    assert abs(measured / formula - 1) < 0.15
    assert fast[-1]["speedup"] > 1.15 * fast[-1]["predicted_flops"]
    assert abs(fast[1]["speedup"] / fast[1]["predicted_flops"] - 1) < 0.15
    numbers = [f"{1e-6 * r['flops'] / r['length']:.1f}" for r in fast]
    numbers += [f"{r[c]:.2f}" for c in ("speedup", "predicted_flops") for r in fast]
    numbers += [f"{r['speedup']:.2f}" for r in other]
    share = total("exact", "seconds", (True,)) / total("exact", "seconds")
    return [*numbers, f"{100 * share:.0f} %", f"{measured:.2f} times", f"the {formula:.2f} that"]


def on_a_gpu(parts):
    stored = read_all(HERE / "results" / "accelerator")["accelerator"].tables["seconds"]
    found = {
        r["length"]: r["speedup"]
        for r in stored
        if (r["policy"], r["dtype"]) == ("compact", "float32")
    }
    assert max(found[512], found[2048]) < 1.2 and min(found[8192], found[32000]) > 2
    return [f"{found[n]:.2f}" for n in (512, 2048, 8192, 32000)]


FINDINGS = [default, tail, with_keep, no_window, cuts, stairs, shares, keys, length, sides, turns]
FINDINGS += [english, drafts, generated, cost, on_a_gpu]
README = (HERE / "README.md").read_text("utf-8")


@pytest.fixture(scope="module")
def stored():
    return read_all(HERE / "results")


@pytest.mark.parametrize("i", range(len(FINDINGS)), ids=[f.__name__ for f in FINDINGS])
def test_a_finding_quotes_the_results(stored, i):
    """Every number that the function returns is in the text, and every interval of the text is one of them."""
    listed = README.split("## Findings")[1].split("\n## ")[0]
    texts = re.split(r"^\d+\. ", listed, flags=re.M)[1:]
    assert len(texts) == len(FINDINGS)
    text, numbers = " ".join(texts[i].split()), FINDINGS[i](stored)
    assert [x for x in numbers if x not in text] == []
    intervals = re.findall(r"[-\w.]+ \[[^\]]*\]", text)
    assert [x for x in intervals if not any(x in y for y in numbers)] == []


def test_the_answer_comes_first(stored):
    """Its numbers are those of the findings, rounded."""
    answer = " ".join(README.split("<!-- begin headline")[0].split())
    assert README[: README.index("<!-- begin headline")].count("\n") <= 14
    ratio, row = pair(stored, "floors", DEFAULT, "fidelity 0"), one(stored, "keep", DEFAULT)
    assert f"{ratio['ratio']:.0f} times less" in answer and number(row["kl"]) in answer
    fast = rows(stored, "cost", "seconds", policy="compact", length=2048, topk="partition")[0]
    assert f"{fast['speedup']:.2f} times faster" in answer
    assert f"FLOPs predict {fast['predicted_flops']:.2f}" in answer
    last = pair(stored, "turns", "chained turn 4", "fidelity 0 turn 4")
    assert f"{last['ratio']:.0f}" == "4" and "four times smaller" in answer


def changed(stored, part, table, policy, **values):
    """The results with other values in the rows of a policy."""
    tables = dict(stored[part].tables)
    found = [
        r | values if policy in (r.get("policy"), r.get("second")) else r for r in tables[table]
    ]
    tables[table] = Table(found)
    return stored | {part: dataclasses.replace(stored[part], tables=tables)}


@pytest.mark.parametrize(
    "finding, part, table, policy, values",
    [
        (default, "keep", "summary", DEFAULT, dict(perplexity_ratio_low=1.001)),
        (tail, "keep", "summary", DEFAULT, dict(kl_max=0.001)),
        (cuts, "keep", "pairs", "vLLM 96", dict(ratio_high=1.01)),
        (stairs, "keep", "pairs", "stairs 127", dict(ratio_high=1.01)),
        (drafts, "keep", "summary", "short 1", dict(length_change_high=0.1)),
        (length, "length", "pairs", "n6 keep 76 behind 1024", dict(ratio_low=1.1)),
        (length, "length", "pairs", "fidelity 0 behind 1920", dict(ratio_low=0.9)),
        (sides, "sides", "pairs", "no replay", dict(ratio_low=0.9)),
        (turns, "turns", "pairs", "chained turn 3", dict(difference_low=-1e-5)),
        (turns, "turns", "pairs", "page given up turn 1", dict(difference_low=-1e-5)),
        (english, "prose", "summary", DEFAULT, dict(kl_low=0.5)),
        (generated, "free", "divergence", DEFAULT, dict(diverged=3)),
        (shares, "law", "summary", "n5 keep 315", dict(kl_max=1e-6)),
    ],
)
def test_a_finding_fails_on_results_that_do_not_support_it(
    stored, finding, part, table, policy, values
):
    assert finding(stored)
    with pytest.raises(AssertionError):
        finding(changed(stored, part, table, policy, **values))
