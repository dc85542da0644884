"""RequestHandle: a request that a background engine runs, to wait for, read from, or end.

running.result()                   # a Completion, once it has finished
for token in running: ...          # StreamedTokens as they are committed
await running                      # the same two in any event loop, which goes on meanwhile
async for token in running: ...
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, cast

from deepinfer.engine.completion import Completion, StreamedToken
from deepinfer.engine.request import Request
from deepinfer.engine.sampling_params import require_timeout
from deepinfer.engine.text import Detokenizer

if TYPE_CHECKING:
    from deepinfer.engine.background.background import Background


class Waiters:
    """Who waits for news hangs up a bell, and whoever has news rings them all. Nobody holds a lock
    while waiting, so an interrupt of one thread can't stop another."""

    def __init__(self) -> None:
        self._hung: deque[Callable[[], object]] = deque()

    def ring(self) -> None:
        """Call it after the news can be seen: who hangs up a bell looks once more."""
        for _ in range(len(self._hung)):  # not those who wait on at once
            try:
                self._hung[0]()
            except RuntimeError:  # rung already before an interrupt, or the event loop is closed
                pass
            self._hung.popleft()

    def wait(self, ready: Callable[[], bool], timeout: float | None = None) -> bool:
        """Block until ready(), or for `timeout` seconds; returns ready()."""
        until = None if timeout is None else time.monotonic() + timeout
        while not ready():
            bell = threading.Lock()
            bell.acquire()
            self._hung.append(bell.release)
            left = -1 if until is None else max(until - time.monotonic(), 0.0)
            if not ready() and not bell.acquire(timeout=left):
                return ready()
        return True

    async def heard(self, ready: Callable[[], bool]) -> None:
        """`wait` for a coroutine: its event loop goes on."""
        loop = asyncio.get_running_loop()
        while not ready():
            bell = loop.create_future()
            self._hung.append(lambda: loop.call_soon_threadsafe(answer, bell))
            if not ready():
                await bell


def answer(bell: asyncio.Future[None]) -> None:
    if not bell.done():
        bell.set_result(None)


class RequestHandle:
    """One request of a Background. `result`, iteration and `await` may be used together, from any
    number of threads and event loops."""

    def __init__(self, background: Background, request: Request) -> None:
        self._background, self._request = background, request
        self._committed = 0  # tokens that can be read
        self._finished = False
        self._fault: BaseException | None = None  # of a step, not of this request
        self._news, self._end = Waiters(), Waiters()
        self._completion: Completion | None = None

    @property
    def id(self) -> int:
        """Its number in the engine."""
        return self._request.id

    @property
    def done(self) -> bool:
        return self._finished

    @property
    def status(self) -> str:
        """'waiting', 'running', or its finish_reason."""
        return str(self._request.finish_reason) if self._finished else self._request.status

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The output so far."""
        return tuple(self._request.output[: self._committed])

    @property
    def text(self) -> str:
        """The text of the output so far."""
        return Detokenizer(self._background._eng._shared.tokenizer).all(list(self.token_ids))

    # --------------------------------------------------------------------------------- waiting

    def result(self, timeout: float | None = None) -> Completion:
        """Wait for its end. What fails this request alone is in .error, as in `eng.generate`.

        TimeoutError after `timeout` seconds, and it runs on; so it does where a cell that waits
        here is interrupted. Raises what a step raised that is no fault of one request.
        ValueError for a timeout that is no time.
        """
        if timeout is not None:
            timeout = require_timeout(timeout)
        if not self._end.wait(lambda: self._finished, timeout):
            raise TimeoutError(f"{self!r} has not finished in {timeout} s; it runs on")
        return self._outcome()

    def abort(self) -> Completion:
        """End it now, unless it has finished; returns what it had emitted."""
        background = self._background
        background._eng._lock.run(background._eng._forget, self._request)
        return self.result()

    def __iter__(self) -> Iterator[StreamedToken]:
        """Its tokens from the first on, as they are committed. Closing or dropping the iterator
        before the end aborts the request, also where a cell is interrupted, as in `eng.stream`.
        Raises the error that ends it. To leave it running, read `.text` or `.token_ids`."""
        tokens = self._tokens()
        next(tokens)  # now it has begun, closing or dropping it aborts the request
        return cast("Iterator[StreamedToken]", tokens)

    def _tokens(self) -> Iterator[StreamedToken | None]:
        read, shown = self._reader(), 0
        try:
            yield None
            while True:
                self._news.wait(lambda: self._beyond(shown))
                if shown == self._committed:
                    break
                yield read(shown)
                shown += 1
            self._raise()
        finally:
            self._give_up()

    def __aiter__(self) -> AsyncTokens:
        """As iteration; cancelling the task aborts the request too. See `AsyncTokens`."""
        return AsyncTokens(self)

    def __await__(self) -> Generator[object, None, Completion]:
        """As `result`; cancelling the task that waits aborts the request, after the step that
        runs: `abort()` or `result()` waits for that."""
        try:
            yield from self._end.heard(lambda: self._finished).__await__()
        finally:
            self._give_up()
        return self._outcome()

    def _beyond(self, shown: int) -> bool:
        """Whether there is something behind so many tokens: another one, or the end."""
        return self._finished or self._committed > shown

    def _reader(self) -> Callable[[int], StreamedToken]:
        """What gives token i, asked one after another."""
        request, text = self._request, Detokenizer(self._background._eng._shared.tokenizer)
        return lambda i: StreamedToken(
            request.output[i], text.push(request.output[i]), request.logprobs[i]
        )

    def _raise(self) -> None:
        error = self._fault or self._request.error
        if error is not None:
            raise error

    def _outcome(self) -> Completion:
        if self._fault is not None:
            raise self._fault
        if self._completion is None:
            self._completion = self._background._eng._completion(self.id, self._request)
        return self._completion

    def _give_up(self) -> None:
        """Nobody wants it any more: the thread aborts it before its next step. An event loop does
        not wait for that."""
        if not self._finished:
            self._background._drop(self.id)

    # ----------------------------------------------------------- what the background calls

    def _publish(self, fault: BaseException | None = None) -> None:
        """In turn: what is committed by now can be read."""
        request = self._request
        committed = min(len(request.output), len(request.logprobs))
        news = committed > self._committed
        self._committed = committed
        if request.finished:
            self._fault = self._fault or fault
            self._finished = True
            self._end.ring()
        if news or request.finished:
            self._news.ring()

    def __repr__(self) -> str:
        from deepinfer.display.background import running_text

        return running_text(self)

    def _repr_html_(self) -> str:
        from deepinfer.display.background import running_html

        return running_html(self)


class AsyncTokens:
    """The tokens of a RequestHandle as they are committed, an async iterator. The request is aborted
    where it is closed or dropped before the end, or its task is cancelled. `aclose` waits for its
    end; the other two do not, so it may run until the end of the step that is running."""

    def __init__(self, handle: RequestHandle) -> None:
        self._running, self._read, self._shown = handle, handle._reader(), 0
        self._over = False

    def __aiter__(self) -> AsyncTokens:
        return self

    async def __anext__(self) -> StreamedToken:
        handle = self._running
        if self._over:
            raise StopAsyncIteration
        try:
            await handle._news.heard(lambda: handle._beyond(self._shown))
        except BaseException:  # cancelled, which is not held up
            self._over = True
            handle._give_up()
            raise
        if self._shown == handle._committed:
            self._over = True
            handle._raise()
            raise StopAsyncIteration
        self._shown += 1
        return self._read(self._shown - 1)

    async def aclose(self) -> None:
        """Read no more: the request is aborted before the next step, and has ended when this
        returns."""
        self._over = True
        self._running._give_up()
        await self._running._end.heard(lambda: self._running._finished)

    def __del__(self) -> None:
        if not self._over:
            self._running._give_up()
