"""Time the routed experts: rows of a decode step up to a prefill chunk, small and larger layers."""

from __future__ import annotations

import torch

from ..benchmark import Problem, main

LAYERS = ((16, 128, 64, 4), (64, 512, 256, 6))  # experts, hidden, intermediate, chosen
ROWS = (1, 6, 16, 64, 300)


def problems(device: str, dtype: torch.dtype):
    g = torch.Generator().manual_seed(0)

    def normal(*shape):
        return (torch.randn(shape, generator=g) * 0.1).to(device, dtype)

    for e, d, i, k in LAYERS:
        w1, w3, w2 = normal(e, i, d), normal(e, i, d), normal(e, d, i)
        for t in ROWS:
            ids = torch.rand(t, e, generator=g).argsort(1)[:, :k].contiguous().to(device)
            yield Problem(
                f"{t} rows, {k} of {e}, {d}x{i}",
                dict(
                    x=normal(t, d),
                    ids=ids,
                    weights=torch.full((t, k), 1 / k, device=device),
                    w1=w1,
                    w3=w3,
                    w2=w2,
                    limit=10.0,
                ),
                flops=6 * t * k * d * i,
                nbytes=ids.unique().numel() * 3 * d * i * w1.element_size(),
            )


if __name__ == "__main__":
    main("experts", problems)
