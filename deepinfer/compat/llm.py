"""LLM: DeepInfer's own entry point, its names, defaults and results, over an Engine.

    llm = di.LLM("path/to/checkpoint", max_num_seqs=64)
    llm.generate(["def add(a, b):"], di.LLM.SamplingParams(temperature=0, max_tokens=32))

Source of arguments, results and their rules: DeepInfer 0.1.0, entrypoints/llm.py,
engine/arg_utils.py and sampling_params.py.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deepinfer.compat import engine_args, environment, sampling_params
from deepinfer.config import ModelConfig
from deepinfer.engine.completion import Completion, Completions
from deepinfer.engine.engine import Engine
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.engine.text import items_of, plain
from deepinfer.slots import registry
from deepinfer.slots.grammar import NoGrammar

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from deepinfer.tables.table import Table

# DeepInfer's names of ends that are called otherwise here
REASONS = {"preempted": "insufficient_system_resource"}


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """One output token, as `generate` returns it with decode_sequence=False.

    token_logprobs: the model's log-probability of the token (temperature 1, after masks).
    top_token_ids, top_logprobs: the most likely tokens, most likely first. num_output_tokens: this
    one included. finish_reason: None before the last. prompt_logprobs: on the first token's output,
    None for the first prompt token. What this engine does not report is None: nextn_logprobs,
    sum_smaller_probs, draft_tok, accept_tok, confidence_score. It stays valid.
    """

    request_id: int
    prompt_len: int
    token_id: int
    finish_reason: str | None
    finished: bool
    token_logprobs: float
    num_output_tokens: int
    top_logprobs: list[float] | None = None
    top_token_ids: list[int] | None = None
    prompt_logprobs: list[float | None] | None = None
    nextn_logprobs: list[float] | None = None
    sum_smaller_probs: float | None = None
    draft_tok: int | None = None
    accept_tok: int | None = None
    confidence_score: list[float] | None = None


class Outputs(list[Any]):
    """What `LLM.generate` returns: out[i], a string or a list of RequestOutput, is of prompt i.

    completions: the same results as the engine reports them. Where a prompt failed, its place holds
    what it had emitted ('' or [] for nothing) and `errors` says why.
    """

    def __init__(self, items: Iterable[Any] = (), completions: Completions | None = None) -> None:
        super().__init__(items)
        self.completions = Completions() if completions is None else completions

    def __repr__(self) -> str:
        """The completions, one line a prompt: a list of RequestOutput is far too long to show."""
        if any(not isinstance(item, str) for item in self):
            return f"{len(self)} lists of RequestOutput, one a token\n{self.completions!r}"
        return super().__repr__()

    def _repr_html_(self) -> str:
        return self.completions._repr_html_()

    @property
    def errors(self) -> dict[int, Exception]:
        """Index of a prompt that failed -> its error."""
        return {i: c.error for i, c in enumerate(self.completions) if c.error is not None}

    def raise_for_errors(self) -> Outputs:
        """Raise the first error (naming the item and how many failed); else return self."""
        self.completions.raise_for_errors()
        return self


class LLM:
    """DeepInfer's face of an Engine: its argument names, defaults and rules, and its results.

    model: a checkpoint folder, a hub id in the local cache, or an Engine, whose weights are shared
    and whose slots and settings stay where no argument, variable or default of DeepInfer says
    otherwise. The rest are DeepInfer's arguments (`LLM.arguments()`) and, under their own names, an
    engine's slots and settings (device, dtype, verifier, ...).
    A DEEPINFER_* variable is read from os.environ now; an argument goes before it. Defaults that
    are not an Engine's: 256 sequences, 5 drafts a step (as many as the model drafts, kept by rule
    'match'), overlap where an engine has it. Precision is an Engine's: see EngineConfig.production.
    Prompt rows are dropped where the YOCO_PREFILL_ variables or replay=di.replay.Bounded() say so.

    decode_sequence: True returns strings, False a list of RequestOutput (one a token) per prompt.
    Raises ValueError naming an argument or variable that cannot be had, TypeError for an unknown
    argument, and what Engine.from_pretrained raises. Usable as a context manager.

    >>> llm = di.LLM(di.Engine.nano(), max_model_len=512)
    >>> llm.generate("def read(path):", di.LLM.SamplingParams(temperature=0))
    """

    SamplingParams = sampling_params.SamplingParams
    RequestOutput = RequestOutput

    def __init__(
        self,
        model: str | os.PathLike[str] | Engine,
        tokenizer: str | None = None,
        trust_remote_code: bool = False,
        expert_parallel_size: int = 1,
        revision: str | None = None,
        tokenizer_revision: str | None = None,
        seed: int = 0,
        gpu_memory_utilization: float = 0.9,
        decode_sequence: bool = True,
        **engine_args: Any,
    ) -> None:
        if tokenizer is not None and str(tokenizer) != str(_source(model)):
            raise ValueError(
                f"LLM(tokenizer={tokenizer!r}) is not available: the tokenizer.json beside the "
                "weights is used; leave it out"
            )
        given = dict(
            trust_remote_code=trust_remote_code,
            expert_parallel_size=expert_parallel_size,
            revision=revision,
            tokenizer_revision=tokenizer_revision,
            seed=seed,
            gpu_memory_utilization=gpu_memory_utilization,
            **engine_args,
        )
        self.decode_sequence = decode_sequence
        self._own_grammar = "grammar" in engine_args
        found = environment.read(os.environ)
        try:
            self.engine = self._make(model, given, found)
        except ValueError as error:
            if found.given:
                error.add_note(f"set by the environment: {', '.join(found.given)}")
            raise
        if decode_sequence:
            self._require_tokenizer()
        self._count = 0

    def _make(self, model: Any, given: dict[str, Any], found: environment.Found) -> Engine:
        if isinstance(model, Engine):
            config = model.config
        else:
            from deepinfer.checkpoint.hub import locate

            config = ModelConfig.from_file(locate(model))
        chosen = engine_args.engine_keywords(given, found, config)
        if not isinstance(model, Engine):
            if not self._own_grammar:
                chosen["grammar"] = sampling_params.NoEosFirst(config.eos_token_id)
            return Engine.from_pretrained(str(model), **chosen)
        if chosen["page_size"] is None and "page_size" not in given:
            chosen["page_size"] = model.settings.page_size
        if not self._own_grammar and type(model.slots["grammar"]) is NoGrammar:
            chosen["grammar"] = sampling_params.NoEosFirst(config.eos_token_id)
        self._own_grammar |= not isinstance(
            chosen.get("grammar", model.slots["grammar"]), sampling_params.NoEosFirst
        )
        return model.with_(**chosen)

    def _require_tokenizer(self) -> None:
        try:
            self.engine.tokenizer
        except ValueError as error:
            raise ValueError(f"{error}, and LLM(decode_sequence=False) for ids back") from None

    @staticmethod
    def arguments() -> Table:
        """Every documented argument: its default, what it becomes here, or why it is refused.
        `.to_text()` has every row and the notes whole."""
        return engine_args.table()

    # ------------------------------------------------------------------------------- generation

    def generate(
        self,
        prompts: str | Sequence[str] | None = None,
        sampling_params: Any = None,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        use_tqdm: bool | None = None,
        multi_modal_data: Any = None,
    ) -> Outputs:
        """Complete prompts; out[i] belongs to prompt i.

        prompts: a string or a list of them; prompt_token_ids: a list of ids or a list of those,
        which go before the strings where both are given. sampling_params: one LLM.SamplingParams
        for all or one per prompt; None is one of defaults (so all share its seed). Also taken:
        di.SamplingParams. use_tqdm: None shows a bar where a person watches.

        Returns a list of strings, or with decode_sequence=False a list of lists of RequestOutput.
        A bad single prompt raises ValueError. In a list it costs its own place: the result has it
        under .errors, with a warning, and the others finish. ValueError for multi_modal_data.
        """
        if multi_modal_data is not None:
            raise ValueError(
                "generate(multi_modal_data=...) is not available: the engine takes text only"
            )
        items, single = _prompts(prompts, prompt_token_ids)
        each = self._params(sampling_params, len(items))
        done = self.engine.generate(items[0] if single else items, each, progress=use_tqdm)
        first, self._count = self._count, self._count + len(done)
        if self.decode_sequence:
            out = Outputs([c.text for c in done], done)
        else:
            out = Outputs([request_outputs(c, first + i) for i, c in enumerate(done)], done)
        _warn(out)
        return out

    def _params(self, given: Any, n: int) -> list[SamplingParams]:
        """One di.SamplingParams per prompt. ValueError for another count, TypeError for a kind."""
        if given is None:
            given = sampling_params.SamplingParams()
        one = isinstance(given, (sampling_params.SamplingParams, SamplingParams))
        want = "sampling_params is one LLM.SamplingParams or a list of them"
        each = [given] * n if one else items_of(given, want)
        if len(each) != n:
            raise ValueError(
                f"sampling_params: {len(each)} for {n} prompts; give one, or one per prompt"
            )
        return [self._translated(p) for p in each]

    def _translated(self, p: Any) -> SamplingParams:
        if isinstance(p, SamplingParams):
            return p
        if not isinstance(p, sampling_params.SamplingParams):
            raise TypeError(
                f"sampling_params: want LLM.SamplingParams, got {type(p).__name__} {p!r}"
            )
        if p.first_n_token_no_eos and self._own_grammar:
            raise ValueError(
                "SamplingParams(first_n_token_no_eos=1) is not available beside a grammar slot of "
                "your own: let that grammar forbid the end token"
            )
        exact = registry.promises(self.engine.slots["replay"], "replay").exact
        if p.prompt_logprobs and not exact:
            warnings.warn(
                f"prompt_logprobs: the replay policy {self.engine.slots['replay']!r} drops rows of "
                "a prompt, so they are None, as in DeepInfer; an engine with replay='exact' has them",
                stacklevel=4,
            )
        return p.translate(exact)

    # ------------------------------------------------------------------------------ what it has

    def get_tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer (a `tokenizers.Tokenizer`). ValueError where it has none."""
        return self.engine.tokenizer

    def close(self) -> None:
        """Free the engine's cache; further calls of generate are refused. Idempotent."""
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"LLM over {self.engine!r}"


# ---------------------------------------------------------------------------------- small helpers


def _source(model: Any) -> Any:
    return model.source if isinstance(model, Engine) else model


def _prompts(prompts: Any, ids: Any) -> tuple[list[Any], bool]:
    """(prompts for the engine, was it a single one)."""
    if prompts is None and ids is None:
        raise ValueError("generate: give prompts (text) or prompt_token_ids")
    texts, single = _texts(prompts)
    if ids is None:
        return texts, single
    rows = items_of(ids, "prompt_token_ids is a list of token ids, or a list of those")
    flat = bool(rows) and not any(hasattr(plain(r), "__iter__") for r in rows)
    rows = [rows] if flat else rows
    if prompts is not None and len(texts) != len(rows):
        raise ValueError(
            f"generate: {len(texts)} prompts and {len(rows)} prompt_token_ids; give as many of each"
        )
    return rows, flat


def _texts(prompts: Any) -> tuple[list[Any], bool]:
    if prompts is None or isinstance(prompts, str):
        return [prompts], True
    texts = items_of(prompts, "prompts is a string or a list of strings")
    if texts and not any(isinstance(t, str) for t in texts):
        kind = type(texts[0]).__name__
        raise ValueError(f"prompts is text, got a list of {kind}: ids go into prompt_token_ids")
    return texts, False


def request_outputs(c: Completion, request_id: int) -> list[RequestOutput]:
    """One RequestOutput per output token of a completion."""
    last = len(c.token_ids) - 1
    reason = REASONS.get(c.finish_reason, c.finish_reason)
    return [
        RequestOutput(
            request_id=request_id,
            prompt_len=len(c.prompt_token_ids),
            token_id=token,
            finish_reason=reason if i == last else None,
            finished=i == last,
            token_logprobs=c.logprobs[i],
            num_output_tokens=i + 1,
            top_logprobs=list(c.top_logprobs[i].values()) if c.top_logprobs else None,
            top_token_ids=list(c.top_logprobs[i]) if c.top_logprobs else None,
            prompt_logprobs=list(c.prompt_logprobs) if c.prompt_logprobs and i == 0 else None,
        )
        for i, token in enumerate(c.token_ids)
    ]


def _warn(out: Outputs) -> None:
    errors = out.errors
    if errors:
        first = min(errors)
        warnings.warn(
            f"{len(errors)} of {len(out)} prompts failed; the first is item {first}: "
            f"{errors[first]} (.errors has all)",
            stacklevel=3,
        )
