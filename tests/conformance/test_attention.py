"""Each law of an attention variant fails on a variant that breaks it."""

from dataclasses import replace

import pytest
import torch

from deepinfer.conformance import check
from deepinfer.slots.attention import CSA2
from deepinfer.slots.protocols import Selected
from support.breaking import Breakers

B = Breakers("attention")


class Claiming(CSA2):
    """A subclass that overrides a method claims nothing unless it says so again: here all do."""

    def __init_subclass__(cls):
        cls.exact = True


@B.breaks("any number of rows", "sequences ()")
class NeedsRows(Claiming):
    def attend(self, layer, q, kv, selected, plan):
        return super().attend(layer, q / q.abs().amax(), kv, selected, plan)


@B.breaks("any number of rows", "dtype bfloat16")
class Widens(Claiming):
    def attend(self, layer, q, kv, selected, plan):
        y = super().attend(layer, q, kv, selected, plan)
        return y.float() if y.dtype == torch.bfloat16 else y


@B.breaks("kv_spec says for every layer", "layer 0")
class NoFormats(Claiming):
    def kv_spec(self, config, layer):
        return replace(super().kv_spec(config, layer), bytes_per_token=-1.0)


@B.breaks("a row picks entries", "twice")
class SameTwice(Claiming):
    def select(self, layer, index, kv, plan, carried):
        s = super().select(layer, index, kv, plan, carried)
        return Selected(torch.cat((s.ids, s.ids[:, :1]), 1), s.candidates)


@B.breaks("a row picks entries", "it may see")
class OpenGroups(Claiming):
    """Picks the entry whose group is still open at the row's position."""

    def select(self, layer, index, kv, plan, carried):
        s = super().select(layer, index, kv, plan, carried)
        last = plan.visible[layer.ratio].clamp(max=plan.reach[layer.ratio] - 1)
        return (
            s
            if not s.ids.shape[1]
            else Selected(torch.cat((s.ids[:, :0], last[:, None]), 1), s.candidates)
        )


@B.breaks("changing later keys", "changed window of sequence 0 from position 1")
class BothSides(Claiming):
    def plan(self, batch, keys, queries, floor, cache):
        p = super().plan(batch, keys, queries, floor, cache)
        ids = p.window_ids
        following = torch.where(
            (ids[:, -1] >= 0) & (ids[:, -1] + 1 < ids.shape[0]), ids[:, -1] + 1, -1
        )
        return replace(p, window_ids=torch.cat((ids, following[:, None]), 1)) if len(ids) else p


@B.breaks("changing later keys", "index_keys")
class BestOfTheStep(Claiming):
    """Entries are chosen for all rows of a step together."""

    def select(self, layer, index, kv, plan, carried):
        s = super().select(layer, index, kv, plan, carried)
        if not s.ids.numel():
            return s
        visible = plan.visible[layer.ratio][:, None]
        last = s.ids[-1:].expand(len(s.ids), -1)
        return Selected(torch.where(last < visible, last, -1), s.candidates)


@B.breaks("a row does not depend on the queries", "queries 0..0 of sequence 0")
class MeanQuery(Claiming):
    def attend(self, layer, q, kv, selected, plan):
        return super().attend(layer, q + q.sum(0, keepdim=True) * 0.1, kv, selected, plan)


@B.breaks("a sequence does not depend", "taken")
class PicksOfTheRowBefore(Claiming):
    def select(self, layer, index, kv, plan, carried):
        s = super().select(layer, index, kv, plan, carried)
        if not s.ids.numel():
            return s
        visible, before = plan.visible[layer.ratio][:, None], s.ids.roll(1, 0)
        return Selected(torch.where(before < visible, before, -1), s.candidates)


@B.breaks("rows behind a cached history", "from position")
class ForgetsTheRing(Claiming):
    """Sees only the window keys of the step's own rows."""

    def plan(self, batch, keys, queries, floor, cache):
        p = super().plan(batch, keys, queries, floor, cache)
        stored = cache.windows[0].count if cache is not None and batch.has_history else 0
        return replace(p, window_ids=p.window_ids.masked_fill(p.window_ids < stored, -1))


@B.breaks("window keys below the floor", "floor 1 in sequence 0")
class IgnoresTheFloor(Claiming):
    def plan(self, batch, keys, queries, floor, cache):
        return super().plan(batch, keys, queries, None, cache)


@B.breaks("padding rows change nothing", "padding 2")
class CountsPadding(Claiming):
    def attend(self, layer, q, kv, selected, plan):
        return super().attend(layer, q, kv, selected, plan) * (
            1 + 1e-3 * (plan.queries.seq < 0).any()
        )


@B.breaks("the same call gives the same bits", "layers.0")
class Noisy(Claiming):
    def attend(self, layer, q, kv, selected, plan):
        return super().attend(layer, q, kv, selected, plan) * (
            1 + 1e-6 * torch.rand(()).double()
        ).to(q.dtype)


@B.breaks("inputs are not changed", "its input q")
class ScalesInPlace(Claiming):
    def attend(self, layer, q, kv, selected, plan):
        y = super().attend(layer, q.clone(), kv, selected, plan)
        q.mul_(2)
        return y


@B.breaks("picks and results are the model's own", "layers.4")
class NoCandidates(Claiming):
    """Second-level picks are not restricted to the candidate blocks of the first."""

    def select(self, layer, index, kv, plan, carried):
        return super().select(layer, index, kv, plan, None)


@B.breaks("picks and results are the model's own", "layers.0")
class NoSink(Claiming):
    def attend(self, layer, q, kv, selected, plan):
        far = torch.full_like(layer.sink, -1e9)
        return super().attend(replace(layer, sink=far), q, kv, selected, plan)


@B.breaks("picks and results are the model's own", "picks [-1] against [0]")
class WindowOnly(Claiming):
    def select(self, layer, index, kv, plan, carried):
        return Selected(torch.full((len(index.query), 1), -1))


@pytest.mark.parametrize("cls, law, shows", B.made)
def test_a_broken_variant_is_told_on(cls, law, shows):
    B.judge(cls, law, shows)


def test_every_law_can_fail():
    B.covered()


def test_csa2_holds_the_laws():
    check(CSA2()).raise_for_failures()


def test_a_selection_in_five_lines_passes():
    class Newest(CSA2):
        """The last entries instead of the best ones: another function, lawful all the same."""

        def select(self, layer, index, kv, plan, carried):
            visible = plan.visible[layer.ratio][:, None]
            ids = visible - 1 - torch.arange(min(layer.top_k, plan.reach[layer.ratio]))
            return Selected(ids.clamp(min=-1))

    report = check(Newest())
    assert report and "does not claim exact=True" in repr(report)
