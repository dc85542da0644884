"""What 200 small requests gave when the golden was recorded, and how it is recorded.

A golden pins behaviour while the code behind it is moved, split and renamed. Each combination of
scheduler, overlap, prefix cache and replay policy serves the same requests on the tiny model in
float64. `tests/data/golden.json.xz` holds, for each request, the tokens, the finish reason, the
cached tokens, where each token came from and sums of log-probabilities; for each combination the
counters. Only public calls are used: `add`, `step`, `abort`, `fork`, `stats`.

    python tests/support/golden.py             what each combination is, without running it
    python tests/support/golden.py --record    run all combinations (minutes), write the file anew

Record only when a change of results is intended, and say in the commit which results changed.
Log-probabilities are compared to 1e-9, which any CPU meets in float64; all else is compared exactly.
"""

from __future__ import annotations

import itertools
import json
import lzma
import random
import sys
from pathlib import Path
from typing import Any

import torch

import deepinfer as di

FILE = Path(__file__).parents[1] / "data" / "golden.json.xz"
TOLERANCE = 1e-9

REQUESTS = 200
FEW = 12  # requests of the combinations that every test run serves
EOS, IMAGE = 1, 1001

COUNTERS = (
    "steps", "prefill_steps", "decode_steps", "mixed_steps", "prefill_rows", "decode_rows",
    "row_limit", "tokens", "requests", "prompt_tokens", "cached_tokens", "preemptions",
    "sum_seqlen_qxk", "max_seqlen_k", "peak_running", "peak_waiting", "peak_kv_usage",
    "ended_prompt_tokens", "ended_tokens",
)  # fmt: skip
COUNTED_BY = (
    "finished",
    "drafted",
    "accepted",
    "survival",
)  # counters with a key: a reason or a draft depth


class ByConfidence(di.verifier.BaseVerifier):
    """Verifies as many drafts as have a survival of a third at least, by confidences a step old."""

    max_draft = 4

    def budget(self, stale: torch.Tensor, cost: Any) -> int:
        return stale.shape[0] + int((stale[:, : self.max_draft] > 1 / 3).sum())


class Ends(di.sampler.Philox):
    """The tiny model hardly ever ends a text: here it does, about once in twenty tokens. No image
    placeholder is drawn, since what such a row means is not settled yet."""

    def distribution(self, logits: torch.Tensor, params: Any, mask: Any = None) -> Any:
        logits = logits.clone()
        logits[:, EOS] += 9.0
        logits[:, IMAGE] = -torch.inf
        return super().distribution(logits, params, mask)


SCHEDULERS = ("fcfs", "decode_order", "mixed")
REPLAYS = {
    "exact": "exact",
    "bounded": di.replay.Bounded(22, sides="both"),
    "halo": di.replay.Halo(),
}
VERIFIERS = {"off": "off", "fixed": di.verifier.Fixed(3), "confidence": ByConfidence()}


def settings_of(
    scheduler: str, overlap: bool, prefix_cache: bool, replay: str
) -> tuple[str, dict[str, Any]]:
    """(name, settings) of a combination. Each verifier meets each value of every other setting."""
    number = SCHEDULERS.index(scheduler) + overlap + prefix_cache + list(REPLAYS).index(replay)
    verifier = list(VERIFIERS)[number % 3]
    words = (scheduler, "overlap" if overlap else "", "cache" if prefix_cache else "", replay)
    name = " ".join(word for word in (*words, verifier) if word)
    return name, {
        "scheduler": scheduler,
        "overlap": overlap,
        "prefix_cache": prefix_cache,
        "replay": REPLAYS[replay],
        "verifier": VERIFIERS[verifier],
        "sampler": Ends(),
        "page_size": 8,
        "num_pages": 22,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 40,
        "max_model_len": 96,
    }


ALL = dict(
    settings_of(*values)
    for values in itertools.product(SCHEDULERS, (False, True), (False, True), REPLAYS)
)
QUICK = (
    "fcfs exact off",
    "decode_order overlap cache bounded fixed",
    "mixed cache halo confidence",
    "mixed overlap cache exact fixed",
)


# ------------------------------------------------------------------------------- the requests


def requests(count: int) -> list[dict[str, Any]]:
    """The first `count` requests: prompt, sampling, the call of `step` before which it is added, and
    what else is done to it (`abort` or `fork`: so many calls later)."""
    chance = random.Random(12)
    shared = [[chance.randrange(3, 999) for _ in range(24)] for _ in range(2)]
    out, arrival = [], 0
    for i in range(count):
        if chance.random() < 0.2:  # long enough to be cut by Bounded, and to begin behind a hit
            begin, length = (
                chance.choice(shared)[: chance.choice((8, 16, 24, 24))],
                chance.randint(30, 44),
            )
        else:
            begin, length = [], chance.choice((chance.randint(1, 6), chance.randint(3, 14)))
        tail = [chance.randrange(3, 999) for _ in range(length - len(begin))]
        sampling: dict[str, Any] = {"seed": 1000 + i, "max_tokens": chance.randint(1, 12)}
        kind = chance.choice(("greedy", "plain", "plain", "filtered"))
        if kind == "greedy":
            sampling["temperature"] = 0.0
        elif kind == "filtered":
            sampling.update(temperature=0.7, top_p=0.9, top_k=50)
        if chance.random() < 0.5:
            sampling["ignore_eos"] = True
        if chance.random() < 0.15:
            sampling["top_logprobs"] = 3
        if chance.random() < 0.1:
            sampling["prompt_logprobs"] = True
        act = chance.choices((None, "abort", "fork"), (8, 1, 1.5))[0]
        one = {"prompt": begin + tail, "sampling": sampling, "arrival": arrival, "act": act}
        out.append({**one, "later": chance.randint(1, 6)})
        if chance.random() < 0.3:
            arrival += chance.randint(1, 5)
    return out


def serve(eng: di.Engine, asked: list[dict[str, Any]]) -> dict[str, Any]:
    """Every request's Completion by name: its number, with an f behind it for a fork of it."""
    names: dict[int, str] = {}
    done: dict[str, Any] = {}
    due: dict[int, list[tuple[str, int, dict[str, Any]]]] = {}
    todo = list(enumerate(asked))
    call = 0
    while todo or len(done) < len(names):
        while todo and todo[0][1]["arrival"] <= call:
            i, one = todo.pop(0)
            sampling = one["sampling"]  # its own copy: a fork has them too
            try:
                id = eng.add(one["prompt"], **sampling)
            except ValueError:  # a policy that drops rows has no log-probabilities of its prompt
                assert sampling.pop("prompt_logprobs")
                id = eng.add(one["prompt"], **sampling)
            names[id] = str(i)
            if one["act"]:
                due.setdefault(call + one["later"], []).append((one["act"], id, one))
        for act, id, one in due.pop(call, []):
            if names[id] in done:
                continue
            if act == "abort":
                done[names[id]] = eng.abort(id)
                continue
            changed = {**one["sampling"], "seed": one["sampling"]["seed"] + 5000}
            params = di.SamplingParams(**{**changed, "max_tokens": changed["max_tokens"] + 3})
            names[eng.fork(id, params)] = f"{names[id]}f"
        for completion in eng.step():
            done[names[completion.index]] = completion
        call += 1
    return done


# -------------------------------------------------------------------------------- what is kept


def numbers(values: list[float | None]) -> float:
    """A sum that also sees the order."""
    return sum((i + 1) * v for i, v in enumerate(values) if v is not None)


def told(completion: Any) -> dict[str, Any]:
    """What is kept of a Completion."""
    c = completion
    tops = [sorted(top.items()) for top in c.top_logprobs]
    out: dict[str, Any] = {
        "tokens": list(c.token_ids),
        "finish": c.finish_reason,
        "cached": c.cached_tokens,
        "steps": [[s.step, s.row, s.source] for s in c.steps],
        "logprobs": numbers(list(c.logprobs)),
    }
    if tops:
        out["top"] = [[token for token, _ in top] for top in tops]
        out["top_logprobs"] = numbers([value for top in tops for _, value in top])
    if c.prompt_logprobs:
        out["prompt_logprobs"] = numbers(list(c.prompt_logprobs))
    return out


def counters(stats: Any) -> dict[str, Any]:
    """Counters of `stats` by name. Synchronous steps without their reasons, which are prose."""
    out = {name: getattr(stats, name) for name in COUNTERS}
    for name in COUNTED_BY:
        out |= {f"{name} {key}": n for key, n in sorted(getattr(stats, name).items())}
    out["synchronous"] = sorted(stats.synchronous.values())
    return out


def run(base: di.Engine, name: str, count: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """(completions by request, counters) of one combination."""
    with base.with_(**ALL[name]) as eng:
        done = serve(eng, requests(count))
        assert all(c.error is None for c in done.values())
        return done, counters(eng.stats)


def result(base: di.Engine, name: str, count: int) -> dict[str, Any]:
    """What the file holds of one combination."""
    done, counted = run(base, name, count)
    return {"requests": {i: told(c) for i, c in done.items()}, "counters": counted}


def engine() -> di.Engine:
    return di.Engine.tiny(dtype="float64", device="cpu")


def load() -> dict[str, Any]:
    """{'full' or 'quick': {combination: result}}."""
    return json.loads(lzma.decompress(FILE.read_bytes()))


def differences(found: dict[str, Any], golden: dict[str, Any]) -> list[str]:
    """One line for each value that is not the golden one."""
    pairs: list[tuple[str, Any, Any]] = []
    for name in sorted(found["counters"].keys() | golden["counters"].keys()):
        pairs.append((name, found["counters"].get(name), golden["counters"].get(name)))
    for i in sorted(found["requests"].keys() | golden["requests"].keys()):
        here, there = found["requests"].get(i, {}), golden["requests"].get(i, {})
        for name in sorted(here.keys() | there.keys()):
            pairs.append((f"request {i}: {name}", here.get(name), there.get(name)))
    return [f"{what}: found {a!r}, golden {b!r}" for what, a, b in pairs if not same(a, b)]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return abs(a - b) < TOLERANCE
    return a == b


def rounded(value: Any) -> Any:
    """Floats to 11 decimals: the tolerance is far above, and the file small."""
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    return round(value, 11) if isinstance(value, float) else value


def record() -> None:
    base = engine()
    new: dict[str, dict[str, Any]] = {"full": {}, "quick": {}}
    for kind, names, count in (("quick", QUICK, FEW), ("full", ALL, REQUESTS)):
        for name in names:
            print(kind, name, flush=True)
            new[kind][name] = rounded(result(base, name, count))
    text = json.dumps(new, sort_keys=True, separators=(",", ":"))
    FILE.write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))
    print(f"{FILE.name}: {FILE.stat().st_size:,} bytes")


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1:] == ["--record"]:
        record()
    else:
        print(__doc__)
        print(*ALL, sep="\n")
