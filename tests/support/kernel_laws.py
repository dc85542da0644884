"""What the tests of kernels share: every implementation on every case of its op."""

import torch

from deepinfer import kernels
from deepinfer.kernels import Quantised, Records

DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def implementations(only=lambda i: True):
    """(op, implementation) pairs, as pytest parameters would name them."""
    return [
        (op.name, i.name)
        for op in map(kernels.get, kernels.names())
        for i in op.ordered()
        if only(i)
    ]


def cases(op, dtype, seed=0, device="cpu"):
    """(label, arguments) of an op's cases on a device."""
    g = torch.Generator().manual_seed(seed)
    for label, arguments in kernels.get(op).cases(g, dtype):
        yield label, {name: to_device(value, device) for name, value in arguments.items()}


def to_device(value, device):
    if isinstance(value, (torch.Tensor, Quantised)):
        return value.to(device)
    if isinstance(value, Records):
        stored, own = (None if x is None else x.to(device) for x in (value.stored, value.own))
        return Records(stored, own, value.layout)
    return value


def take(op, arguments, rows):
    """The same call on some of its rows, possibly repeated or in another order."""
    taken = dict(arguments)
    for name in kernels.get(op).rows:
        if arguments.get(name) is not None:
            taken[name] = arguments[name][torch.as_tensor(rows, dtype=torch.long)]
    return taken


def results(value):
    return value if isinstance(value, tuple) else (value,)


def num_rows(op, arguments):
    return arguments[kernels.get(op).rows[0]].shape[0]


def close(op, dtype, got, want):
    rtol, atol = kernels.get(op).tolerance[str(dtype).removeprefix("torch.")]
    for a, b in zip(results(got), results(want), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol, equal_nan=True)


def brute_rows(t):
    """Selections of rows: one, a few, reversed, repeated, and more than there are."""
    back, more = list(range(t - 1, -1, -1)), [0] * t + [t - 1] * 19
    return [[0], [t - 1], [t // 2], back, [t // 2] * 5, more]
