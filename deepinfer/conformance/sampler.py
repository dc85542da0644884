"""The laws of a sampler."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from deepinfer.conformance.law import (
    Law,
    Subject,
    case,
    close,
    expect,
    follows,
    generator,
    law,
    same,
    shaped,
    show,
    tensors,
    untouched,
)
from deepinfer.slots.protocols import Dist, RowKeys, RowParams
from deepinfer.slots.sampler.distribution import distribution as reference

LAWS: list[Law] = []
SIZES = ((1, 2), (2, 3), (3, 8), (5, 40))  # (rows, vocabulary), smallest first
SETTINGS = ((1.0, 1.0, -1), (0.0, 1.0, -1), (0.5, 1.0, 2), (0.7, 0.6, -1), (2.0, 0.9, 3))
DRAWS = 6000


def logits(rows: int, vocab: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocab, generator=generator(seed + 97 * vocab)) * 2


def params(rows: int, first: int = 0) -> RowParams:
    """The SETTINGS in turn, one a row, so that greedy and sampled rows lie side by side."""
    chosen = [SETTINGS[(first + i) % len(SETTINGS)] for i in range(rows)]
    return all_params(chosen)


def all_params(rows: list[tuple[float, float, int]]) -> RowParams:
    t, p, k = zip(*rows) if rows else ((), (), ())
    return RowParams(
        torch.tensor(t, dtype=torch.float64),
        torch.tensor(p, dtype=torch.float64),
        torch.tensor(k, dtype=torch.long),
    )


def keys(rows: int, seed: int = 7) -> RowKeys:
    return RowKeys(seed + 1000 * torch.arange(rows), 3 + torch.arange(rows))


def dist_rows(d: Dist, at: Tensor) -> Dist:
    return replace(d, probs=d.probs[at], logprobs=d.logprobs[at], finite=d.finite[at])


@law(LAWS, "any number of rows is legal, also none; shapes are [t, v] and [t]")
def shapes(s: Subject) -> None:
    for rows, vocab in ((0, 3), *SIZES):
        with case(rows=rows, vocabulary=vocab):
            sampler = s.fresh()
            d = sampler.distribution(logits(rows, vocab), params(rows))
            shaped(d.probs, (rows, vocab), "probs")
            shaped(d.logprobs, (rows, vocab), "logprobs")
            shaped(d.finite, (rows,), "finite", torch.bool)
            out = sampler.draw(d, keys(rows))
            shaped(out.tokens, (rows,), "tokens", torch.long)
            shaped(out.logprobs, (rows,), "logprobs of the tokens")


@law(LAWS, "a row's probabilities are >= 0 and add up to 1")
def probabilities(s: Subject) -> None:
    for rows, vocab in SIZES:
        for first, setting in enumerate(SETTINGS):
            with case(rows=rows, vocabulary=vocab, temperature_top_p_top_k=setting):
                p = s.fresh().distribution(logits(rows, vocab), params(rows, first)).probs
                expect((p >= 0).all(), f"a probability is {p.min():.4g}")
                total = p[0].double().sum().item()
                expect(abs(total - 1) < 1e-4, f"row 0 adds up to {total:.6g}: {show(p[0])}")


@law(LAWS, "logprobs are the log-softmax of the masked logits at temperature 1")
def reported(s: Subject) -> None:
    for rows, vocab in SIZES:
        for masked in (False, True):
            with case(rows=rows, vocabulary=vocab, mask="yes" if masked else "no"):
                x, sampler = logits(rows, vocab), s.fresh()
                mask = half_mask(rows, vocab) if masked else None
                d = sampler.distribution(x, params(rows), mask)
                legal = x if mask is None else x.masked_fill(~mask, -math.inf)
                want = legal.double().log_softmax(-1)
                expect(
                    close(d.logprobs, want.to(d.logprobs.dtype), 1e-4),
                    f"row 0 reports {show(d.logprobs[0])}, "
                    f"the logits {show(x[0])} give {show(want[0])}",
                )
                out = sampler.draw(d, keys(rows))
                taken = d.logprobs.gather(1, out.tokens[:, None])[:, 0]
                expect(
                    close(out.logprobs.to(taken.dtype), taken, 1e-6),
                    f"draw reports {show(out.logprobs)}, "
                    f"the law's logprobs of its tokens are {show(taken)}",
                )


@law(LAWS, "a temperature below 1e-5 takes the likeliest token, ties to the lowest id", exact=True)
def greedy(s: Subject) -> None:
    for temperature in (0.0, 9e-6):
        for row in ([1.0, 1.0], [0.0, 2.0, 2.0], [2.0, 0.0, 2.0, 2.0], [-math.inf, -3.0, 4.0]):
            with case(temperature=temperature, logits=row):
                sampler, best = s.fresh(), row.index(max(row))
                d = sampler.distribution(torch.tensor([row]), all_params([(temperature, 0.5, 2)]))
                expect(
                    d.probs[0, best] == 1,
                    f"the law is {show(d.probs[0])}, it should be all on {best}",
                )
                got = sampler.draw(d, keys(1)).tokens.item()
                expect(got == best, f"drew token {got}, it should be {best}")


@law(
    LAWS,
    "the law is: mask, temperature, top-p (mass before <= p), top-k, ties to the lower id",
    exact=True,
)
def definition(s: Subject) -> None:
    for rows, vocab in SIZES:
        for first, setting in enumerate(SETTINGS):
            for tied in (False, True):
                name = dict(rows=rows, vocabulary=vocab, temperature_top_p_top_k=setting)
                with case(**name, ties="yes" if tied else "no"):
                    x = logits(rows, vocab)
                    x = x.round() if tied else x
                    got = (
                        s.fresh().distribution(x, params(rows, first), half_mask(rows, vocab)).probs
                    )
                    want = reference(x.double(), params(rows, first), half_mask(rows, vocab)).probs
                    bad = ~torch.isclose(got.double(), want, atol=1e-5).all(-1)
                    i = int(bad.long().argmax())
                    expect(
                        not bad.any(),
                        f"row {i} of logits {show(x[i])} has law {show(got[i])}, "
                        f"it should be {show(want[i])}",
                    )


@law(LAWS, "draws follow the law, over positions and over seeds")
def draws(s: Subject) -> None:
    for vocab in (2, 8):
        for setting in SETTINGS:
            for over in ("positions", "seeds"):
                with case(vocabulary=vocab, temperature_top_p_top_k=setting, over=over):
                    sampler, one = s.fresh(), logits(1, vocab)
                    d = sampler.distribution(
                        one.expand(DRAWS, vocab).contiguous(), all_params([setting] * DRAWS)
                    )
                    count, still = torch.arange(DRAWS), torch.full((DRAWS,), 5)
                    k = RowKeys(still, count) if over == "positions" else RowKeys(count, still)
                    follows(sampler.draw(d, k).tokens, d.probs[0], f"logits {show(one)}")


@law(LAWS, "a token of probability 0 is never drawn")
def never(s: Subject) -> None:
    for vocab in (2, 3, 8, 40):
        with case(vocabulary=vocab):
            sampler, n = s.fresh(), 600
            d = sampler.distribution(logits(n, vocab), all_params([(1.5, 0.8, 2)] * n))
            tokens = sampler.draw(d, RowKeys(torch.arange(n), torch.arange(n))).tokens
            expect(((tokens >= 0) & (tokens < vocab)).all(), "a token lies outside the vocabulary")
            p = d.probs.gather(1, tokens[:, None])[:, 0]
            i = int(p.argmin())
            expect((p > 0).all(), f"drew token {tokens[i]} from the law {show(d.probs[i])}")


def half_mask(rows: int, vocab: int) -> Tensor:
    """About half of the tokens, another half each row, never none."""
    return (torch.arange(vocab) + torch.arange(rows)[:, None]) % 2 == 0


@law(LAWS, "a masked token has no probability and is never drawn")
def masked(s: Subject) -> None:
    for rows, vocab in SIZES:
        for first, setting in enumerate(SETTINGS):
            with case(rows=rows, vocabulary=vocab, temperature_top_p_top_k=setting):
                sampler, mask = s.fresh(), half_mask(rows, vocab)
                x = logits(rows, vocab).masked_fill(
                    ~mask, 9.0
                )  # the illegal ones are the likeliest
                d = sampler.distribution(x, params(rows, first), mask)
                expect(
                    (d.probs[~mask] == 0).all(),
                    f"probs of masked tokens are {show(d.probs[~mask])}",
                )
                expect(
                    (d.logprobs[~mask] == -math.inf).all(), "logprobs of masked tokens are not -inf"
                )
                tokens = sampler.draw(d, keys(rows)).tokens
                expect(
                    mask.gather(1, tokens[:, None]).all(),
                    f"drew {tokens.tolist()}, one of them is masked",
                )


@law(LAWS, "a row does not depend on its neighbours or on the order of rows")
def independent(s: Subject) -> None:
    equal = same if s.promises.batch_invariant else lambda a, b: close(a, b, 1e-5)
    bits = "bits" if s.promises.batch_invariant else "numbers"
    for rows, vocab in SIZES[1:]:
        x, p, k = logits(rows, vocab), params(rows), keys(rows)
        for at in [torch.tensor([i]) for i in range(rows)] + [torch.arange(rows).flip(0)]:
            with case(rows=rows, vocabulary=vocab, taken=at.tolist()):
                sampler = s.fresh()
                d = sampler.distribution(x, p)
                out = sampler.draw(d, k)
                alone = sampler.distribution(x[at], p.rows(at))
                for name, t in tensors(alone).items():
                    whole = tensors(d)[name][at]
                    expect(
                        equal(t, whole), f"{name} has other {bits}: {show(t)} against {show(whole)}"
                    )
                drawn = sampler.draw(alone, k.rows(at)).tokens
                expect(
                    torch.equal(drawn, out.tokens[at]),
                    f"drew {drawn.tolist()}, among all {rows} rows {out.tokens[at].tolist()}",
                )


@law(LAWS, "seed and output position decide a draw, and nothing else does")
def seeded(s: Subject) -> None:
    vocab, n = 50, 16
    with case(seeds="1111, 2222, 3333, 4444, 1111", positions="0..15"):
        sampler, seeds = s.fresh(), torch.tensor([1111, 2222, 3333, 4444, 1111])
        d = sampler.distribution(torch.zeros(5, vocab), all_params([(1.0, 1.0, -1)] * 5))
        text = [sampler.draw(d, RowKeys(seeds, torch.full((5,), i))).tokens for i in range(n)]
        again = sampler.draw(d, RowKeys(seeds, torch.zeros(5, dtype=torch.long))).tokens
        expect(
            torch.equal(again, text[0]),
            "position 0 drawn a second time gives other tokens: a draw keeps a count",
        )
        rows = torch.stack(text, 1)
        expect(torch.equal(rows[0], rows[4]), "two rows of one seed draw different tokens")
        if (
            d.probs.max() > 0.5
        ):  # a sampler that is always nearly certain: streams cannot be told apart
            return
        for i in range(4):
            for j in range(i):
                expect(
                    not torch.equal(rows[i], rows[j]),
                    f"seeds {seeds[j]} and {seeds[i]} draw the same 16 tokens",
                )
            expect(
                len(set(rows[i].tolist())) > 1,
                f"seed {seeds[i]} draws one token at all 16 positions",
            )


@law(LAWS, "the same call gives the same bits")
def deterministic(s: Subject) -> None:
    for rows, vocab in SIZES:
        with case(rows=rows, vocabulary=vocab):
            sampler = s.fresh()
            a, b = (sampler.distribution(logits(rows, vocab), params(rows)) for _ in range(2))
            for name, t in tensors(a).items():
                expect(same(t, tensors(b)[name]), f"{name} differs between two calls")
            x, y = sampler.draw(a, keys(rows)).tokens, s.fresh().draw(b, keys(rows)).tokens
            expect(torch.equal(x, y), f"drew {x.tolist()}, then {y.tolist()}")


@law(LAWS, "inputs are not changed")
def pure(s: Subject) -> None:
    for rows, vocab in SIZES:
        with case(rows=rows, vocabulary=vocab):
            sampler, x, p, mask = (
                s.fresh(),
                logits(rows, vocab),
                params(rows),
                half_mask(rows, vocab),
            )
            with untouched(logits=x, params=p, mask=mask):
                d = sampler.distribution(x, p, mask)
            k = keys(rows)
            with untouched(dist=d, keys=k):
                sampler.draw(d, k)


@law(LAWS, "a row with NaN, +inf or no legal token says finite=False and spares the others")
def broken(s: Subject) -> None:
    for rows in (1, 3):
        at = rows // 2
        clean = s.fresh().distribution(logits(rows, 8), params(rows))
        expect(clean.finite.all(), f"rows {rows}: a finite row says finite=False")
        for bad in ("NaN", "+inf", "all -inf", "all masked"):
            with case(rows=rows, vocabulary=8, row=at, has=bad):
                sampler, x, mask = s.fresh(), logits(rows, 8), torch.ones(rows, 8, dtype=torch.bool)
                if bad == "all masked":
                    mask[at] = False
                elif bad == "all -inf":
                    x[at] = -math.inf
                else:
                    x[at, 3] = math.nan if bad == "NaN" else math.inf
                d = sampler.distribution(x, params(rows), mask)
                expect(not d.finite[at], "the row says finite=True")
                others = torch.tensor([i for i in range(rows) if i != at], dtype=torch.long)
                expect(d.finite[others].all(), "another row says finite=False")
                expect(
                    close(d.probs[others], clean.probs[others], 1e-5),
                    "another row's law has changed",
                )
                tokens = sampler.draw(d, keys(rows)).tokens
                expect(
                    ((tokens >= 0) & (tokens < 8)).all(), f"drew {tokens.tolist()} from 8 tokens"
                )
