"""Each law of a verifier fails on a verifier that breaks it."""

from dataclasses import replace

import pytest
import torch

from deepinfer.conformance import check
from deepinfer.slots.protocols import Accepted, Dist, Draft, Sampled
from deepinfer.slots.verifier import BaseVerifier, Fixed
from support.breaking import Breakers

B = Breakers("verifier")


class Three(BaseVerifier):
    """Up to three drafts, by match, and claims to be exact whatever a subclass overrides."""

    def __init__(self):
        self.max_draft, self.exact = 3, True


class Rejecting(Three):
    rule = "rejection"


@B.breaks("budget is a host integer", "is a Tensor")
class TensorBudget(Three):
    def budget(self, stale, cost):
        return torch.tensor(super().budget(stale, cost))


@B.breaks("budget is a host integer", "sequences 1")
class ForgetsTheAnchor(Three):
    def budget(self, stale, cost):
        return int(stale.sum())


@B.breaks("allocate gives each sequence", "more than the budget")
class SpendsMore(Three):
    def allocate(self, fresh, budget):
        return 1 + (fresh > 0).sum(-1)


@B.breaks("allocate gives each sequence", "only")
class CountsWhatIsNotThere(Three):
    def allocate(self, fresh, budget):
        return super().allocate(fresh.clamp(min=0.5), budget)


@B.breaks("whether a draft is verified", "sequences 1, drafts 3")
class LooksAhead(Three):
    """Stops where the whole draft promises little: later confidences decide on earlier drafts."""

    def allocate(self, fresh, budget):
        rows = super().allocate(fresh, budget)
        return torch.where(fresh[:, -1] > 0.3, rows, 1)


@B.breaks("whether a draft is verified", "sequences 2")
class LikeliestSequenceFirst(Three):
    def allocate(self, fresh, budget):
        rows = torch.ones(len(fresh), dtype=torch.long)
        for i in fresh.sum(-1).argsort(descending=True).tolist():
            more = min(int((fresh[i] > 0).sum()), budget - int(rows.sum()))
            rows[i] += max(more, 0)
        return rows


@B.breaks("accept emits a prefix", "it ran 0 rows")
class KeepsUnverified(Three):
    def accept(self, draft, target):
        n = draft.tokens.shape[1]
        out = super().accept(draft, target)
        if n == 0 or not len(out.count):
            return out
        return Accepted(
            out.tokens.masked_fill(out.tokens < 0, 0), torch.full_like(out.count, n + 1)
        )


@B.breaks("accept emits a prefix", "should be emitted")
class OneAtATime(Three):
    def accept(self, draft, target):
        short = replace(draft, tokens=torch.full_like(draft.tokens, -1))
        return super().accept(short, target)


@B.breaks("a draft of -1", "first absent 0")
class WildcardDraft(Three):
    def accept(self, draft, target):
        if not target.sampled.tokens.numel() or not draft.tokens.shape[1]:
            return super().accept(draft, target)
        own = target.sampled.tokens[target.rows.clamp(min=0)][:, :-1]
        return super().accept(
            replace(draft, tokens=torch.where(draft.tokens < 0, own, draft.tokens)), target
        )


@B.breaks("the first emitted token", "first tokens: of 12000 draws")
class ArgmaxAcceptance(Three):
    """The public fault: the draft is compared with the target's most likely token."""

    def accept(self, draft, target):
        if not draft.tokens.shape[1] or not target.sampled.tokens.numel():
            return super().accept(draft, target)
        best = Sampled(target.dist.probs.argmax(-1), target.sampled.logprobs)
        return super().accept(draft, replace(target, sampled=best))


@B.breaks("the first emitted token", "drafts 1")
class NoResidual(Rejecting):
    """A refused draft is replaced by a plain draw of the target's."""

    def accept(self, draft, target):
        out = super().accept(draft, target)
        if not draft.tokens.shape[1] or not target.sampled.tokens.numel():
            return out
        last = (out.count - 1).clamp(min=0)[:, None]
        own = target.sampled.tokens[target.rows.clamp(min=0)].gather(1, last)
        return Accepted(
            torch.where(out.count[:, None] > 0, out.tokens.scatter(1, last, own), out.tokens),
            out.count,
        )


@B.breaks("the first emitted token", "drafts 1")
class OtherLawThanDrawnFrom(Rejecting):
    """The drafter's law is flattened after the draft was drawn: p / q uses the wrong q."""

    def accept(self, draft, target):
        flat = tuple(
            Dist(torch.full_like(d.probs, 1 / d.probs.shape[1]), d.logprobs, d.finite)
            for d in draft.dists
        )
        return super().accept(replace(draft, dists=flat), target)


@B.breaks("the first two emitted tokens", "drafts 2")
class FirstLawForAll(Rejecting):
    def accept(self, draft, target):
        return super().accept(replace(draft, dists=draft.dists[:1] * len(draft.dists)), target)


@B.breaks("a sequence does not depend", "among all")
class ShortestForAll(Three):
    def accept(self, draft, target):
        out = super().accept(draft, target)
        if not len(out.count):
            return out
        count = out.count.clamp(max=int(out.count.min()))
        return Accepted(
            out.tokens.masked_fill(torch.arange(out.tokens.shape[1]) >= count[:, None], -1), count
        )


@B.breaks("a row whose law is not finite", "drafts 1, broken row 0")
class IgnoresFinite(Three):
    def accept(self, draft, target):
        fine = torch.ones_like(target.dist.finite)
        return super().accept(draft, replace(target, dist=replace(target.dist, finite=fine)))


@B.breaks("the same call gives the same result", "its input draft.tokens")
class ShiftsInPlace(Three):
    def accept(self, draft, target):
        out = super().accept(
            Draft(draft.tokens.clone(), draft.confidence, draft.logprobs, draft.dists), target
        )
        draft.tokens.fill_(-1)
        return out


@B.breaks("the same call gives the same result", "the second time")
class Learns(Three):
    calls = 0

    def accept(self, draft, target):
        self.calls += 1
        if self.calls % 2:
            return super().accept(draft, target)
        return super().accept(replace(draft, tokens=torch.full_like(draft.tokens, -1)), target)


@pytest.mark.parametrize("cls, law, shows", B.made)
def test_a_broken_verifier_is_told_on(cls, law, shows):
    B.judge(cls, law, shows)


def test_every_law_can_fail():
    B.covered()


def test_what_has_nothing_to_run_says_so():
    report = check("off", slot="verifier")
    assert report and "max_draft is 0" in repr(report)
    assert "max_draft is 1" in repr(check(Fixed(1)))


@pytest.mark.parametrize(
    "v", [Fixed(1), Fixed(7), Fixed(3, rule="rejection"), Rejecting(), Three()], ids=repr
)
def test_settings_hold_the_laws(v):
    check(v).raise_for_failures()
