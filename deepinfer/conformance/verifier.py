"""The laws of a verifier."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deepinfer.conformance.law import (
    Law,
    Subject,
    case,
    expect,
    follows,
    generator,
    law,
    shaped,
    show,
    untouched,
)
from deepinfer.slots.protocols import Accepted, Dist, Draft, RowKeys, Sampled, Target
from deepinfer.slots.verifier.cost import CostCurve

LAWS: list[Law] = []
P, Q = (0.5, 0.3, 0.2), (0.2, 0.3, 0.5)  # public case: target and drafter disagree on the extremes
TRIALS = 12000
NOTHING = "max_draft is 0: nothing is ever drafted"


# ------------------------------------------------------------------------------- made-up sequences


def one_law(probs: Tensor) -> Dist:
    """Rows of given probabilities [t, v] as a Dist."""
    return Dist(probs, probs.log(), torch.ones(probs.shape[0], dtype=torch.bool))


def pick(probs: Tensor, g: torch.Generator) -> Tensor:
    """One token a row of probs [t, v], by inversion of the running sum."""
    upto = probs.cumsum(-1)
    u = torch.rand(len(probs), 1, generator=g, dtype=torch.float64) * upto[:, -1:]
    return (upto <= u).sum(-1)


def sampled(d: Dist, g: torch.Generator) -> Sampled:
    tokens = pick(d.probs, g)
    return Sampled(tokens, d.logprobs.gather(1, tokens[:, None])[:, 0])


def chain(b: int, n: int, p: Tensor, q: Tensor, first: int = 0) -> tuple[Draft, Target]:
    """b sequences with n drafts each, where a token's law depends on the token before it.

    p, q: [v+1, v] laws of the target and the drafter after each token, row v after none.
    """
    g, v = generator(first), p.shape[1]
    before, tokens, dists = torch.full((b,), v), [], []
    for _ in range(n):
        d = one_law(q[before])
        tokens.append(pick(d.probs, g))
        dists.append(d)
        before = tokens[-1]
    drafts = torch.stack(tokens, 1) if n else torch.zeros(b, 0, dtype=torch.long)
    context = torch.cat((torch.full((b, 1), v), drafts), 1)
    d = one_law(p[context.flatten()])
    k = RowKeys((first + torch.arange(b)).repeat_interleave(n + 1), torch.arange(n + 1).repeat(b))
    confidence = torch.full((b, n), 0.5)
    rows = torch.arange(b * (n + 1)).view(b, n + 1)
    return Draft(drafts, confidence, torch.zeros(b, n), tuple(dists)), Target(
        d, sampled(d, g), rows, k
    )


def steady(law_: tuple[float, ...]) -> Tensor:
    """The same law after every token."""
    return torch.tensor([law_] * (len(law_) + 1), dtype=torch.float64)


def switching() -> tuple[Tensor, Tensor]:
    """Laws of target and drafter on three tokens that depend on the token before."""
    p = torch.tensor([[0.6, 0.4, 0.0], [0.1, 0.2, 0.7], [0.3, 0.3, 0.4], P], dtype=torch.float64)
    q = torch.tensor([[0.3, 0.3, 0.4], [0.5, 0.2, 0.3], [0.1, 0.8, 0.1], Q], dtype=torch.float64)
    return p, q


def partial(b: int, n: int, depth: list[int]) -> tuple[Draft, Target]:
    """Sequence i runs depth[i] draft rows behind its anchor row (-1: no row at all); flat rows of
    the target are only those that run. Every draft is certain under both laws."""
    drafts = torch.arange(n).expand(b, n) % 3
    rows, flat = torch.full((b, n + 1), -1), []
    for i, d in enumerate(depth):
        for j in range(d + 1):
            rows[i, j] = len(flat)
            flat.append(int(drafts[i, j]) if j < n else 2)
    wanted = torch.tensor(flat, dtype=torch.long)
    d = one_law(torch.eye(3, dtype=torch.float64)[wanted])
    k = RowKeys(torch.arange(len(flat)), torch.arange(len(flat)))
    dists = tuple(one_law(torch.eye(3, dtype=torch.float64)[drafts[:, i]]) for i in range(n))
    return (
        Draft(drafts.clone(), torch.ones(b, n), torch.zeros(b, n), dists),
        Target(d, Sampled(wanted, torch.zeros(len(flat))), rows, k),
    )


def survivals(b: int, n: int, seed: int = 0) -> Tensor:
    """[b, n] products of confidences; some drafts are shorter (survival 0), some are not there."""
    g = generator(seed + 31 * b + n)
    s = torch.rand(b, n, generator=g, dtype=torch.float64).cumprod(-1)
    return s * (torch.arange(n) < torch.randint(0, n + 2, (b, 1), generator=g))


def depth(s: Subject) -> int:
    return min(s.obj.max_draft, 3)


# ------------------------------------------------------------------------------------ how many rows


@law(LAWS, "budget is a host integer of at least one row a sequence")
def budget(s: Subject) -> None:
    n = s.obj.max_draft
    for b in (0, 1, 2, 5):
        for seed in range(3):
            stale = survivals(b, n, seed)
            with case(sequences=b, drafts=n, stale=show(stale)):
                with untouched(stale=stale):
                    got = s.fresh().budget(stale, CostCurve())
                expect(
                    isinstance(got, int) and not isinstance(got, bool),
                    f"budget is a {type(got).__name__} {got!r}",
                )
                expect(
                    b <= got <= b * (1 + n), f"budget is {got}, it should lie in {b}..{b * (1 + n)}"
                )


@law(
    LAWS,
    "allocate gives each sequence one row and a prefix of its draft, together within the budget",
)
def allocate(s: Subject) -> None:
    n = s.obj.max_draft
    for b in (0, 1, 2, 5):
        for seed in range(4):
            for extra in (0, 1, 2, b * n):
                fresh = survivals(b, n, seed)
                with case(sequences=b, drafts=n, fresh=show(fresh), budget=b + extra):
                    with untouched(fresh=fresh):
                        rows = s.fresh().allocate(fresh, b + extra)
                    shaped(rows, (b,), "rows")
                    expect(
                        not rows.is_floating_point() and rows.dtype != torch.bool,
                        f"rows are {rows.dtype}",
                    )
                    there = 1 + (fresh > 0).sum(-1)
                    expect(
                        (rows >= 1).all(),
                        f"rows are {rows.tolist()}: each sequence needs its anchor row",
                    )
                    expect(
                        (rows <= there).all(),
                        f"rows are {rows.tolist()}, but only {there.tolist()} are there",
                    )
                    expect(
                        rows.sum() <= b + extra, f"rows {rows.tolist()} are more than the budget"
                    )


@law(LAWS, "whether a draft is verified does not depend on confidences behind it")
def non_anticipating(s: Subject) -> str | None:
    n = s.obj.max_draft
    if n < 2:
        return f"max_draft is {n}: no draft has another behind it"
    verifier = s.fresh()
    for b in (1, 2, 3):
        for seed in range(4):
            fresh = survivals(b, n, seed)
            for extra in sorted({1, 2, n, b * n // 2, b * n} - {0}):
                for i, j in [(i, j) for i in range(b) for j in range(n - 1)]:
                    _unmoved(verifier, fresh, b + extra, i, j)


def _unmoved(verifier: Any, fresh: Tensor, budget: int, i: int, j: int) -> None:
    """Drafts 0..j of sequence i are given the same rows whatever the survivals behind j."""
    with case(sequences=len(fresh), drafts=fresh.shape[1], budget=budget):
        before = int(verifier.allocate(fresh, budget)[i].clamp(max=j + 2))
        for factor in (0.0, 0.1, 1.0):
            other = fresh.clone()
            other[i, j + 1 :] = fresh[i, j] * factor  # not there, hardly, or as likely as draft j
            after = int(verifier.allocate(other, budget)[i].clamp(max=j + 2))
            expect(
                before == after,
                f"draft {min(before, after)} of sequence {i} is {'' if before > after else 'not '}"
                f"verified with survivals {show(fresh[i])} and "
                f"{'' if after > before else 'not '}verified with {show(other[i])}",
            )


# ------------------------------------------------------------------------------------ which to keep


def well_formed(out: Accepted, draft: Draft, target: Target) -> None:
    """Shapes, counts, -1 behind, and that all but the last emitted token are the draft's."""
    b, n = draft.tokens.shape
    shaped(out.tokens, (b, n + 1), "tokens", torch.long)
    shaped(out.count, (b,), "count")
    place = torch.arange(n + 1)
    ran = (target.rows >= 0).sum(-1)
    for i in range(b):
        c, told = (
            int(out.count[i]),
            f"sequence {i} emits {out.tokens[i].tolist()} with count {out.count[i]}",
        )
        expect(min(1, int(ran[i])) <= c <= ran[i], f"{told}, it ran {ran[i]} rows")
        expect(
            (out.tokens[i][place >= c] == -1).all(),
            f"{told}: what is behind the count should be -1",
        )
        expect((out.tokens[i][place < c] >= 0).all(), f"{told}: a counted token is -1")
        kept = draft.tokens[i, : max(c - 1, 0)]
        expect(
            torch.equal(out.tokens[i, : max(c - 1, 0)], kept),
            f"{told}: all but the last should be the draft's, {draft.tokens[i].tolist()}",
        )


@law(LAWS, "accept emits a prefix of the draft and one token, also where rows did not run")
def shapes(s: Subject) -> None:
    for n in range(depth(s) + 1):
        for d in ([], [n], [-1], [0], [n, -1, 0], list(range(-1, n + 1))):
            with case(drafts=n, draft_rows_run=d):
                draft, target = partial(len(d), n, d)
                out = s.fresh().accept(draft, target)
                well_formed(out, draft, target)
                want = [x + 1 for x in d]
                expect(
                    out.count.tolist() == want,
                    f"every draft is certain under both laws, so {want} should be emitted, "
                    f"not {out.count.tolist()}",
                )


@law(LAWS, "a draft of -1 is never kept")
def absent(s: Subject) -> str | None:
    if not s.obj.max_draft:
        return NOTHING
    for n in range(1, depth(s) + 1):
        for at in range(n):
            with case(drafts=n, first_absent=at):
                draft, target = partial(1, n, [n])
                draft.tokens[:, at:] = -1
                out = s.fresh().accept(draft, target)
                well_formed(out, draft, target)
                expect(
                    out.count[0] == at + 1,
                    f"{out.count[0]} tokens are emitted, it should be {at + 1}",
                )


@law(LAWS, "the first emitted token has the target's law", exact=True)
def first_token(s: Subject) -> None:
    sharp = (1.0, 0.0, 0.0)
    for n in range(depth(s) + 1):
        for p, q in ((P, Q), (P, P), ((0.9, 0.1, 0.0), (0.0, 0.1, 0.9)), (sharp, Q), (P, sharp)):
            with case(drafts=n, target=p, drafter=q):
                draft, target = chain(TRIALS, n, steady(p), steady(q))
                out = s.fresh().accept(draft, target)
                expect((out.count >= 1).all(), "a sequence whose anchor row ran emits nothing")
                follows(out.tokens[:, 0], torch.tensor(p), "first tokens")


@law(LAWS, "the first two emitted tokens have the target's joint law", exact=True)
def two_tokens(s: Subject) -> str | None:
    if not s.obj.max_draft:
        return NOTHING
    p, q = switching()
    for n in range(1, depth(s) + 1):
        with case(drafts=n, laws="depend on the token before"):
            draft, target = chain(TRIALS, n, p, q, first=1)
            out = s.fresh().accept(draft, target)
            first, second = out.tokens[:, 0], out.tokens[:, 1]
            # Where one token was kept the next step draws the second, from the target's law itself.
            second = torch.where(out.count >= 2, second, pick(p[first], generator(99)))
            joint = (p[3][:, None] * p[:3]).flatten()
            follows(3 * first + second, joint, "pairs of tokens")


@law(LAWS, "a sequence does not depend on the others or on their order")
def independent(s: Subject) -> str | None:
    if not s.obj.max_draft:
        return NOTHING
    p, q = switching()
    for n in range(1, depth(s) + 1):
        b = 6
        draft, target = chain(b, n, p, q)
        whole = s.fresh().accept(draft, target)
        for at in [torch.tensor([i]) for i in range(b)] + [torch.arange(b).flip(0)]:
            with case(drafts=n, sequences=b, taken=at.tolist()):
                dists = tuple(Dist(d.probs[at], d.logprobs[at], d.finite[at]) for d in draft.dists)
                part = Draft(draft.tokens[at], draft.confidence[at], draft.logprobs[at], dists)
                out = s.fresh().accept(
                    part, Target(target.dist, target.sampled, target.rows[at], target.keys)
                )
                expect(
                    torch.equal(out.tokens, whole.tokens[at]),
                    f"emitted {out.tokens.tolist()}, among all {whole.tokens[at].tolist()}",
                )


@law(LAWS, "a row whose law is not finite is the last that its sequence emits from")
def broken(s: Subject) -> str | None:
    if not s.obj.max_draft:
        return NOTHING
    for n in range(1, depth(s) + 1):
        for at in range(n):
            with case(drafts=n, broken_row=at):
                draft, target = partial(1, n, [n])
                finite = torch.arange(n + 1) != at
                d = Dist(target.dist.probs, target.dist.logprobs, finite)
                out = s.fresh().accept(draft, Target(d, target.sampled, target.rows, target.keys))
                expect(out.count[0] <= at + 1, f"{out.count[0]} tokens are emitted")


@law(LAWS, "the same call gives the same result, and inputs are not changed")
def pure(s: Subject) -> None:
    p, q = switching()
    for n in range(depth(s) + 1):
        with case(drafts=n, sequences=20):
            draft, target = chain(20, n, p, q)
            verifier = s.fresh()
            with untouched(draft=draft, target=target):
                a = verifier.accept(draft, target)
            b = verifier.accept(draft, target)
            expect(torch.equal(a.tokens, b.tokens), "accept emits other tokens the second time")
            fresh = survivals(5, s.obj.max_draft)
            x, y = (verifier.allocate(fresh, 8) for _ in range(2))
            expect(torch.equal(x, y), f"allocate gives {x.tolist()}, then {y.tolist()}")
