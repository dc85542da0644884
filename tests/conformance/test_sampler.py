"""Each law of a sampler fails on a sampler that breaks it."""

from dataclasses import replace

import pytest
import torch

from deepinfer.slots.protocols import Dist, RowKeys, RowParams, Sampled
from deepinfer.slots.sampler import Philox
from support.breaking import Breakers

B = Breakers("sampler")


class Claiming(Philox):
    """Says of itself what Philox does, whatever a subclass overrides."""

    def __init__(self):
        self.exact = self.batch_invariant = True


@B.breaks("any number of rows", "rows 0")
class NeedsRows(Claiming):
    def draw(self, dist, keys):
        return super().draw(dist, keys.rows(torch.arange(max(len(keys.seed), 1))))


@B.breaks("a row's probabilities", "adds up to 0.9")
class Leaky(Claiming):
    def distribution(self, logits, params, mask=None):
        d = super().distribution(logits, params, mask)
        return replace(d, probs=d.probs * 0.9)


@B.breaks("logprobs are the log-softmax", "rows 2, vocabulary 3")
class ReportsTheFilteredLaw(Claiming):
    def distribution(self, logits, params, mask=None):
        d = super().distribution(logits, params, mask)
        return replace(
            d, logprobs=torch.where(params.temperature[:, None] > 0.9, d.logprobs, d.probs.log())
        )


@B.breaks("logprobs are the log-softmax", "draw reports")
class ReportsZero(Claiming):
    def draw(self, dist, keys):
        return Sampled(super().draw(dist, keys).tokens, torch.zeros(len(keys.seed)))


@B.breaks("a temperature below 1e-5", "it should be all on 0")
class LastOfTies(Claiming):
    def distribution(self, logits, params, mask=None):
        d = super().distribution(logits.flip(-1), params, None if mask is None else mask.flip(-1))
        return Dist(d.probs.flip(-1), d.logprobs.flip(-1), d.finite)


@B.breaks("the law is: mask, temperature", "it should be")
class TopPBeforeTemperature(Claiming):
    def distribution(self, logits, params, mask=None):
        flat = RowParams(torch.ones_like(params.temperature), params.top_p, params.top_k)
        kept = super().distribution(logits, flat, mask)
        off = RowParams(
            params.temperature, torch.ones_like(params.top_p), torch.full_like(params.top_k, -1)
        )
        d = super().distribution(logits, off, kept.probs > 0)
        return replace(d, logprobs=kept.logprobs)


@B.breaks("the law is: mask, temperature", "it should be [0.756, 0, 0.244]")
class ForgetsTemperature(Claiming):
    def distribution(self, logits, params, mask=None):
        hot = torch.where(params.temperature > 0, 0.9, 0.0)
        return super().distribution(logits, RowParams(hot, params.top_p, params.top_k), mask)


@B.breaks("draws follow the law", "vocabulary 2")
class TakesTheLikeliest(Claiming):
    def draw(self, dist, keys):
        return Sampled(dist.probs.argmax(-1), super().draw(dist, keys).logprobs)


@B.breaks("draws follow the law", "over seeds")
class SeedsAreRounded(Claiming):
    """Sixteen seeds share a stream: over positions all looks well."""

    def draw(self, dist, keys):
        return super().draw(dist, RowKeys(keys.seed // 1024, keys.position))


@B.breaks("a token of probability 0", "drew token")
class NowAndThenAnything(Claiming):
    def draw(self, dist, keys):
        out = super().draw(dist, keys)
        rare = keys.seed % 97 == 5
        return Sampled(torch.where(rare, keys.seed % dist.probs.shape[1], out.tokens), out.logprobs)


@B.breaks("a masked token", "probs of masked tokens")
class IgnoresTheMask(Claiming):
    def distribution(self, logits, params, mask=None):
        return super().distribution(logits, params)


@B.breaks("a masked token", "one of them is masked")
class DrawsWithoutTheMask(Claiming):
    def distribution(self, logits, params, mask=None):
        self.free = super().distribution(logits, params)
        return super().distribution(logits, params, mask)

    def draw(self, dist, keys):
        return Sampled(super().draw(self.free, keys).tokens, super().draw(dist, keys).logprobs)


@B.breaks("a row does not depend on its neighbours", "taken [0]")
class OneTemperatureForAll(Claiming):
    def distribution(self, logits, params, mask=None):
        mean = (
            params.temperature.mean().expand_as(params.temperature)
            if len(logits)
            else params.temperature
        )
        return super().distribution(logits, RowParams(mean, params.top_p, params.top_k), mask)


@B.breaks("a row does not depend on its neighbours", "among all")
class StreamOfTheRowNumber(Claiming):
    def draw(self, dist, keys):
        return super().draw(dist, RowKeys(keys.seed + torch.arange(len(keys.seed)), keys.position))


@B.breaks("a row does not depend on its neighbours", "other bits")
class SumsOverTheBatch(Claiming):
    """Right up to rounding: only the claim batch_invariant makes it wrong."""

    def distribution(self, logits, params, mask=None):
        d = super().distribution(logits, params, mask)
        return replace(d, probs=d.probs * (1 + 1e-7 * len(logits)))


@B.breaks("seed and output position", "draw the same 16 tokens")
class OnlyTheFirstSeedCounts(Claiming):
    def draw(self, dist, keys):
        return super().draw(dist, RowKeys(keys.seed[:1].expand_as(keys.seed), keys.position))


@B.breaks("seed and output position", "keeps a count")
class CountsItsDraws(Claiming):
    drawn = 0

    def draw(self, dist, keys):
        self.drawn += 1
        return super().draw(dist, keys.later(self.drawn))


@B.breaks("seed and output position", "at all 16 positions")
class ForgetsThePosition(Claiming):
    def draw(self, dist, keys):
        return super().draw(dist, RowKeys(keys.seed, torch.zeros_like(keys.position)))


@B.breaks("the same call gives the same bits", "drew [")
class TorchsOwnGenerator(Claiming):
    def draw(self, dist, keys):
        if not len(keys.seed):
            return super().draw(dist, keys)
        tokens = torch.multinomial(dist.probs.clamp(min=1e-30), 1)[:, 0]
        return Sampled(tokens, dist.logprobs.gather(1, tokens[:, None])[:, 0])


@B.breaks("inputs are not changed", "its input logits")
class MasksInPlace(Claiming):
    def distribution(self, logits, params, mask=None):
        if mask is not None:
            logits.masked_fill_(~mask, -torch.inf)
        return super().distribution(logits, params, mask)


@B.breaks("inputs are not changed", "its input dist.probs")
class NormalisesInPlace(Claiming):
    def draw(self, dist, keys):
        out = super().draw(dist, keys)
        dist.probs.mul_(0.5)
        return out


@B.breaks("a row with NaN", "has NaN: the row says finite=True")
class LaundersNaN(Claiming):
    def distribution(self, logits, params, mask=None):
        return super().distribution(logits.nan_to_num(0.0), params, mask)


@B.breaks("a row with NaN", "another row says finite=False")
class OneBrokenRowEndsAll(Claiming):
    def distribution(self, logits, params, mask=None):
        d = super().distribution(logits, params, mask)
        return replace(d, finite=d.finite & d.finite.all())


@pytest.mark.parametrize("cls, law, shows", B.made)
def test_a_broken_sampler_is_told_on(cls, law, shows):
    B.judge(cls, law, shows)


def test_every_law_can_fail():
    B.covered()
