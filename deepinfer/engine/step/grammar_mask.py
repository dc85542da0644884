"""Legal tokens per row: each request's grammar is asked on the host, once a row, along its draft.

It is asked before the step is queued, so nothing in `execute` waits for the host. It has to know the
tokens of the step before, so a step with a grammar is committed at once (overlap.py). How many of
its drafts are verified is decided later, on the device, so the walk covers all of them.

Row j of a sequence comes after its first j drafts, so the matcher is walked through them and then
taken back: what is legal is decided before verification, and an illegal draft is simply never the
target's own draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def grammar_masks(
    grammars: Sequence[Any], drafts: Sequence[tuple[int, ...]], width: int, vocab: int
) -> tuple[Tensor | None, dict[int, Exception]]:
    """(mask [e, width + 1, v] by draft depth, True = legal, on the host; errors by number). grammars:
    the state of each of e requests, None if it has none; drafts: at most `width` tokens that each may
    verify. The mask is None if no request has a grammar. A grammar that raises costs its own request
    only."""
    if all(g is None for g in grammars):
        return None, {}
    mask = torch.ones(len(grammars), width + 1, vocab, dtype=torch.bool)
    errors: dict[int, Exception] = {}
    for e, (grammar, draft) in enumerate(zip(grammars, drafts)):
        if grammar is not None:
            try:
                walk(grammar, draft, mask[e])
            except Exception as error:
                errors[e] = error
    return mask, errors


def walk(state, draft: tuple[int, ...], mask: Tensor) -> None:
    """Fill mask [w+1, v] of one sequence, w >= its drafts, and leave the state as it was."""
    taken = 0
    try:
        for j in range(len(draft) + 1):
            restrict(mask[j], state.allowed())
            if j == len(draft) or not bool(mask[j, draft[j]]) or not state.accept(draft[j]):
                break  # rows behind an illegal draft are never emitted from
            taken += 1
    finally:
        if taken:
            state.rollback(taken)


def restrict(row: Tensor, allowed) -> None:
    """Apply what `allowed()` said to row [v]: None (all), a bool mask [v], or ids."""
    if allowed is None:
        return
    allowed = torch.as_tensor(allowed)
    if allowed.dtype == torch.bool:
        if allowed.shape != row.shape:
            raise ValueError(
                f"grammar allowed() returned a mask of shape {list(allowed.shape)}, not [{len(row)}]"
            )
        row.copy_(allowed)
        return
    ids = allowed.to(torch.long).flatten()
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < len(row):
        raise ValueError(f"grammar allowed() names ids outside 0..{len(row) - 1}")
    row.fill_(False)
    row[ids] = True
