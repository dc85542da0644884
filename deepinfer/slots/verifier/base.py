"""Acceptance of drafts, exact under either rule, and the defaults that a verifier may inherit."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

from deepinfer import rng
from deepinfer.slots.protocols import Accepted, Draft, EngineInfo, Target
from deepinfer.slots.sampler.draw import draw_by_weight
from deepinfer.slots.settings import shown

if TYPE_CHECKING:
    from torch import Tensor

RULES = ("match", "rejection")
MASS = 2.0**52  # fixed point of a residual's total, summed as integers: the order never matters


class BaseVerifier:
    """Verifies whole drafts, accepts by `rule`. A subclass states max_draft and overrides the rest.

    rule 'match': a draft is kept iff it equals the target's own draw at its position. The text is
    then the target's draws whatever was drafted: the same for any verifier and draft length.
    rule 'rejection': a draft x is kept with probability min(1, p(x) / q(x)), p the target's and q
    the drafter's distribution; at the first refusal a token of distribution max(p - q, 0) replaces it (Leviathan et
    al. 2023, Chen et al. 2023). It keeps more drafts. Both emit tokens of exactly the target's distribution.
    """

    exact = True
    batch_invariant = True
    on_device = True
    max_draft: int = 0
    rule: str = "match"

    def __repr__(self) -> str:
        return shown(self)

    def start(self, info: EngineInfo) -> Any:
        if self.rule not in RULES:
            raise ValueError(
                f"{type(self).__name__}.rule is {self.rule!r}: the rules are {', '.join(RULES)}"
            )
        return copy.deepcopy(self)

    # ------------------------------------------------------------------------------ how many rows

    def budget(self, stale: Tensor, cost: Any) -> int:
        """Rows of the next step: an anchor row per sequence and all of its drafts.

        stale: [b, n] survival of each draft (product of confidences up to it), one step old.
        """
        b, n = stale.shape
        return b * (1 + min(n, self.max_draft))

    def allocate(self, fresh: Tensor, budget: int) -> Tensor:
        """Rows per sequence [b], 1 + a prefix of its draft; together at most `budget`.

        fresh: [b, n] survivals, 0 where there is no draft. The likeliest drafts are taken, ties to
        the shallower draft, then the lower sequence. Survivals only fall along a draft, so the
        picks are prefixes, and whether a draft is taken cannot depend on confidences behind it.
        """
        b, n = fresh.shape
        if n == 0 or b == 0:
            return torch.ones(b, dtype=torch.long, device=fresh.device)
        n = min(n, self.max_draft)
        survival = fresh[:, :n].cummin(-1)[0] if n else fresh[:, :0]
        order = (
            survival.t().flatten().sort(dim=0, descending=True, stable=True)[1]
        )  # depth-major: ties
        rank = torch.empty_like(order).scatter_(0, order, torch.arange(b * n, device=fresh.device))
        taken = (rank.view(n, b) < budget - b) & (survival.t() > 0)
        return 1 + taken.sum(0)

    # ----------------------------------------------------------------------------- which to keep

    def accept(self, draft: Draft, target: Target) -> Accepted:
        """Keep a prefix of each draft, then one token of the target's.

        A sequence whose anchor row did not run emits nothing. A row whose distribution is not finite keeps
        no draft, so it is the last that its sequence emits from.
        """
        if target.sampled.tokens.shape[0] == 0:  # no row ran at all
            return Accepted(torch.full_like(target.rows, -1), torch.zeros_like(target.rows[:, 0]))
        verified = target.rows >= 0
        at = target.rows.clamp(min=0)
        own = target.sampled.tokens[at]
        usable = verified[:, 1:] & (draft.tokens >= 0) & target.dist.finite[at][:, :-1]
        if self.rule == "rejection" and draft.tokens.shape[1]:
            return self._reject(draft, target, own, usable, verified, at)
        kept = (usable & (draft.tokens == own[:, :-1])).long().cumprod(-1).sum(-1)
        return _emit(draft.tokens, kept, own.gather(1, kept[:, None]), verified)

    def _reject(
        self,
        draft: Draft,
        target: Target,
        own: Tensor,
        usable: Tensor,
        verified: Tensor,
        at: Tensor,
    ) -> Accepted:
        b, n = draft.tokens.shape
        if len(draft.dists) != n:
            raise ValueError(
                f"rule 'rejection' needs the distribution of each drafted token: {n} drafts, "
                f"{len(draft.dists)} distributions; the drafter "
                "keeps them where the verifier's rule is 'rejection'"
            )
        x = draft.tokens.clamp(min=0)
        p = target.dist.probs[at[:, :-1], x].double()
        q = torch.stack(
            [d.probs.gather(1, x[:, i, None])[:, 0] for i, d in enumerate(draft.dists)], 1
        ).double()
        keys = target.keys.rows(at[:, :-1].flatten())
        u = rng.uniform(keys.seed, keys.position, rng.Purpose.ACCEPT).view(b, n)
        kept = (usable & (q > 0) & (u * q < p)).long().cumprod(-1).sum(-1)

        refused = (kept < n) & usable.gather(1, kept.clamp(max=n - 1)[:, None])[:, 0]
        row = at.gather(1, kept[:, None])[:, 0]
        drafted = torch.zeros_like(target.dist.probs[row])
        for i, d in enumerate(draft.dists):
            drafted = torch.where((kept == i)[:, None], d.probs, drafted)
        left = (target.dist.probs[row] - drafted).clamp(min=0).double()
        mass = (left * MASS).long().sum(-1)
        distribution = left / (mass / MASS).clamp(min=1 / MASS)[:, None]
        instead = draw_by_weight(distribution, target.keys.rows(row), rng.Purpose.RESIDUAL)
        # No mass left means p = q up to rounding: then the target's own draw has the right distribution.
        last = torch.where(refused & (mass > 0), instead, own.gather(1, kept[:, None])[:, 0])
        return _emit(draft.tokens, kept, last[:, None], verified)


def _emit(drafts: Tensor, kept: Tensor, last: Tensor, verified: Tensor) -> Accepted:
    """The kept drafts [b, n] and the token after them [b, 1] as [b, n+1], -1 behind."""
    b = drafts.shape[0]
    place = torch.arange(drafts.shape[1] + 1, device=drafts.device)
    padded = torch.cat((drafts, drafts.new_full((b, 1), -1)), 1)
    tokens = torch.where(
        place < kept[:, None], padded, torch.where(place == kept[:, None], last, -1)
    )
    count = torch.where(verified[:, 0], kept + 1, 0)
    return Accepted(torch.where(verified[:, :1], tokens, -1), count)
