"""Replay plans: rows that are dropped, rows that start behind a hit. Checked is what the
stack, the cache and the engine do with the plans, also with those that no policy makes."""

import copy
import dataclasses
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepinfer.engine.step.batch import Work
from deepinfer.slots.protocols import Prompt, ReplayPlan
from deepinfer.slots.replay import Bounded
from deepinfer.slots.verifier import Fixed
from support.serial import TOLERANCE, Place, block, forward, state_rows, stored
from support.small import DRAFTS, WINDOW, poison, small_engine, stream

KEEP = WINDOW + DRAFTS + 1
IDS = stream(3 * WINDOW + 8, 5)


class Last(Bounded):
    """Bounded with any number of rows kept, also fewer than an engine takes."""

    def start(self, info):
        return copy.copy(self)


@dataclass(eq=False)
class Twice:
    """Rows are dropped at the first decoder layer, and again two layers on."""

    keep: int = KEEP
    mode: str = "compact"

    version, exact, batch_invariant, on_device = 1, False, True, False
    layer, whole_window = 2, False

    def plan(self, prompt: Prompt, config) -> ReplayPlan:
        one, two = max(prompt.length - 2 * self.keep, 0), max(prompt.length - self.keep, 0)
        floor = (0, 0, one, one, two)
        rows = (0,) * 5 if self.mode == "mask" else floor
        return ReplayPlan(0, 0, rows, rows, floor, False, "in two stages")


POLICIES = {
    "first decoder layer": dict(layer=2),
    "its window open": dict(layer=2, whole_window=True),
    "a reindexing layer": dict(layer=3),
    "a reindexing layer, its window open": dict(layer=3, whole_window=True),
    "the last layer": dict(layer=4),
    "the last layer, its window open": dict(layer=4, whole_window=True),
    "short": dict(layer=2, keep=5),
    "last row": dict(layer=2, keep=1),
}


def last(name: str) -> Last:
    return Last(**{"keep": KEEP, **POLICIES[name]})


def engine(policy, **settings):
    return small_engine(replay=policy, verifier=Fixed(DRAFTS), **settings)


def cut_of(policy, length: int) -> int:
    return max(length - policy.keep, 0)


# ------------------------------------------------------------------------------- dropped = masked


@pytest.mark.parametrize(
    "policy", [*map(lambda k: (Last, POLICIES[k]), POLICIES), (Twice, {})], ids=[*POLICIES, "twice"]
)
def test_dropping_is_masking_on_the_rows_that_are_kept(policy):
    """Logits of kept and of decoded rows, every cached row that is read later, and the drafts."""
    make, changes = policy
    changes = {"keep": KEEP, **changes}
    dropped, masked = make(**changes), make(**changes, mode="mask")
    a, b = engine(dropped), engine(masked)
    n = 3 * WINDOW
    got, want = run(a.runtime, dropped, n), run(b.runtime, masked, n)
    cut = cut_of(dropped, n)
    assert got.logits[:cut].isnan().all()
    torch.testing.assert_close(got.logits[cut:], want.logits[cut:], **TOLERANCE)
    for name, rows in got.rows.items():
        kind, layer = name.split(".")
        first = dropped.layer + dropped.whole_window
        lowest = cut if kind == "window" and int(layer) >= first else 0
        for number, row in rows.items():
            if number >= max(lowest, n - WINDOW if kind == "window" else 0):
                torch.testing.assert_close(
                    row, want.rows[name][number], **TOLERANCE, msg=lambda m: f"{name} {number}: {m}"
                )
    if dropped.keep >= WINDOW:
        torch.testing.assert_close(got.block, want.block, **TOLERANCE)


@dataclass
class Ran:
    logits: torch.Tensor
    rows: dict
    block: torch.Tensor


def run(rt, policy, n: int, chunks=None, company: int = 0) -> Ran:
    """A prompt of n tokens by its plan, then three decoded rows."""
    poison(rt.cache)
    plan = policy.plan(Prompt(n), rt.config).validate(
        Prompt(n), rt.config.num_layers, rt.config.kv_source_layers
    )
    place, other = Place.take(rt, len(IDS) + DRAFTS), Place.take(rt, len(IDS) + DRAFTS)
    out, at = [], 0
    for size in [*(chunks or [n]), 1, 2]:
        works = [
            Work(IDS[at : at + size], at, IDS[max(at - 3, 0) : at], place.pages, place.state, plan)
        ]
        if company:
            beside = Work(
                IDS[at : at + company], at, IDS[max(at - 3, 0) : at], other.pages, other.state, None
            )
            works.insert(0, beside)
        logits = forward(rt, works, decode=at >= n)[len(works[0].ids) if company else 0 :]
        out += [logits.new_full((size - len(logits), logits.shape[1]), torch.nan), logits]
        at += size
    ran = Ran(torch.cat(out), stored(rt, place, 0, at), block(rt, place, at, IDS[at]))
    place.give(rt)
    other.give(rt)
    return ran


# ------------------------------------------------------------------------------ whatever the chunks

sizes = st.one_of(
    st.sampled_from([0, 1, 2, 6, 13, 14, WINDOW, KEEP - 1, KEEP, KEEP + 1]), st.integers(0, 60)
)


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from(sorted(POLICIES)),
    st.integers(1, 3 * WINDOW),
    st.lists(sizes, max_size=6),
    st.integers(0, 3),
)
def test_chunks_intersect_the_plan_and_never_change_it(name, n, chunks, company):
    policy = last(name)
    rt = engine_of(name).runtime
    whole = run(rt, policy, n)
    cuts, left = [], n
    for size in chunks:
        cuts.append(min(size, left))
        left -= cuts[-1]
    parts = run(rt, policy, n, [*cuts, left], company)
    torch.testing.assert_close(parts.logits, whole.logits, equal_nan=True, **TOLERANCE)
    torch.testing.assert_close(parts.block, whole.block, equal_nan=True, **TOLERANCE)
    assert whole.logits[cut_of(policy, n) :].isfinite().all()


ENGINES: dict = {}


def engine_of(name: str):
    if name not in ENGINES:
        ENGINES[name] = engine(last(name))
    return ENGINES[name]


@pytest.mark.parametrize(
    "chunks", [[40], [6] * 6 + [4], [1] * 40, [39, 1], [1, 39], [18, 22], [17, 23], [19, 21]]
)
def test_engine_logits_say_which_rows_do_not_exist(chunks):
    ids, policy = IDS[:40], Last(keep=KEEP)
    eng = engine_of("first decoder layer")
    logits = eng.logits(ids, chunks=chunks)
    cut = cut_of(policy, 40)
    assert logits[:cut].isnan().all() and logits[cut:].isfinite().all()
    torch.testing.assert_close(logits[cut:], eng.logits(ids)[cut:], **TOLERANCE)
    assert not eng.exact and "approximate" in repr(eng)


def test_a_prompt_that_fits_is_exact_and_a_longer_one_is_not():
    exact, eng = small_engine(), engine_of("first decoder layer")
    short, long = IDS[:KEEP], IDS[:48]
    torch.testing.assert_close(eng.logits(short), exact.logits(short), **TOLERANCE)
    a, b = eng.logits(long)[-1], exact.logits(long)[-1]
    assert (a - b).abs().max() > 1e-6
    # what follows the prompt is decoded: those rows are never dropped
    assert eng.logits(long, prompt=KEEP).isfinite().all()


def test_generation_by_such_a_plan_is_what_its_logits_say():
    """Greedy text in any chunks and company, with drafts, and its log-probabilities."""
    eng = engine_of("first decoder layer")
    prompts = [IDS[:48], IDS[3:10], IDS[:33]]
    texts = eng.generate(prompts, max_tokens=8, temperature=0.0).raise_for_errors()
    small = engine(last("first decoder layer"), max_num_batched_tokens=24)
    assert [c.token_ids for c in small.generate(prompts, max_tokens=8, temperature=0.0)] == [
        c.token_ids for c in texts
    ]
    off = small_engine(replay=last("first decoder layer"))
    for prompt, c in zip(prompts, texts):
        assert off.generate(prompt, max_tokens=8, temperature=0.0)[0].token_ids == c.token_ids
        logits = eng.logits([*prompt, *c.token_ids], prompt=len(prompt))[len(prompt) - 1 : -1]
        want = logits.log_softmax(-1)
        assert want.argmax(-1).tolist() == list(c.token_ids)
        torch.testing.assert_close(
            torch.tensor(c.logprobs, dtype=torch.float64), want.amax(-1), **TOLERANCE
        )


def test_log_probabilities_of_dropped_rows_are_refused_by_name():
    eng = engine_of("first decoder layer")
    with pytest.raises(
        ValueError, match="prompt_logprobs.*Last.*drops rows below 26.*replay='exact'"
    ):
        eng.generate(IDS[:48], prompt_logprobs=True, max_tokens=2)
    scores = eng.score(IDS[:48], prompt=30)[
        0
    ].logprobs  # follow the prompt, so their rows are there
    logits = eng.logits(IDS[:48], prompt=30)[29:-1].log_softmax(-1)
    assert scores == pytest.approx([float(logits[i, t]) for i, t in enumerate(IDS[30:48])])
    out = eng.generate([IDS[:48], IDS[:5]], prompt_logprobs=True, max_tokens=2)
    assert (
        "prompt_logprobs" in str(out[0].error)
        and out[1].error is None
        and len(out[1].prompt_logprobs) == 5
    )
    assert eng.runtime.pages.free == eng.runtime.pages.size


@dataclass(eq=False, repr=False)
class Broken(Last):
    keep: int = KEEP
    change: tuple = ()

    def plan(self, prompt: Prompt, config) -> ReplayPlan:
        return dataclasses.replace(super().plan(prompt, config), **dict(self.change))


@pytest.mark.parametrize(
    "change, words",
    [
        (
            dict(
                rows_from=(0, 30, 30, 30, 30),
                kv_from=(0, 30, 30, 30, 30),
                floor=(0, 30, 30, 30, 30),
            ),
            "before KV source",
        ),
        (dict(rows_from=(0, 0, 9, 5, 9)), "falls from layer to layer"),
        (dict(rows_from=(0,) * 4), "has 4 entries"),
        (dict(rows_from=(0, 0, 9, 9, 48), kv_from=(0, 0, 0, 9, 9)), "drops the last prompt row 47"),
        (dict(floor=(0,) * 5), "floor is below kv_from"),
        (dict(kv_from=(0,) * 5), "kv_from is below the rows_from"),
        (dict(start=8, write_from=8), "past the hit 0"),
        (dict(write_from=8), "write_from 8 is past the hit"),
    ],
)
def test_a_plan_that_would_read_what_nobody_computed_is_refused(change, words):
    eng = small_engine(replay=Broken(change=tuple(change.items())))
    for use in (lambda: eng.generate(IDS[:48], max_tokens=1), lambda: eng.logits(IDS[:48])):
        with pytest.raises(ValueError, match=words):
            use()
    assert eng.runtime.pages.free == eng.runtime.pages.size


# --------------------------------------------------------------------- starting behind a hit


def hit_plan(rt, n: int, hit: int, start: int, state_at: int = 0) -> ReplayPlan:
    """Rows from `start` on, block KV below `hit` only read; without state KV nothing below `start`
    is seen."""
    layers = rt.config.num_layers
    floor = (0 if state_at >= start else start,) * layers
    plan = ReplayPlan(start, hit, floor, (0,) * layers, floor, state_at >= start, "behind a hit")
    return plan.validate(Prompt(n, hit, state_at), layers, rt.config.kv_source_layers)


def feed(rt, place, plan, start: int, stop: int, chunks=(), company=None) -> torch.Tensor:
    """Logits of positions start..stop-1, in chunks."""
    out, at = [], start
    for size in [*chunks, stop - start - sum(chunks)]:
        works = [
            Work(IDS[at : at + size], at, IDS[max(at - 3, 0) : at], place.pages, place.state, plan)
        ]
        if company is not None:
            works.append(
                Work(
                    IDS[9 : 9 + size],
                    at - start,
                    IDS[max(at - start + 6, 9) : 9],
                    company.pages,
                    company.state,
                )
            )
        out.append(forward(rt, works, decode=False)[:size])
        at += size
    return torch.cat(out)


def block_kv(rt, place, below: int) -> dict:
    """Bytes of entries and index keys of the first `below` tokens, by store."""
    rows = stored(rt, place, 0, below)
    return {
        name: torch.stack([*r.values()]).clone()
        for name, r in rows.items()
        if name.startswith(("entry", "index")) and r
    }


@pytest.mark.parametrize("packed", [False, True], ids=["floats", "packed"])
@pytest.mark.parametrize("hit", [WINDOW + 1, 2 * WINDOW - 1, 2 * WINDOW])
@pytest.mark.parametrize("layout", ["2 and 1", "4 and 2 and 1"])
def test_block_kv_of_a_hit_is_read_and_never_rewritten(layout, hit, packed):
    """The last window before the hit runs again on an empty window: its block KV stays."""
    rt = small_engine(layout, packed_cache=packed, verifier=Fixed(DRAFTS)).runtime
    n, start = 3 * WINDOW, hit - WINDOW
    first, other = Place.take(rt, n + DRAFTS), Place.take(rt, n + DRAFTS)
    cold = feed(rt, first, None, 0, n)
    before = block_kv(rt, first, hit)
    plan = hit_plan(rt, n, hit, start)
    results = []
    ways = [
        (0.0, (), None),
        (torch.nan, (), None),
        (torch.nan, (1, 6, 9), other),
        (3.0, (hit - start,), None),
    ]
    for garbage, chunks, company in ways:
        again = Place(first.pages, rt.states.take(1)[0])
        for rows in state_rows(rt, again.state):
            rows.fill_(255 if rows.dtype == torch.uint8 else garbage)
        results.append(feed(rt, again, plan, start, n, chunks, company))
        rt.states.give([again.state])
        after = block_kv(rt, first, hit)
        assert after.keys() == before.keys() and before
        assert all(torch.equal(after[name], before[name]) for name in before)
    for other_result in results[1:]:
        torch.testing.assert_close(other_result, results[0], **TOLERANCE)
    assert results[0].isfinite().all()
    assert (results[0] - cold[start:]).abs().max() > 1e-6  # an approximation, and it says so
    assert not plan.exact


@pytest.mark.parametrize("hit", [1, 5, WINDOW, 2 * WINDOW - 1, 2 * WINDOW])
@pytest.mark.parametrize("layout", ["2 and 1", "4 and 2 and 1", "all 2"])
def test_with_its_state_kv_a_hit_is_exact(layout, hit):
    """Pages adopted and rings copied into another slot: nothing differs from a cold run."""
    rt = small_engine(layout, verifier=Fixed(DRAFTS)).runtime
    poison(rt.cache)
    n = 3 * WINDOW
    first = Place.take(rt, n + DRAFTS)
    cold = feed(rt, first, None, 0, n)
    other = Place.take(rt, n + DRAFTS)
    feed(rt, other, None, 0, hit)
    again = Place(other.pages, rt.states.take(1)[0])
    for mine, theirs in zip(state_rows(rt, again.state), state_rows(rt, other.state)):
        mine.copy_(theirs)
        theirs.fill_(torch.nan)
    before = block_kv(rt, other, hit)
    warm = feed(rt, again, hit_plan(rt, n, hit, hit, state_at=hit), hit, n, (1, 4))
    torch.testing.assert_close(warm, cold[hit:], **TOLERANCE)
    after = block_kv(rt, other, hit)
    assert all(torch.equal(after[name], before[name]) for name in before)
