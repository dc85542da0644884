"""The documented DEEPINFER_* variables: what each becomes here, or why it is refused.

One table, `VARIABLES`. A variable is one of
    field      it becomes a field of EngineConfig
    drafts     it becomes the verifier slot
    context    it becomes a setting of the scheduler
    already    what it asks for holds here anyway (a value for which it does not hold is refused)
    elsewhere  DeepInfer's engine does not read it either (scripts, logs, tests)
    refused    only its default is accepted: what it would need is said
Nothing is read before `read` is called and nothing is kept. The display variables of this package
(DI_DISPLAY) have another prefix and are not settings of an engine.

Source of names, types and defaults: DeepInfer 0.1.0, environ.py.
"""

from __future__ import annotations

import difflib
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from deepinfer.engine.keywords import NEAR

if TYPE_CHECKING:
    from deepinfer.tables.table import Table

PREFIX = "DEEPINFER_"
FALSE = ("0", "", "false", "False")
LIKE_NO = ("0", "", "false", "f", "no", "n", "off", "none", "null", "disable", "disabled")
RULE = "a bool is false for 0, false, False and an empty text, and true for every other"
DRAFTS = 5  # DeepInfer's USE_NEXTN_DECODE where it is not set


# ------------------------------------------------------------------------------------ conversions


def boolean(text: str) -> bool:
    """DeepInfer's rule: false for "0", "", "false" and "False", true for anything else."""
    return text not in FALSE


def mistaken(text: str) -> bool:
    """Whether a text looks like a no and counts as true: `no`, `off`, `FALSE`, ` 0`."""
    return boolean(text) and text.strip().lower() in LIKE_NO


def real(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text!r} is not a finite number")
    return value


def reals(text: str) -> tuple[float, ...]:
    """A number, or a list of them with commas between."""
    return tuple(real(part) for part in text.split(","))


def optional(convert: Callable[[str], Any]) -> Callable[[str], Any]:
    """An empty value means: not set."""
    return lambda text: convert(text) if text else None


def one_of(*names: str) -> Callable[[str], str]:
    def choose(text: str) -> str:
        if text not in names:
            raise ValueError(f"found {text!r}; allowed: {', '.join(map(repr, names))}")
        return text

    return choose


CONVERT: dict[str, Callable[[str], Any]] = {
    "bool": boolean,
    "int": int,
    "float": real,
    "str": str,
    "int or unset": optional(int),
    "str or unset": optional(str),
    "float or list": reals,
    "nvidia | ascend": one_of("nvidia", "ascend"),
    "off | mask | compact": one_of("off", "mask", "compact"),
}


# ---------------------------------------------------------------------------------------- the rows


@dataclass(frozen=True)
class Variable:
    """One documented variable. name: without the prefix; default: DeepInfer's, converted; becomes:
    the field of EngineConfig, or the slot, where there is one; note: what that does, or what it
    would need; holds(value, drafts): whether `already` is true of a value."""

    name: str
    kind: str
    default: Any
    use: str
    note: str
    becomes: str = ""
    holds: Callable[[Any, int], bool] = lambda value, drafts: True

    @property
    def full(self) -> str:
        return PREFIX + self.name

    def convert(self, text: str) -> Any:
        """The value of a text. ValueError starts with the variable's name."""
        try:
            return CONVERT[self.kind](text)
        except ValueError as error:
            raise ValueError(f"{self.full}={text!r}: a value is {self.kind}: {error}") from None


def _field(name: str, kind: str, default: Any, becomes: str, note: str) -> Variable:
    return Variable(name, kind, default, "field", note, becomes)


def _already(name: str, kind: str, default: Any, note: str, holds=lambda v, n: True) -> Variable:
    return Variable(name, kind, default, "already", note, holds=holds)


def _elsewhere(name: str, note: str) -> Variable:
    return Variable(name, "str or unset", None, "elsewhere", note)


def _refused(name: str, kind: str, default: Any, note: str) -> Variable:
    return Variable(name, kind, default, "refused", note)


_GPUS = "needs several GPUs and expert parallelism, which this engine does not have"
_BALANCE = "needs experts spread over devices; this engine holds every expert on one"
_NO_GRAPHS = "no step is captured as a graph here"
_IMAGES = "needs the image tower in the engine, which takes text only"
_GRAMMAR = "no grammar compiler is part of the package yet; see the grammar slot"
_BALLOT = "needs the data-parallel votes; a single engine prefills when something waits"
_LOGS = "this engine writes no log lines; read eng.stats"
_PROFILE = "not built in; use torch.profiler around eng.step()"
_NO_COSTS = "step costs are not measured and cached; a verifier brings its own cost curve"

VARIABLES: tuple[Variable, ...] = (
    # what the hardware is
    _refused("ACCELERATOR", "nvidia | ascend", "nvidia", "needs an Ascend device"),
    _refused("JIT_CACHE_DIR", "str or unset", None, "kernels are not cached on disk"),
    _refused("NCCL_NUM_SMS", "int", 32, _GPUS),
    _refused("USERBUFFER_COMM_SMS", "int", 0, _GPUS),
    _refused("GLOO_TIMEOUT", "float", 14400.0, "needs several processes"),
    _refused("NCCL_MEMORY_SAMPLE_INTERVAL_STEPS", "int", 1000, _GPUS),
    # experts
    _refused("REARRANGE_P2P_GROUPS", "int", 1, _BALANCE),
    _refused("OVERRIDE_NUM_EXTRA_EXPERTS", "int", 0, _BALANCE),
    _refused("EXPERT_COUNT_WINDOW_SIZE", "int", 100, _BALANCE),
    _refused("EXPERT_REARRANGEMENT_STEP_INTERVAL", "int", 0, _BALANCE),
    _refused("REARRANGE_AFTER_PREFILL_IN_NORMAL_ENGINE", "bool", False, _BALANCE),
    _refused("MOE_LB_STAT_INTERVAL", "int", 128, _BALANCE),
    _refused("FORCE_IMBALANCE_RATIO", "float", 0.0, "write an experts variant for it"),
    _refused("FORCE_LOAD_BALANCE", "bool", False, "write an experts variant for it"),
    _refused("SHOW_EPLB_DETAIL", "bool", False, _BALANCE),
    # steps
    _field(
        "PREFILL_MAX_SUM_SEQLEN_K",
        "int or unset",
        None,
        "max_context",
        "most context of a prefill step, in tokens",
    ),
    _refused("PREFILL_ATTEMPT_INTERVAL", "int", 70, _BALLOT),
    _refused("PREFILL_ANY_ATTEMPT_INTERVAL", "int", 100, _BALLOT),
    _refused("NUM_STATE_SLOTS_RATIO", "float", 1.2, "there is one state slot a sequence"),
    _field(
        "ZERO_OVERHEAD_SCHEDULING",
        "bool",
        False,
        "overlap",
        "di.LLM: on unless this says 0; launches a step before the last one is read",
    ),
    _refused("GC_INTERVAL_STEP", "int", 1000, "Python collects its garbage when it likes; see gc"),
    _refused("RINGBUFFER_WARNING_INTERVAL", "int", 60, "needs several processes"),
    _refused("LOGGING_INTERVAL_STEP", "int", 100, _LOGS),
    # drafts
    Variable(
        "USE_NEXTN_DECODE",
        "int",
        DRAFTS,
        "drafts",
        "most drafted tokens a step: verifier=Fixed(n), 0 is 'off'",
        "verifier",
    ),
    _refused(
        "ENABLE_MTP_VARLEN",
        "bool",
        False,
        "needs a verifier that schedules by confidence; so far 'off' and 'fixed'",
    ),
    _already(
        "MAX_BACKTRACKING_TOKENS",
        "int",
        DRAFTS + 1,
        "rings step back by the drafts and one token; more is refused",
        lambda value, drafts: value <= drafts + 1,
    ),
    _refused(
        "DFLASH_CONFIDENCE_HEAD_TEMPERATURE",
        "float or list",
        (1.0,),
        "needs a verifier that schedules by confidence; so far 'off' and 'fixed'",
    ),
    _refused("DECODE_PERF_CACHE_DIR", "str or unset", None, _NO_COSTS),
    _refused("DECODE_PERF_CACHE_TTL_SEC", "int", 3600, _NO_COSTS),
    # model
    _refused(
        "INDEX_ATTN_MEMORY_LIMIT",
        "int",
        10 * 2**30,
        "index scores are not split by a memory limit; lower max_num_batched_tokens",
    ),
    _refused("ENGRAM_PAD_TOKEN", "int", 2, "it is engram_pad_token_id in config.json"),
    _already("ENGRAM_FORCE_GPU_STORAGE", "bool", False, "n-gram tables lie where the weights lie"),
    Variable(
        "YOCO_PREFILL_TRUNCATION_MODE",
        "off | mask | compact",
        "off",
        "truncation",
        "which prompt rows reach the decoder layers: replay=Bounded(mode=...), off is 'exact'",
        "replay",
    ),
    Variable(
        "YOCO_PREFILL_KEEP_TOKENS",
        "int",
        0,
        "truncation",
        "replay=Bounded(keep=n), at least window + backtracking; unused where the mode is off",
        "replay",
    ),
    _field(
        "BATCH_INVARIANT",
        "bool",
        False,
        "batch_invariant",
        "bits that do not depend on the batch (on a CPU so far)",
    ),
    _refused("PREFILL_STORE_EXTRA_STATE", "bool", False, "needs an external key-value store"),
    _refused("PREFILL_STORE_EXTRA_SIZE", "int", 128, "needs an external key-value store"),
    _already("ENFORCE_EAGER", "bool", False, _NO_GRAPHS),
    _refused("CUDAGRAPH_BATCH_SIZE_INTERVAL", "int", 8, _NO_GRAPHS),
    _already("DFLASH_ENFORCE_EAGER", "bool", False, _NO_GRAPHS),
    _refused("DFLASH_CUDAGRAPH_BATCH_SIZE_INTERVAL", "int", 8, _NO_GRAPHS),
    # sampling
    _refused(
        "COMPUTE_SUM_SMALLER_PROBS",
        "bool",
        False,
        "no sampler returns the mass below a token; use top_logprobs, or one of your own",
    ),
    _refused(
        "SAMPLER_FORCE_TOPK",
        "int",
        0,
        "distributions are kept over the whole vocabulary; use top_k",
    ),
    _refused(
        "DECODE_TOKEN_BLACKLIST",
        "str",
        "",
        "write a sampler or a grammar of your own that never allows those ids",
    ),
    # structured output
    _refused("XGRAMMAR_DEBUG", "bool", False, _GRAMMAR),
    _refused("XGRAMMAR_TIMEOUT", "float", 20.0, _GRAMMAR),
    _refused("XGRAMMAR_DISABLE_CACHE", "bool", False, _GRAMMAR),
    _refused("XGRAMMAR_CACHE_LIMIT_BYTES", "int", 10 * 2**30, _GRAMMAR),
    _refused("SO_BUILDER_CPUS", "int", 4, _GRAMMAR),
    # images
    _refused("USE_MULTIMODAL_POOL", "bool", False, _IMAGES),
    _refused("MULTIMODAL_POOL_SIZE_GB", "int", 8, _IMAGES),
    _refused("MULTI_MODAL_BUFFER_SIZE", "int", 512, _IMAGES),
    _refused("MULTI_MODAL_WORKER_TIMEOUT", "float", 1800.0, _IMAGES),
    # looking inside
    _already("DISABLE_SYNC_GUARD", "bool", False, "no guard watches for waits of the host"),
    _refused("PROFILE_TORCH_CUDA_MEMORY", "str or unset", None, _PROFILE),
    _refused("ENABLE_MEMORY_TRACING", "bool", False, _PROFILE),
    _refused("PROFILE_HTTP_ENABLE", "bool", False, _PROFILE),
    _refused("PROFILE_HTTP_PORT_BASE", "int", 6070, _PROFILE),
    _refused("TORCH_PROFILER_DIR", "str", "/tmp", _PROFILE),
    # read outside environ.py
    _elsewhere("HF_MODEL_DIR", "where DeepInfer's example scripts look for the checkpoint"),
    _elsewhere("CPP_LOG_LEVEL", "log level of its C++ parts, which this package has not"),
    _elsewhere("FUSED_SAMPLE_STRESS_TEST", "its own tests"),
    _elsewhere("FUSED_SAMPLE_DETAIL_LOG", "its own tests"),
)

BY_NAME: dict[str, Variable] = {v.full: v for v in VARIABLES}


# ----------------------------------------------------------------------------------------- reading


@dataclass(frozen=True)
class Found:
    """What an environment says. settings: fields of EngineConfig; drafts: most drafted tokens a
    step; truncation: (mode, prompt rows
    kept) of the replay slot; each None where it is not said; given: 'NAME=text' of each variable
    that is set."""

    settings: dict[str, Any] = field(default_factory=dict)
    drafts: int | None = None
    truncation: tuple[str, int] | None = None
    given: tuple[str, ...] = ()


def read(environ: Mapping[str, str]) -> Found:
    """Every DEEPINFER_* variable of `environ`, converted and checked. Warns where a text that looks
    like a no counts as true.

    Raises ValueError naming the variable: unknown (with the nearest name), a text that is no value
    of it, or a value that this engine cannot give.
    """
    texts = {name: text for name, text in environ.items() if name.startswith(PREFIX)}
    for name in texts:
        if name not in BY_NAME:
            raise ValueError(_unknown(name))
    values = {name: BY_NAME[name].convert(text) for name, text in texts.items()}
    for name, text in texts.items():
        if BY_NAME[name].kind == "bool" and mistaken(text):
            warnings.warn(f"{name}={text!r} counts as true: {RULE}", stacklevel=3)
    drafts = _at_least(0, values, "USE_NEXTN_DECODE")
    _at_least(1, values, "PREFILL_MAX_SUM_SEQLEN_K")
    for name, value in values.items():
        _check(BY_NAME[name], value, DRAFTS if drafts is None else drafts)
    fields = {n: v.becomes for n, v in BY_NAME.items() if v.use == "field"}
    settings = {fields[n]: value for n, value in values.items() if n in fields}
    given = tuple(f"{name}={text}" for name, text in sorted(texts.items()))
    return Found(settings, drafts, _truncation(values), given)


def _truncation(values: Mapping[str, Any]) -> tuple[str, int] | None:
    """The mode and the rows kept. Whether they are enough for a model its engine says."""
    mode = values.get(PREFIX + "YOCO_PREFILL_TRUNCATION_MODE")
    keep = _at_least(0, values, "YOCO_PREFILL_KEEP_TOKENS") or 0
    if mode in ("mask", "compact") and not keep:
        raise ValueError(
            f"{PREFIX}YOCO_PREFILL_TRUNCATION_MODE={mode} needs "
            f"{PREFIX}YOCO_PREFILL_KEEP_TOKENS: window + backtracking or more (134 for the "
            "release; published runs use 140)"
        )
    return None if mode is None else (mode, keep)


def _at_least(least: int, values: Mapping[str, Any], name: str) -> int | None:
    value = values.get(PREFIX + name)
    if value is not None and value < least:
        raise ValueError(f"{PREFIX}{name}={value}: want {least} or more")
    return value


def _check(variable: Variable, value: Any, drafts: int) -> None:
    """Raise ValueError for what this engine cannot give."""
    if variable.kind == "float or list" and len(value) not in (1, drafts):
        raise ValueError(
            f"{variable.full} has {len(value)} values: one, or one for each of {drafts} drafts"
        )
    if variable.use == "refused":
        same = value == variable.default or (
            isinstance(value, tuple) and set(value) == set(variable.default)
        )
    else:
        same = variable.holds(value, drafts)
    if not same:
        raise ValueError(
            f"{variable.full}={value!r} (default {variable.default!r}) is not available: "
            f"{variable.note}. Unset it"
        )


def _unknown(name: str) -> str:
    names = [v.name for v in VARIABLES]
    close = difflib.get_close_matches(name.removeprefix(PREFIX), names, 1, NEAR)
    listed = "EngineConfig.environment() lists those there are"
    hint = f"did you mean {PREFIX}{close[0]}?" if close else listed
    return f"{name}: no such variable is documented; {hint}"


def table() -> Table:
    """One row per documented variable: what it becomes here, or what a refusal says. The defaults
    are DeepInfer's."""
    from deepinfer.tables.table import Table

    rows = [
        dict(variable=v.name, here=_here(v), note=v.note, default=_shown(v.default), type=v.kind)
        for v in VARIABLES
    ]
    title = f"{PREFIX}... variables of DeepInfer 0.1.0 and what they become here; {RULE}"
    return Table(rows, title=title)


def _here(variable: Variable) -> str:
    words = {"refused": "default only", "already": "already so", "elsewhere": "not read"}
    return words.get(variable.use, variable.becomes)


def _shown(default: Any) -> str:
    return ",".join(map(str, default)) if isinstance(default, tuple) else str(default)
