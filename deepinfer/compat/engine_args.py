"""DeepInfer's EngineArgs: names, defaults, and what each becomes for `di.LLM`.

Source of names, defaults and rules: DeepInfer 0.1.0, engine/arg_utils.py and entrypoints/llm.py.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deepinfer.compat import environment
from deepinfer.config import EngineConfig, ModelConfig
from deepinfer.engine.keywords import NEAR
from deepinfer.engine.scheduling.scheduler import DecodeOrder
from deepinfer.engine.sizing import DEFAULT_MODEL_LEN
from deepinfer.slots.protocols import SLOTS
from deepinfer.slots.replay import Bounded
from deepinfer.slots.verifier import Fixed

if TYPE_CHECKING:
    from deepinfer.tables.table import Table

LEAST_ROWS = 4096  # of max_num_batched_tokens where it is not given
BLOCK = 128  # tokens_per_block always resolves to this


@dataclass(frozen=True)
class Argument:
    """One documented argument. default: that of DeepInfer's LLM; used: it changes this engine;
    also: other values that ask for what holds here anyway; note: what it becomes, or would need."""

    name: str
    default: Any
    used: bool
    note: str
    also: tuple[Any, ...] = ()

    def check(self, value: Any) -> None:
        """Raise ValueError for a value that this engine cannot give."""
        if self.used:
            return
        if not any(type(value) is type(v) and value == v for v in (self.default, *self.also)):
            raise ValueError(
                f"LLM({self.name}={value!r}) is not available (default {self.default!r}): "
                f"{self.note}"
            )


def _used(name: str, default: Any, note: str) -> Argument:
    return Argument(name, default, True, note)


def _refused(name: str, default: Any, note: str, *also: Any) -> Argument:
    return Argument(name, default, False, note, also)


_PARALLEL = "needs several devices; this engine runs on one"
_HUB = "give the folder of the snapshot you want as model"

ARGUMENTS: tuple[Argument, ...] = (
    _used("seed", 0, "the engine's seed"),
    _used("max_model_len", None, "tokens of prompt and output; None: 4096"),
    _used("max_num_seqs", 256, "sequences of a step"),
    _used(
        "max_num_batched_tokens",
        None,
        "rows of a step; None: max(max_model_len, 4096, max_num_seqs * (1 + drafts))",
    ),
    _used("chunked_prefill", False, "False wants max_num_batched_tokens >= max_model_len"),
    _used("tokens_per_block", -1, "page_size; -1: the model's window, 128 for the release; or 128"),
    _used("stop_preempted_request", False, "True ends a preempted request"),
    _refused("served_model_name", "deepinfer-model", "there is no server that would show it"),
    _refused("trust_remote_code", False, "no code of a checkpoint is ever run", True),
    _refused("load_format", "auto", "random weights: pass di.Engine.tiny() as model"),
    _refused("data_parallel_size", 0, _PARALLEL, 1),
    _refused("context_parallel_size", 1, _PARALLEL),
    _refused("expert_parallel_size", 1, _PARALLEL),
    _refused("engram_parallel_size", 0, _PARALLEL, 1),
    _refused("engine_rank", 0, _PARALLEL),
    _refused("engine_group_rank", 0, _PARALLEL),
    _refused("gpu_memory_utilization", 0.9, "memory is not profiled; num_pages sizes the cache"),
    _refused("disable_log_stats", True, "no log lines are written; read llm.engine.stats"),
    _refused("revision", None, _HUB),
    _refused("tokenizer_revision", None, _HUB),
    _refused("engine_type", 0, "prefill and decode run in one engine", "NORMAL"),
    _refused("ignore_len", 128 * 2**20, "a prompt is refused where it exceeds max_model_len"),
    _refused("lookahead_tokens", 0, "a chunk may be of any length"),
    _refused("offline_inference", True, "there is no server"),
)

BY_NAME = {a.name: a for a in ARGUMENTS}
_OURS = {f.name for f in dataclasses.fields(EngineConfig)} | set(SLOTS)


def engine_keywords(
    given: Mapping[str, Any], found: environment.Found, config: ModelConfig
) -> dict[str, Any]:
    """Slots and settings of the engine that the arguments and the environment ask for.

    An argument goes before a variable, a variable before DeepInfer's default. Besides DeepInfer's
    arguments, every slot and setting of an Engine is taken under its own name.
    Raises TypeError for an unknown name, ValueError for a value that cannot be had.
    """
    for name, value in given.items():
        if name in BY_NAME:
            BY_NAME[name].check(value)
        elif name not in _OURS:
            raise TypeError(_unknown(name))
    args = {a.name: a.default for a in ARGUMENTS if a.used} | dict(given)
    chosen: dict[str, Any] = {"overlap": True, **found.settings}
    chosen |= {n: v for n, v in given.items() if n in _OURS}
    if "scheduler" in given and args["stop_preempted_request"]:
        raise ValueError(
            f"LLM(stop_preempted_request=True, scheduler={given['scheduler']!r}): give one of "
            "them, e.g. scheduler=DecodeOrder(stop_preempted=True)"
        )
    chosen.setdefault("verifier", _verifier(found.drafts, config))
    chosen.setdefault("scheduler", _scheduler(args, found, config))
    if found.truncation is not None:
        chosen.setdefault("replay", _replay(*found.truncation))
    chosen |= {n: args[n] for n in ("seed", "max_model_len", "max_num_seqs")}
    chosen["page_size"] = _page_size(args["tokens_per_block"], chosen.get("page_size"))
    chosen["max_num_batched_tokens"] = _rows(args, _drafts(chosen["verifier"], config), config)
    return chosen


def _verifier(drafts: int | None, config: ModelConfig) -> Any:
    """DeepInfer drafts 5 tokens a step; a model that drafts fewer (none) is taken at its most."""
    n = min(environment.DRAFTS, config.max_draft) if drafts is None else drafts
    return Fixed(n) if n else "off"


def _replay(mode: str, keep: int) -> Any:
    """DeepInfer's decoder side. 'off' is its default; published runs are 'compact', 140."""
    return "exact" if mode == "off" else Bounded(keep, mode)


def _scheduler(args: Mapping[str, Any], found: environment.Found, config: ModelConfig) -> Any:
    """DeepInfer's order of decode. ValueError where a prompt may have more context than a step."""
    if not isinstance(args["stop_preempted_request"], bool):
        given = args["stop_preempted_request"]
        raise ValueError(f"LLM(stop_preempted_request={given!r}): True or False")
    most, limit = found.settings.get("max_context"), _model_len(args, config)
    if most is not None and isinstance(limit, int) and most < limit:
        raise ValueError(
            f"{environment.PREFIX}PREFILL_MAX_SUM_SEQLEN_K={most} is less than max_model_len="
            f"{limit}: a long prompt would never fit; raise it, or lower max_model_len"
        )
    return DecodeOrder(stop_preempted=True) if args["stop_preempted_request"] else "decode_order"


def _model_len(args: Mapping[str, Any], config: ModelConfig) -> Any:
    length = args["max_model_len"]
    return min(DEFAULT_MODEL_LEN, config.max_position_embeddings) if length is None else length


def _drafts(verifier: Any, config: ModelConfig) -> int:
    """Drafted tokens a step, for the rows; at most the model's for a verifier given by name."""
    if isinstance(verifier, str):
        return 0 if verifier == "off" else config.max_draft
    return min(getattr(verifier, "max_draft", config.max_draft), config.max_draft)


def _page_size(block: Any, page_size: int | None) -> int | None:
    if block not in (-1, BLOCK) or isinstance(block, bool):
        raise ValueError(
            f"LLM(tokens_per_block={block!r}) is not available: it is -1 or {BLOCK} in DeepInfer; "
            "page_size=... takes other sizes"
        )
    if block == BLOCK and page_size not in (None, BLOCK):
        both = f"LLM(tokens_per_block={BLOCK}, page_size={page_size!r})"
        raise ValueError(f"{both}: give one of them")
    return BLOCK if block == BLOCK else page_size


def _rows(args: Mapping[str, Any], drafts: int, config: ModelConfig) -> Any:
    """Rows of a step. ValueError where a prompt that may not be split does not fit into one."""
    length, rows = _model_len(args, config), args["max_num_batched_tokens"]
    if rows is None:  # the engine checks the numbers themselves
        numbers = [length, LEAST_ROWS]
        if isinstance(args["max_num_seqs"], int):
            numbers.append(args["max_num_seqs"] * (1 + drafts))
        return max(n for n in numbers if isinstance(n, int))
    if not isinstance(args["chunked_prefill"], bool):
        raise ValueError(f"LLM(chunked_prefill={args['chunked_prefill']!r}): True or False")
    fits = not (isinstance(rows, int) and isinstance(length, int)) or rows >= length
    if not args["chunked_prefill"] and not fits:
        raise ValueError(
            f"LLM(max_num_batched_tokens={rows}) is less than max_model_len={length}: a long "
            "prompt would not fit into one step; give chunked_prefill=True, or raise the one, or "
            "lower the other"
        )
    return rows


def _unknown(name: str) -> str:
    known = [*BY_NAME, *sorted(_OURS)]
    close = difflib.get_close_matches(name, known, 1, NEAR)
    hint = f"did you mean {close[0]!r}?" if close else "LLM.arguments() lists DeepInfer's"
    return f"LLM has no argument {name!r}: {hint}"


def table() -> Table:
    """One row per documented argument: its default and what it becomes, or why it is refused."""
    from deepinfer.tables.table import Table

    rows = [
        dict(
            argument=a.name,
            default=repr(a.default),
            here="used" if a.used else " or ".join(["default only", *map(repr, a.also)]),
            note=a.note,
        )
        for a in ARGUMENTS
    ]
    title = "arguments of DeepInfer's LLM and EngineArgs, and what they become here"
    return Table(rows, title=title)
