"""What an interrupted call leaves in the engine is ended by the next call: nobody knows its id."""

import random
import sys

import pytest

from deepinfer.engine.engine import Engine
from support.pool import check_empty
from support.small import small_engine, stream

PROMPTS = [stream(n, 30 + n, high=90) for n in (5, 12)]
RUN = dict(max_tokens=3, ignore_eos=True, seed=1)
TRACED = ("engine/engine.py", "step/loop.py", "background/fair_lock.py")


@pytest.fixture(scope="module")
def eng():
    return small_engine("one layer", vocab=97, max_model_len=64, page_size=8, max_num_seqs=4)


def next_call(eng) -> None:
    """Any call at all."""
    eng.step()
    assert not eng.requests
    check_empty(eng)


CALLS = {
    "generate": lambda eng: eng.generate(PROMPTS, **RUN),
    "stream": lambda eng: list(eng.stream(PROMPTS[0], **RUN)),
}


@pytest.mark.parametrize("call", CALLS)
def test_an_interrupt_while_an_interrupt_is_cleaned_up(eng, monkeypatch, call):
    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as m:
        m.setattr(Engine, "_step", interrupted)
        m.setattr(Engine, "_end_call", interrupted)
        with pytest.raises(KeyboardInterrupt):
            CALLS[call](eng)
    assert eng.requests  # there they are, and nobody has their ids
    id = eng.add(PROMPTS[1], **RUN)
    assert list(eng.requests) == [id]
    eng.abort(id)
    next_call(eng)


def test_requests_of_a_call_that_runs_and_of_the_user_stay(eng):
    """A stream that is being read, a request that was added, a fork of it."""
    tokens = eng.stream(PROMPTS[0], **RUN)
    id = eng.add(PROMPTS[1], **RUN)
    fork = eng.fork(id)
    next(tokens)
    eng.generate(PROMPTS, **RUN)
    assert len(list(tokens)) == 2
    done = {c.index for c in eng.step()}
    while eng.requests:
        done |= {c.index for c in eng.step()}
    assert {id, fork} <= done
    next_call(eng)


class Interrupts:
    """KeyboardInterrupt at the given lines, counted in the files that hold an engine together."""

    def __init__(self, *lines: int) -> None:
        self.lines, self.count = set(lines), 0

    def __call__(self, frame, event, _):
        if not frame.f_code.co_filename.endswith(TRACED):
            return None
        if event == "line":
            self.count += 1
            if self.count in self.lines:
                raise KeyboardInterrupt
        return self


def interrupted_at(work, *lines: int) -> int:
    """Lines that were run."""
    interrupts, before = Interrupts(*lines), sys.gettrace()
    sys.settrace(interrupts)
    try:
        work()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return interrupts.count


ANY = CALLS | {
    "add": lambda eng: eng.abort(eng.add(PROMPTS[0], **RUN)),
    "fork": lambda eng: fork_of(eng),
}


def fork_of(eng) -> None:
    parent = eng.add(PROMPTS[0], **RUN)
    try:
        eng.abort(eng.fork(parent))
    finally:
        sys.settrace(None)
        eng.abort(parent)


@pytest.mark.parametrize("call", ("generate", "stream", "add"))
def test_two_interrupts_at_any_lines_leave_nothing(eng, call):
    rng = random.Random(5)
    lines = interrupted_at(lambda: ANY[call](eng))
    for _ in range(25 if call != "add" else 60):
        first = rng.randrange(1, lines)
        interrupted_at(lambda: ANY[call](eng), first, first + rng.randrange(1, 40))
        if call == "add":  # an interrupt in `abort`, or as the id is handed over: the user's
            for id in list(eng.requests):
                eng.abort(id)
        next_call(eng)
