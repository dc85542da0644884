"""Time sparse attention: decode of many sequences with a history, and prefill of one without."""

from __future__ import annotations

import torch

from ..benchmark import Problem, main
from ..records import Layout, Records

HEADS, DIM, WINDOW, CHOSEN, RING = 8, 64, 128, 64, 134


def problems(device: str, dtype: torch.dtype):
    g = torch.Generator().manual_seed(0)
    for sequences in (1, 6, 16):
        yield _problem(f"decode {sequences}", sequences, *_decode(g, sequences), device, dtype, g)
    for t in (300, 1024):
        back = torch.arange(t).unsqueeze(1) - torch.arange(WINDOW - 1, -1, -1)
        yield _problem(f"prefill {t}", t, back.clamp(min=-1), None, device, dtype, g)


def _decode(g: torch.Generator, sequences: int):
    """Window ids of one row a sequence in rings of RING slots, the newest key being its own row."""
    state = torch.arange(1, sequences + 1).unsqueeze(1)
    at = (torch.randint(WINDOW, 9999, (sequences, 1), generator=g) + torch.arange(WINDOW)) % RING
    ids = state * RING + at
    count = (sequences + 1) * RING
    ids[:, -1] = count + torch.arange(sequences)
    return ids, count


def _problem(label, t, ids, count, device, dtype, g) -> Problem:
    def normal(*shape):
        return torch.randn(shape, generator=g).to(device, dtype)

    layout = Layout("float", DIM)
    stored = normal(count, DIM) if count else None
    entries = Records(normal(4096, DIM), None, layout)
    entry_ids = torch.randint(0, max(t // 2, 512), (t, CHOSEN), generator=g).to(device)
    listed = int((ids >= 0).sum()) + entry_ids.numel()
    return Problem(
        f"{label}, {HEADS} heads, {WINDOW}+{CHOSEN}",
        dict(
            q=normal(t, HEADS, DIM),
            window=Records(stored, normal(t, DIM), layout),
            window_ids=ids.to(device),
            entries=entries,
            entry_ids=entry_ids,
            sink=torch.zeros(HEADS, device=device),
            scale=DIM**-0.5,
        ),
        flops=4 * listed * HEADS * DIM,
        nbytes=(ids.unique().numel() + entry_ids.unique().numel()) * DIM * stored_size(dtype),
    )


def stored_size(dtype: torch.dtype) -> int:
    return torch.empty(0, dtype=dtype).element_size()


if __name__ == "__main__":
    main("sparse_attend", problems)
