"""EngineConfig: how a model is served. A frozen keyword-only dataclass, checked when it is made."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from deepinfer.config.base import Config

if TYPE_CHECKING:
    from deepinfer.tables.table import Table


@dataclass(frozen=True, kw_only=True)
class EngineConfig(Config):
    """How a model is served. None means: chosen by the engine, which says what it chose.

    device: "auto", "cpu", "cuda", "cuda:1", ...; dtype: "float32", "bfloat16" or "float64" (None:
    float32 on a CPU, bfloat16 elsewhere). fidelity: 0 no fake quantisation, 1 the model's own cache
    roundings, 2 with activation rounding. Lengths and batch sizes are in tokens and sequences,
    page_size in tokens (None: the window). max_context: most summed context length of a prefill
    step (None: no limit; one prompt always runs). packed_cache: store cache records as bytes (None: off on
    a CPU). prefix_cache: reuse the pages of equal prefixes, once an earlier request has computed
    them: prompts that begin in the same step share nothing yet. num_snapshots, with prefix_cache:
    places where a hit may end that it holds at most (None: 8 a sequence in pages of a window, more
    in smaller ones, see `runtime.snapshot_budget`). overlap: schedule and launch a step before the
    one before it is read; the text is the same. On a CPU the device is then a thread, which gains
    nothing.
    keep_quantised: hold FP8 and FP4 weights as they are stored (1x memory, widened at each use)
    instead of in dtype. kernels: {op: implementation}. scheduler: 'fcfs', 'decode_order',
    'mixed', or a class or instance of your own (`deepinfer.engine.scheduling.scheduler`).
    """

    _section: ClassVar[str] = "EngineConfig"

    device: str = "auto"
    dtype: str | None = None
    fidelity: int = 1
    max_model_len: int | None = None
    max_num_seqs: int = 16
    max_num_batched_tokens: int | None = None
    max_context: int | None = None
    page_size: int | None = None
    num_pages: int | None = None
    prefix_cache: bool = False
    num_snapshots: int | None = None
    overlap: bool = False
    batch_invariant: bool = False
    kernels: Mapping[str, str] | None = dataclasses.field(default=None, hash=False)
    scheduler: Any = dataclasses.field(default="fcfs", hash=False)
    seed: int = 0
    packed_cache: bool | None = None
    keep_quantised: bool = False

    def __post_init__(self) -> None:
        # torch.float32 and torch.device are taken by their names, so torch is not imported here
        set_field = object.__setattr__
        if self.dtype is not None:
            set_field(self, "dtype", str(self.dtype).removeprefix("torch."))
        set_field(self, "device", str(self.device))
        if isinstance(self.kernels, Mapping):
            set_field(self, "kernels", dict(self.kernels))
        super().__post_init__()

    def __repr__(self) -> str:
        from deepinfer.display.config import engine_config_text

        return engine_config_text(self)

    def _repr_html_(self) -> str:
        from deepinfer.display.config import engine_config_html

        return engine_config_html(self)

    @classmethod
    def production(cls) -> EngineConfig:
        """DeepInfer's documented settings, as far as there are fields for them.

        bfloat16 with FP8 and FP4 weights kept as stored, activations rounded (fidelity 2), packed
        cache records, pages of 128 tokens, 4,096 tokens of context, 256 sequences and 4,096 rows a
        step, DeepInfer's order of decode, overlap.
        Two of the documents' settings are slots and not fields: five drafts a step
        (verifier=di.verifier.Fixed(5)) and bounded replay of the last 140 prompt tokens
        (replay=di.replay.Bounded(), which is 'compact'; the default of DeepInfer's code is off, and
        so is an engine's here). These do not exist here yet: expert, data and context parallelism,
        graphs, load balancing of experts, 1.2 state slots a sequence, a share of device memory for
        the cache (give num_pages). Source: DeepInfer 0.1.0, EngineArgs and environ.py.

        >>> eng = di.Engine.nano(**dataclasses.asdict(di.EngineConfig.production()))
        """
        return cls(
            dtype="bfloat16",
            fidelity=2,
            max_model_len=4096,
            max_num_seqs=256,
            max_num_batched_tokens=4096,
            page_size=128,
            overlap=True,
            scheduler="decode_order",
            packed_cache=True,
            keep_quantised=True,
        )

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> EngineConfig:
        """The defaults with what DEEPINFER_* variables change; environ None reads os.environ now.

        Raises ValueError naming the variable: not documented, no value of its type, or something
        that cannot be had here (`environment` says why). USE_NEXTN_DECODE and
        YOCO_PREFILL_TRUNCATION_MODE are slots, not fields, and refused here where they are not 0
        and off: `di.LLM` takes them.
        """
        from deepinfer.compat.environment import read

        found = read(os.environ if environ is None else environ)
        if found.drafts:
            raise ValueError(
                f"DEEPINFER_USE_NEXTN_DECODE={found.drafts} is the verifier slot, which an "
                f"EngineConfig does not hold: make the engine with verifier=di.verifier.Fixed("
                f"{found.drafts}) and unset it, or use di.LLM"
            )
        if found.truncation is not None and found.truncation[0] != "off":
            mode, keep = found.truncation
            raise ValueError(
                f"DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE={mode} is the replay slot, which an "
                f"EngineConfig does not hold: make the engine with replay=di.replay.Bounded({keep}, "
                f"{mode!r}) and unset it, or use di.LLM"
            )
        return cls(**found.settings)

    @staticmethod
    def environment() -> Table:
        """Every documented DEEPINFER_* variable: what it becomes here, or why it is refused.

        default: DeepInfer's own. A bool is false for "0", "", "false" and "False" and true for every
        other text, "no" and "FALSE" too, as in DeepInfer; where such a text is read, a warning says
        so. `.to_text()` has every row and the notes whole.
        """
        from deepinfer.compat.environment import table

        return table()

    def to_json(self) -> str:
        """The settings as one JSON object (reads back with `EngineConfig(**json.loads(text))`)."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True, default=repr)
