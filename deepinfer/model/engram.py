"""Engram: an n-gram memory read by hashing the ids around a token (no convolution in V4.1).

    c_0 = map[id_p], c_s = map[id_{p-s}]; past a sequence start or an image token: the pad id
    hash_n = XOR_{s<n} c_s * mult_s;  row = hash_n mod prime[n, h] + offset,  n = 2..N, heads h
    e = concat of the rows;  [key | value] = Wkv e;  S_m += sigmoid(sgn(dot) sqrt|dot|) * value
The map, multipliers and primes derive from the tokenizer, see engram_hash.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from deepinfer.config import ModelConfig
from deepinfer.kernels.numerics import constant, taken
from deepinfer.kernels.quantised import Quantised
from deepinfer.model.engram_hash import hash_constants
from deepinfer.model.layers import Linear, Weight, frozen
from deepinfer.slots.protocols import Rows


class Engram(nn.Module):
    """The tables and the gate of one Engram layer."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        c = config
        m, d = c.hc_mult, c.hidden_size
        which = list(c.engram_layer_ids).index(layer)
        columns = (c.engram_max_ngram_size - 1) * c.engram_n_heads
        self.embed = Weight(c.engram_num_embeddings[which], c.engram_head_dim)
        self.wkv = Linear(columns * c.engram_head_dim, (m + 1) * d, rounded=True)
        self.q_weight = frozen(m, d)
        self.k_weight = frozen(m, d)
        self.constants = hash_constants(config, layer)

    def forward(self, rows: Rows, name: str, token_map: Tensor, ctx) -> Tensor:
        """Updated streams [t, m, d]."""
        c = ctx.config
        t, m, d = rows.streams.shape
        dead = (rows.set.seq < 0) | (rows.ids == c.image_token_id)
        if rows.image is not None:
            dead = dead | rows.image
        history = ctx.once(
            ("ngrams", id(rows.set)),
            lambda: compress_history(rows.ids, rows.lookback, dead, token_map, c),
        )
        k = self.constants
        columns = ctx.once(
            (name, "hash"),
            lambda: tuple(
                constant(tuple(x.ravel().tolist()), history.device, torch.int64).view(x.shape)
                for x in (k.multipliers, k.primes, k.offsets)
            ),
        )
        table_rows = ctx.see(f"{name}.rows", ctx.ops.engram_hash(history, *columns), rows.set)
        weight = self.embed.weight
        dtype = rows.streams.dtype
        e = (
            weight.rows(table_rows, dtype)
            if isinstance(weight, Quantised)
            else taken(weight, table_rows)
        )
        kv = self.wkv(e.flatten(1), ctx)
        key, value = kv[:, : m * d].reshape(t, m, d), kv[:, m * d :]
        value = ctx.see(f"{name}.value", value, rows.set)
        return ctx.ops.engram_gate(
            rows.streams, key, value, self.q_weight, self.k_weight, c.rms_norm_eps, dead
        )


def compress_history(
    ids: Tensor, lookback: Tensor, dead: Tensor, token_map: Tensor, config: ModelConfig
) -> Tensor:
    """[t, N] compressed ids of each row and the N-1 ids before it; from the first id that is
    missing (-1) or an image token on, everything is the pad id."""
    window = torch.cat([ids[:, None], lookback], 1)
    stop = (window < 0) | (window == config.image_token_id)
    stop = stop | torch.nn.functional.pad(dead[:, None], (0, lookback.shape[1]))
    stop = stop.long().cumsum(1) > 0
    compressed = token_map[window.clamp(min=0)]
    return torch.where(stop, token_map[config.engram_pad_token_id], compressed)
