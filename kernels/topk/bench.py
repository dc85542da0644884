"""Time top-k on index scores: decode, verify and prefill sizes, with the ties that relu leaves."""

from __future__ import annotations

import torch

from ..benchmark import Problem, main

SIZES = ((1, 300, 64), (16, 300, 64), (300, 300, 64), (16, 16384, 512), (256, 16384, 512))


def problems(device: str, dtype: torch.dtype):
    g = torch.Generator().manual_seed(0)
    for t, n, k in SIZES:
        scores = torch.relu(torch.randn(t, n, generator=g)).to(device, dtype)
        nbytes = scores.nbytes + t * k * 8
        yield Problem(f"{t}x{n} k={k}", dict(scores=scores, k=k), flops=0, nbytes=nbytes)


if __name__ == "__main__":
    main("topk", problems)
