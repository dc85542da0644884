"""What the prefill of one prompt costs by a replay plan: rows x layers, and FLOPs by a formula.

FLOPs are 2 a multiply-add of the contractions that the definition needs, in the backbone alone. For
a layer with k rows whose keys are projected and q rows that go on past it (d hidden, h heads of e,
m streams; r: entries cover r tokens):

    keys       k d e; KV sources: + k d e (twice for r > 1), and k / r index keys of e * index_dim
    query      q (d q_rank + q_rank h e)
    output     q (h e o_rank + o_groups o_rank d)
    index      index sources: q (q_rank + d / index_dim) index_heads index_dim, and index_heads
               index_dim for each pair of a row and an entry it may pick
    attention  2 h e for each pair of a row and a key it sees: the window above the floor, the picks
    experts    q 3 d i (chosen + shared), and the router's q d experts
    streams    both sites: mix m d (m^2 + 2 m), collapse m d, expand (m^2 + m) d; k rows up to the
               attention's input, q rows behind it
    engram     k table columns * (m + 1) d
    head       d vocabulary, one row

Norms, roundings, activations, softmax and top-k are left out, as is the drafter.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepinfer.config import ModelConfig
from deepinfer.slots.protocols import ReplayPlan

OPS = ("keys", "query", "output", "index", "attention", "experts", "streams", "engram", "head")


@dataclass(frozen=True)
class Cost:
    """entering, going: rows of each layer whose keys are projected, and that run past its
    attention; flops: by op, over all layers."""

    entering: tuple[int, ...]
    going: tuple[int, ...]
    flops: dict[str, int]

    @property
    def rows_x_layers(self) -> int:
        return sum(self.going)

    @property
    def total(self) -> int:
        return sum(self.flops.values())


def prefill_cost(plan: ReplayPlan, prompt: int, config: ModelConfig) -> Cost:
    """The cost of the prompt's prefill by a plan, in any chunks."""
    lowest = [max(plan.start, x) for x in (0, *plan.rows_from)]
    entering = tuple(prompt - x for x in lowest[:-1])
    going = tuple(prompt - x for x in lowest[1:])
    flops: dict[str, int] = dict.fromkeys(OPS, 0)
    for layer in range(config.num_layers):
        for op, adds in layer_adds(
            config, layer, entering[layer], going[layer], prompt, plan.floor[layer]
        ).items():
            flops[op] += 2 * adds
    flops["head"] += 2 * config.hidden_size * config.vocab_size
    return Cost(entering, going, flops)


def layer_adds(
    c: ModelConfig, layer: int, k: int, q: int, prompt: int, floor: int
) -> dict[str, int]:
    """Multiply-adds of one layer by op, see above."""
    d, e, h, m, r = (
        c.hidden_size,
        c.head_dim,
        c.num_attention_heads,
        c.hc_mult,
        c.compress_ratios[layer],
    )
    source, indexes = layer in c.kv_source_layer_ids, layer in c.index_source_layer_ids
    keys = k * d * e
    if source:
        keys += k * d * e * (2 if r > 1 else 1) + k // r * e * c.index_head_dim
    window, entries = pairs(prompt - q, prompt, floor, c.sliding_window, r)
    picked = int(entries.clamp(max=c.index_topk).sum())
    index = 0
    if indexes:
        restricted = not source and c.candidate_source_layer_id is not None
        most = c.candidate_topk_blocks * c.candidate_block_size if restricted else prompt
        scored = int(entries.clamp(max=most).sum())
        index = q * c.index_n_heads * (c.q_lora_rank * c.index_head_dim + d)
        index += scored * c.index_n_heads * c.index_head_dim
    mix, collapse, expand = m * d * (m * m + 2 * m), m * d, (m * m + m) * d
    columns = (c.engram_max_ngram_size - 1) * c.engram_n_heads * c.engram_head_dim
    return {
        "keys": keys,
        "query": q * c.q_lora_rank * (d + h * e),
        "output": q * c.o_lora_rank * (h * e + c.o_groups * d),
        "index": index,
        "attention": 2 * h * e * (window + picked),
        "experts": q
        * d
        * (
            3 * c.moe_intermediate_size * (c.num_experts_per_tok + c.n_shared_experts)
            + c.n_routed_experts
        ),
        "streams": k * collapse + q * (2 * mix + collapse + 2 * expand),
        "engram": k * columns * (m + 1) * d if layer in c.engram_layer_ids else 0,
    }


def pairs(start: int, stop: int, floor: int, window: int, ratio: int) -> tuple[int, torch.Tensor]:
    """(window keys seen by rows start..stop-1, in all; [rows] entries that each may see)."""
    at = torch.arange(start, stop)
    seen = int((at - floor + 1).clamp(0, window).sum())
    return seen, (at + 1) // ratio if ratio else torch.zeros_like(at)
