"""What fails, fails alone: rows that are not finite, interrupts, aborts, streams closed early."""

import gc

import pytest
import torch

from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.engine.step import commit
from deepinfer.slots.sampler import Philox
from deepinfer.slots.verifier import Fixed
from support.pool import check, check_empty
from support.small import small_engine, stream

PROMPTS = [stream(n, 30 + n, high=90) for n in (5, 19, 12)]
PARAMS = [
    SamplingParams(temperature=t, seed=4, max_tokens=10, ignore_eos=True) for t in (0.0, 1.0, 0.7)
]
VOCAB = 97


def engine(layout: str = "one layer", **changes):
    return small_engine(layout, vocab=VOCAB, **{"max_model_len": 64, **changes})


@pytest.fixture(scope="module")
def clean():
    return engine().generate(PROMPTS, PARAMS)


@pytest.fixture(scope="module")
def deep():
    return engine("2 and 1").generate(PROMPTS, PARAMS)


def rows_of(at, request: int, position: int) -> torch.Tensor:
    return ((at.request == request) & (at.position == position)).nonzero().flatten()


def edit_row(request: int, position: int, change):
    """An edit of one row, at one position of one request."""

    def edit(x, at):
        for row in rows_of(at, request, position).tolist():
            x[row] = change(x[row])
        return x

    return edit


def put(value: float, place: int):
    def change(row):
        row[place] = value
        return row

    return change


# ----------------------------------------------------------------------- rows that are not finite

BROKEN = {
    "NaN first": put(torch.nan, 0),
    "NaN inside": put(torch.nan, 48),
    "NaN last": put(torch.nan, 96),
    "+inf": put(torch.inf, 3),
    "all -inf": lambda row: torch.full_like(row, -torch.inf),
    "all NaN": lambda row: torch.full_like(row, torch.nan),
}


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("kind", BROKEN)
def test_logits_that_are_not_finite_end_their_own_request(clean, kind, drafts):
    """In the row that gives output token 4 of request 1 of three."""
    eng = engine(verifier=Fixed(drafts))
    with eng.trace("logits", edit=edit_row(1, len(PROMPTS[1]) + 3, BROKEN[kind])):
        got = eng.generate(PROMPTS, PARAMS)
    assert isinstance(got[1].error, ArithmeticError) and got[1].finish_reason == "error"
    assert got[1].token_ids == clean[1].token_ids[:4] and len(got[1].logprobs) == 4
    words = str(got[1].error)
    assert (
        "request 1" in words
        and "step " in words
        and "row " in words
        and "output position 4" in words
    )
    for i in (0, 2):
        assert got[i].error is None and got[i].token_ids == clean[i].token_ids
        assert got[i].logprobs == pytest.approx(clean[i].logprobs, abs=1e-9)
    check_empty(eng)
    again = eng.generate(PROMPTS, PARAMS)  # nothing of it is left
    assert [c.token_ids for c in again] == [c.token_ids for c in clean]


@pytest.mark.parametrize(
    "name",
    ["layers.0.in", "layers.1.attn.entries", "layers.2.attn.window_keys", "layers.3.ffn.out"],
)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_broken_row_inside_the_stack_stays_in_its_request(deep, name, value):
    """A prompt row of request 1 inside a layer: whatever later rows see of it, batch mates see
    nothing, and the pages and slots that it leaves behind do no harm."""
    eng = engine("2 and 1", max_num_seqs=3, num_pages=9)
    with eng.trace(name, edit=edit_row(1, 15, lambda row: torch.full_like(row, value))):
        got = eng.generate(PROMPTS, PARAMS)
    assert isinstance(got[1].error, ArithmeticError)
    for _ in range(2):  # freed pages and slots come round again
        assert [got[i].token_ids for i in (0, 2)] == [deep[i].token_ids for i in (0, 2)]
        got = eng.generate(PROMPTS, PARAMS)
        assert got[1].token_ids == deep[1].token_ids
    check_empty(eng)


def test_minus_infinity_is_a_mask():
    """A token that is -inf everywhere is never drawn; the others' log-probabilities stay finite."""
    eng = engine()
    with eng.trace("logits", edit=lambda x, at: x.index_fill(1, torch.arange(0, 90), -torch.inf)):
        got = eng.generate(PROMPTS, max_tokens=20, seed=1, ignore_eos=True).raise_for_errors()
    assert all(90 <= t for c in got for t in c.token_ids)
    assert all(lp <= 0 and lp == lp for c in got for lp in c.logprobs)


def test_a_broken_row_of_a_rejected_draft_means_nothing(clean):
    """NaN behind the accepted prefix: those rows are thrown away, so nobody fails."""
    eng = engine(verifier=Fixed(3))

    def edit(x, at):
        if at.name == "mtp.base":  # drafts are all wrong
            wrong = torch.zeros_like(x)
            for row, (r, p) in enumerate(zip(at.request.tolist(), at.position.tolist())):
                text = [*PROMPTS[r], *clean[r].token_ids, *[0] * 9]
                wrong[row, (text[p + 1] + 1) % VOCAB] = 1e6
            return wrong
        for r in range(3):
            first = at.position[at.request == r].min() if (at.request == r).any() else 0
            if first >= len(PROMPTS[r]):
                x[(at.request == r) & (at.position > first)] = torch.nan
        return x

    with eng.trace("logits", "mtp.base", edit=edit):
        got = eng.generate(PROMPTS, PARAMS)
    assert [c.token_ids for c in got] == [c.token_ids for c in clean] and not any(
        c.error for c in got
    )
    assert eng.stats.acceptance == 0 and sum(eng.stats.drafted.values()) > 30


def test_a_prompt_row_that_is_not_finite_is_no_log_probability():
    eng = engine()
    with eng.trace("logits", edit=edit_row(0, 2, lambda row: row * torch.nan)):
        out = eng.generate(PROMPTS[:2], prompt_logprobs=True, max_tokens=2)
    assert isinstance(out[0].error, ArithmeticError) and "row 2" in str(out[0].error)
    assert out[1].error is None and all(lp is None or lp <= 0 for lp in out[1].prompt_logprobs)
    check_empty(eng)


def test_traced_values_are_ordinary_tensors():
    """They can be used in a computation with gradients, whatever mode the engine runs in."""
    eng = engine()
    with eng.trace("logits", edit=lambda x, at: None) as t:
        eng.generate(PROMPTS[0], max_tokens=2)
    seen = t["logits"].as_subclass(torch.Tensor)
    scale = torch.ones((), requires_grad=True)
    (seen * scale).sum().backward()
    assert scale.grad.isfinite()


# --------------------------------------------------------------------------- faults inside a step


@pytest.mark.parametrize("name", ["layers.0.in", "logits", "mtp.base"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupt_in_step_3_of_10(clean, error, name):
    """generate raises it, holds nothing afterwards and works again."""
    eng = engine(verifier=Fixed(2))

    def interrupt(x, at):
        if at.step == 3:
            raise error("here")

    with pytest.raises(error), eng.trace(name, edit=interrupt):
        eng.generate(PROMPTS, PARAMS)
    assert eng._traces == []
    check_empty(eng)
    assert [c.token_ids for c in eng.generate(PROMPTS, PARAMS)] == [c.token_ids for c in clean]
    assert eng.stats.finished["abort"] == 3


@pytest.mark.parametrize("rule", ["match", "rejection"])
@pytest.mark.parametrize("name", ["layers.0.attn.out", "logits", "mtp.base", "mtp.0.ffn.out"])
def test_a_step_that_failed_can_be_run_again(clean, name, rule):
    """With the loop by hand nothing is aborted: the next step goes on, to the same text."""
    eng = engine(verifier=Fixed(3, rule=rule))
    want = (
        clean if rule == "match" else engine(verifier=Fixed(3, rule=rule)).generate(PROMPTS, PARAMS)
    )
    for p, q in zip(PROMPTS, PARAMS):
        eng.add(p, q)
    done, failed = [], []

    def sometimes(x, at):
        if at.step % 2 and at.step not in failed:
            failed.append(at.step)
            raise KeyboardInterrupt

    with eng.trace(name, edit=sometimes):
        while eng.unfinished or eng.requests:
            try:
                done += eng.step()
            except KeyboardInterrupt:
                pass
            check(eng)
    assert len(failed) > 2
    texts = {c.index: c.token_ids for c in done}
    if rule == "match" or name != "mtp.base":
        assert texts[0] == want[0].token_ids
    assert sorted(texts) == [0, 1, 2] and all(len(t) == 10 for t in texts.values())
    if rule == "match":
        assert texts == {i: c.token_ids for i, c in enumerate(want)}
    check_empty(eng)


def test_a_draft_of_another_place_is_never_verified(clean, monkeypatch):
    """An interrupt behind the first of a step's tokens: it stays, the drafts of its place do not."""
    eng = engine(verifier=Fixed(3))
    number = eng.add(PROMPTS[0], PARAMS[0])
    eng.step()
    assert eng.requests[number].draft is not None

    def interrupt(rt, request):
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(commit, "stops", interrupt)
    with pytest.raises(KeyboardInterrupt):
        eng.step()
    assert len(eng.requests[number].output) == 2
    drafted = sum(eng.stats.drafted.values())
    eng.step()
    assert sum(eng.stats.drafted.values()) == drafted
    eng.step()
    assert sum(eng.stats.drafted.values()) == drafted + 3
    done = []
    while eng.unfinished:
        done += eng.step()
    assert done[0].token_ids == clean[0].token_ids


def test_a_step_whose_drafting_fails_is_run_again_with_its_drafts(clean):
    eng = engine(verifier=Fixed(3))
    eng.add(PROMPTS[0], PARAMS[0])
    eng.step()

    def fail(x, at):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), eng.trace("mtp.base", edit=fail):
        eng.step()
    assert sum(eng.stats.drafted.values()) == 0
    eng.step()
    assert sum(eng.stats.drafted.values()) == 3


def test_a_slot_that_raises_ends_the_call_and_nothing_else(clean):
    class Bad(Philox):
        left = 2

        def draw(self, dist, keys):
            Bad.left -= 1
            if Bad.left == 0:
                raise ZeroDivisionError("a bug in a cell")
            return super().draw(dist, keys)

    eng = engine(sampler=Bad())
    with pytest.raises(ZeroDivisionError, match="a bug in a cell"):
        eng.generate(PROMPTS, PARAMS)
    check_empty(eng)
    assert [c.token_ids for c in eng.generate(PROMPTS, PARAMS)] == [c.token_ids for c in clean]


# ------------------------------------------------------------------------------- abort and stream


def test_abort_of_waiting_and_of_running(clean):
    eng = engine(max_num_seqs=1)
    numbers = [eng.add(p, q) for p, q in zip(PROMPTS, PARAMS)]
    waiting = eng.abort(numbers[1])
    assert waiting.finish_reason == "abort" and waiting.token_ids == () and waiting.error is None
    check(eng)
    for _ in range(4):
        eng.step()
    running = eng.abort(numbers[0])
    assert running.finish_reason == "abort" and running.token_ids == clean[0].token_ids[:4]
    check(eng)
    done = []
    while eng.unfinished:
        done += eng.step()
    assert [c.index for c in done] == [numbers[2]] and done[0].token_ids == clean[2].token_ids
    assert eng.stats.finished == {"abort": 2, "length": 1}
    for gone in (*numbers, 99):
        with pytest.raises(KeyError, match=f"no request {gone}"):
            eng.abort(gone)
    check_empty(eng)


def test_a_stream_is_generate_token_by_token(clean):
    eng = engine(verifier=Fixed(3))
    for i in range(3):
        tokens = list(eng.stream(PROMPTS[i], PARAMS[i]))
        assert tuple(t.id for t in tokens) == clean[i].token_ids
        assert [t.logprob for t in tokens] == pytest.approx(clean[i].logprobs, abs=1e-9)
    text = small_engine(verifier=Fixed(2))
    (want,) = text.generate("The walk of a token", max_tokens=16, seed=2)
    assert "".join(
        t.text for t in text.stream("The walk of a token", max_tokens=16, seed=2)
    ) == "".join(want.pieces)
    check_empty(eng)


@pytest.mark.parametrize("taken", [0, 1, 4])
@pytest.mark.parametrize("how", ["close", "drop", "abort"])
def test_a_stream_ended_early_gives_everything_back(clean, taken, how):
    eng = engine()
    tokens = eng.stream(PROMPTS[1], PARAMS[1])
    for i in range(taken):
        assert next(tokens).id == clean[1].token_ids[i]
    if how == "close":
        tokens.close()
    elif how == "drop":
        del tokens
        gc.collect()
    else:
        eng.abort(next(iter(eng.requests)))
        assert list(tokens) == []
    check_empty(eng)
    assert eng.generate(PROMPTS[1], PARAMS[1])[0].token_ids == clean[1].token_ids


def test_streams_and_batches_run_side_by_side(clean):
    """Two streams read in turns, a batch in between: each gets its own text."""
    eng = engine()
    a, b = eng.stream(PROMPTS[0], PARAMS[0]), eng.stream(PROMPTS[1], PARAMS[1])
    got = ([next(a).id], [next(b).id, next(b).id])
    assert eng.generate(PROMPTS[2], PARAMS[2])[0].token_ids == clean[2].token_ids
    got[0].extend(t.id for t in a)
    got[1].extend(t.id for t in b)
    assert [tuple(g) for g in got] == [clean[0].token_ids, clean[1].token_ids]
    check_empty(eng)


def test_a_stream_raises_what_ended_it(clean):
    eng = engine()
    with eng.trace("logits", edit=edit_row(0, len(PROMPTS[0]) + 1, lambda row: row * torch.nan)):
        tokens, seen = eng.stream(PROMPTS[0], PARAMS[0]), []
        with pytest.raises(ArithmeticError, match="output position 2"):
            for token in tokens:
                seen.append(token.id)
    assert tuple(seen) == clean[0].token_ids[:2]
    check_empty(eng)
