"""The gated update of the streams from the n-gram memory, in plain torch."""

from __future__ import annotations

import torch

from ..numerics import acc_dtype

CLAMP = 1e-6  # below this |dot| counts as this (V4.1 released reference)


def engram_gate(
    streams: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    dead: torch.Tensor | None,
) -> torch.Tensor:
    """streams_m + gate_m * value, where gate_m says how well the stream matches its key.

    streams and key "t m d", value "t d", q_weight and k_weight "m d", dead "t" bool (rows that
    stay as they are: image and padding rows; None: no row) -> "t m d" in streams' dtype.
    dot_m is the scaled product of the RMS-normed stream and key; gate_m is
    sigmoid(sign(dot) * sqrt(max(|dot|, 1e-6))).
    """
    wide = acc_dtype(streams)
    s, key = streams.to(wide), key.to(wide)
    weight = q_weight.to(wide) * k_weight.to(wide)
    norms = torch.rsqrt(s.square().mean(-1) + eps) * torch.rsqrt(key.square().mean(-1) + eps)
    dot = (s * weight * key).sum(-1) * norms * s.shape[-1] ** -0.5
    gate = torch.sigmoid(dot.sign() * dot.abs().clamp(min=CLAMP).sqrt())
    out = (s + gate.unsqueeze(-1) * value.to(wide).unsqueeze(1)).to(streams.dtype)
    return out if dead is None else torch.where(dead.view(-1, 1, 1), streams, out)
