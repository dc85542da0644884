"""Engine: the public face. generate is add + step until done; everything else reads or re-makes it."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack, cast

from torch import Tensor

from deepinfer import kernels
from deepinfer.config import EngineConfig
from deepinfer.engine import scoring, weights
from deepinfer.engine.background.background import InBackground
from deepinfer.engine.background.fair_lock import FairLock, locked
from deepinfer.engine.completion import Completion, Completions, StreamedToken, completion, failed
from deepinfer.engine.keywords import Kept, completes
from deepinfer.engine.prompt_length import require_length
from deepinfer.engine.provenance import facts_of
from deepinfer.engine.request import Request
from deepinfer.engine.runtime import Runtime
from deepinfer.engine.sampling_params import (
    FORKED,
    SAMPLING,
    Sampling,
    SamplingParams,
    deadline_of,
    params_list,
    require_salt,
)
from deepinfer.engine.scheduling import scheduler
from deepinfer.engine.settings import (
    DEFAULTS,
    Changes,
    Settings,
    require_invariant,
    split_settings,
    start_slots,
)
from deepinfer.engine.sizing import Limits
from deepinfer.engine.step.loop import Loop
from deepinfer.engine.text import Detokenizer, encode_prompt, prompt_list
from deepinfer.slots import registry
from deepinfer.slots.protocols import SLOTS

if TYPE_CHECKING:
    from deepinfer.engine.trace import Trace

Prompts = (
    str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]] | Sequence[str | Sequence[int]]
)


def how_to_make(given: Any) -> str:
    """What to call in place of Engine(given)."""
    made = "Engine.nano(), Engine.tiny() or Engine.from_pretrained(path)"
    if given in ("nano", "tiny"):
        made = f"Engine.{given}()"
    elif isinstance(given, (str, os.PathLike)):
        made = f"Engine.from_pretrained({str(given)!r})"
    given = "" if given is None else repr(given)
    return f"Engine({given}) makes no engine: call {made}"


class Engine(InBackground):
    """One model, six slots, one cache. Make it with nano, tiny or from_pretrained, not by hand.

    Engines made by `with_` share weights and tokenizer, nothing else. Usable as a context manager;
    close() frees the cache and is idempotent.
    """

    def __init__(
        self,
        shared: Any = None,
        settings: EngineConfig | None = None,
        slots: dict[str, Any] | None = None,
    ) -> None:
        if not isinstance(shared, weights.Weights) or settings is None or slots is None:
            raise TypeError(how_to_make(shared))
        self._shared, self._settings = shared, settings
        self._slots = {name: registry.resolve(name, slots[name]) for name in SLOTS}
        if settings.batch_invariant:
            require_invariant(self._slots, shared.model.device)
        scheduler.resolve(settings.scheduler, settings.max_context)
        # started here, so that what does not fit the model is refused now and not at the first step
        model = shared.model
        self._started = start_slots(model.config, model.device, model.dtype, settings, self._slots)
        self._limits = Limits.of(settings, shared.config, self._started["verifier"].max_draft)
        kernels.bind(settings.kernels, settings.batch_invariant)
        self._runtime: Runtime | None = None
        self._closed = False
        self._loop: Loop | None = None
        self._traces: list[Trace] = []
        self._lock = FairLock()  # whoever touches the loop does it in turn

    # ------------------------------------------------------------------------------------ making

    @classmethod
    @completes(Changes, Settings, defaults=DEFAULTS)
    def from_pretrained(
        cls,
        path: str,
        *,
        download: bool = False,
        verify: bool = False,
        **settings: Unpack[Settings],
    ) -> Engine:
        """Load a checkpoint in the official layout.

        path: a folder, or a hub id found in the local Hugging Face cache (fetched only with
        download=True). verify: every byte of the weights goes into `fingerprint`; otherwise a file
        over 64 MiB counts by its two ends, and the fingerprint says `+sampled`. Settings and slots as in `with_`, plus device ('auto') and dtype (None:
        float32 on a CPU, bfloat16 on an accelerator). What does not fit is refused with bytes by
        component before memory is taken. Raises CheckpointError naming file and tensor,
        MemoryError, ValueError.
        """
        from deepinfer.checkpoint.hub import locate

        find = partial(locate, path, download=download)
        return cls(*weights.from_folder(find, str(path), settings, verify))

    @classmethod
    @completes(Changes, Settings, defaults=DEFAULTS)
    def nano(cls, **settings: Unpack[Settings]) -> Engine:
        """The small model that ships with the package: every mechanism of the text model, really
        trained.

        24 M parameters and a drafter, trained on Python's standard library, read from its FP8 and
        FP4 storage in a second. Settings and errors as of `from_pretrained`; CheckpointError where
        a file is damaged, FileNotFoundError where the weights did not come with the package. It
        completes Python, and its acceptance rates, routing and approximation errors mean something;
        `di.data.heldout()` are texts it was not trained on.
        """
        from deepinfer.checkpoint.nano import verified

        return cls(*weights.from_folder(verified, "nano", settings))

    @classmethod
    @completes(Changes, Settings, defaults=DEFAULTS)
    def tiny(cls, seed: int = 0, **settings: Unpack[Settings]) -> Engine:
        """Random weights from a seed, every code path of the release, made in about a second. For tests:
        what it writes is noise; `nano` is trained."""
        return cls(*weights.from_seed(seed, settings))

    @completes(Changes, defaults=Kept())
    def with_(self, **changes: Unpack[Changes]) -> Engine:
        """An engine over the same weights and tokenizer with some slots or settings changed. It has its
        own cache, counters and slot copies. device, dtype and keep_quantised would be another copy of the
        weights and are refused."""
        for name in ("device", "dtype", "keep_quantised"):
            if name in changes:
                raise ValueError(
                    f"with_({name}=...) would copy the weights; make another engine with from_pretrained(..., {name}=...)"
                )
        config, slots = split_settings(changes, self._settings, self._slots)
        return Engine(self._shared, config, slots)

    # ------------------------------------------------------------------------------- generation

    @completes(Sampling, defaults=SAMPLING)
    def generate(
        self,
        prompts: Prompts,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
        timeout: float | None = None,
        salt: str | None = None,
        **sampling: Unpack[Sampling],
    ) -> Completions:
        """Complete prompts. out[i] belongs to input i.

        prompts: str (raw text, bos in front), token ids, or a list of those. params: one for all or
        one per prompt; or SamplingParams fields as keywords. A bad single prompt raises ValueError; in
        a list it becomes that item's .error and the others finish. progress: None shows a bar where a
        person watches. timeout, salt: as of `add`.
        """
        items, single = prompt_list(prompts)
        each = params_list(params, sampling, len(items))
        requests: list[Request | Exception] = []
        call = threading.Lock()
        with call:  # its requests end with it: see `Loop.calls`
            try:
                for item, p in zip(items, each):
                    try:
                        requests.append(self._add(item, p, timeout, salt, call))
                    except (ValueError, TypeError, KeyError) as error:
                        if single:
                            raise
                        requests.append(error)
                self._drain([r for r in requests if isinstance(r, Request)], progress)
            finally:  # an interrupt or a fault must not leave half a batch in the engine
                self._end_call(call)
        done = Completions(
            self._completion(i, r) if isinstance(r, Request) else failed(i, r)
            for i, r in enumerate(requests)
        )
        done.provenance = {**self._provenance(), "sampling": sorted({repr(p) for p in each})}
        return done

    def _drain(self, requests: list[Request], progress: bool | None) -> None:
        from deepinfer.display.progress import bar

        done = 0
        with bar(sum(r.params.max_tokens for r in requests), "generate", show=progress) as shown:
            while any(not r.finished for r in requests):
                self._step()
                now = sum(
                    len(r.output) if not r.finished else r.params.max_tokens for r in requests
                )
                shown.update(now - done)
                done = now

    @completes(Sampling, defaults=SAMPLING)
    def add(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        salt: str | None = None,
        **sampling: Unpack[Sampling],
    ) -> int:
        """Queue one prompt; returns the request id, which is `.index` of the Completion that `step`
        gives. Raises ValueError for a bad prompt or value.

        timeout: seconds from now after which it ends, before a step, with finish_reason 'timeout' and
        what it had emitted. A clock is read only where one is given. salt: with prefix_cache=True,
        only prompts of the same salt share what is cached, so that nobody can tell by the time
        whether a stranger has sent the same prompt.
        """
        call = threading.Lock()
        with call:  # until the caller is about to know its id
            id = self._add(prompt, params_list(params, sampling, 1)[0], timeout, salt, call).id
            self._keep(call)
        return id

    @locked
    def step(self) -> list[Completion]:
        """Run one step (nothing, when nothing waits); returns the requests it finished, the id that
        `add` returned as `.index` of each (not those of a Background). With overlap=True a call
        launches a step and gives the results of the one before."""
        self._step()
        return [self._completion(r.id, r) for r in self._open().hand_out()]

    @locked
    def abort(self, id: int) -> Completion:
        """End a request and free what it held; returns what it had emitted. KeyError if unknown."""
        request = self._known(id)
        self._forget(request)
        return self._completion(id, request)

    @completes(Sampling, defaults=FORKED)
    @locked
    def fork(
        self, id: int, params: SamplingParams | None = None, **sampling: Unpack[Sampling]
    ) -> int:
        """Queue another request that goes on from all that request `id` has so far; returns its id.

        params: None keeps those of the request but for the seed, which is a new one where it is not
        given; sampling: fields to change. max_tokens counts what is there already. With
        prefix_cache=True both share the pages they have in common; without it, these tokens are
        computed again. KeyError if unknown.
        """
        call = threading.Lock()
        with call:
            child = self._fork(id, params, sampling, call).id
            self._keep(call)
        return child

    def _fork(
        self, id: int, params: SamplingParams | None, sampling: Any, call: threading.Lock
    ) -> Request:
        parent = self._known(id)
        if params is None:
            params = dataclasses.replace(parent.params, **{"seed": None, **sampling})
        elif sampling:
            params = params_list(params, sampling, 1)[0]  # says that it is one or the other
        else:
            params = params_list(params, {}, 1)[0]
        child = self._open().fork(parent, params, call)
        self._work_came()
        return child

    @completes(Sampling, defaults=SAMPLING)
    def stream(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        salt: str | None = None,
        **sampling: Unpack[Sampling],
    ) -> Iterator[StreamedToken]:
        """Tokens of one prompt as they are committed. Closing the iterator aborts the request.
        timeout, salt: as of `add`."""
        tokens = self._stream(prompt, params_list(params, sampling, 1)[0], timeout, salt)
        next(tokens)  # now it has begun, closing or dropping it aborts the request
        return cast("Iterator[StreamedToken]", tokens)

    def _stream(
        self, prompt: Any, params: SamplingParams, timeout: float | None, salt: str | None
    ) -> Iterator[StreamedToken | None]:
        call = threading.Lock()
        with call:
            try:
                yield from self._read(self._add(prompt, params, timeout, salt, call))
            finally:
                self._end_call(call)

    def _read(self, request: Request) -> Iterator[StreamedToken | None]:
        text, shown = Detokenizer(self._shared.tokenizer), 0
        yield None
        while True:
            last = request.finished  # asked first: another thread may be the one that steps
            while shown < len(request.logprobs):
                token = request.output[shown]
                yield StreamedToken(token, text.push(token), request.logprobs[shown])
                shown += 1
            if last:
                break
            self._step()
        if request.error is not None:
            raise request.error

    def _add(
        self,
        prompt: Any,
        params: SamplingParams,
        timeout: float | None,
        salt: str | None,
        call: threading.Lock,
    ) -> Request:
        deadline, salt = deadline_of(timeout), require_salt(salt)
        return self._queue(self._ids(prompt), params, deadline, salt, call)

    def _ids(self, prompt: Any) -> list[int]:
        """Token ids of a prompt, for a request. Asked before the engine's lock is taken: a long text
        is tokenised for seconds, and other requests go on meanwhile."""
        self._require_open()
        require_length(prompt, self._limits.model_len, self.encode)
        return encode_prompt(self, prompt)

    @locked
    def _queue(
        self,
        ids: list[int],
        params: SamplingParams,
        deadline: float | None,
        salt: str | None,
        call: threading.Lock,
    ) -> Request:
        request = self._open().add(ids, params, deadline, salt, call)
        self._work_came()
        return request

    def _keep(self, call: threading.Lock) -> None:
        """The requests of a call outlive it."""
        if (loop := self._loop) is not None:
            loop.calls.pop(call, None)

    @locked
    def _end_call(self, call: threading.Lock) -> None:
        if self._loop is not None:
            self._loop.end_call(call)
        self._requests_changed()

    @locked
    def _step(self) -> None:
        try:
            self._open().step()
        finally:
            self._requests_changed()

    @locked
    def _forget(self, request: Request) -> None:
        if self._loop is not None:
            self._loop.forget(request)
        elif not request.finished:  # the engine was closed meanwhile
            request.finish("abort")
        self._requests_changed()

    def _completion(self, index: int, request: Request) -> Completion:
        return completion(index, request, self._shared.tokenizer)

    # --------------------------------------------------------------------------- teacher forcing

    def logits(
        self,
        token_ids: str | Sequence[int],
        prompt: int | None = None,
        chunks: Sequence[int] | None = None,
    ) -> Tensor:
        """[t, v] teacher-forced logits in FP32 (FP64 in an FP64 engine), through cache and slots.

        The first `prompt` ids (default all) are what the replay policy sees as the prompt, the rest is
        fed as decode rows. chunks: rows per step; prompt=1, chunks=[1]*t is serial decode. Rows a policy
        drops are NaN. Raises ValueError for bad ids or chunks.
        """
        self._require_open()
        ids = encode_prompt(self, token_ids)  # before the lock is taken: see `_ids`
        return self._lock.run(lambda: self._open().logits(ids, prompt, chunks))

    def score(self, texts: Prompts, prompt: int | None = None) -> scoring.Scores:
        """Log-probabilities of what follows the first `prompt` tokens (default 1, the bos) of each text.

        scores[i] belongs to text i: .logprobs in nats, .perplexity, .bits_per_byte (the bytes that
        the scored tokens spell; special tokens spell none). Raises ValueError naming the text where
        nothing follows, and the replay policy where a scored row was dropped or is not finite.
        """
        first = 1 if prompt is None else prompt
        tokenizer = self._shared.tokenizer
        each = [
            scoring.score_text(self, i, text, first, tokenizer)
            for i, text in enumerate(prompt_list(texts)[0])
        ]
        return scoring.Scores(tuple(each), self._provenance())

    # -------------------------------------------------------------------------------- inspection

    def trace(
        self, *patterns: str, edit: Callable | None = None, keep: Callable | None = None
    ) -> Trace:
        """A context manager that records values whose names match (shell patterns, see trace_names).

        edit(x, at) gets a copy of x and returns what to put in its place (same shape), or None to
        leave it; at has .name .request .position .step. keep(at) -> [rows] bool: the rows to record.
        Raises KeyError for a pattern that matches no name, with the nearest ones.
        """
        from deepinfer.engine.trace import Trace

        return Trace(self, patterns or ("*",), edit, keep)

    # -------------------------------------------------------------------------------- life cycle

    @property
    def runtime(self) -> Runtime:
        """This engine's own parts, opened: scheduler, cache, pools, slot copies, limits. Made at first
        use. Raises RuntimeError after close()."""
        self._require_open()
        if self._runtime is None:
            self._runtime = Runtime(
                self._shared.model,
                self._settings,
                self._started,
                self._limits,
                self._shared.edits,
            )
            self._runtime.stats.facts = facts_of(self)
        return self._runtime

    def _open(self) -> Loop:
        rt = self.runtime
        if self._loop is None:
            self._loop = Loop(rt, self._shared.tokenizer, self._traces)
        self._loop.drop_abandoned()
        return self._loop

    def _require_open(self) -> None:
        if self._closed:
            raise RuntimeError(
                "this engine is closed: make another, or eng.with_() over the same weights"
            )

    def close(self) -> None:
        """Free the cache, drop unfinished requests, a Background's too. Weights live on in other engines."""
        self._close_background()
        self._lock.run(self._free)

    def _free(self) -> None:
        loop, self._runtime, self._loop = self._loop, None, None
        self._closed = True
        if loop is not None:
            loop.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _provenance(self) -> dict[str, object]:
        from deepinfer.engine.provenance import of_engine

        return of_engine(self)
