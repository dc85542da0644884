"""The laws of an experts variant."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from deepinfer import kernels
from deepinfer.conformance.law import (
    Law,
    Subject,
    case,
    close,
    expect,
    generator,
    law,
    same,
    shaped,
    show,
    tensors,
    untouched,
)
from deepinfer.slots.experts.local import Local
from deepinfer.slots.protocols import ExpertLayer, Routing, Rows, RowSet
from deepinfer.slots.registry import start

LAWS: list[Law] = []
ROWS = (1, 2, 3, 7)
WIDTH = 32


def layer(s: Subject, dtype: torch.dtype = torch.float64, tied: bool = False) -> ExpertLayer:
    """Layer 1 of a model with the config's experts, WIDTH wide. tied: so many experts score alike
    that the choice has to cut through a tie."""
    g, e, k = generator(5), s.info.config.n_routed_experts, s.info.config.num_experts_per_tok

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

    gate, bias, image = normal(e, WIDTH), normal(e) * 0.1, normal(e)
    if tied:
        gate, bias, image = (
            gate[torch.arange(e) // (k + 1)],
            torch.zeros_like(bias),
            torch.zeros_like(image),
        )
    w1, w3, w2 = (normal(e, WIDTH, WIDTH) * WIDTH**-0.5 for _ in range(3))
    return ExpertLayer(
        name="layers.1",
        gate=gate,
        bias=bias,
        bias_image=image,
        w1=w1,
        w3=w3,
        w2=w2,
        top_k=k,
        scaling=1.5,
        limit=2.0,
        act=None,
        ops=kernels.bind(batch_invariant=s.promises.batch_invariant),
    )


def inputs(
    rows: int, padding: int = 0, images: bool = False, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Rows]:
    """x [t, d] and the Rows it belongs to: one sequence, then padding rows (seq -1)."""
    t = rows + padding
    x = (torch.randn(t, WIDTH, generator=generator(9), dtype=torch.float64) * 2).to(dtype)
    seq = torch.where(torch.arange(t) < rows, 0, -1)
    zero = torch.zeros(1, dtype=torch.long)
    row_set = RowSet(torch.arange(t), seq, zero, zero, ((0, 0, rows),) if rows else ())
    image = torch.arange(t) % 2 == 0 if images else None
    ids = torch.zeros(t, dtype=torch.long)
    return x, Rows(row_set, x[:, None], x.new_ones(t, 1), ids, ids[:, None], image=image)


def narrowed(rows: Rows, at: Tensor) -> Rows:
    """The Rows `at`, in that order, as rows of their own."""
    s = rows.set
    row_set = RowSet(s.positions[at], s.seq[at], s.first, s.start, None)
    return replace(
        rows,
        set=row_set,
        streams=rows.streams[at],
        pre=rows.pre[at],
        ids=rows.ids[at],
        lookback=rows.lookback[at],
        image=None if rows.image is None else rows.image[at],
    )


def both(experts, lay: ExpertLayer, x: Tensor, rows: Rows) -> tuple[Routing, Tensor]:
    routing = experts.route(lay, x, rows)
    return routing, experts.forward(lay, x, routing)


@law(LAWS, "any number of rows is legal, also none; shapes are [t, k] and [t, d], the dtype is x's")
def shapes(s: Subject) -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for rows in (0, *ROWS):
            with case(rows=rows, dtype=str(dtype).removeprefix("torch.")):
                lay = layer(s, dtype)
                routing, y = both(s.fresh(), lay, *inputs(rows, dtype=dtype))
                shaped(routing.ids, (rows, lay.top_k), "ids", torch.long)
                shaped(routing.weights, (rows, lay.top_k), "weights")
                shaped(y, (rows, WIDTH), "forward", dtype)


@law(LAWS, "a row's experts are distinct and exist, its weights are finite; -1 means none")
def routed(s: Subject) -> None:
    for rows in ROWS:
        for images in (False, True):
            with case(rows=rows, images="yes" if images else "no"):
                lay = layer(s)
                x, r = inputs(rows, images=images)
                got = s.fresh().route(lay, x, r)
                for i, ids in enumerate(got.ids.tolist()):
                    there = [e for e in ids if e != -1]
                    expect(
                        all(0 <= e < lay.num_experts for e in there),
                        f"row {i} goes to {ids} of {lay.num_experts}",
                    )
                    expect(
                        len(set(there)) == len(there), f"row {i} goes to one expert twice: {ids}"
                    )
                expect(got.weights.isfinite().all(), f"weights are {show(got.weights)}")


@law(LAWS, "a padding row goes to no expert, gets zeros and changes nothing")
def padded(s: Subject) -> None:
    for rows in (0, *ROWS):
        with case(rows=rows, padding=2):
            x, r = inputs(rows, padding=2)
            routing, y = both(s.fresh(), layer(s), x, r)
            expect(
                (routing.ids[rows:] == -1).all(),
                f"a padding row goes to experts {routing.ids[rows:].tolist()}",
            )
            expect((y[rows:] == 0).all(), f"a padding row gets {show(y[rows:])}")
            _, alone = both(s.fresh(), layer(s), *inputs(rows))
            expect(
                close(y[:rows], alone[:rows], 1e-9) if rows else True,
                "padding changes the other rows",
            )


@law(LAWS, "an expert of -1 contributes nothing")
def missing(s: Subject) -> None:
    for rows in ROWS:
        with case(rows=rows):
            x, r = inputs(rows)
            lay, experts = layer(s), s.fresh()
            routing = experts.route(lay, x, r)
            gone = torch.arange(lay.top_k) == lay.top_k - 1
            without = Routing(routing.ids.masked_fill(gone, -1), routing.weights)
            weightless = Routing(routing.ids, routing.weights.masked_fill(gone, 0))
            a, b = experts.forward(lay, x, without), experts.forward(lay, x, weightless)
            expect(
                close(a, b, 1e-9), f"row 0 is {show(a[0])}, with weight 0 in its place {show(b[0])}"
            )


@law(LAWS, "a row does not depend on its neighbours or on the order of rows")
def independent(s: Subject) -> None:
    exact_bits = s.promises.batch_invariant
    for dtype in (torch.float64, torch.float32):
        equal = (
            same
            if exact_bits
            else lambda a, b: close(a, b, 1e-9 if a.dtype == torch.float64 else 1e-4)
        )
        for rows in ROWS[1:]:
            x, r = inputs(rows, dtype=dtype, images=True)
            lay, experts = layer(s, dtype), s.fresh()
            routing, y = both(experts, lay, x, r)
            for at in [torch.tensor([i]) for i in range(rows)] + [torch.arange(rows).flip(0)]:
                with case(rows=rows, dtype=str(dtype).removeprefix("torch."), taken=at.tolist()):
                    other, z = both(experts, lay, x[at], narrowed(r, at))
                    expect(
                        torch.equal(other.ids, routing.ids[at]),
                        f"experts {other.ids.tolist()}, among all {routing.ids[at].tolist()}",
                    )
                    expect(equal(z, y[at]), f"gives {show(z)}, among all rows {show(y[at])}")


@law(LAWS, "the same call gives the same bits")
def deterministic(s: Subject) -> None:
    for rows in ROWS:
        with case(rows=rows):
            x, r = inputs(rows)
            a, b = (both(s.fresh(), layer(s), x, r) for _ in range(2))
            for name, t in tensors(a).items():
                expect(same(t, tensors(b)[name]), f"{name} differs between two calls")


@law(LAWS, "inputs are not changed")
def pure(s: Subject) -> None:
    for rows in ROWS:
        with case(rows=rows):
            x, r = inputs(rows, padding=1, images=True)
            lay, experts = layer(s), s.fresh()
            with untouched(layer=lay, x=x, rows=r):
                routing = experts.route(lay, x, r)
            with untouched(layer=lay, x=x, routing=routing):
                experts.forward(lay, x, routing)


@law(LAWS, "experts and weights are those of the model's router", exact=True)
def router(s: Subject) -> None:
    for rows in ROWS:
        for images in (False, True):
            for tied in (False, True):
                with case(
                    rows=rows, images="yes" if images else "no", ties="yes" if tied else "no"
                ):
                    x, r = inputs(rows, padding=1, images=images)
                    got = s.fresh().route(layer(s, tied=tied), x, r)
                    want = start(Local(), s.info).route(layer(s, tied=tied), x, r)
                    a, b = (by_expert(w, s.info.config.n_routed_experts) for w in (got, want))
                    bad = ~torch.isclose(a, b, atol=1e-9).all(-1)
                    i = int(bad.long().argmax())
                    expect(
                        not bad.any(),
                        f"row {i} goes to {got.ids[i].tolist()} "
                        f"with weights {show(got.weights[i])}, "
                        f"it should go to {want.ids[i].tolist()} with {show(want.weights[i])}",
                    )


def by_expert(routing: Routing, experts: int) -> Tensor:
    """[t, e] weight of each expert: routing without the order of its columns."""
    out = torch.zeros(routing.ids.shape[0], experts + 1, dtype=torch.float64)
    return out.scatter_add(1, routing.ids % (experts + 1), routing.weights.double())[:, :-1]


@law(LAWS, "the result is the weighted sum of the row's experts", exact=True)
def weighted_sum(s: Subject) -> None:
    for rows in ROWS:
        with case(rows=rows):
            x, r = inputs(rows, padding=1, images=True)
            lay, reference = layer(s), start(Local(), s.info)
            want = reference.forward(lay, x, reference.route(lay, x, r))
            experts = s.fresh()
            got = experts.forward(lay, x, experts.route(lay, x, r))
            expect(close(got, want, 1e-9), f"row 0 is {show(got[0])}, it should be {show(want[0])}")
