"""Background: a thread that steps an engine, so that a cell can add requests while others run.

    with eng.background() as bg:
        first = bg.add("def read(path):", max_tokens=64)  # returns at once, it runs meanwhile
        for token in bg.add("class Tree:", max_tokens=64):
            print(token.text, end="")
        first.result()

Whoever waits hangs up a bell, and the thread rings it: no lock is held by a cell that waits, so
interrupting it leaves everything running.
"""

from __future__ import annotations

import atexit
import contextvars
import threading
import weakref
from collections import Counter, deque
from collections.abc import AsyncIterator, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Unpack, cast

from deepinfer.engine.background.fair_lock import FairLock, locked
from deepinfer.engine.background.handle import RequestHandle, Waiters
from deepinfer.engine.completion import StreamedToken
from deepinfer.engine.inspection import EngineInspection
from deepinfer.engine.keywords import completes
from deepinfer.engine.request import Request
from deepinfer.engine.sampling_params import (
    FORKED,
    SAMPLING,
    Sampling,
    SamplingParams,
    deadline_of,
    params_list,
    require_salt,
)

if TYPE_CHECKING:
    from deepinfer.engine.engine import Engine
    from deepinfer.engine.step.loop import Loop

_LIVE: weakref.WeakSet[Background] = weakref.WeakSet()


class Background:
    """Steps `eng` in a thread of its own while anything is unfinished, and waits else. Made by
    `eng.background()`.

    As a context manager it waits at the end of the block until all that was added has finished, as
    an executor does (`drain`, then `close`); where the block ends in an error or an interrupt, or
    one comes while it waits, what has not finished is aborted. `close()` aborts, `close(wait=True)`
    waits. It ends with `close()`, with the engine, or when neither it nor a request of it is held any
    more. A step that raises ends every request that was added here with that error; the engine
    stays as usable as after an error in `eng.step()`, and the thread goes on with the next request.
    A block `with kernels.use(...)` counts where it is open when the Background is made.
    """

    def __init__(self, eng: Engine, lasting: bool = True) -> None:
        self._eng = eng
        self._lasting = lasting  # asked for by the user, not only by a stream
        self._owned: dict[int, Request] = {}  # added here and not finished
        self._handles: weakref.WeakValueDictionary[int, RequestHandle] = (
            weakref.WeakValueDictionary()
        )
        self._unwanted: deque[int] = deque()  # to be aborted before the next step
        self._ending: deque[RequestHandle | None] = deque()  # finished, and not told yet
        self._ended: Counter[str] = Counter()
        self._rest = Waiters()  # rung when nothing that was added here is left
        self._failure: str | None = None
        self._closed = False
        self._wake: SimpleQueue[bool] = SimpleQueue()
        context = contextvars.copy_context()
        args = (serve, weakref.ref(self), self._wake, weakref.ref(eng), self._owned)
        self._thread = threading.Thread(
            target=context.run, args=args, name="deepinfer background", daemon=True
        )
        self._stop = weakref.finalize(self, self._wake.put, False)
        self._thread.start()
        _LIVE.add(self)

    # -------------------------------------------------------------------------------- requests

    @completes(Sampling, defaults=SAMPLING)
    def add(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        salt: str | None = None,
        **sampling: Unpack[Sampling],
    ) -> RequestHandle:
        """Queue one prompt; returns at once, but for the step that is running. Arguments and errors
        as of `eng.add`. Safe from any thread. RuntimeError after close()."""
        self._require_open()
        one = params_list(params, sampling, 1)[0]
        ids, deadline = self._eng._ids(prompt), deadline_of(timeout)  # before the lock is taken
        return self._eng._lock.run(self._add, ids, one, deadline, require_salt(salt))

    def _add(
        self, ids: list[int], params: SamplingParams, deadline: float | None, salt: str | None
    ) -> RequestHandle:
        self._require_open()
        call = threading.Lock()
        with call:  # until its handle is among ours
            handle = self._own(self._eng._queue(ids, params, deadline, salt, call))
            self._eng._keep(call)
        return handle

    def _require_open(self) -> None:
        if self._closed:
            raise RuntimeError("this background is closed: make another with eng.background()")

    def _own(self, request: Request) -> RequestHandle:
        try:
            handle = RequestHandle(self, request)
            self._handles[request.id] = handle
            self._owned[request.id] = request
            return handle
        except BaseException:  # an interrupt: nobody would wait for it
            self._eng._forget(request)
            raise

    @completes(Sampling, defaults=FORKED)
    def fork(
        self,
        handle: RequestHandle,
        params: SamplingParams | None = None,
        **sampling: Unpack[Sampling],
    ) -> RequestHandle:
        """Queue another request that goes on from all that `running` has so far; params, sampling
        and errors as of `eng.fork`. ValueError for a RequestHandle of another Background."""
        if not isinstance(handle, RequestHandle):
            raise TypeError(
                f"fork: want a RequestHandle of this background, got {type(handle).__name__}"
            )
        return self._eng._lock.run(self._fork, handle, params, sampling)

    def _fork(
        self, handle: RequestHandle, params: SamplingParams | None, sampling: Any
    ) -> RequestHandle:
        self._require_open()
        if handle._background is not self:
            raise ValueError(f"fork: {handle!r} is of another background: fork it there")
        call = threading.Lock()
        with call:
            child = self._own(self._eng._fork(handle.id, params, sampling, call))
            self._eng._keep(call)
        return child

    def drain(self) -> None:
        """Wait until all that was added here has finished. An interrupt leaves it running."""
        self._rest.wait(lambda: not self._owned)

    def close(self, wait: bool = False) -> None:
        """Stop the thread. What was added here and has not finished is aborted, or finished first
        with wait=True; what was added with `eng.add` stays for `eng.step`. Idempotent."""
        if wait and not self._closed:
            self.drain()
        self._eng._lock.run(self._end)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _end(self) -> None:
        self._closed = True
        for request in list(self._owned.values()):
            self._eng._forget(request)
        self._collect()
        self._stop()

    @property
    def closed(self) -> bool:
        return self._closed

    def __enter__(self) -> Background:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        try:
            if error is None and not self._closed:
                self.drain()
        finally:
            self.close()

    # ------------------------------------------------------------------------------ the thread

    def _step(self) -> bool:
        """In turn: one step; whether there is more to do."""
        if self._closed:
            return False
        try:
            while self._unwanted:
                request = self._owned.get(self._unwanted[0])
                if request is not None:
                    self._eng._forget(request)
                self._unwanted.popleft()
            self._collect()
            if not self._eng._busy:
                return False
            self._eng._step()
        except BaseException as error:
            self._fail(error)
            return False
        self._failure = None
        return self._eng._busy

    def _fail(self, error: BaseException) -> None:
        """A step raised: whoever waits here is told. The engine has put itself right already."""
        self._failure = f"{type(error).__name__}: {error}"
        for request in list(self._owned.values()):
            self._eng._open().forget(request, cast("Exception", error))
        self._collect(error)
        while not self._wake.empty():  # what was added before does not try again
            self._wake.get()

    def _drop(self, id: int) -> None:
        """Abort a request before the next step."""
        self._unwanted.append(id)
        self._wake.put(True)

    def _collect(self, fault: BaseException | None = None) -> None:
        """In turn, after all that may have changed a request: what was added here belongs to its
        RequestHandle, so `eng.step` does not hand it out."""
        try:
            for request in list(self._owned.values()):
                handle = self._handles.get(request.id)
                if request.finished:
                    self._ending.append(handle)
                    if self._eng._loop is not None:
                        self._eng._loop.requests.pop(request.id, None)
                    del self._owned[request.id]
                    self._ended[str(request.finish_reason)] += 1
                elif handle is not None:
                    handle._publish()
            while self._ending:
                if (handle := self._ending[0]) is not None:
                    handle._publish(fault)
                self._ending.popleft()
            if not self._owned:
                self._rest.ring()
        except BaseException:  # a cell that stepped was interrupted here: the thread rings the rest
            self._wake.put(True)
            raise

    def __repr__(self) -> str:
        from deepinfer.display.background import background_text

        return background_text(self)

    def _repr_html_(self) -> str:
        from deepinfer.display.background import background_html

        return background_html(self)


def serve(
    of: weakref.ref[Background],
    wake: SimpleQueue[bool],
    engine: weakref.ref[Engine],
    owned: dict[int, Request],
) -> None:
    """The thread. Between two steps it holds neither Background nor engine, so that both can go."""
    while wake.get():
        while (background := of()) is not None and background._eng._lock.run(background._step):
            del background
        del background
    eng = engine()
    if eng is not None:  # nobody holds the Background any more: nobody waits for these
        for request in list(owned.values()):
            eng._forget(request)


class InBackground(EngineInspection):
    """The part of an Engine that works with a Background."""

    _lock: FairLock
    _loop: Loop | None
    _watcher: weakref.ref[Background] | None = None

    def _open(self) -> Loop:
        raise NotImplementedError

    def _ids(self, prompt: Any) -> list[int]:
        raise NotImplementedError

    @locked
    def background(self) -> Background:
        """Start a thread that steps this engine, so that a cell can add requests while others run:

            with eng.background() as bg:
                a, b = bg.add("def read(path):"), bg.add("class Tree:")  # they run now, together
                a.result()  # or: for token in a; await a; async for token in a
            # here both have finished

        The end of the block waits for what has not finished, and so do `drain()` and
        `close(wait=True)`; an error or an interrupt in the block, and `close()`, abort it. Leaving
        a loop over a RequestHandle's tokens before the end aborts that request. The id in `running.id`
        is the one of `eng.requests`.

        Everything else of the engine stays usable meanwhile, from any thread: a call waits for the
        step that is running, no longer. RuntimeError where there is one already.
        """
        live = self._background
        if live is None:
            return self._start(lasting=True)
        if live._lasting:
            raise RuntimeError(
                f"this engine has a background already ({live!r}): add to that one, or close() it; "
                "eng.with_() is another engine over the same weights"
            )
        live._lasting = True  # a stream had started it
        return live

    @completes(Sampling, defaults=SAMPLING)
    def astream(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        salt: str | None = None,
        **sampling: Unpack[Sampling],
    ) -> AsyncIterator[StreamedToken]:
        """`stream` for coroutines: `async for token in eng.astream(...)`. The event loop goes on,
        and what it awaits at the same time runs in the same steps. Closing or dropping the
        iterator, or cancelling its task, aborts the request: `await tokens.aclose()` returns once
        it has ended; dropping and cancelling do not wait, and it ends after the step that runs.

        It runs in the engine's Background; where there is none, in one that lasts as long as the
        iterator.
        """
        one = params_list(params, sampling, 1)[0]
        ids, deadline = self._ids(prompt), deadline_of(timeout)  # before the lock is taken
        return aiter(self._lock.run(self._running, ids, one, deadline, require_salt(salt)))

    def _running(
        self, ids: list[int], params: SamplingParams, deadline: float | None, salt: str | None
    ) -> RequestHandle:
        live = self._background or self._start(lasting=False)
        return live._add(ids, params, deadline, salt)

    @property
    def _background(self) -> Background | None:
        live = None if self._watcher is None else self._watcher()
        return None if live is None or live.closed else live

    def _start(self, lasting: bool) -> Background:
        self._open()
        made = Background(cast("Engine", self), lasting)
        self._watcher = weakref.ref(made)
        return made

    @property
    def _busy(self) -> bool:
        """Whether a step has anything to do."""
        loop = self._loop
        return loop is not None and bool(loop.unfinished or loop.in_flight)

    def _work_came(self) -> None:
        if (live := self._background) is not None:
            live._wake.put(True)

    def _requests_changed(self) -> None:
        if (live := self._background) is not None:
            live._collect()

    def _close_background(self) -> None:
        if (live := self._background) is not None:
            live.close()


def close_all() -> None:
    """At the interpreter's end: no thread, nor an overlapped engine's device, may be in a kernel
    when it is taken down."""
    for background in list(_LIVE):
        if not background.closed:
            background._eng.close()


atexit.register(close_all)
