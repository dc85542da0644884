"""DeepInfer's SamplingParams: its field names, defaults and edge rules, translated to ours.

`di.SamplingParams` is this package's own (seed, grammar, 64 tokens); this one is for `di.LLM` and
is found there as `LLM.SamplingParams`. A value is checked when it is made.

Source of fields and rules: DeepInfer 0.1.0, sampling_params.py.
"""

from __future__ import annotations

import copy
import difflib
import functools
import inspect
import secrets
from dataclasses import dataclass, fields
from typing import Any, NoReturn

import torch
from torch import Tensor

from deepinfer.engine import sampling_params
from deepinfer.engine.keywords import NEAR
from deepinfer.rng import GREEDY_BELOW
from deepinfer.slots.grammar.none import Free

MOST_LOGPROBS = 1000
SEED_BITS = 64
NO_EOS_FIRST = "the first token is not the end token"  # a spec of the grammar slot below

# Documented fields that this engine cannot serve yet: why, and what to do instead.
REFUSED = {
    "so_args": "no grammar compiler is part of the package yet; make the engine with a grammar "
    "slot of your own and pass di.SamplingParams(grammar=...)",
    "golden_token_ids": "given outputs cannot be forced through generate; llm.engine.logits(ids, "
    "prompt=n) and llm.engine.score(texts, prompt=n) feed them",
}


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling of one request, with DeepInfer's fields. All are keywords.

    temperature: below 1e-5 it becomes 1e-5, top_p 1 and top_k -1: greedy, which takes the most
    likely token (DeepInfer draws at 1e-5; the two differ only where logits tie to about 1e-4).
    top_p in (0, 1]; top_k -1 (off) or 1..2**31-1. max_tokens: 0 becomes 1. logprobs: ignored, a
    token's is always returned. prompt_logprobs: False where the replay policy drops rows.
    top_logprobs 0..1000. first_n_token_no_eos: 1 keeps the end token from being the first. eos_id:
    ignored, the model's is used. seq_seed: masked to 64 bits; None is drawn here, once, so requests
    that share one object share its seed. so_args, golden_token_ids: refused so far.
    Raises ValueError for a value, TypeError for a name that is none.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    ignore_eos: bool = False
    max_tokens: int = 16
    logprobs: Any = None
    prompt_logprobs: bool = False
    top_logprobs: int = 0
    first_n_token_no_eos: int = 0
    eos_id: int = 0
    so_args: Any = None
    golden_token_ids: Any = None
    seq_seed: int | None = None

    def __post_init__(self) -> None:
        for name, instead in REFUSED.items():
            if getattr(self, name) is not None:
                raise ValueError(f"SamplingParams({name}=...) is not available: {instead}")
        if isinstance(self.temperature, (int, float)) and self.temperature < GREEDY_BELOW:
            self._set(temperature=GREEDY_BELOW, top_p=1.0, top_k=-1)
        if self.max_tokens == 0 and not isinstance(self.max_tokens, bool):
            self._set(max_tokens=1)
        for name in ("first_n_token_no_eos", "eos_id", "top_logprobs"):
            self._transaction(name)
        if self.first_n_token_no_eos not in (0, 1):
            self._refuse("first_n_token_no_eos", "0 or 1")
        if not 0 <= self.top_logprobs <= MOST_LOGPROBS:
            self._refuse("top_logprobs", f"0..{MOST_LOGPROBS}")
        if self.seq_seed is None:
            self._set(seq_seed=secrets.randbits(SEED_BITS))
        self._set(seq_seed=self._transaction("seq_seed") & (2**SEED_BITS - 1))
        self.translate()  # the other fields have the rules of di.SamplingParams

    def translate(self, exact: bool = True) -> sampling_params.SamplingParams:
        """The same request as di.SamplingParams. exact: the replay policy drops no rows."""
        spec = {"grammar": NO_EOS_FIRST} if self.first_n_token_no_eos else {}
        return sampling_params.SamplingParams(
            temperature=0.0 if self.temperature == GREEDY_BELOW else self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            top_logprobs=self.top_logprobs,
            prompt_logprobs=self.prompt_logprobs and exact,
            seed=self.seq_seed,
            **spec,
        )

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _transaction(self, name: str) -> int:
        value = getattr(self, name)
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            self._refuse(name, "an integer")
        return int(value)

    def _refuse(self, name: str, want: str) -> NoReturn:
        raise ValueError(f"SamplingParams({name}={getattr(self, name)!r}): {name} must be {want}")


def _with_named_refusals(cls: Any) -> None:
    """An unknown keyword is answered with the nearest field, or with what to do instead."""
    build, known = cls.__init__, [f.name for f in fields(cls)]

    @functools.wraps(build)
    def __init__(self: Any, **given: Any) -> None:
        for name in given:
            if name in sampling_params.NOT_YET and name not in known:
                raise TypeError(f"SamplingParams has no {name!r}: {sampling_params.NOT_YET[name]}")
            if name not in known:
                close = difflib.get_close_matches(name, known, 1, NEAR)
                hint = f"did you mean {close[0]!r}?" if close else f"they are {', '.join(known)}"
                raise TypeError(f"SamplingParams has no field {name!r}: {hint}")
        build(self, **given)

    __init__.__signature__ = inspect.signature(build)
    cls.__init__ = __init__


_with_named_refusals(SamplingParams)


# ------------------------------------------------------------------ the end token is not the first


class NoEosFirstState:
    """Where one request stands: `taken` tokens. Their number counts, never which they are."""

    done = False

    def __init__(self, eos: int, vocab: int) -> None:
        self.eos, self.vocab, self.taken = eos, vocab, 0

    def allowed(self) -> Tensor | None:
        if self.taken:
            return None
        mask = torch.ones(self.vocab, dtype=torch.bool)
        mask[self.eos] = False
        return mask

    def accept(self, token: int) -> bool:
        if not self.taken and token == self.eos:
            return False
        self.taken += 1
        return True

    def rollback(self, n: int) -> None:
        self.taken -= n

    def fork(self) -> NoEosFirstState:
        return copy.copy(self)


@dataclass(frozen=True)
class NoEosFirst:
    """A grammar slot with one rule, for requests that ask for it: the first token is not `eos`."""

    eos: int
    version = 1
    exact = True
    batch_invariant = True
    on_device = True  # no state depends on which tokens were drawn

    def compile(self, spec: Any, vocab: Any) -> Any:
        if spec is None:
            return Free()
        if spec != NO_EOS_FIRST:
            raise ValueError(
                f"grammar={spec!r}: di.LLM has no grammar compiler; give it one, "
                "di.LLM(..., grammar=...)"
            )
        return _Compiled(self.eos, len(vocab))


@dataclass(frozen=True)
class _Compiled:
    eos: int
    vocab: int

    def start(self) -> NoEosFirstState:
        return NoEosFirstState(self.eos, self.vocab)
