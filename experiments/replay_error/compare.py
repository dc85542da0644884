"""Two runs beside each other: python -m experiments.replay_error.compare FOLDER FOLDER

Says of every part that both have whether its numbers are the same to the digit, and if not how far apart they
are and whether the second's means lie within the first's intervals. Seconds are not compared.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from deepinfer.tables.table import Table
from experiments.replay_error.files import Part, read_all

TIMES = ("seconds", "fastest", "speedup")  # columns that no two runs share


def sizes(a: Part, b: Part) -> str:
    """What two parts were measured of, where they differ."""
    x, y = (p.facts.get("sizes", {}) for p in (a, b))
    return ", ".join(
        f"{k} {x.get(k)} and {y.get(k)}" for k in dict.fromkeys((*x, *y)) if x.get(k) != y.get(k)
    )


def differences(a: Table, b: Table) -> list[tuple[float, str]]:
    """(how far apart, where) of every cell that differs; infinity where it is no number."""
    if a.columns != b.columns or len(a) != len(b):
        return [(float("inf"), "other rows or columns")]
    out = []
    for i, (x, y) in enumerate(zip(a, b)):
        for k in a.columns:
            if x[k] != y[k] and k not in TIMES:
                numbers = all(isinstance(v, (int, float)) for v in (x[k], y[k]))
                far = abs(x[k] - y[k]) if numbers else float("inf")
                out.append((far, f"row {i}, {k}: {x[k]!r} and {y[k]!r}"))
    return out


def outside(a: Table, b: Table) -> tuple[int, list[str]]:
    """(how many means of kl a gives with an interval, those of b that lie outside by more than
    float32's noise)."""
    if "kl_low" not in a.columns:
        return 0, []
    both = [(x, y) for x, y in zip(a, b) if x["kl_low"] is not None]
    return len(both), [
        f"{x['policy']}: {y['kl']:.3g}, not in [{x['kl_low']:.3g}, {x['kl_high']:.3g}]"
        for x, y in both
        if not x["kl_low"] - 1e-6 <= y["kl"] <= x["kl_high"] + 1e-6
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """0 where all is the same to the digit."""
    p = argparse.ArgumentParser(
        prog="python -m experiments.replay_error.compare", description=__doc__
    )
    p.add_argument("first", type=Path, help="results of a run")
    p.add_argument("second", type=Path, help="those of another")
    o = p.parse_args(arguments)
    try:
        first, second = read_all(o.first), read_all(o.second)
    except ValueError as error:
        p.error(str(error))
    found = 0
    for name in sorted({*first, *second}):
        if name not in first or name not in second:
            print(f"{name}: only in {o.first if name in first else o.second}")
            found += 1
            continue
        if other := sizes(first[name], second[name]):
            print(f"{name}: of other sizes, not compared: {other}")
            found += 1
            continue
        mine, its = first[name].tables, second[name].tables
        if set(mine) != set(its):
            print(
                f"{name}: other tables: {', '.join(sorted(set(mine) ^ set(its)))} in one of the two"
            )
            found += 1
            continue
        apart = [d for t in mine for d in differences(mine[t], its[t])]
        cells = sum(len(t) * len(t.columns) for t in mine.values())
        if not apart:
            print(f"{name}: {cells} cells, the same to the digit")
            continue
        found += 1
        far, where = max(apart)
        counts, out = zip(*(outside(mine[t], its[t]) for t in mine))
        print(f"{name}: {len(apart)} of {cells} cells differ, most by {far:.3g} ({where})")
        print(
            f"  {sum(map(len, out))} of {sum(counts)} means of KL outside the first run's intervals"
        )
        for words in (w for some in out for w in some):
            print(f"    {words}")
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main())
