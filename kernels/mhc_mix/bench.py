"""Time the three ops of a hyper-connection on a GPU, forward and with the gradient.

    python -m deepinfer.kernels.mhc_mix.bench --rows 32768 --channels 224 --dtype bfloat16

"graph" columns are the GPU's own time: a CUDA graph of calls on several sets of inputs, so that
nothing is left in the cache from the call before. "eager" is what a Python loop of the same calls
takes; where it is longer, the launches are what takes the time. A floor is the time to read every
input once and to write every result once, at the rate of a large copy measured just before.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .. import registry
from ..benchmark import rates

OPS = ("mhc_collapse", "mhc_expand", "mhc_mix")
M = 4  # streams


def inputs(op: str, t: int, d: int, dtype: torch.dtype, g: torch.Generator) -> dict[str, Any]:
    """Arguments of an op on the GPU; its tensors want a gradient."""

    def normal(*shape, dtype=torch.float32, std=1.0):
        x = torch.randn(shape, generator=g, device="cuda") * std
        return x.to(dtype).requires_grad_()

    streams, n = normal(t, M, d, dtype=dtype), M * (2 + M)
    if op == "mhc_collapse":
        return dict(streams=streams, pre=normal(t, M))
    if op == "mhc_expand":
        y, post, comb = normal(t, d, dtype=dtype), normal(t, M), normal(t, M, M)
        return dict(streams=streams, y=y, post=post, comb=comb)
    weights = dict(fn=normal(n, M * d, std=0.05), base=normal(n), scale=normal(3))
    return dict(streams=streams, **weights, iters=20, norm_eps=1e-20, hc_eps=1e-6)


def floor_bytes(arguments: dict[str, Any], out: tuple[torch.Tensor, ...]) -> tuple[int, int]:
    """(forward, backward): inputs and results once; inputs, their gradients and the results'."""
    into = sum(x.nbytes for x in arguments.values() if isinstance(x, torch.Tensor))
    results = sum(x.nbytes for x in out)
    return into + results, 2 * into + results


def graph_us(calls: list[Callable[[], Any]], replays: int = 40) -> float:
    """Median time of one call in a captured round of all of them."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return events_us(graph.replay, replays) / len(calls)


def events_us(call: Callable[[], Any], repeats: int) -> float:
    """Median time between two events around a call."""
    for _ in range(3):
        call()
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, end in pairs:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in pairs) * 1e3


def measure(op: str, t: int, d: int, dtype: torch.dtype, rate: float) -> Iterator[dict[str, Any]]:
    """One row per implementation that takes the call and is not kept for its bits alone."""
    g = torch.Generator("cuda").manual_seed(0)
    sets = [inputs(op, t, d, dtype, g) for _ in range(4)]
    for i in registry.get(op).ordered():
        if i.late or i.why_unavailable() or i.why_refused(**sets[0]):
            continue
        with torch.no_grad():
            out = _results(i.fn(**sets[0]))
        weights = [torch.randn_like(x) for x in out]
        forward, backward = floor_bytes(sets[0], out)
        both = [_both(i.fn, arguments, weights) for arguments in sets]
        yield dict(
            op=op,
            implementation=i.name,
            forward_graph_us=graph_us([_forward(i.fn, arguments) for arguments in sets]),
            forward_floor_us=forward / rate * 1e6,
            both_graph_us=graph_us(both),
            both_floor_us=(forward + backward) / rate * 1e6,
            both_eager_us=events_us(lambda both=both: [f() for f in both], 20) / len(both),
        )


def _results(value: Any) -> tuple[torch.Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


def _forward(fn, arguments):
    @torch.no_grad()
    def call():
        fn(**arguments)

    return call


def _both(fn, arguments, weights):
    leaves = tuple(x for x in arguments.values() if isinstance(x, torch.Tensor))

    def call():
        torch.autograd.grad(_results(fn(**arguments)), leaves, weights)

    return call


def main() -> None:
    """Print the table, write JSON when asked."""
    parser = argparse.ArgumentParser(description="time the ops of a hyper-connection on a GPU")
    parser.add_argument("--rows", type=int, default=32768)
    parser.add_argument("--channels", type=int, default=224)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--tf32", action="store_true", help="TF32 in float32 products")
    parser.add_argument("--json", help="write rows and set-up to this file")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("it times a GPU, and there is none here")
    torch.backends.cuda.matmul.allow_tf32 = options.tf32
    dtype = getattr(torch, options.dtype)
    rate = rates("cuda", dtype)[0]
    setup = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "copy TB/s": round(rate / 1e12, 2),
        **{k: v for k, v in vars(options).items() if k != "json"},
    }
    print(", ".join(f"{k} {v}" for k, v in setup.items()))
    rows: list[dict[str, Any]] = []
    for op in OPS:
        for row in measure(op, options.rows, options.channels, dtype, rate):
            if not rows:
                print("  ".join(f"{k.removesuffix('_us'):>14}" for k in row), "  (us)")
            rows.append(row)
            cells = (f"{v:14.1f}" if isinstance(v, float) else f"{v:>14}" for v in row.values())
            print("  ".join(cells))
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"setup": setup, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
