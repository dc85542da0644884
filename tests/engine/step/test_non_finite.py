"""A prompt row that is not finite ends its own request, whether it has logits or none.

NaN is planted at a token of the prompt. In the last layer no later row would ever read it: the text
behind it is the same, and only a look at the row itself can tell.
"""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from properties.test_replay_plans import Twice

from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.engine.step.non_finite import NONE, NonFiniteRows
from deepinfer.slots.attention import CSA2
from deepinfer.slots.experts import Local
from deepinfer.slots.protocols import RowSet
from deepinfer.slots.replay import Bounded, Halo
from deepinfer.slots.verifier import Fixed
from support.overlapped import Knowing
from support.pool import check, check_empty
from support.small import DRAFTS, small_engine, stream

torch.set_num_threads(1)
MARK = 95  # no other token of a prompt, nor of what these requests write
LONG = stream(70, 3, high=90)
OTHERS = [stream(n, 30 + n, high=90) for n in (19, 9)]
PARAMS = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
SMALL, LAST = "two layers", 1  # a layout, and its last layer
BROKEN = re.compile(r"request (\d+): step (\d+), row (\d+) \(prompt position (\d+)\) is not finite")


class Planted(Local):
    """Experts that return NaN in one layer for the rows that `bad` names."""

    def __init__(self, layer: int = 0, value: float = torch.nan) -> None:
        super().__init__()
        self.layer, self.value = layer, value
        self.bad = lambda rows: rows.ids == MARK

    def route(self, layer, x, rows):
        routing = super().route(layer, x, rows)
        if layer.name.startswith(f"layers.{self.layer}."):
            bad = self.bad(rows)[:, None]
            routing = dataclasses.replace(
                routing, weights=routing.weights.masked_fill(bad, self.value)
            )
        return routing


def engine(experts="local", layout: str = SMALL, **changes):
    how = {"max_model_len": 80, "page_size": 8, "max_num_seqs": 4, "max_num_batched_tokens": 16}
    return small_engine(layout, vocab=97, experts=experts, **{**how, **changes})


def marked(at: int, prompt=LONG) -> list[int]:
    return [*prompt[:at], MARK, *prompt[at + 1 :]]


@pytest.fixture(scope="module")
def clean():
    out = engine().generate([LONG, *OTHERS], PARAMS).raise_for_errors()
    assert all(MARK not in c.token_ids for c in out)
    return [c.token_ids for c in out]


# ------------------------------------------------------------------------------- who ends, and how


@pytest.mark.parametrize("cache", [False, True], ids=["", "prefix cache"])
@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
@pytest.mark.parametrize("at, layer", [(0, LAST), (40, 0), (68, LAST)])
def test_a_prompt_row_that_is_not_finite_ends_its_own_request(clean, at, layer, overlap, cache):
    """In its first chunk, one in the middle, or the last one, which has logits of its last row; the
    others of its batch go on, and what it leaves harms nobody."""
    settings = dict(overlap=overlap, prefix_cache=cache, max_num_batched_tokens=24)
    eng = engine(Planted(layer), **settings)
    prompts = [OTHERS[0], marked(at), OTHERS[1]]
    wants = [clean[1], None, clean[2]]
    for turn in range(2):
        got = eng.generate(prompts, PARAMS)
        assert isinstance(got[1].error, ArithmeticError) and not got[1].token_ids
        request, _, row, position = map(int, BROKEN.match(str(got[1].error)).groups())
        assert (request, position) == (3 * turn + 1, at) and 0 <= row <= at
        assert [got[i].token_ids for i in (0, 2)] == [wants[i] for i in (0, 2)]
        check_empty(eng)
    if cache:  # nobody begins behind what it has left
        prefix = eng.runtime.prefix_cache.index
        assert prefix.lookup(prefix.keys(marked(at)), len(LONG)).length == 0
    assert eng.generate(LONG, PARAMS)[0].token_ids == clean[0]


def chunks_of(eng, prompt) -> tuple[str, int]:
    """(the error, prefill rows that ran)."""
    before = eng.stats.prefill_rows
    (out,) = eng.generate(prompt, PARAMS)
    check_empty(eng)
    return str(out.error), eng.stats.prefill_rows - before


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of infinity times 0
@pytest.mark.parametrize(
    "at, value",
    [(0, torch.nan), (15, torch.inf), (16, -torch.inf), (37, torch.nan), (69, torch.nan)],
)
def test_the_error_names_step_row_and_position(at, value):
    """In chunks of 16 rows. No chunk runs behind the one that is broken."""
    eng = engine(Planted(0, value))
    words, rows = chunks_of(eng, marked(at))
    step, row = divmod(at, 16)
    assert f"step {step}, row {row} (prompt position {at}) is not finite" in words
    assert rows == min(16 * (step + 1), 70)
    assert "a slot that returns NaN" in words


def test_the_first_of_several_rows_is_named_and_a_step_on_its_way_gives_nothing():
    eng = engine(Planted(0), overlap=True)
    prompt = marked(21, marked(19, marked(40)))
    words, rows = chunks_of(eng, prompt)
    assert "step 1, row 3 (prompt position 19)" in words and rows == 48  # the third had begun


class Looks(CSA2):
    """Attention that gives NaN to the row at one position."""

    def attend(self, layer, q, kv, selected, plan):
        out = super().attend(layer, q, kv, selected, plan)
        return out.masked_fill((plan.queries.positions == 20)[:, None, None], torch.nan)


def test_of_an_attention_slot_and_of_an_edit_in_a_trace():
    words = "step 1, row 4 (prompt position 20) is not finite"
    assert words in chunks_of(engine(attention=Looks()), LONG)[0]

    def nan(x, at):
        x[at.position == 20] = torch.nan
        return x

    eng = engine()
    for name in ("layers.0.attn.out", "layers.1.in", "layers.1.ffn.out"):
        with eng.trace(name, edit=nan):
            error = chunks_of(eng, LONG)[0]
        assert "row 4 (prompt position 20) is not finite" in error, name
    assert chunks_of(eng, LONG)[0] == "None"


# ------------------------------------------------------------------ rows that a replay plan drops


@pytest.mark.parametrize(
    "policy, runs",
    [
        (Bounded(), 2),
        (Bounded(mode="mask"), 5),
        (Bounded(whole_window=True), 2),
        (Bounded(layer=4), 4),
        (Twice(), 2),
        (Halo(), 2),
    ],
    ids=repr,
)
def test_a_row_that_is_dropped_is_looked_at_where_it_ends(policy, runs):
    """runs: layers that run the row at position 3, far below each cut; what no layer runs for it
    can not be broken."""
    eng = engine(Planted(), "2 and 1", replay=policy, max_num_batched_tokens=24)
    for layer in range(5):
        eng.runtime.slots["experts"].layer = layer
        error, _ = chunks_of(eng, marked(3))
        assert ("row 3 (prompt position 3) is not finite" in error) == (layer < runs)
        assert error == "None" or layer < runs


# ------------------------------------------------------------------------- what is not looked at


def test_no_decode_step_looks(clean, monkeypatch):
    looked, look = [], NonFiniteRows.__call__

    def watched(self, x, rows):
        looked.append(rows.count)
        look(self, x, rows)

    monkeypatch.setattr(NonFiniteRows, "__call__", watched)
    eng = engine(verifier=Fixed(DRAFTS))
    assert eng.generate(LONG, PARAMS)[0].token_ids == clean[0]
    assert looked == [16, 16, 16, 16, 6] and eng.stats.decode_rows >= 4


def test_rows_of_drafts_that_are_not_accepted_end_nobody(clean, monkeypatch):
    """Decode rows beside a chunk, in a mixed step: the rows behind the anchor are all broken."""
    Knowing(monkeypatch, {}).right = 0  # no draft is right
    eng = engine(Planted(LAST), verifier=Fixed(3), scheduler="mixed", max_num_batched_tokens=24)
    length, broken = len(OTHERS[0]), []

    def behind_an_anchor(rows):
        start = rows.set.start[rows.set.owner]
        bad = (rows.set.seq == 0) & (start >= length) & (rows.set.positions > start)
        broken.append((len(rows.set.segments or ()), int(bad.sum())))
        return bad

    eng.runtime.slots["experts"].bad = behind_an_anchor
    number = eng.add(OTHERS[0], PARAMS)
    first = eng.requests[number]
    done = {}
    while not first.output:
        eng.step()
    eng.add(LONG, PARAMS)
    while eng.unfinished:
        done |= {c.index: c for c in eng.step()}
        check(eng)
    assert [done[i].error for i in (0, 1)] == [None, None]
    assert [done[i].token_ids for i in (0, 1)] == [clean[1], clean[0]]
    assert any(scheduled == 2 and bad == 3 for scheduled, bad in broken)  # in a step with a chunk


# --------------------------------------------------------------------------- an output once more


@pytest.mark.parametrize("overlap", [False, True])
def test_an_output_row_that_is_broken_when_it_is_computed_again(clean, overlap):
    """What it emitted stays."""
    eng = engine(Planted(LAST), overlap=overlap)
    number = eng.add(OTHERS[0], PARAMS)
    request = eng.requests[number]
    while len(request.output) < 4:
        eng.step()
    position = len(OTHERS[0]) + 1
    eng.runtime.slots["experts"].bad = lambda rows: rows.set.positions == position
    eng.runtime.scheduler.preempt(request)
    done = []
    while eng.unfinished:
        done += eng.step()
    assert f"row {position - 16} (position {position}) is not finite" in str(done[0].error)
    assert len(done[0].token_ids) == 4
    assert done[0].token_ids == clean[1][: len(done[0].token_ids)]
    check_empty(eng)


# ----------------------------------------------------------------------------------- the flag


def rows_of(positions, seq, seqs):
    long = lambda x: torch.tensor(x, dtype=torch.long)  # noqa: E731
    return RowSet(long(positions), long(seq), torch.zeros(seqs).long(), torch.zeros(seqs).long())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_the_lowest_position_of_each_sequence(value, dtype):
    look = NonFiniteRows(3, torch.device("cpu"))
    rows = rows_of([4, 5, 6, 9, 10, 0, 2], [0, 0, 0, 2, 2, 1, -1], 3)
    x = torch.full((7, 4, 3), torch.finfo(dtype).max, dtype=dtype)  # finite, and no sum of it is
    look(x, rows)
    assert look.lowest.tolist() == [NONE] * 3
    x[2, 3, 2], x[4, 0, 0], x[6, 1, 1] = value, value, value  # the last is padding
    look(x, rows)
    assert look.lowest.tolist() == [6, NONE, 10]
    x[1, 0, 1] = value
    look(x[:2], rows_of([4, 5], [0, 0], 3))
    look(x[:0], rows_of([], [], 3))
    assert look.lowest.tolist() == [5, NONE, 10]
