"""Each law of a replay policy fails on a policy that breaks it."""

from dataclasses import replace

import pytest
from slots.breaking import Breakers

from deepinfer.slots.conformance import check
from deepinfer.slots.protocols import ReplayPlan
from deepinfer.slots.replay import Exact, Halo

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


@B.breaks("a plan that claims exact=True", "the windows before it are at hand")
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


def halo(config, length):
    """The fewest rows an exact plan may keep: each layer looks back a window from the next."""
    w, source, out = config.sliding_window, config.kv_source_layers[-1], length - 1
    rows, kv = [0] * config.num_layers, [0] * config.num_layers
    for layer in reversed(range(source, config.num_layers)):
        rows[layer] = max(out, 0)
        kv[layer] = max(min(out, length) - w + 1, 0) if layer > source else 0
        out = kv[layer]
    return rows, kv


class Tightest(Exact):
    """Drops only decoder rows that no later row looks back to: the tightest exact plan."""

    exact, slack = True, 0

    def plan(self, prompt, config):
        p = super().plan(prompt, config)
        if prompt.wants_all_logits or not prompt.length:
            return p
        rows, kv = halo(config, prompt.length)
        rows = tuple(
            min(r + (self.slack if i == len(rows) - 2 else 0), prompt.length - 1)
            for i, r in enumerate(rows)
        )
        return ReplayPlan(
            p.start, p.write_from, tuple(kv), rows, tuple(kv), why="a halo of windows"
        )


class TooTight(Tightest):
    exact, slack = True, 1


def test_the_tightest_exact_plan_passes_and_one_row_less_does_not():
    check(Tightest()).raise_for_failures()
    report = check(TooTight())
    failed = {r.law for r in report.failures}
    assert "a plan that claims exact=True drops nothing that is visible" in failed
    assert failed <= {
        "a plan that claims exact=True drops nothing that is visible",
        "every plan is valid: lengths, write_from, and rows that only ever leave",
        "no row reads a window that nobody has written",
        "an exact policy's prompt leaves the logits that all rows leave",
    }
