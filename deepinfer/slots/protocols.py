"""The contract page: the six slot protocols and the records that pass between the steps of a
token's walk.

Everything here is data or a signature. A slot variant is any object with the methods of its
protocol (structural typing: nothing has to be inherited); `di.check(obj)` runs the slot's laws on
it.

Axis letters: b sequences, t rows (tokens of this step), h heads, d features, e experts, k chosen,
v vocabulary, n drafts, r ranks, p pages, m residual streams, w window, c candidate blocks, l
layers. Every method must accept any number of rows, 0 included.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from deepinfer.cache.layer_kv import LayerKV
    from deepinfer.config import ModelConfig
    from deepinfer.kernels.registry import Ops

SLOTS = ("attention", "experts", "verifier", "replay", "sampler", "grammar")


# ------------------------------------------------------------------------------------- the batch


@dataclass(frozen=True, slots=True)
class RowSet:
    """Which rows of a step are alive somewhere in the stack: for each sequence one run of
    positions.

    positions, seq: [t] long, seq -1 marks a padding row. first: [b] index of each sequence's first
    row; start: [b] position of that row. segments: host-known (sequence, start row, stop row)
    triples, or None where only the device knows how rows fall to sequences.
    """

    positions: Int[Tensor, t]
    seq: Int[Tensor, t]
    first: Int[Tensor, b]
    start: Int[Tensor, b]
    segments: tuple[tuple[int, int, int], ...] | None = None

    @property
    def count(self) -> int:
        return self.positions.shape[0]

    @property
    def owner(self) -> Tensor:
        """seq with padding sent to sequence 0, for gathers whose result is masked anyway."""
        return self.seq.clamp(min=0)


@dataclass(frozen=True, slots=True)
class Cut:
    """Where rows leave the stack: `keep` [t'] are the row ids (in the entering set) that go on."""

    keep: Int[Tensor, kept]
    rows: RowSet


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's work: a flat batch of rows of several sequences (prefill, decode and verify
    alike).

    ids, positions, seq: [t] long; seq -1 = padding: writes nowhere, expert -1, no logits.
    rows: [b] rows of each sequence; length: [b] tokens of context before its first row.
    pages: [b, p] long, block-KV pages (0 = none); state: [b] long, state-KV slot (0 = none).
    lookback: [t, g-1] long, the ids before each row, nearest first, -1 none (Engram's history).
    image: [t] bool or None; rank: [t] long, the EP rank of a row, or None on one rank.
    logit_rows: [q] long, rows of the last row set whose logits are wanted.
    reach: upper bound known to the host of length + rows, over sequences; max_rows: of rows.
    has_history: False when no sequence has context before its rows (known to the host).
    floors: [l, b] lowest window position visible, per layer (drafter layers last), None = all 0.
    floor_groups: per layer, layers with the same number share their floors (host-known).
    write_from: [b] block KV below it is read and never written, None = the start of the rows.
    kv_from: [l, b] window keys below it are not written, None = every row writes.
    cuts: layer -> Cut, for the layers at which a replay plan drops rows.
    """

    ids: Int[Tensor, t]
    positions: Int[Tensor, t]
    seq: Int[Tensor, t]
    rows: Int[Tensor, b]
    length: Int[Tensor, b]
    pages: Int[Tensor, "b p"]
    state: Int[Tensor, b]
    lookback: Int[Tensor, "t back"]
    logit_rows: Int[Tensor, q]
    row_set: RowSet
    reach: int
    max_rows: int
    has_history: bool = True
    image: Bool[Tensor, t] | None = None
    rank: Int[Tensor, t] | None = None
    floors: Int[Tensor, "l b"] | None = None
    floor_groups: tuple[int, ...] | None = None
    write_from: Int[Tensor, b] | None = None
    kv_from: Int[Tensor, "l b"] | None = None
    cuts: dict[int, Cut] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        return self.ids.shape[0]

    @property
    def num_seqs(self) -> int:
        return self.rows.shape[0]


@dataclass(frozen=True, slots=True)
class Rows:
    """What crosses layers. `keep` narrows all of it at once: the only way rows are dropped.

    streams: [t, m, d] residual streams; pre: [t, m] the previous site's mix; selected: the last
    index source's picks; kv: the LayerKV of the KV source in force; features: drafter features so
    far. ids, lookback, image, rank are the batch's, narrowed alongside.
    """

    set: RowSet
    streams: Float[Tensor, "t m d"]
    pre: Float[Tensor, "t m"]
    ids: Int[Tensor, t]
    lookback: Int[Tensor, "t back"]
    image: Bool[Tensor, t] | None = None
    rank: Int[Tensor, t] | None = None
    selected: Selected | None = None
    kv: LayerKV | None = None
    features: tuple[Tensor, ...] = ()

    def keep(self, cut: Cut) -> Rows:
        at = cut.keep

        def narrow(x: Tensor | None) -> Tensor | None:
            return None if x is None else x[at]

        return replace(
            self,
            set=cut.rows,
            streams=self.streams[at],
            pre=self.pre[at],
            ids=self.ids[at],
            lookback=self.lookback[at],
            image=narrow(self.image),
            rank=narrow(self.rank),
            selected=None if self.selected is None else self.selected.keep(at),
            features=tuple(f[at] for f in self.features),
        )


# ------------------------------------------------------------------------------- attention slot


@dataclass(frozen=True, slots=True)
class LayerInfo:
    """What an attention variant is told about a layer; `name` is 'layers.7' or 'mtp.0'.

    role: 'window' (no compressed entries), 'full' (owns KV and index), 'reindex' (own picks from
    another layer's keys), 'reuse' (the picks of the last index source). sink: [h], scale: of q.k;
    ops: the kernels of this step.
    """

    name: str
    index: int
    role: str
    ratio: int
    window: int
    scale: float
    sink: Float[Tensor, h]
    top_k: int
    ops: Ops
    candidate_source: bool = False
    candidate_blocks: int = 0
    candidate_block_size: int = 0


@dataclass(frozen=True, slots=True)
class KVSpec:
    """What a layer keeps. formats name the record (cache/records); bytes are per stored record."""

    window: int
    window_format: str
    entry_format: str | None = None
    index_format: str | None = None
    ratio: int = 0
    bytes_per_token: float = 0.0


@dataclass(frozen=True, slots=True)
class AttnPlan:
    """Shared by every layer with the same row sets. window_ids: [t, w] places in the window
    Records (-1 none); queries: the rows that look; visible: ratio -> [t] entries each row may see;
    reach: ratio -> host-known upper bound of visible."""

    window_ids: Int[Tensor, "t w"]
    queries: RowSet
    visible: dict[int, Int[Tensor, t]] = field(default_factory=dict)
    reach: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class IndexQuery:
    """The index side of a layer: query [t, h, d] (rotated and rounded), weights [t, h] (scaled)."""

    query: Float[Tensor, "t h d"]
    weights: Float[Tensor, "t h"]


@dataclass(frozen=True, slots=True)
class Selected:
    """ids: [t, k] compressed entries by number within the sequence (-1 none); candidates: [t, c]
    blocks that later index sources may pick from (None = no restriction); places: [t, k] the same
    entries as rows of the Records, filled in by the model once per selection."""

    ids: Int[Tensor, "t k"]
    candidates: Int[Tensor, "t c"] | None = None
    places: Int[Tensor, "t k"] | None = None

    def keep(self, at: Tensor) -> Selected:
        return Selected(
            self.ids[at],
            None if self.candidates is None else self.candidates[at],
            None if self.places is None else self.places[at],
        )


@runtime_checkable
class Attention(Protocol):
    """Which keys a row looks at, and the look. Projections belong to the model.

    `select` is called at index-source layers only and its result is carried to the layers that
    reuse it: another selection rule is a `select` of five lines on top of `CSA2`.
    """

    version: ClassVar[int] = 1

    def kv_spec(self, config: ModelConfig, layer: int) -> KVSpec: ...

    def plan(
        self,
        batch: Batch,
        keys: RowSet,
        queries: RowSet,
        floor: Int[Tensor, b] | None,
        cache: Any,
    ) -> AttnPlan: ...

    def select(
        self,
        layer: LayerInfo,
        index: IndexQuery,
        kv: LayerKV,
        plan: AttnPlan,
        carried: Selected | None,
    ) -> Selected: ...

    def attend(
        self,
        layer: LayerInfo,
        q: Float[Tensor, "t h d"],
        kv: LayerKV,
        selected: Selected | None,
        plan: AttnPlan,
    ) -> Float[Tensor, "t h d"]: ...


# --------------------------------------------------------------------------------- experts slot


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """One MoE layer as the experts slot sees it. gate: [e, d]; bias, bias_image: [e] (steer the
    choice only); w1, w3: [e, i, d]; w2: [e, d, i] (Tensor or Quantised); act: activation rounding
    at fidelity 2; ops: the kernels of this step."""

    name: str
    gate: Float[Tensor, "e d"]
    bias: Float[Tensor, e]
    bias_image: Float[Tensor, e]
    w1: Any
    w3: Any
    w2: Any
    top_k: int
    scaling: float
    limit: float
    act: str | None
    ops: Ops

    @property
    def num_experts(self) -> int:
        return self.gate.shape[0]


@dataclass(frozen=True, slots=True)
class Routing:
    """ids: [t, k] long logical experts (-1 none); weights: [t, k] in FP32 or FP64."""

    ids: Int[Tensor, "t k"]
    weights: Float[Tensor, "t k"]


@runtime_checkable
class Experts(Protocol):
    """Who computes which row. `forward` returns the routed sum; the model adds the shared
    expert."""

    version: ClassVar[int] = 1

    def route(self, layer: ExpertLayer, x: Float[Tensor, "t d"], rows: Rows) -> Routing: ...

    def forward(
        self, layer: ExpertLayer, x: Float[Tensor, "t d"], routing: Routing
    ) -> Float[Tensor, "t d"]: ...


# ----------------------------------------------------------------------- sampler and grammar slots


@dataclass(frozen=True, slots=True)
class RowParams:
    """Sampling parameters per row: temperature [t] (0 = greedy), top_p [t], top_k [t] long (-1 =
    off)."""

    temperature: Float[Tensor, t]
    top_p: Float[Tensor, t]
    top_k: Int[Tensor, t]

    def rows(self, at: Tensor) -> RowParams:
        return RowParams(self.temperature[at], self.top_p[at], self.top_k[at])


@dataclass(frozen=True, slots=True)
class RowKeys:
    """Keys of the random numbers of each row: seed [t] long and output position [t] long
    (0 = first generated token, whatever the prompt, hits or preemption)."""

    seed: Int[Tensor, t]
    position: Int[Tensor, t]

    def rows(self, at: Tensor) -> RowKeys:
        return RowKeys(self.seed[at], self.position[at])

    def later(self, by: int) -> RowKeys:
        return RowKeys(self.seed, self.position + by)


@dataclass(frozen=True, slots=True)
class Dist:
    """The one distribution of a row: draw, log-probabilities and acceptance all use it.

    probs: [t, v] FP64 after temperature, top-k, top-p and mask (greedy: one-hot); logprobs: [t, v]
    log-softmax of the masked logits at temperature 1 (what is reported); finite: [t] bool, False
    for a row with NaN, +inf or no legal token: such a row ends its own request."""

    probs: Float[Tensor, "t v"]
    logprobs: Float[Tensor, "t v"]
    finite: Bool[Tensor, t]


@dataclass(frozen=True, slots=True)
class Sampled:
    """tokens: [t] long drawn; logprobs: [t] of them."""

    tokens: Int[Tensor, t]
    logprobs: Float[Tensor, t]


@runtime_checkable
class Sampler(Protocol):
    version: ClassVar[int] = 1

    def distribution(
        self,
        logits: Float[Tensor, "t v"],
        params: RowParams,
        mask: Bool[Tensor, "t v"] | None = None,
    ) -> Dist: ...

    def draw(self, dist: Dist, keys: RowKeys) -> Sampled: ...


class GrammarState(Protocol):
    """Where one request stands in its grammar."""

    done: bool

    def allowed(self) -> Tensor | None: ...

    def accept(self, token: int) -> bool: ...

    def rollback(self, n: int) -> None: ...

    def fork(self) -> GrammarState: ...


@runtime_checkable
class Grammar(Protocol):
    version: ClassVar[int] = 1

    def compile(self, spec: Any, vocab: Any) -> Any: ...


# --------------------------------------------------------------------------------- verifier slot


@dataclass(frozen=True, slots=True)
class Draft:
    """tokens: [b, n] long (-1 none); confidence: [b, n] estimated conditional acceptance; logprobs:
    of the tokens under the drafter's distribution; dists: the n they were drawn from ([b, v] each),
    kept only for a verifier whose rule needs them."""

    tokens: Int[Tensor, "b n"]
    confidence: Float[Tensor, "b n"]
    logprobs: Float[Tensor, "b n"]
    dists: tuple[Dist, ...] = ()


@dataclass(frozen=True, slots=True)
class Target:
    """The target's side of a verification. dist: flat [q, v]; sampled: the target's own draw at
    each row; rows: [b, n+1] index into them (row 0 the anchor row, -1 not verified); keys: per flat
    row."""

    dist: Dist
    sampled: Sampled
    rows: Int[Tensor, "b n+1"]
    keys: RowKeys


@dataclass(frozen=True, slots=True)
class Accepted:
    """tokens: [b, n+1] long emitted (-1 none); count: [b] how many; at least 1 where a row ran."""

    tokens: Int[Tensor, "b n+1"]
    count: Int[Tensor, b]


@runtime_checkable
class Verifier(Protocol):
    """How many drafts to verify, and which to keep. max_draft 0 = no speculation.

    budget: from survivals one step old, total rows of the next step (host side). allocate: from
    fresh survivals, rows per sequence, a prefix of each draft. Law: the depth given to a draft does
    not depend on confidences behind it. accept: rule 'match' or 'rejection', both exact."""

    version: ClassVar[int] = 1
    max_draft: int
    rule: str

    def budget(self, stale: Float[Tensor, "b n"], cost: Any) -> int: ...

    def allocate(self, fresh: Float[Tensor, "b n"], budget: int) -> Int[Tensor, b]: ...

    def accept(self, draft: Draft, target: Target) -> Accepted: ...


# ----------------------------------------------------------------------------------- replay slot


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a replay policy sees. length: prompt tokens; hit: tokens of block KV found; state_at:
    largest position <= hit whose state KV is available, of all layers; wants_all_logits: prompt
    log-probs asked; states: (position, layers) of all state KV below the hit, highest first, also
    of the first layers alone, as a prompt leaves it whose later layers were cut."""

    length: int
    hit: int = 0
    state_at: int = 0
    wants_all_logits: bool = False
    states: tuple[tuple[int, int], ...] = ()

    def state_for(self, layers: int, limit: int | None = None) -> int:
        """Largest position <= limit (None: the hit) where the state KV of the first `layers` layers
        is available; 0 where it is nowhere."""
        found = [at for at, have in ((self.state_at, layers), *self.states) if have >= layers]
        return max((at for at in found if limit is None or at <= limit), default=0)


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """Which rows of a prompt run where. start: first row run; write_from: block KV below it is
    read, never written. Per backbone layer: kv_from, window keys written from; rows_from, rows that
    go on past the layer's key projection; floor, lowest window position visible (kept for the
    sequence's life). `why` says in words what the policy decided."""

    start: int
    write_from: int
    kv_from: tuple[int, ...]
    rows_from: tuple[int, ...]
    floor: tuple[int, ...]
    exact: bool = True
    why: str = ""

    def __repr__(self) -> str:
        from deepinfer.display.plan import plan_text

        return plan_text(self)

    def _repr_html_(self) -> str:
        from deepinfer.display.plan import plan_html

        return plan_html(self)

    def rows_in(self, length: int) -> tuple[int, ...]:
        """Rows of a prompt of `length` tokens that enter each layer, where their window key (and at
        a KV source their block KV) is projected: length - max(start, rows_from of the layer
        before)."""
        below = (0, *self.rows_from[:-1])
        return tuple(max(length - max(self.start, r), 0) for r in below)

    def rows_run(self, length: int) -> tuple[int, ...]:
        """Rows of a prompt of `length` tokens that each layer runs, attention and experts:
        length - max(start, rows_from). The sum over layers is the plan's rows x layers."""
        return tuple(max(length - max(self.start, r), 0) for r in self.rows_from)

    @property
    def layers_below(self) -> int:
        """How many of the first layers have to begin with state KV: those up to the last that sees
        window keys below start. 0: none does."""
        return max((i + 1 for i, floor in enumerate(self.floor) if floor < self.start), default=0)

    def validate(self, prompt: Prompt, layers: int, sources: tuple[int, ...] = ()) -> ReplayPlan:
        """Raise ValueError naming the first broken law; return self. sources: the KV-source
        layers."""
        for name in ("kv_from", "rows_from", "floor"):
            if len(getattr(self, name)) != layers:
                raise ValueError(
                    f"ReplayPlan.{name} has {len(getattr(self, name))} entries, the model has "
                    f"{layers} "
                    "layers: give one per backbone layer"
                )
            if any(
                isinstance(x, bool) or not isinstance(x, int) or x < 0 for x in getattr(self, name)
            ):
                raise ValueError(
                    f"ReplayPlan.{name} is {getattr(self, name)}: positions are integers >= 0"
                )
        behind = [s for s in sources if s and self.rows_from[s - 1] > self.write_from]
        laws = [
            (
                0 <= self.start < max(prompt.length, 1),
                f"start {self.start} is outside 0..{prompt.length - 1}",
            ),
            (
                self.start <= prompt.hit,
                f"start {self.start} is past the hit {prompt.hit}: nobody computed the block KV "
                "between them",
            ),
            (
                not (
                    n := self.layers_below
                )  # the last row always runs, also where its state KV is available
                or self.start
                in (min(prompt.state_at, prompt.length - 1), prompt.state_for(n, self.start)),
                f"floor {min(self.floor, default=0)} is below start {self.start}, and the state KV "
                f"of the first {n} layers "
                f"is available at {prompt.state_for(n)}: a row would see window keys that were "
                "never written",
            ),
            (self.write_from >= self.start, f"write_from {self.write_from} < start {self.start}"),
            (
                self.write_from <= prompt.hit or self.write_from == self.start,
                f"write_from {self.write_from} is past the hit {prompt.hit}",
            ),
            (
                all(a <= b for a, b in zip(self.rows_from, self.rows_from[1:])),
                f"rows_from falls from layer to layer: {self.rows_from}",
            ),
            (
                all(f >= k for f, k in zip(self.floor, self.kv_from)),
                "floor is below kv_from: a row would see window keys that were never written",
            ),
            (
                all(f < max(prompt.length, 1) for f in self.floor),
                f"floor {max(self.floor, default=0)} hides the last prompt row {prompt.length - 1} "
                "from itself",
            ),
            (
                all(r < max(prompt.length, 1) for r in self.rows_from),
                f"rows_from {max(self.rows_from, default=0)} drops the last prompt row "
                f"{prompt.length - 1}",
            ),
            (
                all(k >= e for k, e in zip(self.kv_from[1:], self.rows_from)),
                "kv_from is below the rows_from of the layer before: no row is there to project "
                "those keys",
            ),
            (
                not behind,
                f"rows are dropped before KV source {behind[:1]}, whose block KV of them would "
                "never be written",
            ),
        ]
        for holds, words in laws:
            if not holds:
                raise ValueError(f"ReplayPlan breaks a law: {words}")
        return self


@runtime_checkable
class Replay(Protocol):
    """Which rows of a prompt run where. Law: whatever is dropped, behind the prompt the last window
    and the backtracking (max_draft + 1 positions) are left, in every layer's window and for the
    drafter (rows_from of the last layer): decoding with drafts may look back so far."""

    version: ClassVar[int] = 1
    exact: ClassVar[bool]

    def plan(self, prompt: Prompt, config: ModelConfig) -> ReplayPlan: ...


# ------------------------------------------------------------------------------- starting a slot


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Handed to `obj.start(info)`: a slot object is settings; what `start` returns is the engine's
    own copy and holds what it learns. A verifier may have an attribute `cost`, the curve its budget
    is asked with (None = CostCurve(), a fixed table)."""

    config: ModelConfig
    device: Any
    dtype: Any
    max_num_seqs: int
    seed: int = 0
