"""Loading a checkpoint into a model, and taking a model's weights out under their official names.

A model's parameter names are the official names, except that a layer's routed experts are stacked:
`layers.3.ffn.experts.w1` "e i d", with or without a `.weight` behind it, stands for
`layers.3.ffn.experts.0.w1.weight`, `layers.3.ffn.experts.1.w1.weight` and so on.
Nothing is loaded by half: names and shapes are compared before memory is taken, parameters start as
NaN, and after an error the model has no values at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from deepinfer.checkpoint import names
from deepinfer.checkpoint.header import CheckpointError
from deepinfer.checkpoint.names import Weight
from deepinfer.config import ModelConfig
from deepinfer.kernels.quantised import Quantised

__all__ = ["load", "official_state"]


class Source(Protocol):
    """What `load` reads from: `reader.Checkpoint` or `memory.MemoryCheckpoint`."""

    config: ModelConfig
    weights: dict[str, Weight]
    token_map: Tensor | None

    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor | Quantised: ...

    def read_experts(
        self, prefix: str, matrix: str, dtype: torch.dtype | None = None
    ) -> Tensor | Quantised: ...


@dataclass(frozen=True, slots=True)
class _Slot:
    """One parameter of the model and what fills it: one weight, or `stack` (prefix, matrix) of
    routed experts, whose first is `weight`."""

    parameter: str
    weight: Weight
    shape: tuple[int, ...]
    stack: tuple[str, str] | None

    def read(self, source: Source, dtype: torch.dtype | None) -> Tensor | Quantised:
        if self.stack is None:
            return source.read(self.weight.name, dtype)
        return source.read_experts(*self.stack, dtype)


def load(
    model: nn.Module,
    checkpoint: Source,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    keep_quantised: bool = False,
) -> None:
    """Fill every parameter of `model` (built on any device, also meta) from a checkpoint.

    dtype: of the weights, except those that stay float32 (hyper-connections, attention sinks,
    router biases), which are float64 in a float64 model. keep_quantised: weights stored as FP8 or
    FP4 are kept as `Quantised` (the module's `set_weight` takes them) instead of being widened.
    CheckpointError when model and checkpoint do not hold the same weights.
    """
    slots = _match(model, checkpoint)
    try:
        with torch.no_grad():
            for slot in slots:
                if not (keep_quantised and _is_quantised(slot.weight)):
                    target = _dtype(slot.weight, dtype)
                    poison = torch.full(slot.shape, torch.nan, dtype=target, device=device)
                    _put(model, slot.parameter, poison)
            for slot in slots:
                _fill(model, slot, checkpoint, device, keep_quantised)
        _check_covered(model, slots)
    except BaseException:
        _clear(model, slots)
        raise
    if checkpoint.token_map is not None and hasattr(model, "set_token_map"):
        model.set_token_map(checkpoint.token_map)


def official_state(model: nn.Module) -> dict[str, Tensor]:
    """{official name: tensor} of a model's float parameters, experts taken apart (views, detached).

    TypeError for a weight that is kept quantised: its float values are gone.
    """
    state = {}
    for name, value in _parameters(model).items():
        if isinstance(value, Quantised):
            raise TypeError(
                f"{name} is kept quantised, which loses the float values; load the model with "
                "keep_quantised=False"
            )
        stack = _stack(name)
        if stack is None:
            state[name] = value.detach()
            continue
        prefix, matrix = stack
        for expert, part in enumerate(value.detach()):
            state[f"{prefix}.{expert}.{matrix}.weight"] = part
    return state


# -- matching model and checkpoint ----------------------------------------------------------------


def _parameters(model: nn.Module) -> dict[str, Tensor | Quantised]:
    """Every weight of the model by name: parameters, and weights kept as Quantised."""
    found: dict[str, Tensor | Quantised] = dict(model.named_parameters())
    for prefix, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, Quantised):
            found[f"{prefix}.weight"] = weight
    return found


def _stack(parameter: str) -> tuple[str, str] | None:
    """(prefix, matrix) of a stacked parameter: `a.experts.w1` or `a.experts.w1.weight`."""
    prefix, found, rest = parameter.rpartition(".experts.")
    matrix = rest.removesuffix(".weight")
    return (f"{prefix}.experts", matrix) if found and matrix in ("w1", "w2", "w3") else None


def _match(model: nn.Module, source: Source) -> list[_Slot]:
    """One slot per parameter; CheckpointError unless they use every weight exactly once."""
    config = getattr(model, "config", None)
    different = config.diff(source.config) if isinstance(config, ModelConfig) else {}
    different.pop("quantization", None)
    if different:
        key, (mine, theirs) = next(iter(different.items()))
        raise CheckpointError(
            f"the model was built with {key} = {mine!r}, the checkpoint has {theirs!r}; build the "
            "model from the checkpoint's config"
        )
    slots, used = [], set()
    for parameter, value in _parameters(model).items():
        slot = _slot(parameter, source)
        if tuple(value.shape) != slot.shape:
            raise CheckpointError(
                f"the model's {parameter} has shape {list(value.shape)}, the checkpoint gives "
                f"{list(slot.shape)}; build the model from the checkpoint's config"
            )
        slots.append(slot)
        used.update([slot.weight.name] if slot.stack is None else _parts(slot.stack, source))
    unused = source.weights.keys() - used
    if unused:
        raise CheckpointError(
            f"the model has no parameter for {min(unused)} (and {len(unused) - 1} more weights of "
            "the checkpoint); a weight left out changes what is computed: build the model from "
            "the checkpoint's config"
        )
    return slots


def _parts(stack: tuple[str, str], source: Source) -> list[str]:
    return names.expert_names(source.weights, *stack)


def _slot(parameter: str, source: Source) -> _Slot:
    stack = _stack(parameter)
    try:
        parts = [parameter.removeprefix("model.")] if stack is None else _parts(stack, source)
        weight = source.weights[parts[0]]
    except KeyError:
        raise CheckpointError(
            f"the checkpoint has no weight for the model's parameter {parameter}; it would stay "
            "unset: build the model from the checkpoint's config"
        ) from None
    lead = () if stack is None else (len(parts),)
    return _Slot(parameter, weight, (*lead, *weight.shape), stack)


# -- values -----------------------------------------------------------------------------------


def _is_quantised(weight: Weight) -> bool:
    return weight.storage in ("fp8", "table", "fp4")


def _dtype(weight: Weight, dtype: torch.dtype) -> torch.dtype:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return wide if weight.wide else dtype


def _fill(model: nn.Module, slot: _Slot, source: Source, device, keep_quantised: bool) -> None:
    if keep_quantised and _is_quantised(slot.weight):
        value = slot.read(source, None)
        module: Any = model.get_submodule(slot.parameter.rpartition(".")[0])
        if not isinstance(value, Quantised) or not hasattr(module, "set_weight"):
            raise CheckpointError(
                f"{slot.parameter} can't be kept quantised: its module takes float tensors only; "
                "load with keep_quantised=False"
            )
        module.set_weight(value.to(device))
        return
    parameter = model.get_parameter(slot.parameter)
    parameter.copy_(slot.read(source, parameter.dtype))


def _put(model: nn.Module, parameter: str, value: Tensor) -> None:
    """Replace a parameter or a kept Quantised by a new tensor that takes no gradient."""
    owner, _, name = parameter.rpartition(".")
    module: Any = model.get_submodule(owner)
    if name == "weight" and hasattr(module, "set_weight"):
        module.set_weight(value)
    else:
        module._parameters[name] = nn.Parameter(value, requires_grad=False)


def _check_covered(model: nn.Module, slots: list[_Slot]) -> None:
    for slot in slots:
        value = _parameters_of(model, slot.parameter)
        if isinstance(value, Tensor) and not bool(torch.isfinite(value).all()):
            raise CheckpointError(
                f"{slot.parameter} holds values that are not finite after loading as "
                f"{value.dtype}; use a wider dtype, or download the checkpoint again"
            )


def _parameters_of(model: nn.Module, parameter: str) -> Tensor | Quantised:
    owner, _, name = parameter.rpartition(".")
    return getattr(model.get_submodule(owner), name)


def _clear(model: nn.Module, slots: list[_Slot]) -> None:
    """Leave shapes without values, so that a half-loaded model can't compute anything."""
    for slot in slots:
        _put(model, slot.parameter, torch.empty(slot.shape, device="meta"))
