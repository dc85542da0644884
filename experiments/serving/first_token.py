"""Time to first token with a prefix hit, against the cold time of the part that was not hit.

"The cold time of the part not hit" can be read in two ways, and both are measured:
    same depth   the same rows behind the same tokens, which were just computed: the last chunk of a
                 cold prompt. It reads as many keys as the hit's rows do
    alone        a prompt that is only those rows: it has nothing in front of it to read
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from deepinfer.engine.engine import Engine
from deepinfer.tables.table import Table
from experiments.serving.setup import CLOCKS, SAMPLING, Clock, prompts, spread

CASES = ((256, 128), (1024, 128), (1920, 128), (1024, 512))  # (tokens of a hit, rows behind it)


@dataclass
class Times:
    """Seconds to the first token, a value a round."""

    hit: int
    rows: int
    with_hit: list[float] = field(default_factory=list)
    same_depth: list[float] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)

    def row(self) -> dict[str, object]:
        """Medians, and the ratios of each round's times."""
        ms = {
            n: 1e3 * statistics.median(getattr(self, n))
            for n in ("with_hit", "same_depth", "alone", "whole")
        }
        depth = spread([a / b for a, b in zip(self.with_hit, self.same_depth)])
        alone = spread([a / b for a, b in zip(self.with_hit, self.alone)])
        return {
            "hit tokens": self.hit,
            "rows": self.rows,
            "with hit ms": ms["with_hit"],
            "same depth ms": ms["same_depth"],
            "alone ms": ms["alone"],
            "whole prompt cold ms": ms["whole"],
            "of same depth": depth["median"],
            "of same depth, least": depth["least"],
            "of same depth, most": depth["most"],
            "of alone": alone["median"],
            "of alone, least": alone["least"],
            "of alone, most": alone["most"],
        }


def to_first(
    eng: Engine, ids: Sequence[int], skip: int = 0, clock: Clock = time.perf_counter
) -> float:
    """Seconds from `add`, or from the end of the first `skip` steps, to the first token."""
    start = clock()
    request = eng.add(ids, max_tokens=2, seed=0, **SAMPLING)
    for _ in range(skip):
        eng.step()
        start = clock()
    while not eng.requests[request].output:
        eng.step()
    took = clock() - start
    eng.abort(request)
    return took


def measure(eng: Engine, hit: int, rows: int, rounds: int, clock: str = "wall") -> Times:
    """Rounds of the four in turn; each round has rows of its own behind the same first tokens."""
    if rows > hit:
        raise ValueError(f"{rows} rows behind a hit of {hit} tokens: want them in one chunk")
    settings = dict(max_num_seqs=2, max_model_len=hit + rows + 8)
    pages = (hit + rows) // eng.runtime.limits.page_size
    warm = eng.with_(prefix_cache=True, num_snapshots=pages, **settings)
    cold = eng.with_(**settings)
    chunked = eng.with_(max_num_batched_tokens=hit, **settings)
    first = prompts(eng, 1, hit)[0]
    out = Times(hit, rows)
    tails = [p[1:] for p in prompts(eng, rounds + 3, rows + 1, skip=hit)]
    for tail in tails[-2:]:  # the first leaves pages, the second a snapshot where they part
        to_first(warm, [*first, *tail])
    for n, tail in enumerate(tails[:-2]):
        before = warm.cache.hit_tokens
        with_hit = to_first(warm, [*first, *tail], 0, CLOCKS[clock])
        found = warm.cache.hit_tokens - before
        if found != hit:
            raise RuntimeError(f"a hit of {hit} tokens was to be measured, {found} were found")
        same_depth = to_first(chunked, [*first, *tail], 1, CLOCKS[clock])
        alone, whole = (to_first(cold, ids, 0, CLOCKS[clock]) for ids in (tail, [*first, *tail]))
        if n:  # the first round warms up
            out.with_hit.append(with_hit)
            out.same_depth.append(same_depth)
            out.alone.append(alone)
            out.whole.append(whole)
    for e in (warm, cold, chunked):
        e.close()
    return out


def tables(
    eng: Engine, cases: Sequence[tuple[int, int]], rounds: int, clock: str = "wall"
) -> Iterator[tuple[str, str, Table]]:
    """(name, what it says, table) of times to first token."""
    yield (
        "first token",
        "Time to first token of a prompt whose first tokens are cached, beside the cold time of the "
        "rows that are left: at the same depth, and as a prompt of their own. Ratios: with a hit to "
        f"each of the two, the median of {rounds} rounds with the least and the most.",
        Table([measure(eng, h, r, rounds, clock).row() for h, r in cases]),
    )
