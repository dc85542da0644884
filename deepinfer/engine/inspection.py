"""EngineInspection: what an engine is, has and has done, for reading. Only `clear_cache` changes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from deepinfer.checkpoint.tokenizer import is_panic
from deepinfer.config import EngineConfig, ModelConfig
from deepinfer.engine import weights
from deepinfer.engine.background.fair_lock import FairLock, locked
from deepinfer.engine.prefix.report import CacheReport
from deepinfer.engine.provenance import facts_of
from deepinfer.engine.runtime import Runtime
from deepinfer.engine.stats.stats import Stats
from deepinfer.engine.text import check_unicode, token_ids
from deepinfer.slots import registry
from deepinfer.slots.protocols import SLOTS

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from deepinfer.engine.request import Request
    from deepinfer.engine.step.loop import Loop
    from deepinfer.engine.trace import TraceNames
    from deepinfer.tables.table import Table


class EngineInspection:
    """The readable part of an Engine."""

    _shared: weights.Weights
    _settings: EngineConfig
    _slots: dict[str, Any]
    _started: dict[str, Any]
    _runtime: Runtime | None
    _loop: Loop | None
    _closed: bool
    _lock: FairLock

    def _provenance(self) -> dict[str, object]:
        raise NotImplementedError

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
        """Slot name -> the engine's own copy of the object that it was made with."""
        return dict(self._started)

    @property
    def model(self):
        return self._shared.model

    @property
    def tokenizer(self) -> Tokenizer:
        """A copy of the checkpoint's tokenizer (a `tokenizers.Tokenizer`): what is done to it changes
        no engine. Raises ValueError for a checkpoint without one."""
        self._own_tokenizer()
        return self._shared.tokenizer_copy

    def _own_tokenizer(self) -> Tokenizer:
        if self._shared.tokenizer is None:
            raise ValueError(f"{self._shared.source} has no tokenizer.json: pass token ids")
        return self._shared.tokenizer

    @property
    def fingerprint(self) -> str:
        """Identity of config, weights and tokenizer, the same for the same bytes on any machine.

        `+sampled`: files over 64 MiB were read at their ends only (`from_pretrained(verify=True)`
        reads all). `+edited`: weights were changed in place after they were loaded.
        """
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
        """What it counts and how long it took; tables with the engine's facts as provenance."""
        return Stats(facts=facts_of(self)) if self._runtime is None else self._runtime.stats

    @property
    def cache(self) -> CacheReport:
        """The prefix cache in numbers: hits, tokens that were not computed, pages and snapshots
        held, evictions. All 0 without prefix_cache=True. `clear_cache` empties it."""
        prefix_cache = None if self._runtime is None else self._runtime.prefix_cache
        report = CacheReport() if prefix_cache is None else prefix_cache.report()
        return dataclasses.replace(report, facts=facts_of(self))

    @locked
    def clear_cache(self) -> None:
        """Forget every page and snapshot of the prefix cache; what is counted in `cache` counts on.

        An edit of weights in place does this by itself when the next request is admitted; call it
        after writing through `parameter.data`, which no engine can notice, on every engine that
        shares the weights (`with_`). It may come at any time. Requests that run go on in their own pages and leave nothing in the
        cache; after a preemption, and from every later request on, all is computed anew.
        """
        if self._runtime is not None and self._runtime.prefix_cache is not None:
            self._runtime.prefix_cache.clear()

    @property
    def kernels(self) -> Table:
        """What ran: op, implementation, calls."""
        from deepinfer.tables.table import Table

        counts = {} if self._runtime is None else self._runtime.ops.counts
        rows = [dict(op=op, implementation=i, calls=n) for (op, i), n in sorted(counts.items())]
        return Table(rows, provenance=self._provenance())

    @property
    def memory(self) -> Table:
        """Bytes by component: weights (shared between engines) and this engine's cache (0 before the
        first step)."""
        from deepinfer.tables.table import Table

        cache = (
            {"block KV": 0, "state KV": 0} if self._runtime is None else self._runtime.cache.nbytes
        )
        if self._runtime is not None and self._runtime.prefix_cache is not None:
            cache = cache | {"snapshots": self._runtime.prefix_cache.snapshots.nbytes}
        parts = [("weights", k, v) for k, v in self._shared.nbytes.items()]
        parts += [("cache", k, v) for k, v in cache.items()]
        rows = [dict(part=p, component=c, bytes=b) for p, c, b in parts]
        return Table(rows, provenance=self._provenance())

    @property
    def requests(self) -> dict[int, Request]:
        """Requests that are not done with, by id, as they are now; for reading."""
        return {} if self._loop is None else dict(self._loop.requests)

    @property
    def unfinished(self) -> int:
        """Requests waiting or running, or finished with their completion not handed out by `step` yet."""
        return len(self.requests)

    def _known(self, id: int) -> Request:
        """A request by its id. KeyError where it has ended, or never was."""
        requests = {} if self._loop is None else self._loop.requests  # no copy: an abort is O(1)
        if id in requests:
            return requests[id]
        there = (
            f"those that are: {', '.join(map(str, sorted(requests)))}" if requests else "none is"
        )
        if isinstance(id, int) and 0 <= id < (0 if self._loop is None else self._loop._count):
            raise KeyError(
                f"no request {id}: it has ended and was handed out or aborted; {there} here now"
            )
        raise KeyError(f"no request {id!r} is waiting or running; {there}")

    def encode(self, text: str, bos: bool = True) -> list[int]:
        """Token ids of raw text, with bos in front unless told otherwise; no chat template.

        ValueError for what is no text (bytes, None, a string with a lone surrogate) and for a text
        that the tokenizer gives up on.
        """
        if not isinstance(text, str):
            raise ValueError(f"encode takes one string, got {type(text).__name__}")
        check_unicode(text)
        tokenizer = self._own_tokenizer()
        try:
            ids = token_ids(tokenizer, text)
        except BaseException as error:
            if not isinstance(error, Exception) and not is_panic(error):
                raise  # an interrupt
            raise ValueError(
                f"the tokenizer of {self._shared.source} cannot encode this text ({error}): "
                "shorten it, or pass token ids"
            ) from None
        return [self.config.bos_token_id, *ids] if bos else ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids; special tokens are left out."""
        return self._own_tokenizer().decode(list(ids), skip_special_tokens=True)

    def trace_names(self) -> TraceNames:
        """Every name that can be traced, in the order of the walk."""
        from deepinfer.engine.trace import trace_names

        return trace_names(self.config, self._started["verifier"].max_draft > 0)

    def __copy__(self) -> NoReturn:
        raise TypeError(
            "a copy would share cache and requests: use eng.with_(), which shares the weights alone"
        )

    def __deepcopy__(self, memo: Any) -> NoReturn:
        self.__copy__()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an engine cannot be pickled: in the other process make one from eng.source with eng.settings"
        )

    def __repr__(self) -> str:
        from deepinfer.display.engine import engine_text

        return engine_text(self)

    def _repr_html_(self) -> str:
        from deepinfer.display.engine import engine_html

        return engine_html(self)
