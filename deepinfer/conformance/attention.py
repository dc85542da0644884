"""The laws of an attention variant."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from deepinfer.conformance.law import (
    Law,
    Subject,
    case,
    close,
    expect,
    law,
    same,
    shaped,
    show,
    untouched,
)
from deepinfer.conformance.walk import World, walk
from deepinfer.slots.attention.csa2 import CSA2
from deepinfer.slots.protocols import KVSpec
from deepinfer.slots.registry import start

LAWS: list[Law] = []
LENGTHS = ((1,), (2,), (5,), (12,), (3, 6), (12, 1, 7))  # tokens of each sequence, smallest first
KEYS = ("window", "entries", "index_keys")
QUERIES = ("q", "index_query", "index_weights")
TOLERANCE = 1e-9  # of FP64, relative to the largest number


def worlds(s: Subject, dtype: torch.dtype = torch.float64) -> Iterator[World]:
    for lengths in LENGTHS:
        yield World(s.info.config, lengths, dtype)


def differ(
    a: dict[str, Tensor], b: dict[str, Tensor], at: Tensor, bt: Tensor, bits: bool = False
) -> str:
    """In words, the first layer where rows `at` of a and `bt` of b differ; '' where none does."""
    for name in a:
        if name in ("positions", "seq"):
            continue
        picks = name.endswith(".ids")
        x, y = a[name][at], b[name][bt]
        if picks:
            x, y = in_order(x, y)
        if same(x, y) if bits else close(x, y, TOLERANCE):
            continue
        i = int((x != y).flatten(1).any(-1).long().argmax())
        where = f"{name.rsplit('.', 1)[0]}, position {int(a['positions'][at][i])}"
        return f"{where} {'picks' if picks else 'gives'} {show(x[i])} against {show(y[i])}"
    return ""


def in_order(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Picks as sets: the largest first, -1 behind, both as wide as the wider."""
    width = max(x.shape[-1], y.shape[-1])
    x, y = (z.sort(-1, descending=True)[0] for z in (x, y))
    x, y = (torch.nn.functional.pad(z, (0, width - z.shape[-1]), value=-1) for z in (x, y))
    return x, y


@law(LAWS, "any number of rows is legal, also none; attend gives [t, h, d] in the dtype of q")
def shapes(s: Subject) -> None:
    c = s.info.config
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for lengths, first in [
            ((), ()),
            ((3,), (3,)),
            *((n, (0,) * len(n)) for n in LENGTHS),
            ((6, 5), (5, 5)),
        ]:
            told = dict(
                sequences=lengths, from_position=first, dtype=str(dtype).removeprefix("torch.")
            )
            with case(**told):
                out = walk(s.fresh(), World(c, lengths, dtype), first)
                t = sum(lengths) - sum(first)
                for name, x in out.items():
                    if name.endswith(".out"):
                        shaped(x, (t, c.num_attention_heads, c.head_dim), name, dtype)
                        expect(
                            x.isfinite().all(), f"{name} is not finite: {show(x[~x.isfinite()])}"
                        )
                    elif name.endswith(".ids"):
                        expect(
                            x.ndim == 2 and len(x) == t,
                            f"{name} has shape {tuple(x.shape)}, it should be ({t}, k)",
                        )
                        expect(
                            x.dtype == torch.long, f"{name} has dtype {x.dtype}, it should be int64"
                        )


@law(LAWS, "kv_spec says for every layer what it keeps")
def specs(s: Subject) -> None:
    attention, c = s.fresh(), s.info.config
    for layer in range(len(c.compress_ratios)):
        with case(layer=layer, role=c.role(layer)):
            spec = attention.kv_spec(c, layer)
            expect(isinstance(spec, KVSpec), f"kv_spec gives a {type(spec).__name__}")
            expect(spec.window >= 1, f"window is {spec.window}")
            expect(spec.bytes_per_token >= 0, f"bytes_per_token is {spec.bytes_per_token}")
            source = layer in c.kv_source_layers
            formats = (spec.entry_format, spec.index_format)
            expect(
                (None not in formats) == source, f"formats of entries and index keys are {formats}"
            )
            expect(
                spec.ratio == c.ratio(layer),
                f"ratio is {spec.ratio}, the model's is {c.ratio(layer)}",
            )


@law(LAWS, "a row picks entries that are complete at its position, each once")
def picks(s: Subject) -> None:
    c = s.info.config
    for world in worlds(s):
        with case(sequences=world.lengths):
            out = walk(s.fresh(), world)
            for layer in c.index_source_layers:
                for ids, p in zip(out[f"layers.{layer}.ids"].tolist(), out["positions"].tolist()):
                    there, visible = [i for i in ids if i != -1], (p + 1) // c.ratio(layer)
                    told = f"layer {layer}, position {p} picks {ids}"
                    expect(
                        all(0 <= i < visible for i in there), f"{told}, it may see 0..{visible - 1}"
                    )
                    expect(len(set(there)) == len(there), f"{told}: an entry twice")


@law(LAWS, "changing later keys changes nothing")
def causal(s: Subject) -> None:
    for world in worlds(s):
        attention = s.fresh()
        before = walk(attention, world)
        for part in KEYS:
            for seq, length in enumerate(world.lengths):
                for p in sorted({1, length // 2, length - 1} & set(range(1, length))):
                    with case(
                        sequences=world.lengths,
                        changed=f"{part} of sequence {seq} from position {p}",
                    ):
                        after = walk(attention, world.changed((part,), seq, p))
                        at = ((before["seq"] != seq) | (before["positions"] < p)).nonzero()[:, 0]
                        told = differ(before, after, at, at)
                        expect(not told, f"an earlier row or another sequence changed: {told}")


@law(LAWS, "a row does not depend on the queries of other rows")
def own_query(s: Subject) -> None:
    for world in worlds(s):
        attention = s.fresh()
        before = walk(attention, world)
        for seq, length in enumerate(world.lengths):
            for p in sorted({1, length // 2, length - 1} & set(range(1, length))):
                for first, stop in ((0, p), (p, length)):
                    with case(
                        sequences=world.lengths,
                        changed=f"queries {first}..{stop - 1} of sequence {seq}",
                    ):
                        after = walk(attention, world.changed(QUERIES, seq, first, stop))
                        mine = (
                            (before["seq"] == seq)
                            & (before["positions"] >= first)
                            & (before["positions"] < stop)
                        )
                        at = (~mine).nonzero()[:, 0]
                        told = differ(before, after, at, at)
                        expect(not told, told)


@law(LAWS, "a sequence does not depend on the others or on their order")
def independent(s: Subject) -> None:
    bits = s.promises.batch_invariant
    for dtype in (torch.float64, torch.float32) if bits else (torch.float64,):
        for world in worlds(s, dtype):
            b, attention = len(world.lengths), s.fresh()
            whole = walk(attention, world, invariant=bits)
            for at in [[i] for i in range(b)] + [list(reversed(range(b)))]:
                with case(
                    sequences=world.lengths, taken=at, dtype=str(dtype).removeprefix("torch.")
                ):
                    part = walk(attention, world.sequences(at), invariant=bits)
                    places = torch.cat([(whole["seq"] == i).nonzero()[:, 0] for i in at])
                    told = differ(part, whole, torch.arange(len(places)), places, bits)
                    expect(not told, told)


@law(LAWS, "rows behind a cached history give what they give in one pass")
def history(s: Subject) -> None:
    for world in worlds(s):
        attention = s.fresh()
        whole = walk(attention, world)
        for back in (1, 2, 3, 5):
            first = tuple(max(n - back, 0) for n in world.lengths)
            with case(sequences=world.lengths, from_position=first):
                part = walk(attention, world, first)
                keep = whole["positions"] >= torch.tensor(first)[whole["seq"]]
                told = differ(part, whole, torch.arange(int(keep.sum())), keep.nonzero()[:, 0])
                expect(not told, told)


@law(LAWS, "window keys below the floor are not seen")
def floors(s: Subject) -> None:
    for world in worlds(s):
        attention = s.fresh()
        for seq, length in enumerate(world.lengths):
            for floor in sorted({1, length // 2} & set(range(1, length))):
                with case(sequences=world.lengths, floor=f"{floor} in sequence {seq}"):
                    low = torch.zeros(len(world.lengths), dtype=torch.long)
                    low[seq] = floor
                    a = walk(attention, world, floor=low)
                    b = walk(attention, world.changed(("window",), seq, 0, floor), floor=low)
                    at = ((a["seq"] != seq) | (a["positions"] >= floor)).nonzero()[:, 0]
                    told = differ(a, b, at, at)
                    expect(not told, f"changing the keys below it changed a row: {told}")


@law(LAWS, "padding rows change nothing and stay finite")
def padded(s: Subject) -> None:
    for world in worlds(s):
        with case(sequences=world.lengths, padding=2):
            attention = s.fresh()
            a, b = walk(attention, world), walk(attention, world, padding=2)
            at = torch.arange(sum(world.lengths))
            told = differ(a, b, at, at)
            expect(not told, told)
            for name, x in b.items():
                expect(
                    not name.endswith(".out") or x.isfinite().all(),
                    f"{name} of a padding row is not finite",
                )


@law(LAWS, "the same call gives the same bits")
def deterministic(s: Subject) -> None:
    for world in worlds(s):
        with case(sequences=world.lengths):
            a, b = walk(s.fresh(), world), walk(s.fresh(), world)
            at = torch.arange(sum(world.lengths))
            told = differ(a, b, at, at, bits=True)
            expect(not told, told)


@law(LAWS, "inputs are not changed")
def pure(s: Subject) -> None:
    for world in worlds(s):
        for back in (2, 20):
            first = tuple(max(n - back, 0) for n in world.lengths)
            with case(sequences=world.lengths, from_position=first):
                walk(s.fresh(), world, first, watch=untouched)


@law(LAWS, "picks and results are the model's own (CSA2)", exact=True)
def model_own(s: Subject) -> None:
    for world in worlds(s):
        with case(sequences=world.lengths):
            got, want = walk(s.fresh(), world), walk(start(CSA2(), s.info), world)
            at = torch.arange(sum(world.lengths))
            told = differ(got, want, at, at)
            expect(not told, told)
