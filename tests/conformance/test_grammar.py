"""Each law of a grammar fails on a grammar that breaks it."""

import pytest
import torch

from deepinfer.conformance import check
from support.breaking import Breakers

VOCAB = [b"a", b"b", b"c", b"ab", b""]
SPEC = ["a", "ab", "abc", "ca"]
END = len(VOCAB) - 1
B = Breakers("grammar", spec=SPEC, vocab=VOCAB)


class State:
    """Where a request stands among the strings of the grammar."""

    def __init__(self, strings, text=b"", history=()):
        self.strings, self.text, self.history = strings, text, list(history)
        self.done = False

    def ends(self):
        return self.text in self.strings

    def lists(self, token):
        if self.done:
            return False
        if token == END:
            return self.ends()
        return any(s.startswith(self.text + VOCAB[token]) for s in self.strings)

    def allowed(self):
        return torch.tensor([t for t in range(len(VOCAB)) if self.lists(t)], dtype=torch.long)

    def accept(self, token):
        if not self.lists(token):
            return False
        self.history.append((self.text, self.done))
        self.text, self.done = self.text + VOCAB[token], token == END
        return True

    def rollback(self, n):
        for _ in range(n):
            self.text, self.done = self.history.pop()

    def fork(self):
        other = type(self)(self.strings, self.text, self.history)
        other.done = self.done
        return other


class Compiled:
    def __init__(self, strings, state):
        self.strings, self.state = strings, state

    def start(self):
        return self.state(self.strings)


class Strings:
    """The strings of the spec and nothing else."""

    state = State

    def compile(self, spec, vocab):
        return Compiled({s.encode() for s in spec}, self.state)


def test_a_sound_grammar_holds_the_laws():
    check(Strings(), spec=SPEC, vocab=VOCAB).raise_for_failures()


def test_a_mask_is_as_good_as_ids():
    class Masked(State):
        def allowed(self):
            return torch.tensor([self.lists(t) for t in range(len(VOCAB))])

    class Masks(Strings):
        state = Masked

    check(Masks(), spec=SPEC, vocab=VOCAB).raise_for_failures()


def variant(state):
    return type(state.__name__, (Strings,), {"state": state})


def breaks(words, shows=""):
    return lambda state: B.breaks(words, shows)(variant(state))


@breaks("a token is listed by allowed", "accept says")
class EndOnlyWhereNothingElse(State):
    """The public fault: the end is listed only when no other token is."""

    def allowed(self):
        ids = super().allowed()
        return ids[ids != END] if len(ids) > 1 else ids


@breaks("a refused token", "changed what is allowed")
class DiesOfARefusal(State):
    def accept(self, token):
        if not super().accept(token):
            self.strings = {b"c"}
            return False
        return True


@breaks("rollback(n) undoes", "rollback 1")
class KeepsDone(State):
    def rollback(self, n):
        for _ in range(n):
            self.text, _ = self.history.pop()


@breaks("a fork is the same state", "the original")
class SharesItself(State):
    def fork(self):
        return self


@breaks("a state that is not done", "nothing is allowed")
class NeverFinishes(State):
    def lists(self, token):
        return token != END and super().lists(token)


@B.breaks("two requests of one compiled grammar", "does not begin at the beginning")
class OneStateForAll(Strings):
    def compile(self, spec, vocab):
        compiled = super().compile(spec, vocab)
        only = compiled.start()
        compiled.start = lambda: only
        return compiled


@pytest.mark.parametrize("cls, law, shows", B.made)
def test_a_broken_grammar_is_told_on(cls, law, shows):
    B.judge(cls, law, shows)


def test_every_law_can_fail():
    B.covered()
