"""For each law a variant that breaks it: a law that nothing fails is no test."""

import importlib

import pytest

from deepinfer.conformance import check


class Breakers:
    """Variants of one slot, each made to break one law (told by its words)."""

    def __init__(self, slot, **options):
        self.slot, self.options, self.made = slot, options, []
        self.laws = [x.words for x in importlib.import_module(f"deepinfer.conformance.{slot}").LAWS]

    def breaks(self, words, shows=""):
        """Decorator: the class breaks the law beginning with `words`; its case has `shows`."""
        law = next(x for x in self.laws if x.startswith(words))

        def put(cls):
            self.made.append(pytest.param(cls, law, shows, id=cls.__name__))
            return cls

        return put

    def judge(self, cls, law, shows):
        report = check(cls, slot=self.slot, only=law, **self.options)
        failed = {r.law: r.case for r in report.failures}
        assert law in failed, f"nothing told on {cls.__name__}:\n{report}"
        assert shows in failed[law], failed[law]
        assert not report

    def covered(self):
        assert {p.values[1] for p in self.made} == set(self.laws)
