"""Do all ways through the model compute the same thing?

One trained checkpoint, the same tokens, mean nats a token by: the plain slots and the batched ones,
eager and compiled, weights that take a gradient and weights that do not, float32 and bfloat16. An
earlier trial had two of these differ by 5 to 9 %; no figure means anything before they agree.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer.model.stack import Model
from deepinfer.slots.attention.csa2 import CSA2
from deepinfer.slots.experts.local import Local
from deepinfer.slots.protocols import EngineInfo
from experiments.nano.train import fast


def nats(model: Model, ids: Tensor, *, batched: bool, compiled: bool, fidelity: int = 1) -> float:
    """Mean nats a token of ids [b, t+1]."""
    x = ids[:, :-1]
    ctx = fast.context(model.config, x, compiled=compiled, fidelity=fidelity, dtype=model.dtype)
    if not batched:
        info = EngineInfo(model.config, x.device, model.dtype, len(x))
        ctx = replace(ctx, attention=CSA2().start(info), experts=Local().start(info))
    logits = model(ctx).logits
    return F.cross_entropy(logits.float(), ids[:, 1:].flatten()).item()


def agreement(models: dict[str, Model], ids: Tensor, compiled: bool) -> list[dict[str, object]]:
    """One row a path: its nats and how far they are from the first's, in %.

    models: {dtype name: the same weights in that dtype}, the first being the reference. compiled:
    also the compiled paths (an accelerator).
    """
    rows: list[dict[str, object]] = []
    for (name, model), batched, fused, gradient in itertools.product(
        models.items(), (False, True), (False, True), (False, True)
    ):
        if fused and not (batched and compiled):
            continue
        for p in model.parameters():
            p.requires_grad_(gradient)
        with torch.set_grad_enabled(gradient):
            value = nats(model, ids, batched=batched, compiled=fused)
        for p in model.parameters():
            p.requires_grad_(False)
        rows.append(
            dict(
                dtype=name,
                slots="batched" if batched else "plain",
                compiled=fused,
                gradient=gradient,
                nats=value,
            )
        )
        rows[-1]["percent"] = 100 * (value / float(rows[0]["nats"]) - 1)  # type: ignore[arg-type]
    return rows
