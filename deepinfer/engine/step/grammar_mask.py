"""Legal tokens per row: each request's grammar is asked once a row, along its draft.

Row j of a sequence comes after its first j drafts, so the matcher is walked through them and then
taken back: what is legal is decided before verification, and an illegal draft is simply never the
target's own draw.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.engine.request import Request


def grammar_mask(
    requests: list[Request], drafts: list[tuple[int, ...]], vocab: int, device: torch.device
) -> tuple[Tensor | None, dict[int, Exception]]:
    """(mask [q, v] True = legal, flat rows in order; errors by request id). None where nothing is
    constrained. A grammar that raises costs its own request only."""
    if all(r.grammar is None for r in requests):
        return None, {}
    mask = torch.ones(sum(len(d) + 1 for d in drafts), vocab, dtype=torch.bool)
    errors: dict[int, Exception] = {}
    first = 0
    for request, draft in zip(requests, drafts):
        if request.grammar is not None:
            try:
                walk(request.grammar, draft, mask[first : first + len(draft) + 1])
            except Exception as error:
                errors[request.id] = error
        first += len(draft) + 1
    return mask.to(device), errors


def walk(state, draft: tuple[int, ...], mask: Tensor) -> None:
    """Fill mask [n+1, v] of one sequence and leave the state as it was."""
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
