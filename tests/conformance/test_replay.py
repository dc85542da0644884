"""Each law of a replay policy fails on a policy that breaks it."""

from dataclasses import replace

import pytest

from deepinfer.conformance import check, prompt_run
from deepinfer.conformance.small import DRAFTS, small_config
from deepinfer.slots.protocols import Prompt, ReplayPlan
from deepinfer.slots.replay import Exact, Halo
from support.breaking import Breakers

B = Breakers("replay")


class Drops:
    """Bounded on the decoder side: past the last KV source only the last `keep` rows run."""

    exact = False

    def __init__(self, keep=8, claims=False, refuses=True):
        self.keep, self.claims, self.refuses = keep, claims, refuses

    def __repr__(self):
        return f"Drops({self.keep})"

    def plan(self, prompt, config):
        layers, source = config.num_layers, config.first_decoder_layer
        cut = max(prompt.length - self.keep, 0)
        if prompt.wants_all_logits and cut:
            if self.refuses:
                raise ValueError("Drops drops rows whose logits are wanted")
        rows = tuple(cut if i >= source else 0 for i in range(layers))
        floor = tuple(cut if i > source else 0 for i in range(layers))
        return ReplayPlan(
            0,
            0,
            floor,
            rows,
            floor,
            exact=self.claims or cut == 0,
            why=f"the last {self.keep} rows",
        )


def test_a_sound_bounded_policy_holds_the_laws():
    check(Drops()).raise_for_failures()


@B.breaks("every plan is valid", "rows_from falls")
class Wavers(Drops):
    def plan(self, prompt, config):
        p = super().plan(prompt, config)
        return ReplayPlan(0, 0, p.kv_from, p.rows_from[::-1], p.floor, exact=False, why="wavers")


@B.breaks("every plan is valid", "why is empty")
class Silent(Exact):
    def plan(self, prompt, config):
        p = super().plan(prompt, config)
        return ReplayPlan(p.start, p.write_from, p.kv_from, p.rows_from, p.floor)


@B.breaks("block KV is complete", "is in no cache")
class LastWindowOnly(Exact):
    def plan(self, prompt, config):
        s = 0 if prompt.wants_all_logits else max(prompt.length - config.sliding_window, 0)
        z = (s,) * config.num_layers
        return ReplayPlan(s, s, z, z, z, exact=False, why="the last window, whatever was found")


@B.breaks("block KV is complete", "KV source")
class CutsBeforeTheSource(Exact):
    def plan(self, prompt, config):
        cut = 0 if prompt.wants_all_logits else max(prompt.length - 8, 0)
        z = (cut,) * config.num_layers
        return ReplayPlan(0, 0, z, z, z, exact=False, why="every layer drops, the encoder too")


@B.breaks("a hit no longer than the window", "start 1")
class AdoptsAnything(Exact):
    def plan(self, prompt, config):
        s = 0 if prompt.wants_all_logits else min(prompt.hit, prompt.length - 1)
        z = (s,) * config.num_layers
        return ReplayPlan(s, s, z, z, z, exact=False, why="all that was found")


@B.breaks("behind a prompt a window", "length 8, hit 0, state at 0: layer 4 has no window keys")
class KeepsTooFew(Drops):
    def __init__(self):
        super().__init__(keep=7)


@B.breaks("where all logits are wanted", "have no logits")
class DropsThemSilently(Drops):
    def __init__(self):
        super().__init__(refuses=False)


@B.breaks("plan is a pure function", "after other prompts")
class Remembers(Drops):
    def plan(self, prompt, config):
        self.keep += 1
        return super().plan(prompt, config)


@B.breaks("a plan that claims exact=True", "hides window positions below")
class ClaimsEachPlan(Drops):
    def __init__(self):
        super().__init__(claims=True)


@B.breaks("a plan that claims exact=True", "the windows before it are available")
class StartsAtTheHit(Exact):
    """Block KV is there, the windows are not."""

    exact = True

    def plan(self, prompt, config):
        s = 0 if prompt.wants_all_logits or prompt.hit <= config.sliding_window else prompt.hit
        z = (0,) * config.num_layers
        return ReplayPlan(s, s, z, z, z, why="from the hit")


@B.breaks("every plan of an exact policy", "the last 8 rows")
class ClaimsInGeneral(Drops):
    exact = True


@B.breaks("no row reads a window", "not finite")
class TrustsTheRings(StartsAtTheHit):
    pass


@B.breaks("an exact policy's prompt", "differ by")
class RowsTooFew(Halo):
    """Of the halo of the last layer but one: behind it nothing but numbers can tell."""

    exact = True

    def plan(self, prompt, config):
        made = super().plan(prompt, config)
        if prompt.wants_all_logits or prompt.length < 40:
            return made
        at, less = config.num_layers - 2, config.max_draft + 2  # past the backtracking too
        change = {n: list(getattr(made, n)) for n in ("kv_from", "floor", "rows_from")}
        change["kv_from"][at] += less
        change["floor"][at] += less
        change["rows_from"][at - 1] += less
        change["rows_from"][at] = max(change["rows_from"][at], change["rows_from"][at - 1])
        return replace(made, **{n: tuple(v) for n, v in change.items()})


@pytest.mark.parametrize("cls, law, shows", B.made)
def test_a_broken_policy_is_told_on(cls, law, shows):
    B.judge(cls, law, shows)


def test_every_law_can_fail():
    B.covered()


class Tightest(Exact):
    """Drops only decoder rows that nothing later looks back to: the tightest exact plan. slack:
    rows too few of the last layer but one; back: tokens that a verification may step back, None =
    the model's own, -1 = as if there were no drafts."""

    exact = True

    def __init__(self, slack=0, back=None):
        self.slack, self.back = slack, back

    def __repr__(self):
        return f"Tightest({self.slack}, {self.back})"

    def plan(self, prompt, config):
        p, length = super().plan(prompt, config), prompt.length
        if prompt.wants_all_logits or not length:
            return p
        rows, kv = self.halo(config, length)
        rows[-2] = min(rows[-2] + self.slack, length - 1)
        return ReplayPlan(
            p.start, p.write_from, tuple(kv), tuple(rows), tuple(kv), why="a halo of windows"
        )

    def halo(self, config, length):
        """Each layer looks back a window from the next, from the last row and from what is left."""
        w, source, out = config.sliding_window, config.kv_source_layers[-1], length - 1
        back = config.backtracking if self.back is None else self.back
        left = max(length - w - back, 0)
        rows, kv = [0] * config.num_layers, [0] * config.num_layers
        for layer in reversed(range(source, config.num_layers)):
            rows[layer] = max(out, 0)
            kv[layer] = max(min(out - w + 1, left), 0) if layer > source else 0
            out = kv[layer]
        if back >= 0:  # the drafter's context
            rows[-1] = min(rows[-1], left)
        return rows, kv


LEFT = "behind a prompt a window and the backtracking are left, for the drafter too"
VISIBLE = "a plan that claims exact=True drops nothing that is visible"
NUMBERS = "an exact policy's prompt leaves the logits and drafts that all rows leave"


def broken(policy):
    return {r.law: r.case for r in check(policy).failures}


def test_the_tightest_exact_plan_passes_and_one_row_less_does_not():
    check(Tightest()).raise_for_failures()
    failed = set(broken(Tightest(slack=1)))
    assert VISIBLE in failed
    assert failed <= {
        VISIBLE,
        NUMBERS,
        "every plan is valid: lengths, write_from, and rows that only ever leave",
        "no row reads a window that was never written",
    }


def test_a_plan_that_is_exact_without_drafts_only_is_told_on():
    """The last row's logits and all tokens behind it are exact; no drafter finds its context."""
    failed = broken(Tightest(back=-1))
    assert set(failed) == {LEFT, VISIBLE, NUMBERS}
    assert failed[LEFT] == (
        "model small, length 2, hit 0, state at 0: the drafter has no context below 1, needed from "
        "0 on: a window of 4 and backtracking of 4 (the drafts of a step and one) behind 2 tokens"
    )
    assert "length 5" in failed[VISIBLE] and "length 9" in failed[NUMBERS]


def test_one_row_less_than_window_and_backtracking_is_told_on():
    failed = broken(Tightest(back=DRAFTS))
    assert set(failed) == {LEFT, VISIBLE}  # this drafter never asks for it
    assert "no window keys below 1, needed from 0 on" in failed[LEFT] and "length 8" in failed[LEFT]
    assert not broken(Drops(8)) and set(broken(Drops(7))) == {LEFT}
    assert "behind 8 tokens" in broken(Drops(7))[LEFT]


def test_such_a_plan_costs_the_drafts_and_nothing_else():
    prompt, config = Prompt(40), small_config()
    plan = Tightest(back=-1).plan(prompt, config)
    apart = (prompt_run.logits(prompt, plan) - prompt_run.full_logits(40)).abs().amax(-1)
    last, drafts, behind = apart[0], apart[1 : 1 + DRAFTS], apart[1 + DRAFTS :]
    assert max(last, behind.max()) < 1e-9 and drafts.min() > 1e-3
