"""Bounded: run the last rows only, and say that this is an approximation.

Decoder side, at every prompt: from a layer behind the last KV source on only the last `keep` prompt
rows go on. Their windows begin at the cut, position lo = length - keep; what lies below they reach
through compressed entries alone, which are complete and exact.
Encoder side, behind a prefix hit without its state KV: the last window of the hit runs again on an
empty window, from s = hit - window. It reads the block KV found and writes none of it.
Source: the V4.1 technical report (SWA bounded replay); DeepInfer 0.1.0 (the decoder side, its modes
and names); vLLM #56227 (the encoder side) and #58132 (the layer whose window stays whole).
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar

from deepinfer.slots.protocols import EngineInfo, Prompt, ReplayPlan
from deepinfer.slots.registry import registry

if TYPE_CHECKING:
    from typing import Self

    from deepinfer.config import ModelConfig
    from deepinfer.engine.engine import Engine, Prompts
    from deepinfer.measure.replay.calibration import Calibration

MODES = ("compact", "mask")
SIDES = ("decoder", "encoder", "both")


@registry("replay").register("bounded")
@dataclass(eq=False, repr=False)
class Bounded:
    """Approximate prefill whose cost does not grow with the depth of the model.

    keep: prompt rows that go on past the cut, in tokens; None = window + 2 * backtracking (140 in
    the release). A prompt of at most so many tokens is not cut and is exact. An engine refuses less
    than window + backtracking: after a verification is rolled back a whole window must be there.
    mode: 'compact' drops the rows below the cut; 'mask' runs them with an empty window, for kept
    rows the same numbers at the full price.
    sides: 'decoder' (every prompt is cut), 'encoder' (a hit without state KV is replayed), 'both'.
    With a prefix cache a prompt that was cut leaves the state KV of the layers before the cut.
    Where it is available at or below its own cut, another prompt begins there: its numbers are the
    same as without a hit (with 'decoder'). 'encoder' and 'both' also use a hit that has none.
    layer: where the cut begins, None = the first decoder layer, as DeepInfer; a later one for
    studies. whole_window: the window keys of that one layer are kept for all rows, so that it stays
    exact and the cut is felt one layer later, as in vLLM; False, as in DeepInfer, cuts them too.
    calibration: how `fit` chose the keep, for `print(policy)` and notebooks; None where it did not.
    It is no setting: two Bounded are equal where all that is above is.
    """

    keep: int | None = None
    mode: str = "compact"
    sides: str = "decoder"
    layer: int | None = None
    whole_window: bool = False
    calibration: Calibration | None = field(default=None, init=False, repr=False, compare=False)

    version: ClassVar[int] = 1
    exact: ClassVar[bool] = False
    batch_invariant: ClassVar[bool] = True
    on_device: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for name in ("keep", "layer"):
            value, least = getattr(self, name), 1 if name == "keep" else 0
            if value is not None and (type(value) is not int or value < least):
                raise ValueError(f"Bounded({name}={value!r}): want an integer >= {least}, or None")
        for name, known in (("mode", MODES), ("sides", SIDES)):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"Bounded({name}={getattr(self, name)!r}): want one of {', '.join(known)}"
                )
        if not isinstance(self.whole_window, bool):
            raise ValueError(f"Bounded(whole_window={self.whole_window!r}): want True or False")

    def __repr__(self) -> str:
        parts = [f"keep={self.keep}", f"mode={self.mode!r}"] if self.cuts else []
        parts += [f"sides={self.sides!r}"] if self.sides != "decoder" else []
        parts += [f"layer={self.layer}"] if self.layer is not None else []
        parts += ["whole_window=True"] if self.whole_window else []
        return f"{type(self).__name__}({', '.join(parts)})"

    def __str__(self) -> str:
        """The repr, and the calibration where there is one: an engine shows the repr alone."""
        return repr(self) if self.calibration is None else str(self.calibration)

    def _repr_html_(self) -> str | None:
        return None if self.calibration is None else self.calibration._repr_html_()

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """What IPython shows without HTML; inside a list or a dict it is the repr."""
        printer.text(str(self) if len(printer.stack) < 2 else repr(self))

    def __eq__(self, other: object) -> bool:
        """Of the class itself: a subclass may have settings that are not known here."""
        if type(self) is not Bounded or type(other) is not Bounded:
            return NotImplemented
        return self._settings() == other._settings()

    def __hash__(self) -> int:
        return hash(self._settings()) if type(self) is Bounded else object.__hash__(self)

    def _settings(self) -> tuple[Any, ...]:
        return tuple(getattr(self, f.name) for f in fields(self) if f.compare)

    @property
    def cuts(self) -> bool:
        """Whether the decoder side is on."""
        return self.sides != "encoder"

    @property
    def replays(self) -> bool:
        """Whether the encoder side is on."""
        return self.sides != "decoder"

    # -------------------------------------------------------------------------------- fitting

    @classmethod
    def fit(
        cls,
        eng: Engine,
        texts: Prompts,
        tolerance: float,
        quantile: float,
        *,
        prompt: int,
        continuation: int,
        groups: Sequence[Any] | None = None,
        metric: str = "kl",
        candidates: Iterable[int] | None = None,
        mode: str = "compact",
        sides: str = "decoder",
        layer: int | None = None,
        whole_window: bool = False,
        hit: int = 0,
    ) -> Self:
        """The smallest keep whose error is <= `tolerance` for `quantile` of the tokens.

            fitted = Bounded.fit(eng, texts, 0.01, 0.99, prompt=512, continuation=64)
            print(fitted)  # Bounded(keep=...), the candidates, how often it holds elsewhere
            eng.with_(replay=fitted)

        The error is that of `di.measure.replay_error`: of each of the `continuation` tokens behind
        the first `prompt` tokens of a text, teacher-forced, against replay='exact' in the same
        engine. metric: 'kl', KL(exact || replay) in nats, or 'dlogprob', |log q - log p| of the
        token that came next. tolerance: in nats. quantile: a share of all tokens, between 0 and 1,
        not of texts. The rest is settings of the policy, and hit= of `replay_error` for
        sides='both'.

        Groups, at least 16, are taken in the order of their names, in turn to choose the keep and
        to check it. groups: a label a text; default: the `module` of texts that have one, as those
        of `di.data` do, and each other text its own. Texts of one group resemble one another, so
        none is on both sides. Those that check run only once the keep is chosen, and by it alone.

        candidates: keeps to try, in tokens; default: at most 13 from window + backtracking to the
        exact length. A cut shows its whole error with a window below it, so a candidate has at most
        prompt - window tokens. From the largest downwards, each must meet the tolerance, and the
        first that does not ends the search: so trying many keeps makes no false one more likely
        (fixed-sequence testing; Angelopoulos et al., "Learn then Test", 2021). A keep meets it
        where the upper end of the quantile's 95 % interval does: the percentile bootstrap over
        groups (Efron and Tibshirani, "An Introduction to the Bootstrap", 1993, chapter 13), since
        tokens of a group depend on one another. That is no guarantee: one that holds for any law
        needs quantile / (1 - quantile) groups to choose by, 99 for 0.99 (Angelopoulos et al.,
        "Conformal Risk Control", 2022). Hence the check, with its own interval. Both are of
        prompts of this length, texts of this kind, and this model.

        Raises ValueError for arguments that don't fit, for fewer groups or tokens than the quantile
        needs, for a text on both sides, for what `replay_error` refuses, and where no candidate
        meets the tolerance, naming the best.
        """
        from deepinfer.measure.replay.fit import fit

        settings: Any = dict(mode=mode, sides=sides, layer=layer, whole_window=whole_window)
        return fit(
            lambda keep: cls(keep=keep, **settings),
            eng,
            texts,
            tolerance,
            quantile,
            prompt=prompt,
            continuation=continuation,
            groups=groups,
            metric=metric,
            candidates=candidates,
            hit=hit,
            who=f"{cls.__name__}.fit",
        )

    # ------------------------------------------------------------------------------- starting

    def start(self, info: EngineInfo) -> Bounded:
        """The engine's own copy, with `keep` in tokens. Raises ValueError where keep is less than
        window + backtracking or the layer lies before a KV source; warns where a model has no
        layer to cut at."""
        config, own = info.config, copy.copy(self)
        if not self.cuts:
            return own
        own.keep = self.rows_kept(config)
        window, back = config.sliding_window, config.backtracking
        if own.keep < config.ring_length:
            raise ValueError(
                f"Bounded(keep={own.keep}): this model needs keep >= {config.ring_length}, its "
                "window "
                f"({window}) and backtracking ({back}): a verification may step back so far, and a "
                "whole window must be there"
            )
        least = max(config.kv_source_layers, default=0)
        if self.layer is not None and not least <= self.layer < config.num_layers:
            raise ValueError(
                f"Bounded(layer={self.layer}): this model can be cut at layers {least} to "
                f"{config.num_layers - 1}; before KV source {least} every row is needed, for its "
                "block KV"
            )
        if self.cut_layer(config) is None:
            warnings.warn(
                f"{self!r}: nothing will be dropped, since {_no_cut(config)}", stacklevel=2
            )
        return own

    # ------------------------------------------------------------------------------- arithmetic

    def rows_kept(self, config: ModelConfig) -> int:
        """`keep` in tokens for this model."""
        if self.keep is not None:
            return self.keep
        return config.ring_length + config.backtracking

    def cut_layer(self, config: ModelConfig) -> int | None:
        """The layer whose key projection is the last thing that all rows enter; None where this
        layout cannot be cut: no decoder layer, or a KV source above the first."""
        layer = config.first_decoder_layer if self.layer is None else self.layer
        least = max(config.kv_source_layers, default=0)
        return layer if least <= layer < config.num_layers else None

    def exact_keep(self, config: ModelConfig) -> int | None:
        """The least keep that changes nothing: window + (n - 1)(window - 1) for n layers whose
        window is cut, since each looks window - 1 further back than the next (2,541 in the release,
        2,414 with whole_window). None where nothing is cut. Such a plan still does not say exact:
        of the window rows it leaves, those below the last window are not."""
        layer, window = self.cut_layer(config), config.sliding_window
        if layer is None or not self.cuts:
            return None
        n = config.num_layers - layer - self.whole_window
        return window + (n - 1) * (window - 1)

    def cut_of(self, length: int, config: ModelConfig) -> int:
        """Position of the cut in a prompt of `length` tokens; 0 where nothing is dropped."""
        if not self.cuts or self.cut_layer(config) is None:
            return 0
        return max(length - self.rows_kept(config), 0)

    # ------------------------------------------------------------------------------- the plan

    def plan(self, prompt: Prompt, config: ModelConfig) -> ReplayPlan:
        """Raises ValueError where log-probabilities of rows below the cut are asked."""
        cut = self.cut_of(prompt.length, config)
        if prompt.wants_all_logits and cut:
            does = "drops rows" if self.mode == "compact" else "hides the windows of rows"
            raise ValueError(
                f"prompt_logprobs: the replay policy {self!r} {does} below {cut}, whose "
                "log-probabilities do not exist; use replay='exact'"
            )
        layers = range(config.num_layers)
        first = self.cut_layer(config) if cut else None
        hidden = config.num_layers if first is None else first + self.whole_window
        state = prompt.state_for(hidden, cut) if cut else prompt.state_at
        start, write_from, lowest, begins = self._begin(prompt, config, state)
        floor = tuple(max(cut, lowest) if i >= hidden else lowest for i in layers)
        dropped = cut and self.mode == "compact"
        return ReplayPlan(
            start=start,
            write_from=write_from,
            kv_from=floor if dropped else (lowest,) * len(layers),
            rows_from=tuple(cut if dropped and i >= first else 0 for i in layers),
            floor=floor,
            exact=not cut and not lowest,
            why=f"{begins}; {self._cut_words(prompt, config, cut)}",
        )

    def _begin(self, prompt: Prompt, config: ModelConfig, state: int) -> tuple[int, int, int, str]:
        """(first row run, block KV read below, lowest window position there is, in words). state:
        where the state KV of the layers that are not cut is available."""
        if prompt.wants_all_logits:
            return 0, 0, 0, "from 0: log-probabilities of the whole prompt are asked"
        window, hit = config.sliding_window, prompt.hit
        begin = hit - window
        if self.replays and begin > state:
            # A group that the hit does not close is written, so its rows run from its first token.
            groups = [hit // config.ratio(i) * config.ratio(i) for i in config.kv_source_layers]
            begin = min(begin, *groups) if groups else begin
            return (
                begin,
                hit,
                begin,
                (
                    f"replayed from {begin} on an empty window: block KV is available below {hit}, "
                    "state "
                    f"KV up to {state} only"
                ),
            )
        start = min(state, hit, max(prompt.length - 1, 0))
        if start:
            read = max(min(hit, prompt.length - 1), start) if self.replays else start
            return start, read, 0, f"from {start}: block KV and state KV are available below it"
        if hit and self.replays and hit <= window:
            return 0, 0, 0, f"from 0: a hit of {hit} is no longer than the window ({window})"
        words = "no state KV is available" if hit else "nothing is available"
        return 0, 0, 0, f"from 0: {words}"

    def _cut_words(self, prompt: Prompt, config: ModelConfig, cut: int) -> str:
        if not self.cuts:
            return "nothing is dropped"
        layer = self.cut_layer(config)
        if layer is None:
            return f"nothing is dropped, since {_no_cut(config)}"
        keep = self.rows_kept(config)
        if not cut:
            return f"nothing is dropped: the prompt of {prompt.length} is within keep ({keep})"
        does = "run" if self.mode == "compact" else "see a window"
        own = f"; layer {layer} sees its whole window" if self.whole_window else ""
        return f"from layer {layer} on only the last {keep} rows {does}, those from {cut}{own}"


def _no_cut(config: ModelConfig) -> str:
    if config.first_decoder_layer >= config.num_layers:
        return "this model has no decoder layer (none of ratio 1)"
    return (
        f"KV source {max(config.kv_source_layers)} lies above the first decoder layer "
        f"{config.first_decoder_layer} and needs every row"
    )
