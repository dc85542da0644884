"""A background engine: the same tokens from any thread and event loop, and nobody waits forever."""

import asyncio
import contextlib
import gc
import random
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

import deepinfer as di
from deepinfer.engine.background.fair_lock import FairLock
from deepinfer.engine.device import SimulatedDevice
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.slots.sampler import Philox
from deepinfer.slots.verifier import Fixed
from support.pool import check, check_empty
from support.small import small_engine, stream

PROMPTS = [stream(n, 30 + n, high=90) for n in (5, 19, 12, 8)]
PARAMS = [
    SamplingParams(temperature=t, seed=4 + i, max_tokens=18 - 3 * i, ignore_eos=True)
    for i, t in enumerate((0.0, 1.0, 0.7, 1.0))
]
LONG = dict(max_tokens=500, ignore_eos=True, seed=1)
SOON = 15  # seconds after which a test gives up


def engine(layout: str = "one layer", **changes):
    return small_engine(
        layout, vocab=97, **{"max_model_len": 64, "page_size": 8, "max_num_seqs": 6, **changes}
    )


def long_engine(**changes):
    return engine(max_model_len=512, page_size=64, **changes)


@pytest.fixture(scope="module")
def want():
    return [c.token_ids for c in engine("two layers").generate(PROMPTS, PARAMS)]


@pytest.fixture(autouse=True)
def no_thread_is_left():
    """After every test: whatever it did, nobody steps any more."""
    yield
    if stepping():
        gc.collect()
        until(lambda: not stepping(), "the end of a thread")


def stepping() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "deepinfer background"]


def until(true, what: str = "it") -> None:
    end = time.monotonic() + SOON
    while not true():
        assert time.monotonic() < end, f"{what} never came"
        time.sleep(0.001)


def elsewhere(work) -> None:
    """Run it in another thread, which has to get its turn."""
    raised: list[BaseException] = []

    def run():
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(SOON)
    assert not thread.is_alive()
    if raised:
        raise raised[0]


def at_once(eng, looked_at) -> None:
    """Look at an engine between two steps."""
    eng._lock.run(looked_at, eng)


# ----------------------------------------------------------------------------------- the same text


@pytest.mark.parametrize("overlap, drafts", [(False, 0), (True, 0), (True, 3)])
def test_many_threads_add_and_abort_and_every_text_is_its_own(want, overlap, drafts):
    """Pages for two thirds of what they want: some be preempted meanwhile."""
    eng = engine("two layers", overlap=overlap, verifier=Fixed(drafts), num_pages=12)
    wrong: list[object] = []

    def client(number: int) -> None:
        chance = random.Random(number)
        try:
            for _ in range(4):
                i = chance.randrange(len(PROMPTS))
                running = bg.add(PROMPTS[i], PARAMS[i])
                how = chance.choice(["result", "read", "abort", "leave", "step"])
                if how == "read":
                    assert tuple(t.id for t in running) == want[i]
                elif how == "abort":
                    got = running.abort().token_ids
                    assert got == want[i][: len(got)]
                elif how == "leave":
                    for _token in running:
                        break
                    got = running.result(SOON)
                    assert got.finish_reason in ("abort", "length")
                    assert got.token_ids == want[i][: len(got.token_ids)]
                elif how == "step":
                    assert eng.step() == []  # all belong to the background
                if how in ("result", "step"):
                    got = running.result(SOON)
                    assert got.token_ids == want[i] == running.token_ids and got.index == running.id
                    assert len(got.logprobs) == len(got.steps) == len(want[i])
                at_once(eng, check)
        except BaseException as error:
            wrong.append(error)

    with eng.background() as bg:
        threads = [threading.Thread(target=client, args=(n,)) for n in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(SOON)
        assert not wrong and not any(t.is_alive() for t in threads)
        bg.drain()
        at_once(eng, check_empty)
        assert bg._ended.total() == 16 and not bg._handles


def test_everything_else_of_the_engine_works_meanwhile():
    eng, quiet = long_engine(), long_engine()
    with eng.background() as bg:
        busy = bg.add(PROMPTS[0], **LONG)
        short = dict(max_tokens=5, seed=2, ignore_eos=True)
        out = eng.generate(PROMPTS, **short)
        assert [c.token_ids for c in out] == [c.token_ids for c in quiet.generate(PROMPTS, **short)]
        tokens = [t.id for t in eng.stream(PROMPTS[1], **short)]
        assert tokens == [t.id for t in quiet.stream(PROMPTS[1], **short)]
        torch.testing.assert_close(eng.logits(PROMPTS[1]), quiet.logits(PROMPTS[1]))
        assert eng.score(PROMPTS[:1]).perplexity == quiet.score(PROMPTS[:1]).perplexity
        with eng.trace("logits") as t:
            eng.generate(PROMPTS[2], **short)
        of_it = t["logits"].request == t["logits"].request.max()
        assert t["logits"].accepted[of_it].all()
        assert not busy.done and busy.token_ids
        mine = eng.add(PROMPTS[3], **short)
        child = eng.fork(busy.id, seed=9)
        until(lambda: eng.requests[mine].finished, "a request of eng.add")
        (done,) = eng.step()  # without having stepped it by hand
        assert done.index == mine and len(done.token_ids) == 5
        assert eng.abort(child).finish_reason == "abort"
        assert eng.abort(busy.id).token_ids == busy.result(SOON).token_ids
        assert busy.status == "abort" and eng.unfinished == 0
    check_empty(eng)


def test_a_trace_begins_and_ends_between_two_steps():
    eng, entered, leave = engine(), threading.Event(), threading.Event()
    eng.runtime

    seen = []

    def step():
        entered.set()
        leave.wait(SOON)
        seen.extend(eng._traces)

    def cell():
        with eng.trace("logits"):
            assert len(eng._traces) == 1

    stepper = threading.Thread(target=eng._lock.run, args=(step,))
    stepper.start()
    assert entered.wait(SOON)
    threading.Timer(0.05, leave.set).start()
    elsewhere(cell)
    stepper.join(SOON)
    assert leave.is_set() and seen == eng._traces == []


# ------------------------------------------------------------------------------------- event loops


@pytest.mark.parametrize("overlap", [False, True])
def test_gather_runs_them_in_the_same_steps_and_the_event_loop_goes_on(want, overlap):
    eng, alone = engine("two layers", overlap=overlap), engine("two layers")
    alone.generate(PROMPTS, PARAMS)
    ticks = 0

    async def tick():
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    async def cell():
        ticking = asyncio.ensure_future(tick())
        got = await asyncio.gather(*[bg.add(p, q) for p, q in zip(PROMPTS, PARAMS)])
        ticking.cancel()
        return got

    with eng.background() as bg:
        for _ in range(2):  # an event loop of its own each time
            before = eng.stats.steps
            got = asyncio.run(cell())
            assert [c.token_ids for c in got] == want
            assert eng.stats.steps - before <= alone.stats.steps + len(PROMPTS)
        assert ticks > 100
    check_empty(eng)


def test_an_async_stream_brings_its_own_background_and_takes_it_away(want):
    eng = engine("two layers")

    async def read(i):
        return tuple([t.id async for t in eng.astream(PROMPTS[i], PARAMS[i])])

    async def both():
        first, second = eng.astream(PROMPTS[0], PARAMS[0]), eng.astream(PROMPTS[1], PARAMS[1])
        assert len(stepping()) == 1
        del first, second
        return await asyncio.gather(*map(read, range(len(PROMPTS))))

    assert asyncio.run(both()) == want
    until(lambda: not stepping(), "the thread's end")
    check_empty(eng)
    with pytest.raises(ValueError, match="token ids of this model"):
        eng.astream([1000])
    with eng.background() as bg:  # the same thread from now on
        assert asyncio.run(read(0)) == want[0] and bg._ended["length"] == 1


@pytest.mark.parametrize(
    "how", ["break", "aclose", "cancel reading", "cancel awaiting", "wait_for"]
)
def test_who_stops_reading_aborts(how):
    eng = long_engine()

    async def read(running):
        async for _ in running:
            pass

    async def cell():
        running = bg.add(PROMPTS[0], **LONG)
        tokens = aiter(running)
        await anext(tokens)
        if how == "break":
            async for _ in tokens:
                break
            del tokens
        elif how == "aclose":
            await tokens.aclose()
            assert running.done and running.status == "abort"  # not only asked to end
            at_once(eng, check_empty)
            assert [t async for t in tokens] == []
            await tokens.aclose()
        elif how == "wait_for":
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(read(running), 0.01)
        else:
            waits = read(running) if how == "cancel reading" else asyncio.wait_for(running, None)
            task = asyncio.ensure_future(waits)
            await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        return await running

    with eng.background() as bg:
        got = asyncio.run(cell())
        assert got.finish_reason == "abort" and 0 < len(got.token_ids) < 500
        at_once(eng, check_empty)


# ------------------------------------------------------------------------------ the block's end


def test_a_block_waits_for_all_at_its_end_as_an_executor_does():
    eng = long_engine()
    with eng.background() as bg:
        runs = [bg.add(p, max_tokens=40, ignore_eos=True, seed=1) for p in PROMPTS]
    assert bg.closed and [r.status for r in runs] == ["length"] * 4
    assert [len(r.result(SOON).token_ids) for r in runs] == [40] * 4
    check_empty(eng)
    with eng.background() as bg:  # closed inside: nothing to wait for
        running = bg.add(PROMPTS[0], **LONG)
        bg.close()
    assert running.status == "abort"
    with eng.background() as bg:
        running = bg.add(PROMPTS[0], **LONG)
        eng.close()
    assert running.status == "abort" and bg.closed


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_an_error_in_the_block_aborts(error):
    eng = long_engine()
    eng.runtime.device = SimulatedDevice(0.002)
    with pytest.raises(error):
        with eng.background() as bg:
            running = bg.add(PROMPTS[0], **LONG)
            raise error
    assert bg.closed and running.status == "abort"
    check_empty(eng)


def test_an_interrupt_while_the_block_s_end_waits_aborts():
    eng = long_engine()
    eng.runtime.device = SimulatedDevice(0.002)
    with pytest.raises(KeyboardInterrupt):
        with eng.background() as bg:
            running = bg.add(PROMPTS[0], **LONG)
            interrupted_soon()
    assert bg.closed and running.status == "abort" and not stepping()
    check_empty(eng)


def test_fork_of_a_running_goes_on_from_its_tokens_and_is_a_running():
    eng = long_engine(prefix_cache=True)
    eng.runtime.device = SimulatedDevice(0.002)
    with eng.background() as bg:
        parent = bg.add(PROMPTS[0], **LONG)
        until(lambda: parent.token_ids)
        child = bg.fork(parent, seed=9, max_tokens=60)
        own = bg.fork(parent, SamplingParams(max_tokens=30, ignore_eos=True, seed=1))
        assert child.id != parent.id and child.id in eng.requests
        assert len(child.result(SOON).token_ids) == 60 and len(own.result(SOON).token_ids) == 30
        assert child.token_ids[0] == own.token_ids[0] == parent.token_ids[0]
        assert tuple(t.id for t in own) == own.token_ids == parent.token_ids[:30]  # the same draws
        parent.abort()
        with pytest.raises(KeyError, match=f"no request {parent.id}: it has ended"):
            bg.fork(parent)
        with pytest.raises(TypeError, match="want a RequestHandle of this background, got int"):
            bg.fork(parent.id)
        with (
            eng.with_().background() as other,
            pytest.raises(ValueError, match="another background"),
        ):
            other.fork(parent)
    with pytest.raises(RuntimeError, match="this background is closed"):
        bg.fork(parent)
    check_empty(eng)


@pytest.mark.parametrize("timeout", ["a", -1, True, float("nan")])
def test_a_timeout_of_result_is_checked_as_that_of_add(timeout):
    eng = long_engine()
    with eng.background() as bg:
        running = bg.add(PROMPTS[0], max_tokens=2)
        with pytest.raises(ValueError, match="timeout=.*want None or seconds >= 0"):
            running.result(timeout)
        running.result()


# ---------------------------------------------------------------------------------------- fairness


def test_a_cell_waits_for_one_step_at_most():
    """And so it does beside another thread that steps as fast as it can."""
    eng = long_engine()
    eng.runtime.device = SimulatedDevice(0.003)
    with eng.background() as bg:
        bg.add(PROMPTS[0], **LONG)
        other = threading.Thread(target=lambda: eng.generate(PROMPTS[1], max_tokens=30, seed=1))
        other.start()
        waited = []
        for _ in range(12):
            before = eng._loop.steps
            mine = bg.add(PROMPTS[2], **LONG)
            waited.append(eng._loop.steps - before)
            before = eng._loop.steps
            mine.abort()
            waited.append(eng._loop.steps - before)
        other.join(SOON)
        assert not other.is_alive()
    assert max(waited) <= 3 and sum(waited) <= 2 * len(waited), waited


def test_turns_are_taken_in_the_order_of_asking():
    turns, order = FairLock(), []

    def ask(n):
        turns.run(lambda: turns.run(order.append, n))  # again, by who has it

    def hold():
        threads = []
        for n in range(8):
            threads.append(threading.Thread(target=ask, args=(n,)))
            last = turns._last
            threads[-1].start()
            until(lambda: turns._last is not last, "its place")
        assert order == []
        return threads

    for thread in turns.run(hold):
        thread.join(SOON)
    assert order == list(range(8)) and not turns._inside


def test_who_is_interrupted_in_the_queue_lets_nobody_in():
    turns, order = FairLock(), []
    entered, leave = threading.Event(), threading.Event()

    def hold():
        entered.set()
        leave.wait(SOON)
        order.append("first")

    first = threading.Thread(target=turns.run, args=(hold,))
    first.start()
    assert entered.wait(SOON)
    last = turns._last

    def ask():
        until(lambda: turns._last is not last, "the place of the main thread")
        turns.run(order.append, "behind")

    behind = threading.Thread(target=ask)
    behind.start()
    interrupted_soon()
    with pytest.raises(KeyboardInterrupt):
        turns.run(order.append, "main")
    time.sleep(0.02)
    assert order == []
    leave.set()
    for thread in (first, behind):
        thread.join(SOON)
    assert order == ["first", "behind"] and not turns._inside


# ----------------------------------------------------------------------------------------- faults


class Faulty(Philox):
    fails = False

    def draw(self, dist, keys):
        if Faulty.fails:
            raise ZeroDivisionError("a bad slot")
        return super().draw(dist, keys)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_that_raises_ends_all_with_its_error_and_the_engine_goes_on(monkeypatch, overlap):
    eng = long_engine(sampler=Faulty(), overlap=overlap)
    with eng.background() as bg:
        runs = [bg.add(p, **LONG) for p in PROMPTS[:2]]
        mine = eng.add(PROMPTS[2], max_tokens=4, ignore_eos=True)
        reader = iter(runs[1])
        next(reader)
        monkeypatch.setattr(Faulty, "fails", True)
        for wait in (
            lambda: runs[0].result(SOON),
            lambda: list(reader),
            lambda: list(runs[0]),
            lambda: asyncio.run(asyncio.wait_for(runs[1], SOON)),
        ):
            with pytest.raises(ZeroDivisionError, match="a bad slot"):
                wait()
        assert [r.status for r in runs] == ["error"] * 2 and runs[0].token_ids
        assert "ZeroDivisionError: a bad slot" in repr(bg) and "a bad slot" in bg._repr_html_()
        steps = eng._loop.steps
        time.sleep(0.05)
        assert eng._loop.steps == steps  # it does not try again and again
        monkeypatch.setattr(Faulty, "fails", False)
        got = bg.add(PROMPTS[3], max_tokens=4, ignore_eos=True).result(SOON)
        assert len(got.token_ids) == 4 and got.error is None
        until(lambda: mine not in eng.requests or eng.requests[mine].finished)
        assert "bad slot" not in repr(bg)
        assert {c.index for c in eng.step()} <= {mine}
    check_empty(eng)


def test_a_fault_of_one_request_costs_that_one():
    eng = long_engine()

    def edit(x, at):
        return x.masked_fill((at.request == 0)[:, None] & (at.position == 8)[:, None], torch.nan)

    with eng.background() as bg, eng.trace("logits", edit=edit):
        bad, good = bg.add(PROMPTS[0], **LONG), bg.add(PROMPTS[1], max_tokens=20, ignore_eos=True)
        assert isinstance(bad.result(SOON).error, ArithmeticError) and bad.status == "error"
        with pytest.raises(ArithmeticError):
            list(bad)
        assert good.result(SOON).error is None and len(good.token_ids) == 20
        assert "failed" not in repr(bg)
        with pytest.raises(ValueError, match="the prompt is empty"):
            bg.add([])
        with pytest.raises(TypeError, match="did you mean 'max_tokens'"):
            bg.add([5], max_token=3)
        with pytest.raises(ValueError, match="timeout=-1"):
            bg.add([5], timeout=-1)
        late = bg.add(PROMPTS[0], timeout=0.0, **LONG)
        assert late.result(SOON).finish_reason == "timeout"


# -------------------------------------------------------------------------------------- interrupts


def interrupted_soon() -> None:
    main = threading.main_thread().ident
    threading.Timer(0.05, lambda: signal.pthread_kill(main, signal.SIGINT)).start()


def test_an_interrupted_wait_leaves_it_running_and_an_interrupted_reading_does_not():
    eng = long_engine()
    eng.runtime.device = SimulatedDevice(0.002)
    with eng.background() as bg:
        running = bg.add(PROMPTS[0], **LONG)
        interrupted_soon()
        with pytest.raises(KeyboardInterrupt):
            running.result(SOON)
        assert not running.done
        interrupted_soon()
        with pytest.raises(KeyboardInterrupt):
            bg.drain()
        with pytest.raises(TimeoutError, match="has not finished in 0.01 s; it runs on"):
            running.result(0.01)
        interrupted_soon()
        with pytest.raises(KeyboardInterrupt):
            for _ in running:
                pass
        assert running.result(SOON).finish_reason == "abort"
        at_once(eng, check_empty)


class InterruptAt:
    """A trace function that raises KeyboardInterrupt at line n of this package in this thread, but
    for turns.py: tracing sees a line at the end of a `with`, before it gives the lock back, where no
    signal is looked at. The test behind this one sends signals."""

    def __init__(self, n: int) -> None:
        self.left = n

    def __call__(self, frame, event, arg):
        file = frame.f_code.co_filename
        if "/deepinfer/" not in file or file.endswith("fair_lock.py"):
            return None
        if event == "line" and self.left > 0:
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt
        return self


@contextlib.contextmanager
def line(n: int):
    before = sys.gettrace()
    sys.settrace(InterruptAt(n))
    try:
        yield
    finally:
        sys.settrace(before)


@contextlib.contextmanager
def moment(n: int):
    """A signal that interrupts after so many microseconds, if the block lasts so long."""

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 1e-6 * n)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("what", ["add", "abort"])
def test_what_is_interrupted_at_a_line_is_done_or_not_and_nothing_else(what):
    eng, short = engine(), dict(max_tokens=4, ignore_eos=True)
    for n in range(1, 3000):
        mine = eng.add(PROMPTS[1], **short)
        if what == "abort":
            eng.step()
        through = False
        try:
            with line(n):
                if what == "add":
                    eng.add(PROMPTS[2], **short)
                else:
                    eng.abort(mine)
                through = True
        except KeyboardInterrupt:
            pass
        check(eng)
        for number in eng.requests:
            eng.abort(number)
        check_empty(eng)
        if through:
            break
    assert through and n > 30


@pytest.mark.parametrize("at, overlap", [(line, False), (moment, True)])
def test_a_cell_interrupted_anywhere_stops_nobody(at, overlap):
    want = [c.token_ids for c in engine().generate(PROMPTS, PARAMS)]
    eng = engine(overlap=overlap)
    chance, interrupted = random.Random(5), 0
    with eng.background() as bg:
        for i in range(21):
            other = bg.add(PROMPTS[3], PARAMS[3])
            try:
                with at(int(10 ** chance.uniform(0, 3) * (1 if at is line else 5)) + 1):
                    mine = bg.add(PROMPTS[2], PARAMS[2])
                    if i % 3 == 0:
                        eng.step()
                    elif i % 3 == 1:
                        mine.abort()
                    mine.result(SOON)
            except KeyboardInterrupt:
                interrupted += 1
            elsewhere(lambda: at_once(eng, check))
            assert other.result(SOON).token_ids == want[3]
        bg.drain()
        at_once(eng, check_empty)
    assert interrupted > 7


# ------------------------------------------------------------------------------------- life cycle


def test_closing_aborts_or_waits():
    eng = long_engine()
    bg = eng.background()
    mine, running = eng.add(PROMPTS[1], **LONG), bg.add(PROMPTS[0], **LONG)
    bg.close()
    bg.close()
    assert running.done and running.result().finish_reason == "abort" and not stepping()
    assert list(eng.requests) == [mine] and not eng.requests[mine].finished
    with pytest.raises(RuntimeError, match="closed: make another with eng.background"):
        bg.add(PROMPTS[0])
    assert "closed" in repr(bg)
    with eng.background() as bg:
        running = bg.add(PROMPTS[0], max_tokens=9, ignore_eos=True)
        bg.close(wait=True)
        assert running.result().finish_reason == "length" and len(running.token_ids) == 9
    eng.abort(mine)
    check_empty(eng)


def test_closing_the_engine_ends_all():
    eng = long_engine(overlap=True)
    bg = eng.background()
    running, dropped = bg.add(PROMPTS[0], **LONG), bg.add(PROMPTS[1], **LONG).id
    caught = []

    def wait():
        caught.append(running.result(SOON).finish_reason)

    waits = threading.Thread(target=wait)
    waits.start()
    until(lambda: running.token_ids)
    eng.close()
    waits.join(SOON)
    assert caught == ["abort"] and bg.closed and not stepping() and dropped
    assert running.text == running.result().text
    with pytest.raises(RuntimeError, match="closed"):
        bg.add(PROMPTS[0])
    with pytest.raises(RuntimeError, match="closed"):
        eng.background()


def test_one_background_an_engine():
    eng = long_engine()
    with eng.background() as bg, eng.with_().background():
        with pytest.raises(RuntimeError, match="has a background already .*close"):
            eng.background()
        bg.close()
        eng.background().close()


def test_a_background_that_nobody_holds_ends():
    eng = long_engine()
    bg = eng.background()
    running = bg.add(PROMPTS[0], **LONG)
    bg.add(PROMPTS[1], **LONG)
    del bg
    until(lambda: running.token_ids)  # who waits for a request keeps it going
    assert len(stepping()) == 1
    del running
    until(lambda: not stepping(), "the thread's end")
    check_empty(eng)
    eng.background().add(PROMPTS[0], max_tokens=5).result(SOON)


@pytest.mark.slow  # it loads the package anew
def test_a_process_may_end_while_it_runs():
    script = """
import deepinfer as di
eng = di.Engine.tiny(device="cpu", overlap=True)
bg = eng.background()
runs = [bg.add("hello", max_tokens=3000, ignore_eos=True) for _ in range(3)]
next(iter(runs[0]))
print(runs[1].status)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "running\n", "")


def test_an_idle_thread_sleeps_and_an_engine_without_one_asks_nobody():
    eng = long_engine()
    with eng.background() as bg:
        bg.add(PROMPTS[0], max_tokens=3).result(SOON)
        time.sleep(0.02)
        began = time.process_time()
        time.sleep(0.1)
        assert time.process_time() - began < 0.05
    assert eng.stats.steps <= 3 and eng._background is None


def test_kernels_that_were_chosen_where_it_was_made_are_its_own():
    eng = engine()
    with di.kernels.use(experts="reference"):
        bg = eng.background()
    with bg:
        bg.add(PROMPTS[0], max_tokens=2).result(SOON)
        ran = {r["implementation"] for r in eng.kernels.rows if r["op"] == "experts"}
    assert ran == {"reference"}


def test_what_a_cell_shows(monkeypatch):
    eng = di.Engine.tiny(device="cpu", max_model_len=64, max_num_seqs=30)
    monkeypatch.setattr(type(eng), "_busy", False)  # nothing moves
    with eng.background() as bg:
        runs = [bg.add("hello", max_tokens=3, ignore_eos=True) for _ in range(30)]
        assert repr(bg) == "Background(0 running, 30 waiting, 0 ended)"
        shown = bg._repr_html_()
        assert "waiting" in shown and "0 of at most 3" in shown and "and 10 more requests" in shown
        assert repr(runs[3]) == "RequestHandle 3: waiting, 0 tokens"
        assert "waiting" in runs[3]._repr_html_()
        monkeypatch.undo()
        bg._wake.put(True)
        text = runs[3].result(SOON).text
        assert repr(runs[3]) == f"RequestHandle 3: finished (length), 3 tokens, {text!r}"
        assert "finished (length)" in runs[3]._repr_html_()
        bg.drain()
        assert repr(bg) == "Background(0 running, 0 waiting, 30 ended (30 length))"
