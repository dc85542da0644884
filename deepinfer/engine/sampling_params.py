"""SamplingParams: how one request is sampled. Checked when made, so a bad value costs no step."""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import numbers
import reprlib
import time
from dataclasses import dataclass, fields
from typing import Any, NoReturn, TypedDict

from deepinfer.engine.keywords import NEAR, Kept, Word
from deepinfer.rng import GREEDY_BELOW

LARGEST_TOP_K = 2**31 - 1

# Names that other engines have, and what to do here instead.
NOT_YET: dict[str, str] = {
    "n": "pass the prompt n times with n seeds",
    "best_of": "pass the prompt several times with several seeds and choose by .logprobs",
    "min_p": "use top_p or top_k, or a sampler of your own (di.sampler.register)",
    "presence_penalty": "write a sampler of your own (di.sampler.register)",
    "frequency_penalty": "write a sampler of your own (di.sampler.register)",
    "repetition_penalty": "write a sampler of your own (di.sampler.register)",
    "logit_bias": "write a sampler of your own (di.sampler.register)",
    "stop": "cut the text at the string, or stop by eng.stream and eng.abort",
    "stop_token_ids": "stop by eng.stream and eng.abort",
    "min_tokens": "use ignore_eos with max_tokens",
    "golden_token_ids": "use eng.logits(ids, prompt=n), which feeds given outputs",
    "first_n_token_no_eos": "use ignore_eos",
    "so_args": "use grammar=",
    "logprobs": "leave it out: the log-probability of each token is always returned; "
    "use top_logprobs for more",
    "seq_seed": "use seed",
}


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling of one request. All fields are keywords.

    temperature: >= 0; below 1e-5 is greedy (most likely token, ties to the lowest id; top_p and
    top_k then change nothing). top_p in (0, 1]: the most likely tokens are kept while the mass
    before them is <= top_p. top_k: -1 (off) or >= 1, applied after top_p; more than the vocabulary
    is no filter. max_tokens: most tokens generated, >= 1. ignore_eos: go on past the end token.
    top_logprobs: how many of the most likely tokens to report at each output position.
    prompt_logprobs: report the log-probability of each prompt token. seed: 0..2**64-1, or None for
    one drawn from the engine's own seed. grammar: a spec for the engine's grammar slot, or None.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int = 64
    ignore_eos: bool = False
    top_logprobs: int = 0
    prompt_logprobs: bool = False
    seed: int | None = None
    grammar: Any = None

    def __post_init__(self) -> None:
        self._real("temperature", 0.0, math.inf, "a finite number >= 0 (0 = greedy)", open_top=True)
        self._real("top_p", 0.0, 1.0, "a number in (0, 1] (1 = off)", open_bottom=True)
        self._integer("top_k", 1, LARGEST_TOP_K, "-1 (off) or an integer >= 1", also=-1)
        self._integer("max_tokens", 1, LARGEST_TOP_K, "an integer >= 1")
        self._integer("top_logprobs", 0, LARGEST_TOP_K, "an integer >= 0")
        if self.seed is not None:
            self._integer("seed", 0, 2**64 - 1, "None or an integer in 0..2**64-1")
        for name in ("ignore_eos", "prompt_logprobs"):
            if not isinstance(getattr(self, name), bool):
                self._refuse(name, "True or False")

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    def validate_for(self, vocab_size: int) -> SamplingParams:
        """Raise ValueError where a field does not fit a vocabulary of this size; return self."""
        if self.top_logprobs > vocab_size:
            raise ValueError(
                f"SamplingParams(top_logprobs={self.top_logprobs}): the vocabulary has "
                f"{vocab_size} tokens; "
                f"ask for at most {vocab_size}"
            )
        return self

    # ------------------------------------------------------------------------------- the checks

    def _real(
        self,
        name: str,
        low: float,
        high: float,
        want: str,
        open_bottom: bool = False,
        open_top: bool = False,
    ) -> None:
        x = getattr(self, name)
        if isinstance(x, bool) or not isinstance(x, numbers.Real):
            self._refuse(name, want)
        try:
            x = float(x)
        except OverflowError:  # an integer or a fraction above every float
            self._refuse(name, want)
        above = x > low if open_bottom else x >= low
        below = x < high if open_top else x <= high
        if not (above and below):  # NaN fails both
            self._refuse(name, want)
        object.__setattr__(self, name, x)

    def _integer(self, name: str, low: int, high: int, want: str, also: int | None = None) -> None:
        x = getattr(self, name)
        if isinstance(x, bool) or not isinstance(x, numbers.Integral):
            self._refuse(name, want)
        whole = int(x)
        if not (low <= whole <= high or whole == also):
            self._refuse(name, want)
        object.__setattr__(self, name, whole)

    def _refuse(self, name: str, want: str) -> NoReturn:
        x = getattr(self, name)
        raise ValueError(
            f"SamplingParams({name}={x!r}): {name} must be {want}, got {type(x).__name__} {x!r}"
        )


def _with_named_refusals(cls: type) -> type:
    """Make an unknown keyword say what to do, instead of the constructor's bare TypeError."""
    build, known = cls.__init__, [f.name for f in fields(cls)]

    @functools.wraps(build)
    def __init__(self: Any, *args: Any, **given: Any) -> None:
        if args:
            raise TypeError(
                f"SamplingParams takes keywords only, e.g. SamplingParams(temperature={args[0]!r})"
            )
        for name in given:
            if name not in known:
                raise TypeError(_unknown(name, known))
        build(self, **given)

    __init__.__signature__ = inspect.signature(build)
    cls.__init__ = __init__
    return cls


def _unknown(name: str, known: list[str]) -> str:
    if name in NOT_YET:
        return f"SamplingParams has no {name!r} yet: {NOT_YET[name]}"
    close = difflib.get_close_matches(name, known, 1, NEAR)
    hint = f"did you mean {close[0]!r}?" if close else f"the fields are {', '.join(known)}"
    return f"SamplingParams has no field {name!r}: {hint}"


_with_named_refusals(SamplingParams)


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


SAMPLING: dict[str, object] = {f.name: f.default for f in fields(SamplingParams)}
FORKED = Kept(seed=Word("new"))  # of a fork, whose request has its own already


def params_list(params: Any, sampling: Any, n: int) -> list[SamplingParams]:
    """One SamplingParams per prompt. ValueError when both forms are given or the count differs,
    TypeError for what is no SamplingParams."""
    if params is not None and sampling:
        names = ", ".join(sampling)
        raise ValueError(f"params and {names} were both given: put the fields into SamplingParams")
    if params is None:
        params = SamplingParams(**sampling)
    if isinstance(params, SamplingParams):
        return [params] * n
    each = list(params) if isinstance(params, (list, tuple)) else [params]
    for p in each:
        if not isinstance(p, SamplingParams):
            kind = type(p).__qualname__
            if kind == SamplingParams.__name__:  # that of di.LLM, or of another package
                kind = f"{type(p).__module__}.{kind}"
            hint = ": give its items as keywords" if isinstance(p, dict) else ""
            raise TypeError(
                f"params must be SamplingParams, or a list of one per prompt, found {kind} {p!r}{hint}"
            )
    if len(each) != n:
        raise ValueError(
            f"params: {len(each)} for {n} prompts; give one SamplingParams, or one per prompt"
        )
    return each


def require_timeout(timeout: float) -> float:
    """Seconds from now. ValueError for what is no time."""
    number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
    if not number or not timeout >= 0:
        raise ValueError(f"timeout={reprlib.repr(timeout)}: want None or seconds >= 0")
    try:
        return float(timeout)
    except OverflowError:
        raise ValueError(
            "timeout is an integer above every float: want None or seconds >= 0"
        ) from None


def deadline_of(timeout: float | None) -> float | None:
    """The time on the monotonic clock that is so many seconds from now."""
    return None if timeout is None else require_timeout(timeout) + time.monotonic()


def require_salt(salt: str | None) -> str | None:
    """A salt as it was given. TypeError for another type than a string, ValueError for a string with
    a lone surrogate, which has no bytes to make page keys from."""
    if salt is None:
        return None
    if not isinstance(salt, str):
        raise TypeError(f"salt={salt!r}: want None or a string, got {type(salt).__name__}")
    try:
        str.encode(salt)
    except UnicodeEncodeError as error:
        raise ValueError(
            f"salt={salt!r} is not valid Unicode: index {error.start} is the lone surrogate "
            f"{salt[error.start]!r}; remove it"
        ) from None
    return salt
