"""Engine: the public face. generate is add + step until done; everything else reads or re-makes it."""

from __future__ import annotations

import dataclasses
import difflib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack, cast

import torch
from torch import Tensor

from deepinfer import kernels, rng
from deepinfer.config import EngineConfig, ModelConfig
from deepinfer.engine import commit, scheduler, step, teacher, weights
from deepinfer.engine.params import SamplingParams
from deepinfer.engine.request import Completion, Completions, Request
from deepinfer.engine.runtime import Limits, Runtime, cache_bytes, start_slots
from deepinfer.engine.scheduler import Schedule, require_runnable
from deepinfer.engine.settings import (
    LATER,
    Changes,
    Settings,
    completes,
    placement,
    require_invariant,
    split_settings,
)
from deepinfer.engine.stats import Stats
from deepinfer.engine.text import (
    Detokenizer,
    check_unicode,
    encode_prompt,
    prompt_list,
    token_bytes,
)
from deepinfer.slots import registry
from deepinfer.slots.protocols import SLOTS, Prompt

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from deepinfer.measure.table import Table
    from deepinfer.measure.trace import Trace

Prompts = str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]] | Sequence[str | Sequence[int]]

MOST_IDLE = 1000  # steps in a row without a row, while requests wait, before the scheduler is blamed


class Sampling(TypedDict, total=False):
    """Fields of SamplingParams as keywords of generate, add and stream."""

    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    ignore_eos: bool
    top_logprobs: int
    prompt_logprobs: bool
    seed: int | None
    grammar: Any


@dataclass(frozen=True, slots=True)
class StreamedToken:
    """One token of `eng.stream`: its id, the text it completes ('' inside a character), logprob."""

    id: int
    text: str
    logprob: float


class Engine:
    """One model, six slots, one cache. Make it with nano, tiny or from_pretrained, not by hand.

    Engines made by `with_` share weights and tokenizer, nothing else. Usable as a context manager;
    close() frees the cache and is idempotent.
    """

    def __init__(self, shared: weights.Weights, settings: EngineConfig, slots: dict[str, Any]) -> None:
        for name, what in LATER.items():
            if getattr(settings, name):
                raise ValueError(f"{name}={getattr(settings, name)!r}: {what} is not available yet; leave it out")
        self._shared, self._settings = shared, settings
        self._slots = {name: registry.resolve(name, slots[name]) for name in SLOTS}
        if settings.batch_invariant:
            require_invariant(self._slots, shared.model.device)
        scheduler.resolve(settings.scheduler)
        # started here, so that what does not fit the model is refused now and not at the first step
        self._started = start_slots(shared.model, settings, self._slots)
        self._limits = Limits.of(settings, shared.config, self._started["verifier"].max_draft)
        kernels.bind(settings.kernels, settings.batch_invariant)
        self._runtime: Runtime | None = None
        self._closed = False
        self._traces: list[Trace] = []
        self._requests: dict[int, Request] = {}
        self._count = 0
        self._steps = 0
        self._idle = 0

    # ------------------------------------------------------------------------------------ making

    @classmethod
    @completes(Changes, Settings)
    def from_pretrained(
        cls, path: str, *, download: bool = False, **settings: Unpack[Settings]
    ) -> Engine:
        """Load a checkpoint in the official layout.

        path: a folder, or a hub id found in the local Hugging Face cache (fetched only with
        download=True). Settings and slots as in `with_`, plus device ('auto') and dtype (None:
        float32 on a CPU, bfloat16 on an accelerator). What does not fit is refused with bytes by
        component before memory is taken. Raises CheckpointError naming file and tensor,
        MemoryError, ValueError.
        """
        from deepinfer.checkpoint.hub import locate

        return cls._from_folder(lambda: locate(path, download=download), str(path), settings)

    @classmethod
    @completes(Changes, Settings)
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

        return cls._from_folder(verified, "nano", settings)

    @classmethod
    def _from_folder(cls, find: Callable[[], Path], source: str, given: Any) -> Engine:
        """Load the official checkpoint in the folder that `find` names, asked once the settings are
        known to be good."""
        from deepinfer.checkpoint.reader import Checkpoint

        config, slots = split_settings(given)
        device, dtype = placement(config)
        slots = {name: registry.resolve(name, slots[name]) for name in SLOTS}
        checkpoint = Checkpoint.open(find())
        parts = weights.weight_bytes(checkpoint.config, dtype, config.keep_quantised)
        parts |= cache_bytes(checkpoint.config, config, slots, dtype, device)
        remedy = (
            "Use a smaller dtype, keep_quantised=True, a smaller cache or a device with more memory."
        )
        weights.require(f"{source} in {dtype}", parts, device, remedy)
        loaded = weights.from_checkpoint(
            checkpoint, dtype=dtype, device=device, source=source,
            keep_quantised=config.keep_quantised,
        )  # fmt: skip
        return cls(loaded, config, slots)

    @classmethod
    @completes(Changes, Settings)
    def tiny(cls, seed: int = 0, **settings: Unpack[Settings]) -> Engine:
        """Random weights from a seed, every code path of the release, made in about a second. For tests:
        what it writes is noise; `nano` is trained."""
        from deepinfer.checkpoint.memory import MemoryCheckpoint
        from deepinfer.checkpoint.tiny import tiny_state

        config, slots = split_settings(settings)
        device, dtype = placement(config)
        loaded = weights.from_checkpoint(
            MemoryCheckpoint(*tiny_state(seed)), dtype=dtype, device=device, source=f"tiny(seed={seed})",
            keep_quantised=config.keep_quantised,
        )
        return cls(loaded, config, slots)

    @completes(Changes)
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

    # ------------------------------------------------------------------------------- what it is

    @property
    def config(self) -> ModelConfig:
        """The model's config."""
        return self._shared.config

    @property
    def source(self) -> str:
        """Where the weights came from: a path as it was given, 'nano' or 'tiny(seed=0)'."""
        return self._shared.source

    @property
    def settings(self) -> EngineConfig:
        return self._settings

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def slots(self) -> dict[str, Any]:
        """Slot name -> the settings object it was made with."""
        return dict(self._slots)

    @property
    def model(self):
        return self._shared.model

    @property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer (a `tokenizers.Tokenizer`). Raises ValueError where it has none."""
        if self._shared.tokenizer is None:
            raise ValueError(f"{self._shared.source} has no tokenizer.json: pass token ids")
        return self._shared.tokenizer

    @property
    def fingerprint(self) -> str:
        """Identity of weights and config, the same for the same bytes on any machine."""
        return self._shared.fingerprint

    @property
    def exact(self) -> bool:
        """False where a slot computes something else than the model (every repr then says so)."""
        return not self.approximate_slots

    @property
    def approximate_slots(self) -> list[str]:
        return [n for n in SLOTS if not registry.promises(self._slots[n], n).exact]

    @property
    def stats(self) -> Stats:
        return Stats() if self._runtime is None else self._runtime.stats

    @property
    def kernels(self) -> Table:
        """What ran: op, implementation, calls."""
        from deepinfer.measure.table import Table

        counts = {} if self._runtime is None else self._runtime.ops.counts
        rows = [dict(op=op, implementation=i, calls=n) for (op, i), n in sorted(counts.items())]
        return Table(rows, provenance=self._provenance())

    @property
    def memory(self) -> Table:
        """Bytes by component: weights (shared between engines) and this engine's cache (0 before the
        first step)."""
        from deepinfer.measure.table import Table

        cache = {"block KV": 0, "state KV": 0} if self._runtime is None else self._runtime.cache.nbytes
        parts = [("weights", k, v) for k, v in self._shared.nbytes.items()]
        parts += [("cache", k, v) for k, v in cache.items()]
        rows = [dict(part=p, component=c, bytes=b) for p, c, b in parts]
        return Table(rows, provenance=self._provenance())

    def encode(self, text: str, bos: bool = True) -> list[int]:
        """Token ids of raw text, with bos in front unless told otherwise; no chat template.

        ValueError for what is no text: bytes, None, a string with a lone surrogate.
        """
        if not isinstance(text, str):
            raise ValueError(f"encode takes one string, got {type(text).__name__}")
        check_unicode(text)
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        return [self.config.bos_token_id, *ids] if bos else ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids; special tokens are left out."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=True)

    # ------------------------------------------------------------------------------- generation

    @completes(Sampling)
    def generate(
        self, prompts: Prompts, params: SamplingParams | Sequence[SamplingParams] | None = None, *,
        progress: bool | None = None, timeout: float | None = None, **sampling: Unpack[Sampling],
    ) -> Completions:
        """Complete prompts. out[i] belongs to input i.

        prompts: str (raw text, bos in front), token ids, or a list of those. params: one for all or
        one per prompt; or SamplingParams fields as keywords. A bad single prompt raises ValueError; in
        a list it becomes that item's .error and the others finish. progress: None shows a bar where a
        person watches. timeout: as of `add`.
        """
        items, single = prompt_list(prompts)
        each = params_list(params, sampling, len(items))
        requests: list[Request | Exception] = []
        try:
            for item, p in zip(items, each):
                try:
                    requests.append(self._add(item, p, timeout))
                except (ValueError, TypeError, KeyError) as error:
                    if single:
                        raise
                    requests.append(error)
            self._drain([r for r in requests if isinstance(r, Request)], progress)
        finally:  # an interrupt or a fault must not leave half a batch in the engine
            for r in requests:
                if isinstance(r, Request):
                    self._forget(r)
        done = Completions(
            self._completion(i, r) if isinstance(r, Request) else failed(i, r) for i, r in enumerate(requests)
        )
        done.provenance = {**self._provenance(), "sampling": sorted({repr(p) for p in each})}
        return done

    def _provenance(self) -> dict[str, object]:
        from deepinfer.measure.provenance import of_engine

        return of_engine(self)

    def _drain(self, requests: list[Request], progress: bool | None) -> None:
        from deepinfer.display.progress import bar

        done = 0
        with bar(sum(r.params.max_tokens for r in requests), "generate", show=progress) as shown:
            while any(not r.finished for r in requests):
                self._step()
                now = sum(len(r.output) if not r.finished else r.params.max_tokens for r in requests)
                shown.update(now - done)
                done = now

    @completes(Sampling)
    def add(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, *,
        timeout: float | None = None, **sampling: Unpack[Sampling],
    ) -> int:
        """Queue one prompt; returns the request id. Raises ValueError for a bad prompt or value.

        timeout: seconds from now after which it ends, before a step, with finish_reason 'timeout' and
        what it had emitted. A clock is read only where one is given.
        """
        return self._add(prompt, params_list(params, sampling, 1)[0], timeout).id

    def step(self) -> list[Completion]:
        """Run one step (nothing, when nothing waits); returns the requests it finished."""
        self._step()
        finished = [r for r in self._requests.values() if r.finished]
        for r in finished:
            del self._requests[r.id]
        return [self._completion(r.id, r) for r in finished]

    @property
    def requests(self) -> dict[int, Request]:
        """Requests that are not done with, by id, as they are now; for reading."""
        return dict(self._requests)

    @property
    def unfinished(self) -> int:
        """Requests waiting or running, or finished with their completion not handed out by `step` yet."""
        return len(self._requests)

    def abort(self, id: int) -> Completion:
        """End a request and free what it held; returns what it had emitted. KeyError if unknown."""
        if id not in self._requests:
            raise KeyError(f"no request {id} is waiting or running: {sorted(self._requests)} are")
        request = self._requests[id]
        self._forget(request)
        return self._completion(id, request)

    @completes(Sampling)
    def stream(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, *,
        timeout: float | None = None, **sampling: Unpack[Sampling],
    ) -> Iterator[StreamedToken]:
        """Tokens of one prompt as they are committed. Closing the iterator aborts the request.
        timeout: as of `add`."""
        tokens = self._stream(self._add(prompt, params_list(params, sampling, 1)[0], timeout))
        next(tokens)  # now it has begun, closing or dropping it aborts the request
        return cast("Iterator[StreamedToken]", tokens)

    def _stream(self, request: Request) -> Iterator[StreamedToken | None]:
        text, shown = Detokenizer(self._shared.tokenizer), 0
        try:
            yield None
            while True:
                while shown < len(request.output):
                    token = request.output[shown]
                    yield StreamedToken(token, text.push(token), request.logprobs[shown])
                    shown += 1
                if request.finished:
                    break
                self._step()
            if request.error is not None:
                raise request.error
        finally:
            self._forget(request)

    def _add(self, prompt: Any, params: SamplingParams, timeout: float | None = None) -> Request:
        rt = self.runtime
        deadline = None if timeout is None else require_timeout(timeout) + time.monotonic()
        ids = encode_prompt(self, prompt)
        params.validate_for(self.config.vocab_size)
        limit = rt.limits.model_len
        if len(ids) >= limit:
            raise ValueError(
                f"the prompt has {len(ids)} tokens, this engine takes at most {limit - 1} "
                f"(max_model_len={limit} with room for one): shorten it or raise max_model_len"
            )
        params = dataclasses.replace(params, max_tokens=min(params.max_tokens, limit - len(ids)))
        seed = rng.request_seed(self._settings.seed, self._count) if params.seed is None else params.seed
        request = Request(self._count, ids, params, seed, deadline=deadline)
        if params.grammar is not None:
            vocab = token_bytes(self._shared.tokenizer, self.config.vocab_size)
            request.grammar = rt.slots["grammar"].compile(params.grammar, vocab).start()
        prompt_seen = Prompt(len(ids), wants_all_logits=params.prompt_logprobs)
        request.plan = rt.replay_plan(prompt_seen)
        if params.prompt_logprobs and request.plan.rows_from[-1] > 0:
            raise ValueError(
                f"prompt_logprobs: the replay policy {rt.replay!r} drops rows below {request.plan.rows_from[-1]}, "
                "whose log-probabilities do not exist; use replay='exact'"
            )
        need = rt.room.most(request)
        if rt.pages.ask(need) == "never":
            raise ValueError(
                f"the request needs {need} pages of {rt.limits.page_size} tokens, the pool has {rt.pages.size}: "
                "lower max_tokens or raise num_pages"
            )
        self._count += 1
        self._requests[request.id] = request
        rt.scheduler.add(request)
        return request

    def _step(self) -> None:
        rt = self.runtime  # its storage is made outside inference mode, so anything may read it later
        try:
            self._expire(rt)
            schedule = require_runnable(rt.scheduler.schedule(), rt.scheduler, rt.room)
            if schedule.shares:
                self._run(rt, schedule)
        except BaseException:  # wherever it was: no page, slot or request is lost
            rt.room.recover(self._requests.values())
            rt.scheduler.recover(self._requests.values())
            raise
        self._idle = self._idle + 1 if schedule.kind == "idle" and rt.scheduler.unfinished else 0
        if self._idle >= MOST_IDLE:
            raise RuntimeError(
                f"{rt.scheduler!r} scheduled nothing in {self._idle} steps while {rt.scheduler.unfinished} "
                f"requests wait or run; {rt.pages!r}. Abort them, or look at its schedule()"
            )

    def _expire(self, rt: Runtime) -> None:
        """End the requests whose time is up. Without a timeout no clock is read."""
        timed = [r for r in self._requests.values() if r.deadline is not None and not r.finished]
        if not timed:
            return
        now = time.monotonic()
        for request in timed:
            if request.deadline is not None and now >= request.deadline:
                rt.room.end(request, "timeout")
                rt.scheduler.release(request)

    @torch.inference_mode()
    def _run(self, rt: Runtime, schedule: Schedule) -> None:
        requests = [s.request for s in schedule.shares]
        try:
            result = step.run(rt, schedule, self._tap([r.id for r in requests]))
            commit.commit(rt, result, self._steps, schedule.kind)
            shares = [result.shares[i] for i in result.emitters]
            going = [s.request for s in shares if not s.request.finished]
            step.propose(rt, going, self._tap([r.id for r in going]))
            for trace in self._traces:
                trace.settle(self._steps, {r.id: r.computed for r in requests})
        except BaseException:
            commit.undo(rt, schedule)
            raise
        finally:  # rows of a step that failed keep its number to themselves
            self._steps += 1

    def _forget(self, request: Request) -> None:
        """Drop a request; one that has not finished is aborted and gives back what it held."""
        self._requests.pop(request.id, None)
        if request.finished:
            return
        request.finish("abort")
        if self._runtime is not None:
            self._runtime.stats.finished["abort"] += 1
            self._runtime.scheduler.release(request)

    def _completion(self, index: int, r: Request) -> Completion:
        text = Detokenizer(self._shared.tokenizer)
        return Completion(
            index=index, prompt_token_ids=tuple(r.prompt), token_ids=tuple(r.output),
            text=text.all(r.output), finish_reason=r.finish_reason or "running",
            logprobs=tuple(r.logprobs), steps=tuple(r.steps), error=r.error,
            top_logprobs=tuple(r.top_logprobs), prompt_logprobs=tuple(r.prompt_logprobs),
            pieces=tuple(text.push(t) for t in r.output),
        )

    # --------------------------------------------------------------------------- teacher forcing

    @torch.no_grad()
    def logits(
        self, token_ids: str | Sequence[int], prompt: int | None = None, chunks: Sequence[int] | None = None
    ) -> Tensor:
        """[t, v] teacher-forced logits in FP32 (FP64 in an FP64 engine), through cache and slots.

        The first `prompt` ids (default all) are what the replay policy sees as the prompt, the rest is
        fed as decode rows. chunks: rows per step; prompt=1, chunks=[1]*t is serial decode. Rows a policy
        drops are NaN. Raises ValueError for bad ids or chunks.
        """
        rt = self.runtime
        ids = encode_prompt(self, token_ids)
        if len(ids) > rt.limits.model_len:
            raise ValueError(f"{len(ids)} ids, this engine holds max_model_len={rt.limits.model_len}")
        chunked = None if chunks is None else list(chunks)
        tap_of = (lambda batch: self._tap([-1] * batch.num_seqs)) if self._traces else None
        try:
            out = teacher.forced_logits(rt, ids, prompt, chunked, tap_of)
            for trace in self._traces:
                trace.settle(self._steps, {-1: len(ids)})
        finally:
            self._steps += 1
        return out

    def score(self, texts: Prompts, prompt: int | None = None) -> teacher.Scores:
        """Log-probabilities of what follows the first `prompt` tokens (default 1, the bos) of each text.

        scores[i] belongs to text i: .logprobs in nats, .perplexity, .bits_per_byte (the bytes that
        the scored tokens spell; special tokens spell none). Raises ValueError naming the text where
        nothing follows, and the replay policy where a scored row was dropped or is not finite.
        """
        each = []
        for i, text in enumerate(prompt_list(texts)[0]):
            ids, first = encode_prompt(self, text), 1 if prompt is None else prompt
            if first >= len(ids):
                raise ValueError(
                    f"score: text {i} has {len(ids)} tokens and prompt={first}: nothing follows to be "
                    "scored; give a longer text or a smaller prompt"
                )
            logits = self.logits(ids, prompt=first)[first - 1 : -1]
            if not (finite := logits.isfinite().all(-1)).all():
                at = first - 1 + int((~finite).nonzero()[0])
                raise ValueError(
                    f"score: text {i}, position {at}: the replay policy {self._slots['replay']!r} "
                    "dropped that row, or its logits are not finite; try replay='exact'"
                )
            each.append(teacher.score(logits, ids, first, self._shared.tokenizer))
        return teacher.Scores(tuple(each), self._provenance())

    # -------------------------------------------------------------------------------- inspection

    def trace(
        self, *patterns: str, edit: Callable | None = None, keep: Callable | None = None
    ) -> Trace:
        """A context manager that records values whose names match (shell patterns, see trace_names).

        edit(x, at) gets a copy of x and returns what to put in its place (same shape), or None to
        leave it; at has .name .request .position .step. keep(at) -> [rows] bool: the rows to record.
        Raises KeyError for a pattern that matches no name, with the nearest ones.
        """
        from deepinfer.measure.trace import Trace

        return Trace(self, patterns or ("*",), edit, keep)

    def trace_names(self) -> list[str]:
        """Every name that can be traced, in the order of the walk."""
        from deepinfer.measure.trace import trace_names

        return trace_names(self.config, self._slots["verifier"].max_draft > 0)

    def _tap(self, request_ids: list[int]):
        if not self._traces:
            return None
        requests = torch.tensor(request_ids, dtype=torch.long, device=self._shared.model.device)

        def tap(name: str, x: Tensor, rows) -> Tensor:
            for trace in list(self._traces):
                x = trace.see(name, x, rows, requests, self._steps)
            return x

        return tap

    # -------------------------------------------------------------------------------- life cycle

    @property
    def runtime(self) -> Runtime:
        """This engine's own parts, opened: scheduler, cache, pools, slot copies, limits. Made at first
        use. Raises RuntimeError after close()."""
        if self._closed:
            raise RuntimeError("this engine is closed: make another, or eng.with_() over the same weights")
        if self._runtime is None:
            self._runtime = Runtime(self._shared.model, self._settings, self._started, self._limits)
        return self._runtime

    def close(self) -> None:
        """Free the cache and drop unfinished requests. The weights live while another engine uses them."""
        self._runtime = None
        self._requests.clear()
        self._closed = True

    def __copy__(self) -> Engine:
        raise TypeError("a copy would share cache and requests: use eng.with_(), which shares the weights alone")

    def __deepcopy__(self, memo: Any) -> Engine:
        return self.__copy__()

    def __reduce__(self) -> Any:
        raise TypeError(
            "an engine cannot be pickled: in the other process make one from eng.source with eng.settings"
        )

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        from deepinfer.display.engine import engine_text

        return engine_text(self)

    def _repr_html_(self) -> str:
        from deepinfer.display.engine import engine_html

        return engine_html(self)


# ---------------------------------------------------------------------------------- small helpers


def params_list(params, sampling: Any, n: int) -> list[SamplingParams]:
    """One SamplingParams per prompt. ValueError when both forms are given or the count differs."""
    if params is not None and sampling:
        raise ValueError(f"params and {', '.join(sampling)} were both given: put the fields into SamplingParams")
    if params is None:
        params = SamplingParams(**sampling)
    if isinstance(params, SamplingParams):
        return [params] * n
    each = list(params)
    if len(each) != n or not all(isinstance(p, SamplingParams) for p in each):
        raise ValueError(f"params: {len(each)} for {n} prompts; give one SamplingParams, or one per prompt")
    return each


def require_timeout(timeout: float) -> float:
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout >= 0:
        raise ValueError(f"timeout={timeout!r}: want None or seconds >= 0")
    return float(timeout)


def failed(index: int, error: Exception) -> Completion:
    """The Completion of a prompt that never became a request."""
    return Completion(index, (), (), "", "error", (), (), error)
