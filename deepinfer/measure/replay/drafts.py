"""Expected accepted length of the drafter on a text, by the target's and the drafter's
distributions.

A draft of distribution q is accepted with probability sum min(p, q) = 1 - TV(p, q), p the target's
distribution at the same place. With the real text before both, the expected tokens of a step, bonus
included, are 1 + sum over k of the product over j <= k of (1 - TV_j), at temperature 1. Both
distributions are those of one pass: the target's logits and the context keys that its own features
give the drafter.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from deepinfer.engine.runtime import Runtime
from deepinfer.engine.step.batch import Work, build
from deepinfer.kernels.records import Layout, Records
from deepinfer.measure.replay.passes import Pass
from deepinfer.model.drafter import SequenceContext

AT_ONCE = (
    128  # draft blocks: each of their two distributions takes AT_ONCE * drafts * vocabulary numbers
)


def block_starts(prompt: int, length: int, drafts: int, apart: int) -> Tensor:
    """[a] positions of the last token before each draft block: the first is the first token of the
    continuation, the last leaves a fed row for every draft. length: of the ids that are fed."""
    return torch.arange(prompt, max(length - drafts, prompt - 1) + 1, apart)


def accepted_lengths(rt: Runtime, done: Pass, ids: list[int], prompt: int, apart: int) -> Tensor:
    """[a] expected lengths of the draft blocks every `apart` tokens of the continuation, float64.
    Empty where the model has no drafter or the continuation is no longer than a block."""
    n = rt.config.max_draft
    starts = block_starts(prompt, len(ids), n, apart)
    if not n or not rt.config.num_nextn_predict_layers or not len(starts):
        return torch.zeros(0, dtype=torch.float64)
    device, drafter, text = rt.model.device, rt.model.drafter, torch.tensor(ids)
    text, starts = text.to(device), starts.to(device)
    context, ctx = _context(rt, done, ids)
    out = []
    for at in starts.split(AT_ONCE):
        rows = at[:, None] + torch.arange(n, device=device)
        step = drafter.block_context(context, torch.zeros_like(at), text[at], at, ctx)
        if done.first:  # no keys below it
            layers = rt.config.num_layers + rt.config.num_nextn_predict_layers
            floors = at.new_full((layers, len(at)), done.first)
            step = replace(step, batch=replace(step.batch, floors=floors))
        h, base = drafter.states(text[at], at, n, step)
        draft, _ = drafter.slot_logits(
            h.flatten(0, 1), base.flatten(0, 1), text[rows].flatten(), step
        )
        p = done.logits[rows - (prompt - 1)].double().softmax(-1)
        q = draft.double().softmax(-1).view_as(p)
        out.append(1 + torch.minimum(p, q).sum(-1).cumprod(-1).sum(-1))
    return torch.cat(out).cpu()


def _context(rt: Runtime, done: Pass, ids: list[int]):
    """The drafter's context keys of a pass by position, zeros below its first row; a context."""
    batch = build([Work(ids[done.first :], done.first)], rt.config, rt.model.device)
    ctx = replace(rt.context(batch), cache=None)
    windows = {}
    keys = rt.model.drafter.context_keys(done.features, batch.row_set, ctx)
    for layer, key in zip(rt.config.draft_layers, keys, strict=True):
        fmt = ctx.attention.kv_spec(rt.config, layer).window_format
        key = torch.cat([key.new_zeros(done.first, key.shape[1]), ctx.round(key, fmt)])
        windows[layer] = Records(key, None, Layout("float", key.shape[-1]))
    return SequenceContext(windows, len(ids)), ctx
