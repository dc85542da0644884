"""Teacher-forced passes: the logits of given ids, through an engine's own cache and slots."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from deepinfer.engine.runtime import Runtime
from deepinfer.engine.step.batch import Work, build
from deepinfer.model.context import Tap
from deepinfer.slots.protocols import Prompt, ReplayPlan


def forced_logits(
    rt: Runtime, ids: list[int], prompt: int | None, chunks: list[int] | None, tap_of=None
) -> Tensor:
    """[t, v] logits of every row. The first `prompt` ids are the replay policy's prompt (default all);
    the rest is fed as decode rows. Rows a policy drops are NaN; under an exact policy that drops rows
    so are all prompt rows but the last, which come from windows that are cut. See Engine.logits."""
    prompt = len(ids) if prompt is None else prompt
    if not 1 <= prompt <= len(ids):
        raise ValueError(f"prompt={prompt}: the first rows to treat as the prompt, 1..{len(ids)}")
    sizes = chunk_sizes(len(ids), prompt, chunks, rt.limits.rows)
    plan = rt.replay_plan(Prompt(prompt))
    need = rt.resources.pages_of(len(ids))
    if need > rt.pages.available or not rt.states.free:
        raise RuntimeError(
            f"a teacher-forced pass of {len(ids)} tokens needs {need} pages and a state slot; "
            f"{rt.pages.available} pages are free of {rt.pages.size}: finish or abort running requests, "
            "or make the engine with more num_pages"
        )
    pages, (slot,) = rt.pages.take(need), rt.states.take(1)
    try:
        return torch.cat(list(_chunks(rt, ids, prompt, sizes, plan, pages, slot, tap_of)))
    finally:
        rt.pages.give(pages)
        rt.states.give([slot])


def chunk_sizes(total: int, prompt: int, chunks: list[int] | None, most: int) -> list[int]:
    """Rows per step; default: as few steps as the row limit allows, the prompt's apart from the rest's."""
    if chunks is None:
        cuts = [*range(0, prompt, most), *range(prompt, total, most), total]
        return [b - a for a, b in zip(cuts, cuts[1:])]
    if sum(chunks) != total or any(c < 0 for c in chunks):
        raise ValueError(
            f"chunks={chunks} are {sum(chunks)} rows, the ids are {total}: give rows per step"
        )
    return list(chunks)


def _chunks(rt: Runtime, ids, prompt, sizes, plan: ReplayPlan, pages, slot, tap_of):
    vocab, back = rt.config.vocab_size, rt.config.engram_max_ngram_size - 1
    start = 0
    for size in sizes:
        if size == 0:
            continue
        before = ids[max(start - back, 0) : start]
        work = Work(ids[start : start + size], start, before, pages, slot, plan, "all")
        batch = build(
            [work],
            rt.config,
            rt.model.device,
            decode=start >= prompt and size <= rt.limits.backtracking,
        )
        tap: Tap | None = None if tap_of is None else tap_of(batch)
        logits = rt.model(rt.context(batch, tap)).logits
        dropped = size - logits.shape[0]
        if (
            plan.exact and plan.rows_from[-1]
        ):  # of prompt rows it promises the last one's numbers only
            logits[: max(min(prompt - 1, start + size) - start - dropped, 0)] = math.nan
        yield torch.cat([logits.new_full((dropped, vocab), math.nan), logits])
        start += size
