"""How far one distribution of the next token is from another, row by row: the meters of a
continuation.

    error = dist_error(p, q, tokens)      # p, q: logits [t, v]; tokens: [t] that really came next
    error.kl, error.agreement, error.dlogprob, error.summary()

p is the reference. Everything is computed in float64, 64 rows at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ROWS_AT_ONCE = 64  # of [rows, vocabulary] in float64: 66 MB at the released vocabulary
METERS = ("kl", "agreement", "dlogprob")


@dataclass(frozen=True)
class DistError:
    """Of t rows, float64 on the CPU. kl: [t] KL(p||q) in nats; agreement: [t] 1 where both
    distributions have the same likeliest token; dlogprob: [t] |log q - log p| of the token that
    came next; nats_p, nats_q: [t] its -log p and -log q."""

    kl: Tensor
    agreement: Tensor
    dlogprob: Tensor
    nats_p: Tensor
    nats_q: Tensor

    @property
    def perplexity_ratio(self) -> float:
        """Perplexity by q over perplexity by p: exp of the mean of log p - log q."""
        return float((self.nats_q - self.nats_p).mean().exp())

    def summary(self) -> dict[str, float]:
        """Means, and of kl and dlogprob the median, 99 % quantile and maximum too."""
        out: dict[str, float] = {}
        for name in ("kl", "dlogprob"):
            out |= {name: float(getattr(self, name).mean()), **tails(name, getattr(self, name))}
        return out | dict(
            agreement=float(self.agreement.mean()),
            perplexity_ratio=self.perplexity_ratio,
            nats_p=float(self.nats_p.sum()),
            nats_q=float(self.nats_q.sum()),
        )


def tails(name: str, values: Tensor) -> dict[str, float]:
    """{name_median, name_p99, name_max} of [t] values, t >= 1, interpolated linearly."""
    at = torch.tensor([0.5, 0.99, 1.0], dtype=values.dtype)
    found = torch.quantile(values, at).tolist()
    return dict(zip((f"{name}_median", f"{name}_p99", f"{name}_max"), found, strict=True))


def dist_error(p: Tensor, q: Tensor, tokens: Tensor | Sequence[int]) -> DistError:
    """The errors of logits q against the reference p, both [t, v]; tokens: [t] that came next.

    Raises ValueError for shapes that do not fit, a row that is not there (NaN) and tokens outside
    the vocabulary.
    """
    tokens = torch.as_tensor(tokens, dtype=torch.long).cpu()
    if p.ndim != 2 or p.shape != q.shape or tokens.shape != p.shape[:1] or not len(tokens):
        raise ValueError(
            f"dist_error: logits {list(p.shape)} and {list(q.shape)}, tokens {list(tokens.shape)}: "
            "want [t, v], [t, v] and [t], of the same rows, at least one"
        )
    if not 0 <= int(tokens.min()) <= int(tokens.max()) < p.shape[1]:
        raise ValueError(f"dist_error: tokens outside the vocabulary of {p.shape[1]}")
    for name, x in (("p", p), ("q", q)):
        bad = x.isnan().any(-1) | (x == torch.inf).any(-1)
        if bad.any():
            raise ValueError(
                f"dist_error: row {int(bad.nonzero()[0])} of {name} is no distribution: it has NaN "
                "or inf "
                "(rows that a replay policy dropped are NaN)"
            )
    parts = [
        rows_error(a.detach().cpu().double(), b.detach().cpu().double(), at)
        for a, b, at in zip(*(x.split(ROWS_AT_ONCE) for x in (p, q, tokens)), strict=True)
    ]
    return DistError(*(torch.cat(x) for x in zip(*parts, strict=True)))


def rows_error(p: Tensor, q: Tensor, tokens: Tensor) -> tuple[Tensor, ...]:
    """The fields of DistError of a few rows. A token of -inf logit in p adds nothing to the KL."""
    a, b = p.log_softmax(-1), q.log_softmax(-1)
    terms = torch.where(a == -torch.inf, 0.0, a.exp() * (a - b))
    kl = terms.sum(-1).clamp(min=0)  # rounding may leave it at -1e-17
    same = (p.argmax(-1) == q.argmax(-1)).double()
    nats_p, nats_q = (-x.gather(1, tokens[:, None])[:, 0] for x in (a, b))
    return kl, same, (nats_q - nats_p).abs(), nats_p, nats_q
